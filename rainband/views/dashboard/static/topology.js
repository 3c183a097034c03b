// Servers above, workers below. Width: bytes; filled part: share of the time spent waiting; triangle: slow; dashed: lost.

import { $, bytes, color, empty, key, legendIn, num, percent, sign, svg } from "./dom.js";

const SERVER_Y = 38;
const BELOW = 48; // the workers, to the end of the picture
const MANY = 12; // more workers have no text of their own
const MAX_SERVERS = 8;
const SERVER_WIDTH = 92; // with the space between two

let workerY = 168;

export function drawTopology(now) {
  const host = $("topology");
  if (!now.workers.length && !now.num_servers) return host.replaceChildren(empty("No node has joined yet."));
  host.querySelector(".empty")?.remove();
  workerY = now.num_servers ? 168 : 92;
  const height = workerY + BELOW;
  const width = Math.max(260, host.clientWidth);
  const few = now.workers.length <= MANY;
  const servers = now.servers.slice(0, Math.max(1, Math.min(MAX_SERVERS, Math.floor(width / SERVER_WIDTH))));
  const label = `${now.num_workers} workers, ${now.num_servers} servers and a coordinator`;
  const picture = svg("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": label,
  });
  const workerX = (k) => position(k, now.workers.length, few ? Math.min(46, width / 8) : 14, width);
  const serverX = (k) => position(k, servers.length, Math.max(46, width / 2 - servers.length * 52), width);
  drawLinks(picture, now, servers, workerX, serverX, few);
  drawReplicas(picture, now, workerX);
  servers.forEach((server, k) => picture.append(...serverShape(server, serverX(k))));
  if (!servers.length) {
    const text =
      now.num_workers > 1 ? "no servers: workers exchange gradients with each other" : "one worker, no servers";
    picture.append(svg("text", { x: width / 2, y: 22, "text-anchor": "middle", class: "d" }, text));
  }
  now.workers.forEach((worker, k) => picture.append(workerShape(now, worker, k, workerX(k), few, width)));
  host.querySelector("svg")?.remove();
  host.prepend(picture);
  const some = now.num_workers > now.workers.length;
  legendIn(
    host,
    key("--compute", "computes"),
    key("--wait", "share of time waiting"),
    key("--slow", "▲ slow"),
    key("--bad", "✕ lost or inactive"),
    some
      ? `${now.workers.length} of ${now.num_workers.toLocaleString("en-US")} workers: those that stand out, and others`
      : null,
    servers.length < now.num_servers
      ? `${servers.length} of ${now.num_servers.toLocaleString("en-US")} servers`
      : null,
  );
  const traffic = now.pushed_bytes + now.pulled_bytes > 0;
  $("topology-note").textContent = traffic
    ? `${bytes(now.pushed_bytes)} pushed, ${bytes(now.pulled_bytes)} pulled; thicker: more bytes`
    : "";
}

const position = (k, number, margin, width) =>
  number <= 1 ? width / 2 : margin + ((width - 2 * margin) * k) / (number - 1);

const colorOf = (worker) => color(worker.lost ? "--bad" : worker.slow ? "--slow" : "--compute");

function drawLinks(picture, now, servers, workerX, serverX, few) {
  const traffic = (worker) => (worker.pushed_bytes ?? 0) + (worker.pulled_bytes ?? 0);
  const most = Math.max(1, ...now.workers.map(traffic));
  now.workers.forEach((worker, k) => {
    servers.forEach((_, j) => {
      const stroke =
        worker.lost || worker.slow ? colorOf(worker) : color(worker.waiting > 0.3 ? "--wait" : "--compute");
      picture.append(
        svg("line", {
          x1: workerX(k),
          y1: workerY - (few ? 13 : 6),
          x2: serverX(j),
          y2: SERVER_Y + 14,
          stroke,
          "stroke-width": worker.lost ? 1 : 0.5 + (few ? 5 : 3) * (traffic(worker) / most),
          "stroke-dasharray": worker.lost ? "3 4" : null,
          opacity: worker.lost ? 0.7 : few ? 0.55 : 0.3,
        }),
      );
    });
  });
}

