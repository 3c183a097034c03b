"""The output of a run while it runs and when it ends: lines, frames, charts."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rainband
from rainband.protocol import events
from rainband.protocol.events import AnyEvent
from rainband.protocol.messages import SampleAccount
from rainband.views.charts import ASCII, BLOCKS, bar, curve, histogram, ink_for, progress_bar, spark
from rainband.views.event_text import lasting_lines, user_error, waiting_for
from rainband.views.formatting import assignment, count, cut, duration, percent, short, size, table
from rainband.views.history import RunSoFar
from rainband.views.live_display import PlainView, RunWatch, is_terminal
from rainband.views.progress import LiveView, frame
from rainband.views.summary import accounting, headline, shared, summary
from rainband.views.warnings import warnings
from tests.synthetic_runs import ACCOUNTING, ended, planned, progress, started, whole_run

TRACEBACK = "Traceback (most recent call last):\n"


def running(*story: AnyEvent, workers: int = 2) -> RunSoFar:
    return RunSoFar.from_events([started(workers), planned(), events.PhaseChanged(at_s=1.0, phase="running"), *story])


def drawn(so_far: RunSoFar, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain for line in frame(so_far, width, height)]


# ---- words ----


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 s"),
        (1e-7, "1 ms"),
        (0.044, "44 ms"),
        (0.095, "0.1 s"),
        (9.94, "9.9 s"),
        (12.4, "12 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (273600, "3 d 4 h"),
    ],
)
def test_a_duration_is_said_in_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.0325, "0.0325"), (1.0687, "1.07"), (28740.4, "28,740"), (1.2e-7, "1.2e-07")],
)
def test_a_number_has_three_figures_that_matter(number: float, text: str) -> None:
    assert short(number) == text


def test_one_hundred_percent_is_all_and_nothing_less() -> None:
    assert (percent(0.999), percent(1.0)) == ("99 %", "100 %")


def test_counted_things_have_their_plural() -> None:
    assert [
        count(1, "batch"),
        count(2, "batch"),
        count(3, "epoch"),
        count(1000, "push"),
        count(2, "sample"),
    ] == [
        "1 batch",
        "2 batches",
        "3 epochs",
        "1,000 pushes",
        "2 samples",
    ]


def test_sizes_are_in_powers_of_a_thousand() -> None:
    assert [size(200), size(1500), size(25.3e9)] == ["200 B", "1.5 kB", "25.3 GB"]


def test_a_setting_is_shown_as_it_would_be_typed() -> None:
    values = {"overlap": True, "local_lr": None, "betas": (0.9, 0.99), "lr": 0.1}
    assert [assignment(*pair) for pair in values.items()] == [
        "overlap=true",
        "local_lr=none",
        "betas=0.9,0.99",
        "lr=0.1",
    ]


def test_a_table_aligns_its_columns_and_wraps_the_last_without_breaking_words() -> None:
    rows = [("a", "one two three four five six"), ("long", "runs/2026-11-16-digits/model.safetensors")]
    assert table(rows, width=26) == [
        "a     one two three four",
        "      five six",
        "long  runs/2026-11-16-digits/model.safetensors",
    ]
    assert table([]) == []


@given(st.text(), st.integers(0, 20))
def test_what_is_cut_fits(text: str, width: int) -> None:
    assert len(cut(text, width)) <= max(1, width) and (len(text) > width or cut(text, width) == text)


# ---- charts ----


def test_a_bar_of_half_the_width_has_half_the_blocks() -> None:
    assert bar(0.5, 8) == "████"
    assert bar(0.5, 8, ASCII) == "####"
    assert (bar(0.0, 8), bar(1e-9, 8), bar(2.0, 2)) == ("", "▏", "██")


def test_a_progress_bar_is_full_only_at_the_end() -> None:
    assert (progress_bar(0.0, 4), progress_bar(0.99, 4), progress_bar(1.0, 4)) == ("░░░░", "███░", "████")


def test_a_spark_line_goes_from_low_to_high_and_means_what_it_leaves_out() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark([0, 0, 7, 7], 2) == "▁█"
    assert (spark([3, 3], 5), spark([], 5)) == ("▁▁", "")


def test_a_histogram_has_a_bar_for_each_value_even_for_one_that_never_came() -> None:
    assert histogram({0: 8, 2: 4}, 13) == ["0 │████████ 8", "1 │         0", "2 │████     4"]


@given(st.dictionaries(st.integers(0, 5000), st.integers(1, 10**6), min_size=1), st.integers(30, 120))
def test_a_histogram_of_any_staleness_fits_and_counts_everything(counts: dict[int, int], width: int) -> None:
    lines = histogram(counts, width)
    assert len(lines) <= 16 and max(map(len, lines)) <= width
    assert sum(int(line.split()[-1].replace(",", "")) for line in lines) == sum(counts.values())


def test_a_curve_goes_from_the_top_left_to_the_bottom_right_as_a_loss_should() -> None:
    assert curve([(0, 3.0), (50, 2.0), (100, 1.0)], width=14, height=3) == [
        "3 │•",
        "  │     •",
        "1 │          •",
        "  └───────────",
        "   0       100",
    ]
    assert curve([(0, 1.0)], 14) == []


def test_where_blocks_cannot_be_written_ascii_is() -> None:
    assert (ink_for("utf-8"), ink_for("latin-1"), ink_for(None), ink_for("nonsense")) == (
        BLOCKS,
        ASCII,
        ASCII,
        ASCII,
    )


# ---- lines ----


def test_the_quiet_start_says_what_it_waits_for() -> None:
    story: list[AnyEvent] = [started(workers=4, servers=2)]
    assert waiting_for(RunSoFar.from_events(story)) == "starting 4 workers and 2 servers ..."
    story += [events.Joined(at_s=1.0, node=node) for node in ("server 0", "worker 1", "worker 2")]
    assert (
        waiting_for(RunSoFar.from_events(story)) == "3 of 6 have joined, waiting for server 1, worker 0, worker 3 ..."
    )
    story += [events.Joined(at_s=1.0, node=node) for node in ("server 1", "worker 0", "worker 3")]
    assert waiting_for(RunSoFar.from_events(story)) == "waiting for the first steps ..."


def in_the_users_file(error: str = "RuntimeError: bad") -> events.UserError:
    trace = f'{TRACEBACK}  File "/home/ada/mine.py", line 3, in loss\n    bad()\n{error}\n'
    return events.UserError(at_s=3.0, worker=1, step=7, error=error, traceback=trace)


def test_the_users_traceback_is_shown_with_rank_and_step() -> None:
    lines = user_error(in_the_users_file())
    assert lines[0] == "worker 1 failed at step 7:"
    assert lines[1] == "Traceback (most recent call last):" and lines[-1] == "RuntimeError: bad"


def test_a_mistake_that_rainband_noticed_is_reported_without_a_traceback() -> None:
    file = Path(rainband.__file__).with_name("settings.py")
    error = events.UserError(
        at_s=1.0,
        worker=0,
        step=0,
        error="ValueError: samples=abc: expected a whole number",
        traceback=f'{TRACEBACK}  File "{file}", line 3, in build\n    x\nValueError: no\n',
    )
    assert user_error(error) == ["worker 0 could not start: samples=abc: expected a whole number"]
    beside = error.traceback.replace(str(file), f"{file.parent}_of_mine/data.py")
    assert len(user_error(msgspec.structs.replace(error, traceback=beside))) > 1  # of a user's package beside ours
    assert len(user_error(error, verbose=True)) > 1


def test_a_value_error_in_the_users_own_code_keeps_its_traceback() -> None:
    assert len(user_error(in_the_users_file("ValueError: shapes"))) > 1


def test_who_is_lost_and_who_is_back_is_said() -> None:
    so_far = running(progress(2, 100))
    lost = events.Lost(at_s=3.0, node="worker 1", why="killed by signal 9")
    assert lasting_lines(lost, so_far) == ["lost worker 1 (killed by signal 9); its batches are reassigned"]
    assert lasting_lines(events.Returned(at_s=4.0, node="worker 1"), so_far) == ["worker 1 is active again"]


def test_paused_and_inactive_workers_are_not_called_lost() -> None:
    so_far = running(progress(2, 100))
    paused = events.Lost(at_s=3.0, node="worker 1", why="paused, by its own request", state="paused")
    inactive = events.Lost(
        at_s=3.0, node="worker 1", why="inactive: heartbeats, but no push for 12.0 s", state="inactive"
    )
    assert [line for event in (paused, inactive) for line in lasting_lines(event, so_far)] == [
        "worker 1 paused, by its own request; its batches are reassigned",
        "worker 1 is inactive: heartbeats, but no push for 12.0 s; its batches are reassigned",
    ]


def test_what_processes_print_is_marked_and_a_flood_is_counted() -> None:
    printed = events.ProcessOutput(at_s=1.0, lines=("hello", "there"), left_out=1500)
    assert lasting_lines(printed, running()) == ["| ... 1,500 lines before this in output.log", "| hello", "| there"]
    assert lasting_lines(printed, running(in_the_users_file())) == []


def test_details_are_for_those_who_ask() -> None:
    again = events.BatchesReassigned(at_s=1.0, portion=3, batches=5, from_worker=1)
    assert lasting_lines(again, running()) == []
    assert lasting_lines(again, running(), verbose=True) == ["5 batches of worker 1 reassigned (portion 3)"]


# ---- where there is no terminal ----


def plain_lines(story: list[AnyEvent], verbose: bool = False) -> list[str]:
    out = io.StringIO()
    view = PlainView(out, verbose)
    for event in story:
        view(event)
    return out.getvalue().splitlines()


def test_a_whole_run_is_a_handful_of_readable_lines() -> None:
    pace = "100 samples/s  staleness mean 0.5, max 2"
    assert plain_lines(whole_run()) == [
        "digits with downpour: 2 workers and 1 server",
        "starting 2 workers and 1 server ...",
        "38,282 parameters in 2 blocks, 2 epochs of 1,000 samples, 900 batches of 32",
        "    2.0 s    0 %  0 of 2,000 samples  loss 2  staleness mean 0.5, max 2",
        f"    7.0 s   25 %  500 of 2,000 samples  loss 0.333  {pace}  15 s left",
        f"     12 s   50 %  1,000 of 2,000 samples  loss 0.182  {pace}  10 s left",
        f"     17 s   75 %  1,500 of 2,000 samples  loss 0.125  {pace}  5.0 s left",
        "evaluating and saving the model ...",
    ]


def test_an_hour_of_progress_is_no_wall_of_lines() -> None:
    hour = [progress(float(s), s, samples=10**6) for s in range(3600)]
    assert len(plain_lines([started(), planned(10**6, 1), *hour])) < 3600 / 5 + 5


def test_slow_and_lost_workers_are_in_the_line() -> None:
    story = [progress(5.0 * s, 100 * s, rates=(100.0, 100.0, 10.0, 0.0)) for s in range(1, 5)]
    lost = events.Lost(at_s=4.0, node="worker 3", why="killed")
    running_now = events.PhaseChanged(at_s=0.0, phase="running")
    assert plain_lines([started(4), planned(), running_now, lost, *story])[-1].endswith(
        "slow: worker 2  lost: worker 3"
    )


def test_workers_that_are_paused_inactive_or_gone_are_not_called_lost_in_the_line_and_the_live_view() -> None:
    pace = [progress(5.0 * s, 100 * s, rates=(100.0, 0.0, 0.0, 0.0)) for s in range(1, 5)]
    states: tuple[events.Absence, ...] = ("paused", "inactive", "left")
    whys = ("paused, by its own request", "inactive: heartbeats, but no push for 9 s", "it left, by its own request")
    gone = [
        events.Lost(at_s=4.0, node=f"worker {i + 1}", why=why, state=state)
        for i, (why, state) in enumerate(zip(whys, states, strict=True))
    ]
    story = [started(4), planned(), events.PhaseChanged(at_s=0.0, phase="running"), *gone, *pace]
    assert plain_lines(story)[-1].endswith("paused: worker 1  inactive: worker 2  left: worker 3")
    assert lasting_lines(gone[2], running(progress(2, 100))) == ["worker 3 has left; its batches are reassigned"]
    live = "\n".join(drawn(RunSoFar.from_events(story)))
    assert "paused  paused, by its own request" in live and "lost" not in live


def test_a_live_view_keeps_the_last_reports_and_some_of_each_time_before() -> None:
    story = [progress(float(s), s, samples=10**6, loss=1.0) for s in range(20_000)]
    live, whole = RunSoFar(most_progress=200), RunSoFar()
    for event in [started(), planned(10**6, 1), *story]:
        live.absorb(event)
        whole.absorb(event)
    assert len(live.progress) <= 200 and len(whole.progress) == 20_000
    assert (live.progress[-6:], live.per_s, live.left_s) == (whole.progress[-6:], whole.per_s, whole.left_s)
    assert live.progress[0] == whole.progress[0] and len({int(p.at_s // 4000) for p in live.progress}) == 5


def test_a_worker_that_others_wait_for_is_in_the_line() -> None:
    waiting = msgspec.structs.replace(progress(5.0, 100), waiting_for={0: 3, 2: 3, 1: 12})
    assert plain_lines([started(4), planned(), waiting])[-1].endswith("  waiting for: worker 3, worker 12")


# ---- on a terminal ----


def test_the_frame_shows_how_far_how_fast_how_stale_and_each_worker() -> None:
    story = [
        progress(10, 400, loss=2.0),
        progress(11, 500, loss=1.0),
        progress(12, 600, loss=0.5, rates=(80.0, 20.0), waited=(0.5, 0.0)),
    ]
    assert drawn(running(*story)) == [
        "digits with downpour: 2 workers and 1 server                               12 s",
        "█████████░░░░░░░░░░░░░░░░░░░░░░  30 %    600 of 2,000 samples  14 s left       ",
        "100 samples/s   staleness mean 0.5, max 2   loss 0.5 █▃▁",
        "",
        "worker  samples/s                                     waiting      in all",
        "     0         80  █████████████████████████████████     25 %       0.5 s",
        "     1         20  ████████▎                              0 %       0.0 s  slow",
    ]


def many(workers: int) -> RunSoFar:
    rates = [100.0] * (workers - 1) + [5.0]
    lost = events.Lost(at_s=3.0, node="worker 7", why="killed by signal 9, often because memory ran out " * 5)
    joined = [events.Joined(at_s=1.0, node=f"worker {i}") for i in range(workers)]
    story = [progress(s, 10**6 * s, rates, waited=[0.1 * s] * workers, samples=10**9) for s in (2.0, 3.0, 4.0)]
    return running(*joined, lost, *story, workers=workers)


@pytest.mark.parametrize("workers", [1, 2, 30, 1000])
@pytest.mark.parametrize("height", [1, 4, 7, 24, 60])
@pytest.mark.parametrize("width", [20, 40, 80, 140, 300])
def test_the_frame_fits_into_any_terminal(width: int, height: int, workers: int) -> None:
    lines = drawn(many(max(8, workers)), width, height)
    assert len(lines) <= max(1, height - 1)
    assert max(map(len, lines)) < width


def test_of_thirty_workers_those_worth_looking_at_are_shown() -> None:
    lines = drawn(many(30), 80, 12)
    assert [line.split()[:2] for line in lines if line.endswith("slow") or " lost " in line] == [
        ["7", "lost"],
        ["29", "5"],
    ]
    assert lines[-1] == "   and 25 more, 100 samples/s each on average"


def test_before_the_first_step_the_frame_says_what_it_waits_for() -> None:
    assert drawn(RunSoFar.from_events([started()]))[1] == "starting 2 workers and 1 server ..."


def test_at_the_end_the_frame_says_that_the_model_is_saved() -> None:
    concluding = events.PhaseChanged(at_s=5.0, phase="concluding")
    assert "100 %  2,000 of 2,000 samples  saving" in drawn(running(progress(4, 2000), concluding))[1]


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_the_live_view_leaves_what_lasts_and_shows_the_cursor_again(a_terminal: Terminal) -> None:
    view = LiveView(a_terminal)
    for event in [
        started(),
        planned(),
        progress(2, 100),
        events.Lost(at_s=3.0, node="worker 1", why="killed"),
    ]:
        view(event)
    # Never hidden for longer than the start takes: a killed process could not show it again.
    assert a_terminal.getvalue().rfind("\x1b[?25h") > a_terminal.getvalue().rfind("\x1b[?25l")
    view.close()
    assert "lost worker 1 (killed)" in a_terminal.getvalue()
    assert a_terminal.getvalue().rfind("\x1b[?25h") > a_terminal.getvalue().rfind("\x1b[?25l")


def test_no_colour_is_used_where_none_is_wanted(a_terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    colours = ("\x1b[36m", "\x1b[32m", "\x1b[31m")

    def drawn_on(terminal: Terminal) -> str:
        view = LiveView(terminal)
        for event in [started(), planned(), progress(2, 100), progress(3, 200)]:
            view(event)
        view.close()
        return terminal.getvalue()

    assert any(colour in drawn_on(a_terminal) for colour in colours)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not any(colour in drawn_on(Terminal()) for colour in colours)


# ---- watching ----


def test_a_dumb_terminal_gets_lines(a_terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_terminal(a_terminal) and not is_terminal(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(a_terminal)


class Broken(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_who_goes_away_does_not_end_the_run() -> None:
    seen: list[AnyEvent] = []

    class Keep:
        def write(self, event: AnyEvent) -> None:
            seen.append(event)

        def close(self) -> None:
            pass

    with RunWatch(Broken(), sinks=[Keep]) as watch:
        for event in whole_run():
            watch(event)
    assert seen == whole_run()


def test_warnings_of_ours_are_lines_of_the_view_and_details_only_when_asked_for() -> None:
    def lines(verbose: bool) -> list[str]:
        out = io.StringIO()
        with RunWatch(out, verbose):
            logging.getLogger("rainband").warning("closed a connection: %s", "bad magic")
            logging.getLogger("rainband").debug("small talk")
        return out.getvalue().splitlines()

    assert lines(verbose=False) == ["warning: closed a connection: bad magic"]
    assert lines(verbose=True) == ["warning: closed a connection: bad magic", "debug: small talk"]
    assert not logging.getLogger("rainband").handlers and logging.getLogger("rainband").propagate


def test_the_terminal_is_restored_when_the_run_raises(a_terminal: Terminal) -> None:
    with pytest.raises(RuntimeError), RunWatch(a_terminal) as watch:
        watch(started())
        raise RuntimeError("a bug")
    assert a_terminal.getvalue().rfind("\x1b[?25h") > a_terminal.getvalue().rfind("\x1b[?25l")
    assert not logging.getLogger("rainband").handlers


# ---- the end ----


def test_the_summary_has_the_accounting_the_staleness_and_where_the_model_lies(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    lost = events.Lost(at_s=9.0, node="worker 1", why="killed")
    assert summary(RunSoFar.from_events([*whole_run()[:-1], lost, ended()]), tmp_path) == [
        "finished after 20 s: 2,000 samples (with those of 2 skipped batches), 118 samples/s in 17 s of training",
        "  result     accuracy 0.975",
        "  batches    898 of 900 applied, 0 lost, 0 applied twice",
        "             2 skipped: 2 not finite",
        "             3 leases reassigned, because a worker was lost or inactive",
        "             6 pushes refused: 5 from revoked leases, 1 sent to another server",
        "  staleness  mean 0.5, max 2 updates",
        f"  model      {tmp_path}/model.safetensors",
    ]


def test_the_summary_says_what_went_through_the_servers(tmp_path: Path) -> None:
    moved = msgspec.structs.replace(progress(5.0, 1000), pushed_bytes=1_500_000, pulled_bytes=3_000_000_000)
    lines = summary(RunSoFar.from_events([started(), moved, ended()]), tmp_path)
    assert "  traffic    1.5 MB of gradients pushed, 3 GB of parameters pulled" in lines
    assert not any(
        "traffic" in line for line in summary(RunSoFar.from_events([started(), progress(5.0, 1000), ended()]), tmp_path)
    )


def test_the_summary_says_how_many_bytes_a_codec_has_saved_and_what_it_has_lost(tmp_path: Path) -> None:
    moved = msgspec.structs.replace(
        progress(5.0, 1000), pushed_bytes=1_000_000, pulled_bytes=3_000_000, saved_bytes=9_000_000
    )
    end = msgspec.structs.replace(ended(), accounting={**ended().accounting, "lost_residuals": [3.0, 4.0]})
    lines = summary(RunSoFar.from_events([started(), moved, end]), tmp_path)
    assert "  traffic    1 MB pushed for 10 MB of gradients (10 times less), 3 MB of parameters pulled" in lines
    assert "             what the codecs of 2 workers had not sent is lost: norm 5" in lines
    exchanged = msgspec.structs.replace(progress(5.0, 1000), sent_bytes={0: 1_000_000}, saved_bytes=4_000_000)
    lines = summary(RunSoFar.from_events([started(), exchanged, ended()]), tmp_path)
    assert "  traffic    1 MB exchanged for 5 MB of values (5 times less)" in lines


def test_a_failed_run_says_why_unless_that_was_shown(tmp_path: Path) -> None:
    failed = RunSoFar.from_events([ended("failed", "server 0 was lost")])
    nowhere = Path("runs/nowhere")  # short: long lines are folded
    assert "  reason     server 0 was lost" in summary(failed, nowhere)
    assert summary(failed, nowhere)[-1] == f"  run        {nowhere} (it contains no model)"
    told = RunSoFar.from_events([in_the_users_file(), ended("failed", "server 0 was lost")])
    assert not any("server 0" in line for line in summary(told, tmp_path))


def test_a_measure_that_is_not_finite_is_said_to_be_so(tmp_path: Path) -> None:
    lines = summary(RunSoFar.from_events([ended(loss=None)]), tmp_path)
    assert lines[1] == "  result     loss not finite"
    assert lines[-2].startswith("WARNING: the model is of no use: loss is not finite. Try a smaller learning rate")


def diverged(skipped: int, **settings: object) -> list[str]:
    """Return the warnings for a run of 900 batches with some of them skipped."""
    accounting = {**ACCOUNTING, "applied": 900 - skipped, "skipped": {"not finite": skipped}}
    start = msgspec.structs.replace(started(), settings=settings)
    return warnings(RunSoFar.from_events([start, msgspec.structs.replace(ended(), accounting=accounting)]))


def test_a_run_that_diverged_says_so_loudly_and_what_to_try() -> None:
    assert diverged(450, lr=0.02, momentum=0.9) == [
        "WARNING: training diverged: 450 of 900 batches (50 %) were skipped, because their gradients were not",
        "         finite. Try a smaller learning rate, such as lr=0.002 instead of 0.02, or momentum=0; and",
        "         check the data for NaN.",
    ]
    of_a_script = " ".join(" ".join(diverged(450)).split())
    assert "Try a smaller learning rate; and check" in of_a_script  # its own rate is not known here


def test_a_few_batches_skipped_are_no_divergence() -> None:
    assert diverged(44) == [] and len(diverged(45)) == 2  # 5 %


def test_portions_that_loops_give_back_at_their_end_are_no_news(tmp_path: Path) -> None:
    assert not any("reassigned" in line for line in summary(RunSoFar.from_events(whole_run()), tmp_path))


def test_the_headline_says_that_it_counts_the_samples_of_skipped_batches() -> None:
    end = msgspec.structs.replace(
        ended(), samples=192, accounting={**ACCOUNTING, "applied": 16, "skipped": {"a": 7, "b": 1}}
    )
    said = "finished after 20 s: 192 samples (with those of 8 skipped batches), 16 samples/s in 12 s of training"
    assert headline(end, training_s=12.0) == said
    none = msgspec.structs.replace(end, accounting={**ACCOUNTING, "skipped": {}})
    assert headline(none, training_s=12.0) == said.replace(" (with those of 8 skipped batches)", "")


def test_moved_samples_are_explained_also_if_no_worker_was_lost() -> None:
    account = SampleAccount(rounds=18, total=128, applied=120, skipped={"no backward pass": 8}, carried_over=8)
    assert shared(msgspec.to_builtins(account), 2) == [
        "120 of 128 applied in 18 batches, which the workers shared",
        "8 skipped: 8 no backward pass",
        "8 moved to a later batch: a worker was lost or inactive, or had left out its part of the batch before, on "
        "which others stepped",
    ]


def test_the_steps_of_a_custom_loader_are_counted_at_the_end() -> None:
    own = {**ACCOUNTING, "batches": 0, "applied": 0, "skipped": {}, "untracked_pushes": 600}
    end = msgspec.structs.replace(ended(), samples=0, accounting=own)
    assert headline(end, training_s=12.0) == "finished after 20 s: 600 steps, 50 steps/s in 12 s of training"


def test_simulated_time_is_marked_as_simulated(tmp_path: Path) -> None:
    start = msgspec.structs.replace(started(), started_at="")
    story = [start, *whole_run()[1:]]
    so_far = RunSoFar.from_events(story)
    assert drawn(RunSoFar.from_events(story[:-2]))[0].endswith(" simulated") and ", simulated" in drawn(so_far)[0]
    assert summary(so_far, tmp_path)[0].startswith("finished after 20 s of simulated time: ")
    assert plain_lines(story)[0] == "digits with downpour: 2 workers and 1 server, simulated"


def test_a_bound_on_staleness_is_shown_in_its_own_unit() -> None:
    bounded = msgspec.structs.replace(progress(12, 600), staleness_bound=3.0, staleness_unit="clocks")
    assert "staleness mean 0.5, max 2 (bound 3 clocks)" in drawn(running(bounded))[2]
    assert "bound" not in drawn(running(progress(12, 600)))[2]


def test_accounting_that_balances_is_one_line() -> None:
    quiet = {**ACCOUNTING, "applied": 900, "skipped": {}, "reassigned": 0, "refused": {}}
    assert accounting(quiet) == ["900 of 900 applied, 0 lost, 0 applied twice"]
    assert accounting({}) == []


def test_batches_that_a_stopped_run_did_not_process_are_in_its_accounting() -> None:
    stopped = {**ACCOUNTING, "applied": 600, "not_processed": 298}
    assert accounting(stopped)[1] == "298 not processed before the run ended"
