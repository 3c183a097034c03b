// The table of workers.

import { $, bytes, color, el, known, num, percent, seconds, svg } from "./dom.js";

const SPARK = { width: 56, height: 14 };

export function drawWorkers(now, history) {
  const staged = now.replica_size > 1;
  const stale = now.workers.some((worker) => known(worker.missed_mean));
  const traffic = now.workers.some((worker) => worker.pushed_bytes || worker.pulled_bytes);
  const sent = now.workers.some((worker) => worker.sent_bytes);
  const cpu = now.workers.some((worker) => worker.cpu_s);
  const fastest = Math.max(1e-9, ...now.workers.map((worker) => worker.per_s));
  const strips = new Map(history.strips.map((strip) => [strip.rank, strip.per_s]));
  const peak = Math.max(1e-9, ...[...strips.values()].flat().filter(known));
  const columns = [
    ["", (w) => [`worker ${w.rank} `, tagOf(w)]],
    staged ? ["stage", (w) => [String(w.stage)]] : null,
    [`${now.unit}s/s`, (w) => [meter(w.per_s / fastest, ""), number(num(w.per_s))]],
    ["over time", (w) => [spark(strips.get(w.rank) ?? [], peak, w.lost)]],
    [
      "waits",
      (w) => [meter(w.waiting, "waits"), number(percent(w.waiting))],
      (w) => `waited ${seconds(w.waited_s)} in all`,
    ],
    stale ? ["missed", (w) => [num(w.missed_mean)], () => "mean updates missed by its gradients"] : null,
    stale ? ["max", (w) => [num(w.missed_max)]] : null,
    cpu ? ["processor", (w) => [seconds(w.cpu_s)]] : null,
    traffic
      ? ["traffic", (w) => [trafficOf(w)], (w) => `${bytes(w.pushed_bytes)} pushed, ${bytes(w.pulled_bytes)} pulled`]
      : null,
    sent ? ["sent", (w) => [bytes(w.sent_bytes)], () => "to other workers"] : null,
  ].filter(Boolean);
  const head = el("tr", {}, ...columns.map(([title]) => el("th", { scope: "col" }, title)));
  const rows = now.workers.map((worker) =>
    el(
      "tr",
      { "data-worker": worker.rank, "data-lost": worker.lost ? "true" : null },
      ...columns.map(([, cell, tip]) => el("td", { "data-tip": tip ? tip(worker) : null }, ...cell(worker))),
    ),
  );
  $("workers").replaceChildren(el("thead", {}, head), el("tbody", {}, ...rows));
  const all = now.num_workers.toLocaleString("en-US");
  $("workers-note").textContent = now.num_workers > now.workers.length ? `${now.workers.length} of ${all}` : "";
}

const trafficOf = (w) => (known(w.pushed_bytes) ? bytes(w.pushed_bytes + w.pulled_bytes) : "–");

function tagOf(worker) {
  if (worker.lost) return el("span", { class: "tag lost", "data-tip": worker.lost }, `✕ ${worker.absence}`);
  if (worker.slow) return el("span", { class: "tag slow" }, "▲ slow");
  return worker.waits_now ? el("span", { class: "tag waits" }, "waits") : "";
}

const number = (text) => el("span", { class: "number" }, text);

const meter = (share, kind) =>
  el("span", { class: `meter ${kind}` }, el("i", { style: { width: `${100 * Math.max(0, Math.min(1, share))}%` } }));

function spark(values, peak, lost) {
  const { width, height } = SPARK;
  const box = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const x = (k) => ((width - 2) * k) / Math.max(1, values.length - 1) + 1;
  const points = values.map((v, k) =>
    known(v) ? `${x(k).toFixed(1)},${(height - 1 - ((height - 2) * v) / peak).toFixed(1)}` : null,
  );
  const stroke = color(lost ? "--bad" : "--compute");
  const line = points.filter(Boolean).join(" ");
  box.append(svg("polyline", { points: line, fill: "none", stroke, "stroke-width": 1.3 }));
  return box;
}
