// A row for each worker over time: staleness, waiting or rate; with staleness also its histogram.

import { $, canvasIn, color, empty, heat, known, legendIn, num, percent, seconds, sign, whole } from "./dom.js";

const KINDS = {
  missed_mean: [
    "Staleness",
    "updates that a gradient had missed when it was applied",
    (x) => `${num(x)} updates missed`,
  ],
  waiting: ["Waiting", "share of the time that a worker waited", (x) => `waited ${percent(x)} of the time`],
  per_s: ["Rate", "samples/s", (x) => `${num(x)} samples/s`],
};
export const STRIP_CHOICES = [
  ["missed_mean", "staleness"],
  ["waiting", "waiting"],
  ["per_s", "rate"],
];
const ROWS_HEIGHT = 196; // pixels
const LEFT = 40;

export function drawStrips(now, history, kind) {
  const host = $("strips");
  const rows = now.workers;
  $("strips-title").textContent = KINDS[kind][0];
  $("strips-note").textContent = KINDS[kind][1];
  if (!rows.length) return host.replaceChildren(empty("No worker has reported yet."));
  if (kind === "missed_mean" && !rows.some((row) => known(row.missed_mean))) {
    return host.replaceChildren(empty(noStaleness(now)));
  }
  host.querySelector(".empty")?.remove();
  const height = Math.max(5, Math.min(40, Math.floor(ROWS_HEIGHT / rows.length)));
  const bottom = 16 + height * rows.length;
  const [g, width, canvas] = canvasIn(host, bottom + 20);
  const hasBins = kind === "missed_mean";
  const binsWidth = hasBins ? Math.min(230, width * 0.36) : 0;
  const area = { g, rows, height, left: LEFT, width: width - LEFT - binsWidth - 58, top: 16, boxes: [] };
  const strips = new Map(history.strips.map((strip) => [strip.rank, strip[kind]]));
  const all = [...strips.values()].flat().filter(known);
  const most = kind === "waiting" ? 1 : Math.max(1e-9, ...all);
  drawNames(area);
  drawCells(area, history.column_s, strips, most, now.began_s, KINDS[kind][2]);
  drawMeans(area, kind);
  if (hasBins) drawBins(area, history.bins, LEFT + area.width + 48, binsWidth);
  drawScale(area, bottom + 11, history.column_s, now.began_s, kind === "waiting" ? "100 %" : num(most));
  canvas.setAttribute("aria-label", described(rows, kind));
  canvas.boxes = area.boxes;
  drawBlocks(host, now, hasBins);
}

function noStaleness(now) {
  if (!now.num_servers) return "Without servers no gradient is stale: choose waiting or rate.";
  return now.state === "running" ? "No gradient has been counted yet." : "This run has no staleness per worker.";
}

const described = (rows, kind) =>
  rows
    .slice(0, 8)
    .map((row) => {
      if (kind === "missed_mean") return `worker ${row.rank}: mean ${num(row.missed_mean)}, max ${row.missed_max ?? 0}`;
      return `worker ${row.rank}: ${kind === "waiting" ? `waits ${percent(row.waiting)}` : `${num(row.per_s)} per second`}`;
    })
    .join("; ");

const isNamed = (area, k) => area.height >= 11 || k % Math.ceil(11 / area.height) === 0;

function drawNames({ g, rows, height, top }) {
  g.textAlign = "left";
  rows.forEach((row, k) => {
    if (!isNamed({ height }, k) && !row.lost && !row.slow) return;
    if (height < 11 && !isNamed({ height }, k)) return;
    g.fillStyle = color(row.lost ? "--bad" : row.slow ? "--warn" : "--fg");
    g.fillText(`${sign(row)}w${row.rank}`, 0, top + (k + 0.5) * height);
  });
}

function drawCells({ g, rows, height, left, width, top, boxes }, columns, strips, most, began, words) {
  if (!columns.length) return;
  const [first, last] = [columns[0][0], columns.at(-1)[1]];
  const x = (s) => left + (width * (s - first)) / (last - first || 1);
  rows.forEach((row, k) => {
    (strips.get(row.rank) ?? []).forEach((value, j) => {
      if (!known(value)) return;
      const [begin, end] = columns[j];
      const box = [x(begin), top + k * height, x(end) - x(begin), height];
      g.fillStyle = heat(Math.sqrt(value / most)); // the root, because one outlier would take the whole scale
      g.fillRect(box[0], box[1] + 0.5, box[2] + 0.6, height - 1);
      boxes.push([...box, `worker ${row.rank}, ${num(begin - began)} to ${num(end - began)} s: ${words(value)}`]);
    });
  });
}

