// The events, newest at the bottom.

import { $, el } from "./dom.js";

const BAD = new Set(["Lost", "UserError"]);

let older = []; // lines before those that the stream sends
let shown = "";

export function forgetLog() {
  older = [];
  shown = "";
}

const lineOf = ([, at_s, kind, text]) =>
  el(
    "li",
    { class: BAD.has(kind) ? "bad" : "" },
    el("span", { class: "dim" }, `${at_s.toFixed(2)} s`),
    el("span", {}, kind),
    el("span", {}, text),
  );

export function drawLog(now, history, connection) {
  const lines = [...older, ...history.log];
  $("older").hidden = !connection || !lines.length || lines[0][0] === 0;
  const mark = `${lines.length} ${lines.at(-1)?.[0]}`;
  if (mark === shown) return;
  const host = $("events");
  const atEnd = !shown || host.scrollTop + host.clientHeight > host.scrollHeight - 20;
  shown = mark;
  host.replaceChildren(...lines.map(lineOf));
  if (now.traceback) host.append(el("li", { class: "bad" }, "", "", el("pre", { class: "traceback" }, now.traceback)));
  if (atEnd) host.scrollTop = host.scrollHeight;
}

export async function fetchOlder(history, connection) {
  const first = older[0] ?? history.log[0];
  const answer = await connection.ask("/api/events", { before: first[0], n: 200 });
  if (!answer.ok) return;
  const found = await answer.json();
  older = found.length ? [...found, ...older] : older;
  if (!found.length) $("older").hidden = true;
}
