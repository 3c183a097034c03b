"""Real processes: forked from one zygote, ended in every way a process can end."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rainband.runtimes.processes.zygote import Event, Exited, SpawnFailed, Started, Zygote
from rainband.runtimes.processes.zygote_main import short_title

pytestmark = pytest.mark.processes

DEADLINE_S = 30.0  # only a broken zygote comes near
Job = Callable[[bytes, list[int]], None]


# What the processes do. They find these functions by importing this file as `test_zygote`.


def leave(job: bytes, fds: list[int]) -> None:
    sys.exit(int(job))


def leave_with_words(job: bytes, fds: list[int]) -> None:
    sys.exit(job.decode())


def return_at_once(job: bytes, fds: list[int]) -> None:
    pass


def kill_itself(job: bytes, fds: list[int]) -> None:
    os.kill(os.getpid(), int(job))


def wait_for_ever(job: bytes, fds: list[int]) -> None:
    signal.pause()


def say_last_words(job: bytes, fds: list[int]) -> None:
    atexit.register(os.write, fds[0], b"last words")
    sys.exit(7)


def write_its_number_to_each(job: bytes, fds: list[int]) -> None:
    for number, fd in enumerate(fds):
        os.write(fd, str(number).encode())


def hash_the_job(job: bytes, fds: list[int]) -> None:
    os.write(fds[0], hashlib.sha256(job).digest())


def divide_by_zero(job: bytes, fds: list[int]) -> None:
    os.write(1 // 0, b"never")


def tell_session_and_group(job: bytes, fds: list[int]) -> None:
    os.write(fds[0], f"{os.getsid(0)} {os.getpgid(0)} {os.getpid()}".encode())


def fork_one_that_waits(job: bytes, fds: list[int]) -> None:
    """Like a DataLoader with a worker; leaves, without a word to it, at the end of input."""
    forked = os.fork()
    if forked == 0:
        if job == b"stray":
            os.setsid()
        signal.pause()
    os.write(fds[0], str(forked).encode())
    os.read(fds[1], 1)
    os._exit(3)


def ignore_sigterm(job: bytes, fds: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(fds[0], b"deaf")
    while True:
        signal.pause()


def end_politely(job: bytes, fds: list[int]) -> None:
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(5))
    os.write(fds[0], b"ready")
    while True:
        signal.pause()


def tell_where_64_mib_lie(job: bytes, fds: list[int]) -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    address = libc.malloc(ctypes.c_size_t(64 * 2**20))
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < end:
            os.write(fds[0], line.encode())


def multiply_ones(job: bytes, fds: list[int]) -> None:
    import numpy
    import torch

    ones = torch.ones(512, 512)
    product = ones @ ones
    words = [
        product.min().item(),
        product.max().item(),
        torch.get_num_threads(),
        torch.initial_seed(),
        int(numpy.random.randint(2**62)),
    ]
    os.write(fds[0], "|".join(map(str, words)).encode())


def launch_and_wait() -> None:
    """Be a launcher in a process of its own; print who there is: zygote, job, the job's child."""
    zygote = Zygote.start(preload=["test_zygote"])
    if os.fork() == 0:  # a bystander with a copy of all that the launcher has open
        os.read(sys.stdin.fileno(), 1)
        os._exit(0)
    with Pipe() as news, Pipe() as leash:
        token = zygote.spawn("test_zygote:fork_one_that_waits", b"", "", [news.writer, leash.reader])
        pid = Nursery(zygote).started(token)
        print(zygote.pid, pid, news.read(), "torch" in sys.modules, flush=True)
        signal.pause()


def launch_importing(module: str) -> None:
    zygote = Zygote.start(preload=[module])
    print(zygote.pid, flush=True)
    signal.pause()


# What the tests hold them with.


class Pipe:
    def __enter__(self) -> Pipe:
        self.reader, self.writer = os.pipe()
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.reader)
        self.hang_up()

    def hang_up(self) -> None:
        """Close our writing end."""
        if self.writer != -1:
            os.close(self.writer)
            self.writer = -1

    def read(self) -> str:
        """Wait for one message."""
        assert select.select([self.reader], [], [], DEADLINE_S)[0]
        return os.read(self.reader, 4096).decode(errors="replace")

    def read_to_the_end(self) -> bytes:
        """Wait until nobody has the writing end any more."""
        self.hang_up()
        content = b""
        while True:
            assert select.select([self.reader], [], [], DEADLINE_S)[0], f"only {content!r}, and no end"
            part = os.read(self.reader, 4096)
            if not part:
                return content
            content += part