// Arcs between the workers of one replica, in the order of their stages; or a line through all that share batches.
function drawReplicas(picture, now, workerX) {
  const size = now.replica_size;
  for (let k = 0; k + 1 < now.workers.length; k++) {
    const [one, next] = [now.workers[k], now.workers[k + 1]];
    const together = size > 1 && Math.floor(one.rank / size) === Math.floor(next.rank / size);
    if (!together && !(now.shares_batches && !now.num_servers)) continue;
    const [x1, x2] = [workerX(k), workerX(k + 1)];
    const gone = one.lost || next.lost;
    picture.append(
      svg("path", {
        d: `M${x1},${workerY} Q${(x1 + x2) / 2},${workerY - 34} ${x2},${workerY}`,
        fill: "none",
        stroke: color(gone ? "--bad" : "--apply"),
        "stroke-width": 3,
        "stroke-dasharray": gone ? "3 4" : null,
        "data-tip": together
          ? `workers ${one.rank} and ${next.rank} compute one model; they sent ${bytes(one.sent_bytes)} and ${bytes(next.sent_bytes)}`
          : "the workers share each batch and average their gradients",
      }),
    );
  }
}

function serverShape(server, x) {
  const stroke = color(server.lost ? "--bad" : "--apply");
  const box = { x: x - 42, y: SERVER_Y - 14, width: 84, height: 28, rx: 6, fill: color("--card"), stroke };
  const text = server.lost ? "✕ lost" : server.updates === null ? "" : `${num(server.updates)} updates`;
  return [
    svg("rect", {
      ...box,
      "stroke-width": 2,
      "stroke-dasharray": server.lost ? "3 3" : null,
      "data-tip": server.lost || null,
    }),
    svg("text", { x, y: SERVER_Y + 4, "text-anchor": "middle" }, `server ${server.rank}`),
    svg("text", { x, y: SERVER_Y - 20, "text-anchor": "middle", class: "d" }, text),
  ];
}

function workerShape(now, worker, k, x, few, width) {
  const r = few ? 13 : Math.max(4, Math.min(9, width / now.workers.length / 2.6));
  const tip = [
    `worker ${worker.rank}${worker.lost ? `: ${worker.lost}` : ""}`,
    `${num(worker.per_s)} ${now.unit}s/s, waits ${percent(worker.waiting)} of the time`,
    `${bytes(worker.pushed_bytes)} pushed, ${bytes(worker.pulled_bytes)} pulled`,
  ].join("\n");
  const group = svg("g", { "data-tip": tip, "data-worker": worker.rank });
  const fill = colorOf(worker);
  if (worker.slow && !worker.lost) {
    const d = `M${x},${workerY - r - 3} L${x + r + 3},${workerY + r} L${x - r - 3},${workerY + r} Z`;
    group.append(svg("path", { d, fill }));
  } else {
    const dash = worker.lost ? "3 3" : null;
    const ground = worker.lost ? color("--card") : fill;
    group.append(
      svg("circle", {
        cx: x,
        cy: workerY,
        r,
        fill: ground,
        stroke: fill,
        "stroke-width": 2,
        "stroke-dasharray": dash,
      }),
    );
    if (!worker.lost && worker.waiting > 0.02) group.append(slice(x, r, Math.min(0.999, worker.waiting)));
  }
  if (few) {
    const below = worker.lost ? worker.absence : worker.stage !== null ? `stage ${worker.stage}` : `${num(worker.per_s)}/s`;
    group.append(
      svg("text", { x, y: workerY + 28, "text-anchor": "middle" }, `${sign(worker)}w${worker.rank}`),
      svg("text", { x, y: workerY + 41, "text-anchor": "middle", class: "d" }, below),
    );
  } else if (k % Math.ceil(now.workers.length / 10) === 0) {
    group.append(svg("text", { x, y: workerY + 24, "text-anchor": "middle", class: "d" }, String(worker.rank)));
  } else if (worker.lost || worker.slow) {
    group.append(svg("text", { x, y: workerY - 14, "text-anchor": "middle" }, sign(worker).trim()));
  }
  return group;
}

function slice(x, r, share) {
  const angle = 2 * Math.PI * share;
  const end = `${x + r * Math.sin(angle)},${workerY - r * Math.cos(angle)}`;
  const d = `M${x},${workerY} L${x},${workerY - r} A${r},${r} 0 ${angle > Math.PI ? 1 : 0} 1 ${end} Z`;
  return svg("path", { d, fill: color("--wait"), stroke: color("--wait-edge"), "stroke-width": 0.7 });
}
