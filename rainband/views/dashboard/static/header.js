// What is so now: state, progress, time left, what stands out.

import { $, bytes, el, known, num, percent, seconds, whole } from "./dom.js";

const SIGNS = { running: "▶", starting: "…", finished: "✓", stopped: "■", failed: "✕", killed: "✕" };
const LEVELS = { bad: "✕", warn: "▲", good: "✓" };

export function drawHeader(now) {
  const share = now.samples ? Math.min(1, now.samples_done / now.samples) : 0;
  const title = `${now.task || now.name} · ${now.strategy || "…"}`;
  document.title = `${now.samples ? `${Math.floor(100 * share)} % ` : ""}${title} · Rainband`;
  $("title").textContent = title;
  $("title").title = now.name;
  const phase = now.state === "running" && now.phase !== "running" ? `: ${now.phase}` : "";
  $("state").textContent = `${SIGNS[now.state] ?? ""} ${now.state}${phase}`;
  $("state").className = `pill ${now.state}`;
  $("virtual").hidden = !now.virtual;
  $("fill").style.width = `${100 * share}%`;
  $("bar").setAttribute("aria-valuenow", Math.floor(100 * share));
  $("facts").replaceChildren(
    ...facts(now, share).map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text))),
  );
  const lines = now.sentences.map((one) => [one.level, `${LEVELS[one.level]} ${one.text}`]);
  const host = $("sentences"); // changed only if it differs, because screen readers read it out
  if ([...host.children].map((line) => line.textContent).join("\n") !== lines.map((line) => line[1]).join("\n")) {
    host.replaceChildren(...lines.map(([level, text]) => el("li", { class: level }, text)));
  }
}

function facts(now, share) {
  const metrics = Object.entries(now.metrics).filter(([name]) => name !== "loss" || !known(now.loss));
  const bound = known(now.staleness_bound) ? `, bound ${now.staleness_bound} ${now.staleness_unit}` : "";
  return [
    ["done", now.samples ? `${Math.floor(100 * share)} % of ${whole(now.samples)}` : `${whole(now.done)} ${now.unit}s`],
    known(now.left_s) ? ["left", seconds(now.left_s)] : null,
    [now.state === "running" ? "so far" : "took", seconds(now.at_s)],
    ["speed", `${num(now.per_s)} ${now.unit}s/s`],
    ["training loss", num(now.loss)],
    ...metrics.slice(0, 3).map(([name, value]) => [name, num(value, 4)]),
    known(now.staleness_mean)
      ? ["staleness", `mean ${num(now.staleness_mean)}, max ${now.staleness_max} updates${bound}`]
      : null,
    ["nodes", `${whole(now.num_workers)} workers${now.num_servers ? `, ${now.num_servers} servers` : ", no servers"}`],
    now.cpu_s ? ["processor", `${num(now.cpu_s)} s`] : null,
    now.pushed_bytes ? ["traffic", bytes(now.pushed_bytes + now.pulled_bytes)] : null,
    now.unreadable ? ["note", `${now.unreadable} lines could not be read`] : null,
  ].filter(Boolean);
}

export function drawReading(share) {
  $("link").textContent = `reading the run: ${percent(share)}`;
  $("bar").setAttribute("aria-valuenow", Math.floor(100 * share));
  $("fill").style.width = `${100 * share}%`;
}