class Life:
    """Watches one process, by a handle that cannot come to mean another."""

    def __init__(self, pid: int) -> None:
        self.fd = os.pidfd_open(pid)

    def ends(self) -> bool:
        ended = bool(select.select([self.fd], [], [], DEADLINE_S)[0])
        os.close(self.fd)
        return ended


class Nursery:
    """A zygote, and what it has said so far."""

    def __init__(self, zygote: Zygote, stderr: Path = Path(os.devnull)) -> None:
        self.zygote = zygote
        self.stderr = stderr
        self.seen: list[Event] = []

    def spawn(self, job: Job, content: bytes = b"", fds: tuple[int, ...] = (), title: str = "a test") -> int:
        return self.zygote.spawn(f"test_zygote:{job.__name__}", content, title, fds)

    def first(self, fits: Callable[[Event], bool]) -> Event:
        """Wait for an event."""
        while not (found := [event for event in self.seen if fits(event)]):
            assert select.select([self.zygote], [], [], DEADLINE_S)[0], f"only {self.seen}"
            self.seen += self.zygote.events()
            assert self.seen, "readable, but nothing has happened"
            assert fits(self.seen[-1]) or not isinstance(self.seen[-1], SpawnFailed), self.seen[-1].reason
        return found[0]

    def started(self, token: int) -> int:
        event = self.first(lambda event: isinstance(event, Started) and event.token == token)
        assert isinstance(event, Started)
        return event.pid

    def ended(self, token: int) -> tuple[int | None, int | None]:
        """Wait for the job's end: its exit code, or the signal."""
        event = self.first(lambda event: isinstance(event, Exited) and event.token == token)
        assert isinstance(event, Exited)
        assert event.pid == self.started(token)
        return event.code, event.signal


@contextmanager
def new_nursery(path: Path, *preload: str) -> Iterator[Nursery]:
    """Start a zygote that can import this file, with its stderr in a file, and close it."""
    stderr = path / "stderr"
    saved = os.dup(2)
    with pytest.MonkeyPatch.context() as patch, stderr.open("wb") as file:
        patch.syspath_prepend(Path(__file__).parent)
        patch.syspath_prepend(path)
        os.dup2(file.fileno(), 2)
        try:
            zygote = Zygote.start(preload)
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    try:
        yield Nursery(zygote, stderr)
    finally:
        zygote.close(grace_s=0.0)


@contextmanager
def new_launcher(call: str, *path: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[bytes]]]:
    """Run a launcher in a process of its own; what it prints first comes along."""
    places = [str(Path(__file__).parent), *map(str, path), *sys.path]
    program = f"import sys; sys.path[:] = {places}; import test_zygote; {call}"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        yield launcher, launcher.stdout.readline().split()


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with new_nursery(tmp_path_factory.mktemp("nursery"), "test_zygote") as nursery:
        yield nursery


# What is true of them.


def test_a_process_ends_with_the_code_it_gives_to_sys_exit(nursery: Nursery) -> None:
    assert nursery.ended(nursery.spawn(leave, b"7")) == (7, None)
    assert nursery.ended(nursery.spawn(return_at_once)) == (0, None)


def test_the_error_that_ends_a_process_is_reported_with_its_end(tmp_path: Path) -> None:
    with new_nursery(tmp_path, "test_zygote") as nursery:

        def error_of(job: Callable[[bytes, list[int]], object], content: bytes = b"") -> str:
            token = nursery.spawn(job, content)
            event = nursery.first(lambda event: isinstance(event, Exited) and event.token == token)
            assert isinstance(event, Exited)
            return event.error

        assert error_of(divide_by_zero) == "ZeroDivisionError: integer division or modulo by zero"
        assert error_of(leave_with_words, b"lost the coordinator") == "lost the coordinator"
        assert len(error_of(leave_with_words, b"x" * 5000)) == 1000
        assert [error_of(leave, b"7"), error_of(return_at_once)] == ["", ""]


def test_a_process_that_is_killed_is_reported_with_the_signal(nursery: Nursery) -> None:
    assert nursery.ended(nursery.spawn(kill_itself, b"9")) == (None, signal.SIGKILL)


def test_a_signal_sent_before_the_process_has_begun_is_not_lost(nursery: Nursery) -> None:
    tokens = []
    for _ in range(10):
        tokens.append(nursery.spawn(wait_for_ever))
        nursery.zygote.signal(tokens[-1], signal.SIGTERM)
    assert {nursery.ended(token) for token in tokens} == {(None, signal.SIGTERM)}


