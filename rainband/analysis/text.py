"""An analysis as text."""

from __future__ import annotations

from rainband.analysis.analysis import HERE, Analysis
from rainband.analysis.count import LayerWork
from rainband.analysis.predict import KINDS
from rainband.analysis.recommend import range_text
from rainband.runtimes.simulation.rounds import costs_of
from rainband.views.formatting import count, short, size, table, whole

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
MAX_LAYERS = 40


def lines_of(analysis: Analysis) -> list[str]:
    """Return all tables and the recommendation."""
    return [
        *_layers(analysis),
        "",
        *_times(analysis),
        "",
        *_updates(analysis),
        *_predictions(analysis),
        "",
        *(f"- {reason}" for reason in analysis.recommendation.reasons),
    ]


def number(value: float) -> str:
    """Format a number of operations: 64.5 M."""
    for factor, prefix in PREFIXES:
        if value >= factor:
            return f"{short(value / factor)} {prefix}"
    return short(value)


def seconds_text(seconds: float) -> str:
    """Format short times with three digits: 0.42 ms, 12.3 ms, 1.2 s."""
    return f"{short(seconds)} s" if seconds >= 1 else f"{short(1000 * seconds)} ms"


def _layers(analysis: Analysis) -> list[str]:
    work = analysis.measured.work
    head = ("layer", "", "work W", "depth D", "W/D", "parameters", "activations")
    rows = [head, *map(_layer_row, work.layers[:MAX_LAYERS])]
    if len(work.layers) > MAX_LAYERS:
        rows.append((f"... and {count(len(work.layers) - MAX_LAYERS, 'layer')} (--json)", *[""] * 6))
    total = ("all", "", number(work.work), whole(work.depth), number(work.parallelism), whole(work.parameters))
    rows.append((*total, size(work.activation_bytes)))
    gradient_s = analysis.measured.batch.median_s
    return [
        f"{analysis.task}: one gradient of a batch of {work.batch_size}, forward and backward, in scalar operations",
        "",
        *table(rows, indent="  "),
        "",
        f"Measured here with {count(work.batch_size, 'sample')}: {seconds_text(gradient_s)}, "
        f"{number(work.work / gradient_s)} operations/s. On average, {number(work.parallelism)} operations can be done "
        "at the same time.",
    ]


def _layer_row(layer: LayerWork) -> tuple[str, ...]:
    return (
        layer.name,
        layer.what,
        number(layer.work),
        whole(layer.depth),
        number(layer.parallelism),
        whole(layer.parameters),
        size(layer.activation_bytes),
    )


def _times(analysis: Analysis) -> list[str]:
    head = ("processors p", "max(W/p, D)", "greedy schedule", "W/p + D")
    rows = [
        ("any number" if p >= analysis.measured.work.work > 1 else whole(p), number(low), number(greedy), number(high))
        for p, low, greedy, high in analysis.times
    ]
    return ["Time T_p of the gradient on p processors, in operations:", "", *table([head, *rows], indent="  ")]


def _updates(analysis: Analysis) -> list[str]:
    if not analysis.updates:
        return []
    setting, measured = analysis.setting, analysis.measured
    costs = costs_of(setting.model, setting.workers)
    rows = [("", "steps", "messages", "bytes", "time")]
    for row in analysis.updates:
        rows.append((row.name, whole(row.steps), f"{row.alphas:g} α", f"{row.betas:.3g} Nβ", seconds_text(row.seconds)))
    rows.append(("LogP lower bound of all-reduces", "", "", "", seconds_text(analysis.bound_s)))
    return [
        f"Cost of one update: the gradients of {count(setting.workers, 'worker')} are summed, and all receive the sum.",
        f"N = {size(measured.model_bytes)}, α = {seconds_text(costs.alpha_s)} a message, "
        f"1/β = {size(1 / costs.beta_s)}/s ({setting.network}). Steps overlap if vectors are long:",
        "",
        *table(rows, indent="  "),
        "",
    ]


def _predictions(analysis: Analysis) -> list[str]:
    setting = analysis.setting
    rows = [("", "step", "samples/s", "range", "compute", "staleness", "its updates are")]
    for one in analysis.predictions:
        stale = f"{one.staleness:.1f}" if one.kind == "stale" else "-"
        rows.append(
            (
                one.words,
                seconds_text(one.step_s),
                short(one.samples_per_s),
                range_text(one),
                f"{one.compute_share:.0%}",
                stale,
                KINDS[one.kind],
            )
        )
    servers = f" and {count(setting.servers, 'server')}" if setting.servers else ""
    where = (
        "processes of this machine" if setting.network == HERE else f"each on a machine of its own, {setting.network}"
    )
    return [
        f"Predicted by the simulator for {count(setting.workers, 'worker')}{servers}, {where}.",
        "In a step, each worker computes a batch; workers that share batches compute one together:",
        "",
        *table(rows, indent="  "),
    ]
