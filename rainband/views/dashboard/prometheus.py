"""The state of a run as text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from rainband.views.dashboard.page import Now

STATES = ("starting", "running", "finished", "stopped", "failed", "killed")


def as_metrics(now: Now) -> str:
    """Return gauges and counters of the run and of its workers."""
    lines = [
        *_series("state", "gauge", "1: the run is in this state", ((f'state="{s}"', now.state == s) for s in STATES)),
        *_series("samples_total", "counter", "samples trained on", [("", now.samples_done)]),
        *_series("samples_per_second", "gauge", "samples (or steps) per second, of all workers", [("", now.per_s)]),
        *_series("loss", "gauge", "training loss", [("", now.loss)]),
        *_series("staleness_mean", "gauge", "updates that gradients missed", [("", now.staleness_mean)]),
        *_series("pushed_bytes_total", "counter", "bytes pushed to servers", [("", now.pushed_bytes)]),
        *_series("pulled_bytes_total", "counter", "bytes pulled from servers", [("", now.pulled_bytes)]),
        *_series("cpu_seconds_total", "counter", "processor time of all processes", [("", now.cpu_s)]),
        *_series(
            "worker_samples_per_second",
            "gauge",
            "of the workers that the page shows",
            ((f'worker="{w.rank}"', w.per_s) for w in now.workers),
        ),
        *_series(
            "worker_waited_seconds_total",
            "counter",
            "of the workers that the page shows",
            ((f'worker="{w.rank}"', w.waited_s) for w in now.workers),
        ),
        *_series(
            "worker_pushed_bytes_total",
            "counter",
            "of the workers that the page shows",
            ((f'worker="{w.rank}"', w.pushed_bytes) for w in now.workers),
        ),
        *_series(
            "server_updates_total",
            "counter",
            "updates of blocks",
            ((f'server="{s.rank}"', s.updates) for s in now.servers),
        ),
        *_series(
            "worker_lost", "gauge", "1: lost or inactive", ((f'worker="{w.rank}"', bool(w.lost)) for w in now.workers)
        ),
        *_series(
            "metric",
            "gauge",
            "the task's metrics, as last measured",
            ((f'name="{_escaped(name)}"', value) for name, value in now.metrics.items()),
        ),
    ]
    return "\n".join(lines) + "\n"


def _series(name: str, kind: str, text: str, values: Iterable[tuple[str, float | None]]) -> list[str]:
    known = [(labels, value) for labels, value in values if value is not None]
    if not known:
        return []
    head = [f"# HELP rainband_{name} {text}", f"# TYPE rainband_{name} {kind}"]
    return head + [f"rainband_{name}{f'{{{labels}}}' if labels else ''} {float(value):.10g}" for labels, value in known]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
