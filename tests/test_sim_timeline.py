"""The picture of a run: its spans, the file for Chrome, the image."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from rainband.cli.timeline import chrome_trace, command, draw, nodes_of, within
from rainband.record.spans import write_spans
from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation import run as sim
from rainband.views.spans import Span, read_spans

SPANS = [
    Span("worker 10", "compute", 5.0, 6.0),
    Span("worker 2", "wait", 6.0, 6.5),
    Span("server 0", "apply", 6.5, 6.6),
    Span("worker 2", "push", 6.25, 7.0),
]


def app() -> Typer:
    app = Typer()
    app.callback()(lambda: None)
    app.command("timeline")(command)
    return app


def test_spans_are_read_back_from_the_first_moment_on(tmp_path: Path) -> None:
    write_spans(tmp_path, SPANS)
    (tmp_path / "spans-worker-3.jsonl").write_bytes(
        b'{"node": "worker 3", "what": "compute", "from_s": 4.0, "to_s": 5.5}\n{"node": "worker 3", "wh'
    )
    spans = read_spans(tmp_path)
    assert Span("worker 3", "compute", 0.0, 1.5) in spans and Span("worker 10", "compute", 1.0, 2.0) in spans
    assert len(spans) == 5  # the torn line of a killed process does not count


def test_workers_come_by_number_and_then_servers() -> None:
    assert nodes_of(SPANS) == ["worker 2", "worker 10", "server 0"]


def test_a_part_of_the_time_is_what_touches_it() -> None:
    assert within(SPANS, 6.5, 6.55) == SPANS[1:]
    assert within(SPANS, 6.9, None) == SPANS[3:]


def test_chrome_gets_microseconds_and_a_name_for_each_node() -> None:
    events = json.loads(chrome_trace(SPANS))["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["worker 2", "worker 10", "server 0"]
    assert {"ph": "X", "name": "push", "pid": 0, "tid": 1, "ts": 6.25e6, "dur": 0.75e6} in events


def test_an_image_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert draw(SPANS, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("strategy", ["downpour", "sync"])
def test_a_simulated_run_tells_what_every_node_did(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "run").mkdir()
    config = RunConfig(
        task="linear",
        task_settings={"dimension": 32},
        strategy=strategy,
        strategy_settings={"batch_per_worker": True} if strategy == "sync" else {},
        num_workers=2,
        num_servers=2,
        epochs=1,
        directory=str(tmp_path / "run"),
        sim=SimSettings(compute={"kind": "constant", "step_s": 1.0}),
    )
    result = sim.run(config, lambda event: None)
    spans = read_spans(tmp_path / "run")
    computed = [span for span in spans if span.what == "compute"]
    assert len(computed) == 256 and {round(span.to_s - span.from_s, 9) for span in computed} == {1.0}
    assert sum(span.what == "push" for span in spans) == 256
    assert sum(span.what == "apply" for span in spans) == 512  # on each of two blocks
    assert any(span.what == "pull" for span in spans)
    for worker in ("worker 0", "worker 1"):  # one thread: computing and waiting do not overlap
        own = sorted((s.from_s, s.to_s) for s in spans if s.node == worker and s.what in ("compute", "wait"))
        assert all(later[0] >= earlier[1] - 1e-9 for earlier, later in pairwise(own))
    shown = CliRunner().invoke(app(), ["timeline", str(tmp_path / "run"), "--to", "5"])
    assert shown.exit_code == 0 and (tmp_path / "run" / "timeline.json").exists(), shown.output
    assert result.outcome == "finished"


def test_a_run_without_spans_says_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"")
    result = CliRunner().invoke(app(), ["timeline", str(tmp_path)])
    assert result.exit_code == 2 and "--runtime sim" in result.output
