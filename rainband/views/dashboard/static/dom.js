// Elements, numbers as text, and what several panels draw. A text of a run is only ever set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const el = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);

export const empty = (text) => el("p", { class: "empty" }, text);

// ---- numbers ----

export const known = (x) => x !== null && x !== undefined && Number.isFinite(x);

export function num(x, digits = 3) {
  if (!known(x)) return "–";
  return Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en-US") : String(+x.toPrecision(digits));
}

export const whole = (x) => (known(x) ? Math.round(x).toLocaleString("en-US") : "–");

export function bytes(x) {
  if (!known(x)) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let k = 0;
  while (x >= 1000 && k < units.length - 1) {
    x /= 1000;
    k++;
  }
  return `${+x.toPrecision(3)} ${units[k]}`;
}

export function seconds(s) {
  if (!known(s)) return "–";
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 120) return `${+s.toPrecision(3)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}

export const percent = (share) => `${Math.round(100 * share)} %`;

// ---- drawing ----

const root = document.documentElement;
let colors = {};

export function color(name) {
  colors[name] ??= getComputedStyle(root).getPropertyValue(name).trim();
  return colors[name];
}

export const isDark = () => root.dataset.theme === "dark";

export function setTheme(theme) {
  root.dataset.theme = theme;
  colors = {};
}

const LIGHT = [
  [232, 238, 244],
  [168, 207, 221],
  [88, 165, 178],
  [45, 104, 145],
  [50, 36, 92],
];
const DARK = [
  [38, 48, 62],
  [44, 95, 122],
  [64, 150, 134],
  [158, 197, 92],
  [252, 231, 120],
];

// From little to much: lighter to darker on light ground, darker to lighter on dark, so that it can be read in gray.
export function heat(share) {
  const stops = isDark() ? DARK : LIGHT;
  const x = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const k = Math.min(stops.length - 2, Math.floor(x));
  return `rgb(${stops[k].map((a, i) => Math.round(a + (x - k) * (stops[k + 1][i] - a))).join()})`;
}

// A canvas of this height in host, sharp on any screen; returns its context, its width and itself.
export function canvasIn(host, height) {
  let canvas = host.querySelector("canvas");
  if (!canvas) {
    canvas = el("canvas", { role: "img" });
    host.prepend(canvas);
  }
  const width = host.clientWidth;
  const ratio = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  context.textBaseline = "middle";
  return [context, width, canvas];
}

export function legendIn(host, ...children) {
  let legend = host.querySelector(".legend");
  if (!legend) host.append((legend = el("div", { class: "legend" })));
  legend.replaceChildren(...children.filter(Boolean));
}

export const key = (name, text) => el("span", {}, el("i", { style: { background: color(name) } }), text);

// Text in front of a worker: a shape, so that its color says nothing alone.
export const sign = (worker) => (worker.lost ? "✕ " : worker.slow ? "▲ " : "");

export function showTip(x, y, text) {
  const tip = $("tip");
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = `${Math.max(2, Math.min(x, innerWidth - tip.offsetWidth - 6))}px`;
  tip.style.top = `${Math.max(2, Math.min(y, innerHeight - tip.offsetHeight - 6))}px`;
}

export function hideTip() {
  $("tip").hidden = true;
}

// Buttons of which one is chosen; arrow keys move, as in every group of radio buttons.
export function radios(host, choices, chosen, choose) {
  const buttons = choices.map(([value, label]) => {
    const button = el("button", { type: "button", role: "radio" }, label);
    button.onclick = () => select(value, true);
    return button;
  });
  function select(value, byUser) {
    choices.forEach(([one], k) => {
      buttons[k].setAttribute("aria-checked", one === value);
      buttons[k].tabIndex = one === value ? 0 : -1;
    });
    if (byUser) choose(value);
  }
  host.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = (buttons.indexOf(document.activeElement) + step + buttons.length) % buttons.length;
    buttons[next].focus();
    buttons[next].click();
  };
  host.replaceChildren(...buttons);
  select(chosen, false);
  return (value) => select(value, false);
}
