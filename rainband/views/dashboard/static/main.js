// The page: receives the run's data, and draws the panels again when it has changed.

import { drawAccounting } from "./accounting.js";
import { AXES, drawCurves, forgetPlots, leaveCurves } from "./curves.js";
import { $, el, hideTip, isDark, known, radios, setTheme, showTip } from "./dom.js";
import { drawHeader, drawReading } from "./header.js";
import { drawLog, fetchOlder, forgetLog } from "./log.js";
import { Connection, merged } from "./stream.js";
import { drawStrips, STRIP_CHOICES } from "./strips.js";
import { drawTimeline, forgetSpans, LENGTHS } from "./timeline.js";
import { drawTopology } from "./topology.js";
import { drawWaits } from "./waits.js";
import { drawWorkers } from "./workers.js";

const RUNS_EVERY_MS = 10_000;
const root = document.documentElement;
const embedded = $("run-data"); // a saved page has its data in itself
const connection = embedded ? null : new Connection();
const view = { axis: "at_s", log: false, length: 2, strip: null };
let now = null;
let past = null;
let isDue = false;

// ---- drawing ----

function draw() {
  if (!now || !past) return;
  const strip = view.strip ?? (now.workers.some((worker) => known(worker.missed_mean)) ? "missed_mean" : "waiting");
  selectStrip(strip);
  const panels = [
    () => drawHeader(now),
    () => drawStrips(now, past, strip),
    () => drawCurves(now, past, view.axis, view.log),
    () => drawTopology(now),
    () => drawWorkers(now, past),
    () => drawTimeline(now, past, view.length, connection),
    () => drawWaits(now),
    () => drawAccounting(now),
    () => drawLog(now, past, connection),
  ];
  for (const panel of panels) {
    try {
      panel()?.catch?.((error) => console.error(error));
    } catch (error) {
      console.error(error); // a panel that fails does not take the others with it
    }
  }
}

function schedule() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    const begin = performance.now();
    draw();
    if (!now) return;
    root.dataset.drawMs = (performance.now() - begin).toFixed(1);
    root.dataset.drawn = String(1 + Number(root.dataset.drawn ?? 0)); // tests wait for it
  });
}

// ---- data ----

function receive(kind, data) {
  if (kind === "reading") return drawReading(data.share);
  past = kind === "all" ? data.history : merged(past, data.history);
  now = data.now;
  schedule();
}

const say = (text) => {
  $("link").textContent = text;
};

function follow() {
  now = past = null;
  forgetLog();
  forgetSpans();
  forgetPlots();
  connection.follow(receive, say).catch((error) => {
    console.error(error);
    say("this page has met an error: reload it");
  });
}

async function listRuns() {
  const answer = await connection.ask("/api/runs").catch(() => null); // the server may have ended
  if (!answer?.ok) return;
  const { chosen, runs } = await answer.json();
  const select = $("runs");
  const options = runs.map((run) => el("option", { value: run.name }, `${run.name} (${run.state})`));
  if ([...select.options].map((o) => o.textContent).join() !== options.map((o) => o.textContent).join()) {
    select.replaceChildren(...options);
    select.value = connection.run || chosen;
  }
  $("choice").hidden = runs.length < 2;
}

// ---- hands ----

function chooseTheme(theme) {
  setTheme(theme);
  forgetPlots();
  schedule();
}

function tipAt(event) {
  const target = event.target;
  let text = target.closest?.("[data-tip]")?.dataset.tip;
  if (target.boxes) {
    const box = target.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    text = target.boxes.findLast(([bx, by, w, h]) => x >= bx && x < bx + w && y >= by && y < by + h)?.[4];
  }
  if (text) showTip(event.clientX + 12, event.clientY + 12, text);
  else leaveCurves(target);
}

function stored(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // no storage in a sandbox
  }
}

function store(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // no storage in a sandbox: the choice lasts as long as the page
  }
}

setTheme(stored("rainband-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").onclick = () => {
  const theme = isDark() ? "light" : "dark";
  store("rainband-theme", theme);
  chooseTheme(theme);
};
const selectStrip = radios($("strip-kinds"), STRIP_CHOICES, "missed_mean", (kind) => {
  view.strip = kind;
  schedule();
});
radios($("axes"), AXES, view.axis, (axis) => {
  view.axis = axis;
  schedule();
});
radios($("lengths"), LENGTHS, view.length, (length) => {
  view.length = length;
  schedule();
});
$("log-scale").onchange = (event) => {
  view.log = event.target.checked;
  schedule();
};
$("older").onclick = () => fetchOlder(past, connection).then(schedule);
$("runs").onchange = (event) => {
  connection.run = event.target.value;
  history.replaceState(null, "", `${location.pathname}#run=${encodeURIComponent(connection.run)}`);
  follow();
};
document.addEventListener("pointermove", tipAt);
document.addEventListener("scroll", hideTip, true);
new ResizeObserver(schedule).observe(document.body);

if (embedded) {
  say("");
  receive("all", JSON.parse(embedded.textContent));
} else {
  follow();
  listRuns();
  setInterval(listRuns, RUNS_EVERY_MS);
}
