"""A comparison as one HTML file without scripts: it can be mailed, printed and kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from statistics import median

from rainband.views.compare.judge import Comparison, Entrant, seconds_text, verdict
from rainband.views.compare.measured import MetricPoint, RunMeasures
from rainband.views.compare.tables import time_of
from rainband.views.formatting import short, size, whole

# Colors that people with any color vision can tell apart, and dashes besides, for as many lines as are readable.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#8e44ad", "#6b7280", "#b8860b", "#c2185b", "#00838f")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 140, 10, 34
STEPS = 60  # of the grid on which medians over seeds are drawn
LINE = 13  # pixels between two names
NOT_COUNTED = '<td class="no">not counted</td>'

STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--fg:#1c2330;--dim:#5c6675;--line:#dfe3e9;--track:#eceff3}
@media(prefers-color-scheme:dark){:root{--bg:#12161d;--card:#1a202a;--fg:#e6eaf0;--dim:#9aa5b4;--line:#2c3542;
--track:#28303c}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);font:14px/1.45 system-ui,"DejaVu Sans",
sans-serif;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}main{max-width:1220px;margin:0 auto;padding:16px}
h1{font-size:20px;margin:0 0 4px}h2{font-size:14px;margin:0 0 6px}p{margin:4px 0 10px}.d,small{color:var(--dim);
font-size:12.5px}section{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px;
margin:0 0 12px;min-width:0}.verdict li{margin:3px 0}.verdict ul{margin:0;padding-left:18px}
.two{display:grid;grid-template-columns:minmax(0,1fr) minmax(0,1fr);gap:12px}.x{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13px}th{text-align:left;font-weight:400;color:var(--dim);
padding:4px 8px;white-space:nowrap}tbody th{color:var(--fg);font-weight:600}td,tbody th{padding:5px 8px;
border-top:1px solid var(--line);vertical-align:middle}
.k{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:7px}
.b{display:block;position:relative;height:9px;min-width:96px;background:var(--track);border-radius:2px}
.b i{display:block;position:absolute;left:0;top:0;height:100%;border-radius:2px}
.b .w{background:none;border:solid var(--fg);border-width:0 1px;top:-2px;height:13px;border-radius:0}
.b .w::after{content:"";position:absolute;left:0;right:0;top:6px;border-top:1px solid var(--fg)}
.v{font-size:12.5px}.no{color:var(--dim)}.dots{width:110px;height:15px;display:block}svg{width:100%;display:block}
svg text{fill:var(--dim);font-size:11px}svg .n{font-weight:600}.g{stroke:var(--line)}
.t{stroke:var(--fg);stroke-dasharray:2 3;opacity:.6}.r td,.r th{text-align:right}.r th:first-child{text-align:left}
pre{white-space:pre-wrap}@media(max-width:900px){.two{grid-template-columns:minmax(0,1fr)}}
@media(max-width:600px){.two section{overflow-x:auto}.two svg{min-width:500px}}
@media print{section{break-inside:avoid}}
"""


def report(comparison: Comparison) -> str:
    """Return the report."""
    title = f"{comparison.task}: comparison of {len(comparison.contenders)} strategies"
    ranked = comparison.ranked()
    color = {one.name: COLORS[k % len(COLORS)] for k, one in enumerate(comparison.contenders)}
    seeds = max((len(one.runs) for one in comparison.contenders), default=0)
    about = f"{seeds} runs of each, with different seeds. Lines are medians, bands go from the worst to the best seed; "
    about += "seconds are those since the first step."
    if any(run.virtual for one in ranked for run in one.runs):
        about += " The runs are simulated: seconds are virtual."
    notes = "".join(f"<p class=d>{escape(note)}</p>" for note in comparison.notes)
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in verdict(comparison))
    runs = "".join(
        f"<li><code>{escape(str(run.directory))}</code> {escape(run.state)}</li>" for c in ranked for run in c.runs
    )
    by_time = _chart(comparison, color, lambda point: point.seconds, "seconds since the first step")
    by_data = _chart(comparison, color, lambda point: float(point.samples), "samples")
    number = sum(len(one.runs) for one in ranked)
    command = f"<pre>{escape(comparison.command)}</pre>" if comparison.command else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>
