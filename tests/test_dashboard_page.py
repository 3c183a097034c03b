"""The data of the dashboard's page: any part of a run gives one, of bounded size, and its sums are those of the run."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rainband.protocol import events
from rainband.views.dashboard import fold
from rainband.views.dashboard.findings import Level
from rainband.views.dashboard.fold import Folded, RunFile, log_before, main_metric
from rainband.views.dashboard.page import LATE_COLUMNS, NOTHING, PageHistory, RunPage, Sent, bin_names, strip_of
from rainband.views.dashboard.prometheus import as_metrics
from rainband.views.dashboard.runs_list import list_newest
from rainband.views.dashboard.saved import STATIC, SavedPage, joined_modules, saved_page
from rainband.views.dashboard.series import MAX_COLUMNS, MAX_POINTS, Column, Curve, Point, Shares, Strips
from rainband.views.dashboard.span_window import MAX_SHOWN, SpanWindow
from rainband.views.spans import Span
from tests.dashboard_runs import HOSTILE, made_run, measured, written

UPLOT = {  # uPlot 1.6.32, as npm has it: npm pack uplot@1.6.32, folder dist
    "LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
MAX_BYTES = 128_000  # of an answer, for any run
RUN = made_run(num_workers=3, seconds=8, lost=[2])
LINES = b"".join(msgspec.json.encode(event) + b"\n" for event in RUN)


def page_of(directory: Path) -> RunPage:
    file = RunFile(directory)
    file.read()
    return RunPage(file)


def size_of(page: RunPage) -> int:
    return len(msgspec.json.encode({"now": page.now(), "history": page.history()[0]}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@given(end=st.integers(0, len(LINES)))
def test_any_beginning_of_a_run_gives_a_page(folder: Path, end: int) -> None:
    (folder / "events.jsonl").write_bytes(LINES[:end])
    page = page_of(folder)
    assert page.file.offset == LINES[:end].rfind(b"\n") + 1
    assert page.folded.num_events == LINES[:end].count(b"\n")
    now = page.now()
    assert now.state == ("finished" if end == len(LINES) else "killed")
    assert msgspec.json.decode(msgspec.json.encode(now))["name"] == folder.name
    assert len(now.sentences) <= 4


@given(cuts=st.lists(st.integers(0, len(LINES)), max_size=6))
@settings(max_examples=30)
def test_a_page_that_receives_only_what_is_new_has_the_same_history(folder: Path, cuts: list[int]) -> None:
    path = folder / "events.jsonl"
    page, sent, shown = RunPage(RunFile(folder)), NOTHING, None
    for end in [*sorted(cuts), len(LINES)]:
        path.write_bytes(LINES[:end])
        page.file.read()
        update, sent = page.history(sent)
        shown = joined(shown, update)
    whole = page_of(folder).history()[0]
    assert shown is not None
    assert (shown.curve, shown.column_s, shown.strips) == (whole.curve, whole.column_s, whole.strips)
    assert shown.log == whole.log


def joined(before: PageHistory | None, update: PageHistory) -> PageHistory:
    """Do what `merged` in stream.js does."""
    if before is None or before.version != update.version:
        return update
    k, c = update.from_point, update.from_column
    return msgspec.structs.replace(
        update,
        curve={name: before.curve[name][:k] + values for name, values in update.curve.items()},
        column_s=before.column_s[:c] + update.column_s,
        strips=[
            msgspec.structs.replace(
                new,
                missed_mean=old.missed_mean[:c] + new.missed_mean,
                waiting=old.waiting[:c] + new.waiting,
                per_s=old.per_s[:c] + new.per_s,
            )
            for old, new in zip(before.strips, update.strips, strict=True)
        ],
        log=before.log + update.log,
    )


@pytest.mark.parametrize(("num_workers", "seconds"), [(1, 3), (60, 2000), (10_000, 40)])
def test_an_answer_is_bounded_for_any_run(tmp_path: Path, num_workers: int, seconds: int) -> None:
    run = made_run(num_workers, seconds, lost=range(1, num_workers, 7), text=HOSTILE * 20)
    page = page_of(written(tmp_path / "run", run))
    assert size_of(page) <= MAX_BYTES
    assert len(page.now().workers) == min(num_workers, len(page.now().workers)) <= 64
    assert page.now().num_workers == num_workers


@given(intervals=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(0, 3)), max_size=400))
def test_columns_have_the_sums_of_all_intervals(intervals: list[tuple[int, int, int]]) -> None:
    strips = Strips()
    for second, (missed, gradients, worker) in enumerate(intervals):
        strips.add(Column(second, second + 1, {worker: Shares(missed, gradients, 0.5, 1)}))
    assert len(strips.columns) <= MAX_COLUMNS
    for worker in range(4):
        shares = [column.shares[worker] for column in strips.columns if worker in column.shares]
        of_worker = [interval for interval in intervals if interval[2] == worker]
        assert sum(share.missed for share in shares) == sum(missed for missed, _, _ in of_worker)
        assert sum(share.gradients for share in shares) == sum(gradients for _, gradients, _ in of_worker)
        assert sum(share.samples for share in shares) == len(of_worker)
    ends = [column.end_s for column in strips.columns]
    assert ends == sorted(set(ends)) and (not ends or ends[-1] == len(intervals))


def test_a_thinned_curve_keeps_both_ends_and_a_single_spike() -> None:
    curve, spike = Curve(), 43_210
    for k in range(100_000):
        curve.add(Point(float(k), k, k, 99.0 if k == spike else 1.0 + 1e-6 * k, None, 0.0, 0, 1.0))
    assert len(curve.points) <= MAX_POINTS
    assert (curve.points[0].at_s, curve.points[-1].at_s) == (0.0, 99_999.0)
    assert max(point.loss or 0.0 for point in curve.points) == 99.0
    times = [point.at_s for point in curve.points]
    assert times == sorted(set(times))


def test_the_page_says_what_the_events_say(tmp_path: Path) -> None:
    page = page_of(written(tmp_path / "run", RUN))
    now = page.now()
    assert (now.state, now.task, now.num_workers, now.samples_done) == ("finished", "digits", 3, 8000)
    assert (now.staleness_mean, now.staleness_max, now.cpu_s) == (4.0, 9, 12.5)
    assert now.metrics == {"loss": 0.1, "digits": 0.97}
    worker = now.workers[1]
    assert (worker.rank, worker.pushed_bytes, worker.staleness, worker.waited_s) == (1, 8000, (0, 0, 0, 0, 8), 4.0)
    assert worker.waiting == pytest.approx(0.5) and not worker.lost
    assert now.workers[2].lost == "digits"
    assert now.held_up == [(0, 0.4 * 8)]
    assert [server.updates for server in now.servers] == [24, 24]
    history, _ = page.history()
    assert history.curve["updates"][-1] == 24  # of each of the two blocks
    assert [mark.kind for mark in history.marks] == ["Lost"]
    assert history.log[-1].kind == "RunEnded"


def test_staleness_over_time_is_that_of_each_interval(tmp_path: Path) -> None:
    run = [*made_run(num_workers=1, seconds=0)[:-3]]
    for second, missed in enumerate([4, 4, 10], 1):  # updates missed so far, by one gradient more in each second
        run += measured(1, second, 3, [0], [missed])
    history, _ = page_of(written(tmp_path / "run", run)).history()
    assert history.column_s == [(1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert history.strips[0].missed_mean == [4.0, 0.0, 6.0]
    assert history.strips[0].waiting == [0.5, 0.5, 0.5]


def test_waiting_that_is_reported_late_is_of_the_columns_before() -> None:
    """The heartbeat at 3 s reports 2.5 s of waiting; a column has room for 1 s."""
    waited = [0.25, 0.0, 2.5, 0.0]
    columns = [Column(k, k + 1, {0: Shares(0, 0, waited_s, 0)}) for k, waited_s in enumerate(waited)]
    assert strip_of(0, columns).waiting == [0.75, 1.0, 1.0, 0.0]
    assert strip_of(0, columns, 2).waiting == [1.0, 0.0]
    gone = [Column(0, 1, {0: Shares()}), Column(1, 2, {}), Column(2, 3, {0: Shares(0, 0, 3.0, 0)})]
    assert strip_of(0, gone).waiting == [0.0, None, 1.0]


def test_a_lost_worker_neither_computes_nor_waits() -> None:
    folded = Folded()
    for event in [*made_run(num_workers=2, seconds=1)[:-3], events.Lost(at_s=2.5, node="worker 1", why="killed")]:
        folded.absorb(event)
    assert folded.nodes is not None
    folded.absorb(msgspec.structs.replace(folded.nodes, at_s=3.0))
    assert [sorted(column.shares) for column in folded.strips.columns] == [[0, 1], [0]]


def test_the_names_of_the_bins_are_the_intervals() -> None:
    assert bin_names() == ["0", "1", "2", "3–4", "5–8", "9–16", "17–32", "33–64", "65–128", "129+"]


@pytest.mark.parametrize(
    ("names", "metric"), [((), ""), (("loss",), "loss"), (("loss", "accuracy"), "accuracy"), (("f1", "loss"), "f1")]
)
def test_the_main_metric_is_the_first_besides_the_loss(names: tuple[str, ...], metric: str) -> None:
    assert main_metric(names) == metric


# ---- sentences ----


def sentences_of(tmp_path: Path, run: list[events.AnyEvent]) -> dict[Level, list[str]]:
    found: dict[Level, list[str]] = {}
    for sentence in page_of(written(tmp_path / "run", run)).now().sentences:
        found.setdefault(sentence.level, []).append(sentence.text)
    return found


def test_a_lost_worker_and_waiting_stand_out(tmp_path: Path) -> None:
    found = sentences_of(tmp_path, made_run(4, 10, lost=[3], text="killed by signal 9"))
    assert found[Level.BAD] == ["Lost or inactive: worker 3 (killed by signal 9)."]
    assert "On average, workers wait 50 % of the time." in found[Level.WARN]


def test_paused_workers_and_those_that_left_are_no_trouble_and_are_named_so(tmp_path: Path) -> None:
    run = made_run(num_workers=3, seconds=2)[:-1]
    run += [
        events.Lost(at_s=2.6, node="worker 1", why="paused, by its own request", state="paused"),
        events.Lost(at_s=2.7, node="worker 2", why="it left, by its own request", state="left"),
    ]
    now = page_of(written(tmp_path / "run", run)).now()
    assert [worker.absence for worker in now.workers] == ["", "paused", "left"]
    assert not [sentence for sentence in now.sentences if "Lost" in sentence.text]


def test_a_run_without_its_last_event_was_killed(tmp_path: Path) -> None:
    found = sentences_of(tmp_path, made_run(2, 4)[:-1])
    assert any("was killed" in text for text in found[Level.BAD])


def test_a_slow_worker_is_compared_with_the_others(tmp_path: Path) -> None:
    run = [event for event in made_run(3, 4) if not isinstance(event, events.NodesMeasured)]
    base = next(event for event in measured(3, 4, 4, range(3), [40, 8, 8]) if isinstance(event, events.NodesMeasured))
    slow = msgspec.structs.replace(base, samples=(10, 100, 100), waited_s=(0.0,) * 3, waited_for=())
    run.insert(-3, slow)
    found = sentences_of(tmp_path, run)
    assert found[Level.WARN] == [
        "Worker 0 does 0.10 of what each of the others does; its gradients miss 10.0 updates, those of the others 2.0."
    ]


def test_an_error_of_the_user_comes_first(tmp_path: Path) -> None:
    run = made_run(2, 4, lost=[1])
    run.insert(-2, events.UserError(at_s=3.0, worker=1, step=7, error="ValueError: no", traceback="Traceback ..."))
    page = page_of(written(tmp_path / "run", run)).now()
    assert page.sentences[0].text == "Your code raised in worker 1, step 7: ValueError: no"
    assert page.traceback == "Traceback ..."


# ---- files ----


def test_a_line_that_cannot_be_read_is_counted_and_skipped(tmp_path: Path) -> None:
    directory = written(tmp_path / "run", RUN[:-1], rest=b'{"event":"Unheard"}\n')
    with (directory / "events.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(RUN[-1]) + b"\n")
    now = page_of(directory).now()
    assert (now.unreadable, now.state) == (1, "finished")


def test_a_file_is_read_in_slices_although_a_line_is_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold, "SLICE_BYTES", 64)
    directory = written(tmp_path / "run", RUN)
    assert page_of(directory).folded.num_events == len(RUN)


@pytest.mark.parametrize("slice_bytes", [50, 1000, 1 << 20])
@pytest.mark.parametrize("number", [1, 5, 1000])
def test_older_lines_of_the_log_are_found_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int, number: int
) -> None:
    directory = written(tmp_path / "run", RUN)
    every = list(page_of(directory).folded.log)
    monkeypatch.setattr(fold, "SLICE_BYTES", slice_bytes)
    path = directory / "events.jsonl"
    assert log_before(path, path.stat().st_size, number) == every[-number:]
    assert log_before(path, every[4].offset, number) == every[:4][-number:]
    assert log_before(path, 0, number) == []


def test_runs_are_listed_with_their_state(tmp_path: Path) -> None:
    written(tmp_path / "a-finished", RUN)
    written(tmp_path / "b-killed", RUN[:-1])
    written(tmp_path / "c-empty", [])
    rows = {row.name: row for row in list_newest(tmp_path)}
    assert {name: row.state for name, row in rows.items()} == {
        "a-finished": "finished",
        "b-killed": "killed",
        "c-empty": "killed",
    }
    assert rows["a-finished"].metrics == {"loss": 0.1, "digits": 0.97}


def test_spans_are_merged_to_what_can_be_seen(tmp_path: Path) -> None:
    window = SpanWindow(tmp_path)
    lines = [Span(f"worker {k % 2}", "compute", 100 + k / 1000, 100 + (k + 1) / 1000) for k in range(20_000)]
    lines.append(Span("worker 0", "wait", 121.0, 122.0))
    (tmp_path / "spans-0.jsonl").write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in lines) + b'{"no')
    window.read()
    found = window.excerpt(100.0, None, 30.0, 800)
    assert (found.from_s, found.to_s) == (0.0, 22.0)
    assert list(found.nodes) == ["worker 0", "worker 1"]
    assert found.nodes["worker 0"]["wait"] == [(21.0, 22.0)]
    assert sum(len(row) for kinds in found.nodes.values() for row in kinds.values()) <= MAX_SHOWN
    computed = found.nodes["worker 0"]["compute"]
    assert computed[0][0] == 0.0 and computed[-1][1] == pytest.approx(19.999)
    close = window.excerpt(100.0, 1.0, 0.01, 800)
    assert len(close.nodes["worker 1"]["compute"]) == 6


# ---- what leaves the program ----


def test_a_saved_page_is_alone_and_no_text_of_a_run_is_markup(tmp_path: Path) -> None:
    page = saved_page(written(tmp_path / "run", made_run(3, 5, lost=[1], text=HOSTILE)))
    assert "<img" not in page and "alert(1)" in page
    assert page.count("<script") == page.count("</script") == 3
    policy = re.findall(r'content="(default-src[^"]*)"', page)[0]
    assert "'unsafe-inline'" not in policy.partition("script-src")[2]
    outside = re.findall(r"""(?:src|href)=["']?([^"'> ]+)|url\(([^)]*)\)|@import""", page.partition("<body>")[0])
    assert [first or second for first, second in outside] == ["data:,"]


def test_a_notebook_shows_the_page_in_a_frame_that_cannot_reach_out(tmp_path: Path) -> None:
    shown = SavedPage(written(tmp_path / "run", RUN))
    frame = shown._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts"') and frame.count("<") == 2
    shown.save(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == shown.html


def test_joined_modules_have_every_module_once() -> None:
    script = joined_modules("main")
    modules = {path.stem for path in STATIC.glob("*.js")}
    assert {name for name in modules if script.count(f"modules.{name} = (() =>") == 1} == modules
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


def test_the_library_for_curves_is_the_published_one_with_its_license() -> None:
    folder = STATIC / "uplot"
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    assert digests == UPLOT
    assert "MIT License" in (folder / "LICENSE").read_text()


@pytest.mark.parametrize("path", sorted(STATIC.glob("*.js")), ids=lambda path: path.stem)
def test_scripts_never_read_text_as_html_and_ask_nobody_else(path: Path) -> None:
    source = path.read_text()
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "https:")
    assert [word for word in forbidden if word in source] == []
    assert re.findall(r"http:(?!//www\.w3\.org/2000/svg)", source) == []


def test_prometheus_reads_every_line(tmp_path: Path) -> None:
    text = as_metrics(page_of(written(tmp_path / "run", made_run(3, 5, lost=[1], text=HOSTILE + "\n"))).now())
    labels = r"(\{(\w+=\"([^\"\\]|\\.)*\",?)*\})?"
    for line in text.splitlines():
        assert re.fullmatch(rf"# (HELP|TYPE) \w+ .+|rainband_\w+{labels} [-+.\de]+", line), line
    assert 'rainband_worker_lost{worker="1"} 1' in text
    assert 'rainband_state{state="finished"} 1' in text


def test_nothing_is_sent_twice() -> None:
    folded = Folded()
    for event in RUN:
        folded.absorb(event, offset=folded.num_events)
    file = RunFile(Path("run"))
    file.folded = folded
    _, sent = RunPage(file).history()
    again, same = RunPage(file).history(sent)
    assert same == sent != Sent()
    assert (len(again.curve["at_s"]), again.log) == (1, [])
    assert len(again.column_s) <= LATE_COLUMNS + 1  # their waiting may be reported late
    assert math.isclose(again.curve["at_s"][0] or 0.0, 9.0)
