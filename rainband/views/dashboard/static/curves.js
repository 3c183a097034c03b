// The training loss above the task's metric, with one cursor; dashed lines where something happened.

import { $, color, empty, hideTip, known, num, showTip } from "./dom.js";

const HEIGHT = { loss: 142, alone: 232, metric: 108 };
const FONT = "11px system-ui, 'DejaVu Sans', sans-serif";
const MARK_COLORS = { Lost: "--bad", UserError: "--bad", Returned: "--good" };
const FEW = 60; // points that are shown one by one

let plots = [];
let drawn = ""; // what the plots were made for
let current = null; // history and axis, for the hooks

export const AXES = [
  ["at_s", "seconds"],
  ["samples", "samples"],
  ["updates", "updates"],
];

export function forgetPlots() {
  plots.splice(0).forEach((plot) => plot.destroy());
  drawn = "";
}

export function drawCurves(now, history, axis, logScale) {
  const host = $("curve");
  const curve = history.curve;
  if (curve.at_s.length < 2) {
    forgetPlots();
    const text = curve.at_s.length ? "One point so far" : "No point yet";
    return host.replaceChildren(empty(`${text}: the loss is reported about once a second.`));
  }
  if (!curve.loss.some(known)) {
    forgetPlots();
    const text = now.virtual
      ? "No loss is known: without gradients (--time-only), a simulation has none."
      : "No loss has been reported yet.";
    return host.replaceChildren(empty(text));
  }
  const xs = axis === "at_s" ? curve.at_s.map((s) => Math.max(0, s - now.began_s)) : curve[axis];
  current = { now, history, axis, xs };
  const hasMetric = history.metric !== "loss" && curve.metric.filter(known).length > 1;
  const wanted = [hasMetric, history.metric, logScale, host.clientWidth].join("\n");
  if (wanted !== drawn) {
    forgetPlots();
    host.replaceChildren();
    drawn = wanted;
    plots.push(plotOf(host, "training loss", "--c1", hasMetric ? HEIGHT.loss : HEIGHT.alone, logScale, !hasMetric));
    if (hasMetric) plots.push(plotOf(host, history.metric.slice(0, 24), "--c2", HEIGHT.metric, false, true));
  }
  const positive = logScale ? curve.loss.map((loss) => (loss > 0 ? loss : null)) : curve.loss;
  plots.forEach((plot, k) => plot.setData([xs, k ? curve.metric : positive]));
  host.setAttribute("role", "img");
  const first = num(curve.loss.find(known));
  host.setAttribute("aria-label", `training loss from ${first} to ${num(now.loss)}; ${history.marks.length} marks`);
}

function plotOf(host, label, name, height, logScale, isLast) {
  const line = { stroke: () => color("--line"), width: 1 };
  const axis = { font: FONT, stroke: () => color("--dim"), grid: line, ticks: { show: false } };
  const numbers = (plot, values) => values.map((x) => (x === null ? "" : num(x)));
  return new uPlot(
    {
      width: host.clientWidth,
      height,
      padding: [6, 8, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "curve" }, y: false, drag: { x: true, y: false }, points: { size: 7 } },
      scales: {
        x: { time: false, range: (plot, low, high) => [Math.min(0, low), high] },
        y: { distr: logScale ? 3 : 1 },
      },
      axes: [
        { ...axis, size: isLast ? 26 : 8, values: isLast ? numbers : () => [] },
        { ...axis, size: 52, label, labelSize: 14, labelGap: 0, labelFont: FONT, values: numbers },
      ],
      series: [
        {},
        {
          stroke: () => color(name),
          width: 1.8,
          spanGaps: true,
          points: { show: (plot) => plot.data[0].length < FEW, size: 4, fill: () => color(name) },
        },
      ],
      hooks: { draw: [drawMarks], setCursor: [describePoint] },
    },
    null,
    host,
  );
}

function drawMarks(plot) {
  if (!current) return;
  const { history, axis, xs, now } = current;
  const at = history.curve.at_s;
  const g = plot.ctx;
  g.save();
  g.setLineDash([4, 4]);
  g.lineWidth = devicePixelRatio || 1;
  for (const [at_s, kind] of history.marks) {
    const k = at.findIndex((s) => s >= at_s);
    if (k < 0 && axis !== "at_s") continue;
    const part = k > 0 ? (at_s - at[k - 1]) / (at[k] - at[k - 1] || 1) : 1;
    const value = axis === "at_s" ? at_s - now.began_s : k > 0 ? xs[k - 1] + part * (xs[k] - xs[k - 1]) : xs[0];
    const x = plot.valToPos(value, "x", true);
    if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) continue;
    g.strokeStyle = color(MARK_COLORS[kind] ?? "--warn");
    g.beginPath();
    g.moveTo(x, plot.bbox.top);
    g.lineTo(x, plot.bbox.top + plot.bbox.height);
    g.stroke();
  }
  g.restore();
}

function describePoint(plot) {
  const k = plot.cursor.idx;
  if (!current || k === null || k === undefined || !plot.over.matches(":hover")) return;
  const { history, now } = current;
  const value = (name, digits) => num(history.curve[name][k], digits);
  const box = plot.over.getBoundingClientRect();
  const at = num(history.curve.at_s[k] - now.began_s);
  const near = history.marks.filter(([s]) => Math.abs(s - history.curve.at_s[k]) < 0.02 * (now.at_s - now.began_s));
  showTip(
    box.left + plot.cursor.left + 14,
    box.top + 10,
    [
      `${at} s · ${value("samples")} samples · ${value("updates")} updates`,
      `loss ${value("loss")}${history.metric ? ` · ${history.metric} ${value("metric", 4)}` : ""}`,
      `staleness ${value("staleness_mean")} · ${value("per_s")} ${now.unit}s/s`,
      ...near.slice(0, 3).map(([, kind, text]) => `${kind}: ${text}`),
    ].join("\n"),
  );
}

export function leaveCurves(target) {
  if (!target.closest?.(".u-over")) hideTip();
}