<h1>{escape(title)}</h1><p class=d>{escape(about)}</p>{notes}
<section class=verdict><h2>Verdict</h2><ul>{sentences}</ul></section>
<section><h2>The four judgements</h2><div class=x>{_judgements(comparison, ranked, color)}</div></section>
<div class=two>
<section><h2>By time</h2>{by_time}</section>
<section><h2>By data</h2>{by_data}</section>
</div>
<section><h2>Where the time comes from</h2>
<p class=d>Time to the target = samples needed ÷ samples/s. Staleness costs samples, waiting costs samples/s.</p>
<div class=x>{_numbers(comparison, ranked)}</div></section>
<section><h2>Runs</h2>{command}<details><summary>{number} directories</summary><ul>{runs}</ul></details></section>
</main></body></html>
"""


def _judgements(comparison: Comparison, ranked: Sequence[Entrant], color: dict[str, str]) -> str:
    slowest = max((one.times[-1] for one in ranked if one.times), default=1.0) or 1.0
    dearest = max((one.middle("cpu_s") for one in ranked), default=0.0)
    largest = max((one.middle("num_bytes") for one in ranked), default=0.0)
    latest = max((one.middle("start_s") for one in ranked), default=0.0)
    finals = [value for one in ranked for value in one.finals]
    low, high = (min(finals), max(finals)) if finals else (0.0, 1.0)
    head = [
        "",
        f"1 · time to {comparison.target}" if comparison.target else "",
        "2 · settings of its own",
        f"3 · final {comparison.metric}, {short(low)} to {short(high)}",
        "4 · processor",
        "4 · bytes",
        "4 · start",
    ]
    rows = []
    for one in ranked:
        c = color[one.name]
        tried = f" · learning rates tried: {', '.join(f'{lr:g}' for lr in one.tuning.tried)}" if one.tuning else ""
        spread = "one run" if one.spread is None else f"spread {short(one.spread)}"
        cpu, num_bytes, start = one.middle("cpu_s"), one.middle("num_bytes"), one.middle("start_s")
        rows.append(
            f'<tr><th scope="row"><i class="k" style="background:{c}"></i>{escape(one.name)}</th>'
            + _time(one, slowest, c, comparison)
            + f"<td><b>{len(one.own_settings)}</b> <small>{escape(', '.join(one.own_settings) + tried)}</small></td>"
            + f'<td>{_dots(one.finals, low, high, c)}<span class="v">{spread}</span></td>'
            + (_bar(cpu, dearest, f"{short(cpu)} s", c) if dearest else NOT_COUNTED)
            + (_bar(num_bytes, largest, size(num_bytes), c) if one.counts_bytes else NOT_COUNTED)
            + (NOT_COUNTED if one.virtual else _bar(start, latest, seconds_text(start), c))
            + "</tr>"
        )
    headings = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    return f"<table><thead><tr>{headings}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _time(one: Entrant, slowest: float, color: str, comparison: Comparison) -> str:
    if comparison.target is None:
        return '<td class="no">no target</td>'
    if one.time is None:
        return '<td class="no">not reached</td>'
    hits = "" if one.always_reached else f", {len(one.hits)} of {len(one.runs)} runs"
    return _bar(one.time, slowest, f"{time_of(one)}{hits}", color, (one.times[0], one.times[-1]))


def _bar(value: float, most: float, text: str, color: str, span: tuple[float, float] | None = None) -> str:
    share = 100 * value / most if most else 0.0
    whisker = ""
    if span and most:
        left, width = 100 * span[0] / most, max(0.5, 100 * (span[1] - span[0]) / most)
        whisker = f'<i class="w" style="left:{left:.1f}%;width:{width:.1f}%"></i>'
    bar = f'<span class="b"><i style="width:{share:.1f}%;background:{color}"></i>{whisker}</span>'
    return f'<td>{bar}<span class="v">{escape(text)}</span></td>'


def _dots(values: Sequence[float], low: float, high: float, color: str) -> str:
    room = (high - low) or 1.0
    dots = "".join(
        f'<circle cx="{4 + 92 * (value - low) / room:.1f}" cy="7" r="3.2" fill="{color}" opacity=".75">'
        f"<title>{value:.6g}</title></circle>"
        for value in values
    )
    line = '<line x1="4" x2="96" y1="7" y2="7" class="g"/>'
    return (
        f'<svg viewBox="0 0 100 14" class="dots" role="img" aria-label="final values of all seeds">{line}{dots}</svg>'
    )


def _numbers(comparison: Comparison, ranked: Sequence[Entrant]) -> str:
    to_target = f" to {comparison.target}" if comparison.target else ""
    head = ["", f"final {comparison.metric}", "samples/s", f"samples{to_target}", f"updates{to_target}", "staleness"]
    head += ["training", "start"]
    rows = [
        [
            "-" if one.final is None else f"{one.final:.4g}",
            whole(one.middle("per_s")),
            "-" if one.samples_needed is None else whole(one.samples_needed),
            "-" if one.updates_needed is None else whole(one.updates_needed),
            short(one.middle("staleness")),
            seconds_text(one.middle("training_s")),
            "-" if one.virtual else seconds_text(one.middle("start_s")),
        ]
        for one in ranked
    ]
    body = "".join(
        f'<tr><th scope="row">{escape(one.name)}</th>{"".join(f"<td>{escape(text)}</td>" for text in row)}</tr>'
        for one, row in zip(ranked, rows, strict=True)
    )
    headings = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    return f'<table class="r"><thead><tr>{headings}</tr></thead><tbody>{body}</tbody></table>'


# ---- the charts ----


def _chart(comparison: Comparison, color: dict[str, str], x_of: Callable[[MetricPoint], float], label: str) -> str:
    points = [point for one in comparison.contenders for run in one.runs for point in run.curve]
    if not points:
        return f'<p class="d">No {escape(comparison.metric)} was measured.</p>'
    end = max(map(x_of, points)) or 1.0
    low, high = min(point.value for point in points), max(point.value for point in points)
    if comparison.target:
        low, high = min(low, comparison.target.value), max(high, comparison.target.value)
    room = (high - low) or 1.0

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / end

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / room

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(comparison.metric)} over {label}">']
    for value in ticks(low, high):
        out.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{short(value)}</text>')
    for at in ticks(0.0, end):
        out.append(f'<text x="{x(at):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{short(at)}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 2}" text-anchor="middle">{label}</text>')
    if comparison.target:
        at = y(comparison.target.value)
        out.append(f'<line class="t" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    ends: list[tuple[float, float, str, str]] = []
    for number, one in enumerate(comparison.contenders):
        drawn = _band(one.runs, x_of)
        if not drawn:
            continue
        c, dash = color[one.name], DASHES[number // len(COLORS) % len(DASHES)]
        upper = [f"{x(at):.1f},{y(max(values)):.1f}" for at, values in drawn]
        lower = [f"{x(at):.1f},{y(min(values)):.1f}" for at, values in reversed(drawn)]
        line = " ".join(f"{x(at):.1f},{y(median(values)):.1f}" for at, values in drawn)
        out.append(f'<polygon points="{" ".join(upper + lower)}" fill="{c}" opacity=".13"/>')
        out.append(
            f'<polyline points="{line}" fill="none" stroke="{c}" stroke-width="2" stroke-dasharray="{dash}">'
            f"<title>{escape(one.name)}</title></polyline>"
        )
        ends.append((y(median(drawn[-1][1])), x(drawn[-1][0]), one.name, c))
    return "".join([*out, *_names(ends), "</svg>"])


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two others, four to ten."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10(high - low))
    step = next(power * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if (high - low) / (power * part) <= 8)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _band(runs: Sequence[RunMeasures], x_of: Callable[[MetricPoint], float]) -> list[tuple[float, list[float]]]:
    """Return the values of all seeds on a grid, as steps: no value is drawn that was not measured."""
    curves = [run.curve for run in runs if run.curve]
    if not curves:
        return []
    end = min(x_of(curve[-1]) for curve in curves)
    drawn = []
    for k in range(STEPS + 1):
        at = end * k / STEPS
        known = [[point.value for point in curve if x_of(point) <= at] for curve in curves]
        if all(known):
            drawn.append((at, [values[-1] for values in known]))
    return drawn or [(end, [curve[-1].value for curve in curves])]


def _names(ends: list[tuple[float, float, str, str]]) -> list[str]:
    """Return the names of lines, moved apart, right of the chart."""
    out, free = [], -1e9
    for at, x, name, color in sorted(ends):
        y = max(at, free)
        free = y + LINE
        out.append(f'<circle cx="{x:.1f}" cy="{at:.1f}" r="3" fill="{color}"/>')
        to = WIDTH - RIGHT + 6
        line = f'x1="{x + 3:.1f}" y1="{at:.1f}" x2="{to}" y2="{y:.1f}" stroke="{color}" opacity=".5"'
        out.append(f"<line {line}/>")
        shown = name if len(name) <= 17 else name[:16] + "…"
        out.append(
            f'<text x="{WIDTH - RIGHT + 9}" y="{y + 4:.1f}" class="n" style="fill:{color}">{escape(shown)}</text>'
        )
    return out