function drawMeans(area, kind) {
  const { g, rows, height, left, width, top } = area;
  const text = {
    missed_mean: (r) => num(r.missed_mean),
    waiting: (r) => percent(r.waiting),
    per_s: (r) => num(r.per_s),
  };
  g.fillStyle = color("--dim");
  g.textAlign = "left";
  g.fillText("over time", left, 7);
  g.textAlign = "right";
  g.fillText(kind === "per_s" ? "rate" : "mean", left + width + 42, 7);
  g.fillStyle = color("--fg");
  rows.forEach((row, k) => {
    if (isNamed(area, k)) g.fillText(text[kind](row), left + width + 42, top + (k + 0.5) * height);
  });
}

function drawBins({ g, rows, height, top, boxes }, names, left, width) {
  const step = width / names.length;
  g.fillStyle = color("--dim");
  g.textAlign = "center";
  let free = 0;
  names.forEach((name, k) => {
    const low = name.split("–")[0].replace("+", "");
    const [x, half] = [left + (k + 0.5) * step, g.measureText(low).width / 2 + 3];
    if (x - half < free) return;
    g.fillText(low, x, 7);
    free = x + half;
  });
  rows.forEach((row, k) => {
    const sum = row.staleness.reduce((a, b) => a + b, 0) || 1;
    const most = Math.max(1, ...row.staleness);
    const y = top + k * height;
    names.forEach((name, j) => {
      const count = row.staleness[j] ?? 0;
      if (height >= 12) {
        g.fillStyle = color("--track");
        g.fillRect(left + j * step + 0.5, y + height - 2, step - 1, 1);
        const bar = count ? Math.max(1, ((height - 4) * count) / most) : 0;
        g.fillStyle = color(row.slow || row.lost ? "--slow" : "--compute");
        g.fillRect(left + j * step + 0.5, y + height - 2 - bar, step - 1, bar);
      } else {
        g.fillStyle = heat(count / most);
        g.fillRect(left + j * step + 0.5, y + 0.5, step - 1, height - 1);
      }
      const share = ((100 * count) / sum).toFixed(0);
      if (count) {
        const text = `worker ${row.rank}: ${whole(count)} gradients (${share} %) missed ${name} updates`;
        boxes.push([left + j * step, y, step, height, text]);
      }
    });
  });
}

function drawScale({ g, left, width }, y, columns, began, most) {
  if (!columns.length) return;
  g.fillStyle = color("--dim");
  g.textAlign = "left";
  g.fillText(seconds(Math.max(0, columns[0][0] - began)), left, y);
  g.textAlign = "right";
  g.fillText(seconds(columns.at(-1)[1] - began), left + width, y);
  if (width < 200) return; // no room between the ends
  const ends = g.measureText(most).width + g.measureText(seconds(columns.at(-1)[1] - began)).width + 16;
  const shift = Math.max(0, ends - width * 0.3); // so that the ends of both scales do not touch
  const [from, steps] = [left + width * 0.3 - shift, 40];
  const step = (width * 0.4) / steps;
  for (let k = 0; k < steps; k++) {
    g.fillStyle = heat(Math.sqrt(k / (steps - 1)));
    g.fillRect(from + k * step, y - 4, step + 0.5, 7);
  }
  g.fillStyle = color("--dim");
  g.fillText("0", from - 4, y);
  g.textAlign = "left";
  g.fillText(most, left + width * 0.7 - shift + 4, y);
}

function drawBlocks(host, now, shown) {
  const some = now.blocks.slice(0, 4).map(([mean, max], k) => `block ${k}: mean ${num(mean)}, max ${max}`);
  const more = now.blocks.length > 4 ? ` · and ${now.blocks.length - 4} more blocks` : "";
  legendIn(host, shown && some.length ? some.join(" · ") + more : "");
}