def test_an_ended_process_can_be_signalled_without_effect(nursery: Nursery) -> None:
    token = nursery.spawn(return_at_once)
    assert nursery.ended(token) == (0, None)
    nursery.zygote.signal(token, signal.SIGKILL)
    assert nursery.ended(nursery.spawn(leave, b"4")) == (4, None)


def test_the_zygote_outlives_the_signals_that_everybody_gets(nursery: Nursery) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(nursery.zygote.pid, signum)
    assert nursery.ended(nursery.spawn(leave, b"4")) == (4, None)


def test_a_process_runs_its_exit_handlers(nursery: Nursery) -> None:
    with Pipe() as words:
        token = nursery.spawn(say_last_words, fds=(words.writer,))
        assert words.read_to_the_end() == b"last words"
    assert nursery.ended(token) == (7, None)


def test_open_files_arrive_in_order_and_nobody_keeps_a_copy(nursery: Nursery) -> None:
    with Pipe() as first, Pipe() as second:
        nursery.spawn(write_its_number_to_each, fds=(first.writer, second.writer))
        assert first.read_to_the_end() == b"0"
        assert second.read_to_the_end() == b"1"


@pytest.mark.parametrize("num_bytes", [0, 1, 3_000_001])
def test_a_job_of_any_size_arrives_whole(nursery: Nursery, num_bytes: int) -> None:
    content = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    with Pipe() as answer:
        nursery.spawn(hash_the_job, content, fds=(answer.writer,))
        assert answer.read_to_the_end() == hashlib.sha256(content).digest()


def test_the_title_is_what_ps_and_top_show(nursery: Nursery) -> None:
    with Pipe() as leash, Pipe() as news:
        token = nursery.spawn(fork_one_that_waits, fds=(news.writer, leash.reader), title="rainband worker 2")
        news.read()
        process = Path("/proc", str(nursery.started(token)))
        assert (process / "cmdline").read_bytes().rstrip(b"\0") == b"rainband worker 2"
        assert (process / "comm").read_text() == "rb worker 2\n"
        leash.hang_up()
        assert nursery.ended(token) == (3, None)


@pytest.mark.parametrize(
    "title, short",
    [
        ("rainband worker 2", "rb worker 2"),
        ("rainband coordinator", "rb coordinator"),
        ("rainband coordinator 12", "rb coordinat 12"),
        ("rainband worker 1234567890123456", "12345678901234"),
        ("rainband straße straße 3", "rb straße st 3"),
        ("", ""),
    ],
)
def test_a_short_title_has_15_bytes_and_keeps_the_number(title: str, short: str) -> None:
    assert short_title(title) == short
    assert len(short_title(title).encode()) <= 15


def test_a_process_is_out_of_reach_of_the_terminal(nursery: Nursery) -> None:
    with Pipe() as answer:
        nursery.spawn(tell_session_and_group, fds=(answer.writer,))
        session, group, pid = map(int, answer.read_to_the_end().split())
    assert session == nursery.zygote.pid
    assert group == pid


def test_an_error_is_printed_once_from_the_jobs_own_code_on(nursery: Nursery) -> None:
    assert nursery.ended(nursery.spawn(divide_by_zero)) == (1, None)
    printed = nursery.stderr.read_text()
    assert printed.count("Traceback") == printed.count("ZeroDivisionError") == 1
    assert printed.count("  File ") == 1
    assert "in divide_by_zero" in printed


@pytest.mark.parametrize(
    "entry, complaint",
    [
        ("no_such_package.main:go", "cannot start 'a test' at 'no_such_package.main:go': there is no module"),
        ("test_zygote:no_such_job", "module 'test_zygote' has no function 'no_such_job'"),
    ],
)
def test_an_entry_that_is_not_there_is_named(nursery: Nursery, entry: str, complaint: str) -> None:
    token = nursery.zygote.spawn(entry, b"", "a test")
    assert nursery.ended(token) == (1, None)
    assert nursery.stderr.read_text().count(complaint) == 1


@pytest.mark.parametrize("entry", ["json.dumps", "json:", ":dumps", "json:dumps()"])
def test_an_entry_that_is_no_function_is_refused_at_once(nursery: Nursery, entry: str) -> None:
    with pytest.raises(ValueError, match=r"use package\.module:function"):
        nursery.zygote.spawn(entry, b"", "a test")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told")
def test_a_large_block_of_memory_comes_from_the_heap_that_is_kept(nursery: Nursery) -> None:
    with Pipe() as answer:
        nursery.spawn(tell_where_64_mib_lie, fds=(answer.writer,))
        assert b"[heap]" in answer.read_to_the_end()


