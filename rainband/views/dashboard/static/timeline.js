// What each node did from when to when, if spans were recorded; otherwise the share of each interval spent waiting.

import { $, canvasIn, color, empty, key, known, legendIn, num, percent, seconds } from "./dom.js";

export const LENGTHS = [
  [0.5, "½ s"],
  [2, "2 s"],
  [10, "10 s"],
  [60, "1 min"],
];
const ORDER = ["compute", "forward", "backward", "wait", "apply", "push", "pull"]; // later ones are drawn above
const WORDS = {
  compute: "computes",
  wait: "waits",
  push: "push under way",
  pull: "pull under way",
  apply: "applies updates",
  forward: "forward pass",
  backward: "backward pass",
};
const HEIGHT = 230;
const LEFT = 40;
const REFRESH_MS = 900;

let spans = null;
let asked = { at: -Infinity, length: 0 };

export function forgetSpans() {
  spans = null;
  asked = { at: -Infinity, length: 0 };
}

export async function drawTimeline(now, history, length, connection) {
  const host = $("timeline");
  if (now.has_spans && connection && (performance.now() - asked.at > REFRESH_MS || asked.length !== length)) {
    asked = { at: performance.now(), length };
    const answer = await connection.ask("/api/spans", { seconds: length, width: Math.max(50, host.clientWidth) });
    if (answer.ok) spans = await answer.json();
  }
  const names = spans ? Object.keys(spans.nodes) : now.workers.map((worker) => `worker ${worker.rank}`);
  if (!names.length) return host.replaceChildren(empty("Nothing has been computed yet."));
  host.querySelector(".empty")?.remove();
  const height = Math.max(6, Math.min(22, Math.floor(HEIGHT / names.length)));
  const [g, width, canvas] = canvasIn(host, height * names.length + 22);
  g.translate(0, 4);
  g.textAlign = "left";
  g.fillStyle = color("--fg");
  names.forEach((name, k) => {
    if (height < 11 && k % Math.ceil(11 / height)) return;
    g.fillText(name.replace("worker ", "w").replace("server ", "s"), 0, (k + 0.5) * height);
  });
  const area = { g, width, height, names, boxes: [] };
  const [from, to, kinds] = spans ? drawSpans(area) : drawShares(area, now, history);
  drawAxis(area, from - now.began_s, to - now.began_s);
  canvas.boxes = area.boxes.map(([x, y, w, h, text]) => [x, y + 4, w, h, text]);
  canvas.setAttribute("aria-label", "what each node did, and when");
  legendIn(host, ...kinds.map((kind) => key(`--${kind}`, WORDS[kind] ?? kind)));
  const range = `${num(Math.max(0, from - now.began_s), 4)} to ${num(to - now.began_s, 4)} s after the first step`;
  $("lengths").hidden = !now.has_spans || !connection;
  $("timeline-note").textContent = spans
    ? range
    : `share of each interval${now.has_spans ? "" : "; a run started with --timeline shows every step"}`;
}

function drawSpans({ g, width, height, names, boxes }) {
  const { from_s, to_s, nodes } = spans;
  const x = (s) => LEFT + ((width - LEFT) * (s - from_s)) / (to_s - from_s);
  names.forEach((name, k) => {
    for (const kind of ORDER) {
      const lane = { push: [0.04, 0.12], pull: [0.17, 0.12] }[kind] ?? [0.32, 0.6];
      for (const [begin, end] of nodes[name][kind] ?? []) {
        const left = Math.max(LEFT, x(begin));
        const w = Math.max(0.7, Math.min(width, x(end)) - left);
        const [y, h] = [(k + lane[0]) * height, Math.max(1.5, lane[1] * height)];
        g.fillStyle = color(`--${kind}`);
        g.fillRect(left, y, w > 3 ? w - 0.7 : w, h);
        boxes.push([left, y, Math.max(2, w), h, `${name}: ${WORDS[kind] ?? kind}, ${seconds(end - begin)}`]);
      }
    }
  });
  const kinds = new Set(Object.values(nodes).flatMap((of) => Object.keys(of)));
  return [from_s, to_s, ORDER.filter((kind) => kinds.has(kind))];
}

function drawShares({ g, width, height, names, boxes }, now, history) {
  const columns = history.column_s;
  const [from, to] = columns.length ? [columns[0][0], columns.at(-1)[1]] : [0, 1];
  const strips = new Map(history.strips.map((strip) => [strip.rank, strip.waiting]));
  names.forEach((name, k) => {
    (strips.get(now.workers[k].rank) ?? []).forEach((waiting, j) => {
      if (!known(waiting)) return;
      const [begin, end] = columns[j];
      const left = LEFT + ((width - LEFT) * (begin - from)) / (to - from);
      const w = ((width - LEFT) * (end - begin)) / (to - from);
      const [y, h] = [k * height + 1, height - 2];
      g.fillStyle = color("--compute");
      g.fillRect(left, y + h * waiting, w - 0.5, h * (1 - waiting));
      g.fillStyle = color("--wait");
      g.fillRect(left, y, w - 0.5, h * waiting);
      const range = `${num(begin - now.began_s)} to ${num(end - now.began_s)} s`;
      boxes.push([left, y, w, h, `${name}: waited ${percent(waiting)} of ${range}`]);
    });
  });
  return [from, to, ["compute", "wait"]];
}

function drawAxis({ g, width, height, names }, from, to) {
  const y = height * names.length + 9;
  const steps = width < 500 ? 2 : 5;
  g.fillStyle = color("--dim");
  for (let k = 0; k <= steps; k++) {
    g.textAlign = k === 0 ? "left" : k === steps ? "right" : "center";
    const s = from + ((to - from) * k) / steps;
    g.fillText(
      `${Math.max(0, s).toFixed(2)}${k === 0 || k === steps ? " s" : ""}`,
      LEFT + ((width - LEFT) * k) / steps,
      y,
    );
  }
}
