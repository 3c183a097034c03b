// Which worker waited for which: a matrix, and the sum for each worker that was waited for.

import { $, color, empty, heat, seconds, svg } from "./dom.js";

const LEFT = 32;
const TOP = 16;
const MAX_SIDE = 200;

export function drawWaits(now) {
  const host = $("waits");
  if (!now.waited_for.length) return host.replaceChildren(empty(noWaits(now)));
  const ranks = now.workers.map((worker) => worker.rank);
  const place = new Map(ranks.map((rank, k) => [rank, k]));
  const most = Math.max(1e-9, ...now.waited_for.map((wait) => wait[2]));
  const width = host.clientWidth;
  const size = Math.max(3, Math.min(26, Math.floor(Math.min(MAX_SIDE, width - 60) / ranks.length)));
  const side = size * ranks.length;
  const height = Math.max(side, 24 + 18 * Math.min(8, now.held_up.length)) + 20;
  const label = now.held_up.slice(0, 4).map(([rank, s]) => `others waited ${seconds(s)} for worker ${rank}`);
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": label.join("; "),
  });
  picture.append(svg("rect", { x: LEFT, y: TOP, width: side, height: side, fill: color("--track") }));
  drawNames(picture, ranks, size);
  for (const [waiter, holder, s] of now.waited_for) {
    const [x, y] = [LEFT + place.get(holder) * size, TOP + place.get(waiter) * size];
    const tip = `worker ${waiter} waited ${seconds(s)} for worker ${holder}`;
    picture.append(
      svg("rect", {
        x,
        y,
        width: size - (size > 6 ? 1 : 0),
        height: size - (size > 6 ? 1 : 0),
        fill: heat(s / most),
        "data-tip": tip,
      }),
    );
    if (size < 24) continue;
    const style = { fill: color(s / most > 0.5 ? "--card" : "--fg"), fontSize: "10px", pointerEvents: "none" };
    const text = s < 9.95 ? s.toFixed(1) : Math.round(s);
    picture.append(svg("text", { x: x + size / 2 - 0.5, y: y + size / 2 + 4, "text-anchor": "middle", style }, text));
  }
  drawSums(picture, now.held_up, LEFT + side + 24, width);
  host.replaceChildren(picture);
}

function noWaits(now) {
  if (now.num_workers < 2) return "There is one worker.";
  return "No worker was held back for another, as far as this strategy reports it.";
}

function drawNames(picture, ranks, size) {
  const [down, across] = [Math.ceil(14 / size), Math.ceil((14 + 6 * String(ranks.at(-1)).length) / size)];
  ranks.forEach((rank, k) => {
    const middle = k * size + size / 2;
    if (k % across === 0) picture.append(svg("text", { x: LEFT + middle, y: 11, "text-anchor": "middle" }, `w${rank}`));
    if (k % down === 0)
      picture.append(svg("text", { x: LEFT - 6, y: TOP + middle + 4, "text-anchor": "end" }, `w${rank}`));
  });
}

function drawSums(picture, sums, left, width) {
  const room = width - left - 90;
  if (room < 60 || !sums.length) return;
  picture.append(svg("text", { x: left, y: 11, class: "d" }, "others waited for"));
  sums.forEach(([rank, s], k) => {
    const length = Math.max(1, (room * s) / sums[0][1]);
    const y = 30 + 18 * k;
    picture.append(
      svg("text", { x: left + 28, y, "text-anchor": "end" }, `w${rank}`),
      svg("rect", {
        x: left + 34,
        y: y - 9,
        width: length,
        height: 11,
        rx: 2,
        fill: color("--wait"),
        stroke: color("--wait-edge"),
        "stroke-width": 0.7,
      }),
      svg("text", { x: left + 40 + length, y }, seconds(s)),
    );
  });
}