def test_a_processs_own_children_end_with_it(nursery: Nursery) -> None:
    with Pipe() as leash, Pipe() as news:
        token = nursery.spawn(fork_one_that_waits, fds=(news.writer, leash.reader))
        forked = Life(int(news.read()))
        leash.hang_up()
        assert nursery.ended(token) == (3, None)
        assert forked.ends()


def test_nothing_is_left_when_the_launcher_is_killed() -> None:
    """Not even while another process still has the launcher's files open."""
    with new_launcher("test_zygote.launch_and_wait()") as (launcher, words):
        *pids, torch_was_imported = words
        lives = [Life(int(pid)) for pid in pids]
        launcher.kill()
        assert [life.ends() for life in lives] == [True, True, True]
        assert torch_was_imported == b"False"


def test_a_zygote_that_is_still_importing_ends_with_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import signal; signal.pause()")
    with new_launcher("test_zygote.launch_importing('endless')", tmp_path) as (launcher, (pid,)):
        zygote = Life(int(pid))
        launcher.kill()
        assert zygote.ends()


def test_closing_ends_the_deaf_and_the_strays_too(tmp_path: Path) -> None:
    with new_nursery(tmp_path, "test_zygote") as nursery, Pipe() as news, Pipe() as leash:
        deaf = nursery.spawn(ignore_sigterm, fds=(news.writer,))
        lives = [Life(nursery.started(deaf))]
        assert news.read() == "deaf"
        parent = nursery.spawn(fork_one_that_waits, b"stray", fds=(news.writer, leash.reader))
        lives += [Life(nursery.started(parent)), Life(int(news.read()))]
        nursery.zygote.close(grace_s=0.0)
        assert [life.ends() for life in lives] == [True, True, True]
        exits = nursery.zygote.events()
        assert {(exit.token, exit.signal) for exit in exits if isinstance(exit, Exited)} >= {(deaf, 9)}


def test_closing_waits_for_those_who_end_by_themselves(tmp_path: Path) -> None:
    with new_nursery(tmp_path, "test_zygote") as nursery, Pipe() as news:
        token = nursery.spawn(end_politely, fds=(news.writer,))
        pid = nursery.started(token)
        assert news.read() == "ready"
        nursery.zygote.close(grace_s=DEADLINE_S)
        assert nursery.zygote.events() == [Exited(token, pid, 5, None)]


def test_a_lost_zygote_is_reported_and_takes_everything_along(tmp_path: Path) -> None:
    with new_nursery(tmp_path, "test_zygote") as nursery, Pipe() as news, Pipe() as leash:
        token = nursery.spawn(fork_one_that_waits, fds=(news.writer, leash.reader))
        lives = [Life(nursery.started(token)), Life(int(news.read()))]
        os.kill(nursery.zygote.pid, signal.SIGKILL)
        assert lives[0].ends()  # though the launcher does not know yet
        event = nursery.first(lambda event: isinstance(event, SpawnFailed))
        assert isinstance(event, SpawnFailed)
        assert event.token is None
        assert "killed by signal 9" in event.reason
        assert lives[1].ends()
        nursery.spawn(return_at_once)  # too late, and harmless
        assert nursery.zygote.events() == []


def test_a_missing_module_is_left_out_and_a_broken_one_reported(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import there_is_no_such_module")
    with new_nursery(tmp_path, "there_is_no_such_module", "json.nor_this_one", "broken", "json") as nursery:
        nursery.spawn(return_at_once)
        assert Life(nursery.zygote.pid).ends()
        event = nursery.first(lambda event: True)
        assert isinstance(event, SpawnFailed)
        assert event.token is None
        assert 'broken.py", line 1' in event.reason
        assert "No module named 'there_is_no_such_module'" in event.reason
        assert nursery.zygote.events() == []


def test_children_of_torch_compute_with_their_threads_and_draw_their_own_numbers(tmp_path: Path) -> None:
    with new_nursery(tmp_path, "torch", "numpy.random") as nursery, Pipe() as first, Pipe() as second:
        for pipe in (first, second):
            nursery.zygote.spawn("test_zygote:multiply_ones", b"", "a test", [pipe.writer], threads=2)
        answers = [pipe.read_to_the_end().decode().split("|") for pipe in (first, second)]
    smallest, largest, threads, torch_seeds, numpy_draws = (set(column) for column in zip(*answers, strict=True))
    assert smallest == largest == {"512.0"}
    assert threads == {"2"}
    assert len(torch_seeds) == len(numpy_draws) == 2
