"""Real runs, for tests: started from one warm process, watched and harmed from outside, looked for when they are over.

Importing torch takes seconds, a run of these tests takes one. So launchers are forked from a zygote that all tests
share; and a launcher's own zygote is forked, too, where a real one starts an interpreter. All else is as it is.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import psutil
import pytest
import safetensors.torch
from torch import Tensor

from rainband.cli import main as cli
from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.protocol import events
from rainband.runtimes.config import RunConfig
from rainband.runtimes.processes import launcher as local
from rainband.runtimes.processes import zygote_main
from rainband.runtimes.processes.entries import SERVERS_NEED, WORKERS_NEED
from rainband.runtimes.processes.launcher import RunResult
from rainband.runtimes.processes.zygote import Event, Exited, Started, Zygote
from tests.gated import Gate, Gated

DEADLINE_S = 30.0  # only a broken run comes near
ROOT = Path(__file__).parent.parent
CLONE_NEWNET = 0x40000000
LR = 0.0625  # a power of two: every sum of updates is exact

E = TypeVar("E", bound=events.Event)
T = TypeVar("T")
E2 = TypeVar("E2", Started, Exited)
_event_decoder = msgspec.json.Decoder(events.AnyEvent)


class Order(msgspec.Struct):
    """The job of a launcher: a run, or the words of a command line."""

    output: str
    config: RunConfig | None = None
    words: tuple[str, ...] = ()
    deaf: bool = False  # nobody reads its standard output
    namespace: str = ""  # the network namespace to run in: another machine, as far as connections are concerned
    folder: str = ""  # to work in
    errors: str = ""  # the file for standard error, if not that for all output


# ---- inside the launcher --------------------------------------------------------------------------------------------


def launch(job: bytes, fds: list[int]) -> None:
    """Be the launcher of one run; leave by its exit code."""
    order = msgspec.json.decode(job, type=Order)
    if order.namespace:
        enter_namespace(order.namespace)
    output = os.open(order.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(os.open(order.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if order.errors else output, 2)
    if order.folder:
        os.chdir(order.folder)
    os.environ["LAUNCHER_PID"] = str(os.getpid())  # for scripts that interrupt their own run
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  # buffered, as it is by default
    Zygote.start = staticmethod(forked_zygote)  # type: ignore[method-assign]
    if order.deaf:
        _stop_reading(1)
    if order.config is None:
        sys.argv[1:] = order.words
        return cli.main()
    result = local.run(order.config, lambda event: None)
    Path(order.output).with_suffix(".json").write_bytes(msgspec.json.encode(result))
    sys.exit(result.exit_code)


def enter_namespace(name: str) -> None:
    """Put this process, and those that it starts, into a network namespace."""
    fd = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    assert ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
    os.close(fd)


def _stop_reading(fd: int) -> None:
    reader, writer = os.pipe()
    os.dup2(writer, fd)
    os.close(reader)
    os.close(writer)


def do_nothing(job: bytes, fds: list[int]) -> None:
    """Run as soon as a process can be started."""


def forked_zygote(preload: Sequence[str] = (), output: int | None = None) -> Zygote:
    """Do what `Zygote.start` does, without waiting for a new interpreter to import everything again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        _print_into([] if output is None else [output])
        _leave_after(lambda: zygote_main.main(theirs.detach()))
    theirs.close()
    zygote = Zygote(Forked(pid), ours)  # type: ignore[arg-type]
    zygote.preload(preload)
    return zygote


def _leave_after(main: Callable[[], None]) -> None:
    """End here, not in the frames of the process we were forked from."""
    code: Any = 1
    try:
        main()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if leaving.code is not None else 0
    except BaseException:
        traceback.print_exc()
    finally:  # without a last flush: a real process may be ended before it comes to that, too
        os._exit(code if isinstance(code, int) else 1)


def be_zygote(job: bytes, fds: list[int]) -> None:
    """A zygote for a launcher in the tests' own process."""
    _print_into(fds[1:])
    zygote_main.main(os.dup(fds[0]))


def _print_into(fds: list[int]) -> None:
    for fd in fds:
        os.dup2(fd, 1)
        os.dup2(fd, 2)


class Grandchild:
    """A zygote that another zygote has forked, with what `Zygote` uses of a Popen."""

    def __init__(self, launcher: RunLauncher, token: int) -> None:
        self.launcher = launcher
        self.token = token

    @property
    def pid(self) -> int:
        return wait_for(lambda: self.launcher.all(Started, self.token), "a zygote")[0].pid

    def wait(self, timeout_s: float | None = None) -> int:
        (ended,) = wait_for(lambda: self.launcher.all(Exited, self.token), "the end of a zygote")
        return ended.code if ended.code is not None else -(ended.signal or 0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class Forked:
    """A child process, with what `Zygote` uses of a Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        self.code: int | None = None

    def wait(self, timeout_s: float | None = None) -> int:
        if self.code is None:
            if not select.select([self.fd], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("zygote", timeout_s or 0.0)
            _, status = os.waitpid(self.pid, 0)
            self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


# ---- outside --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def launcher() -> Iterator[RunLauncher]:
    """The warm process; started by the first test that wants it."""
    launcher = RunLauncher(Zygote.start((*SERVERS_NEED, *WORKERS_NEED, "tests.processes")))
    token = launcher.zygote.spawn("tests.processes:do_nothing", b"", "the first")
    ended = lambda: [e for e in launcher.note() if isinstance(e, Exited) and e.token == token]  # noqa: E731
    wait_for(ended, "imports", 2 * DEADLINE_S)  # here, so that no test is to blame for the time they take
    yield launcher
    launcher.zygote.close(grace_s=0.0)


@pytest.fixture
def warm(launcher: RunLauncher) -> Iterator[None]:
    """For launchers in the tests' own process (`fit`, `minimize`): their zygote need not import torch again."""
    with warmed(launcher):
        yield


@contextmanager
def warmed(launcher: RunLauncher) -> Iterator[None]:
    """Until it is left, zygotes are forked from the warm process."""

    def start(preload: Sequence[str] = (), output: int | None = None) -> Zygote:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = [theirs.fileno(), *([] if output is None else [output])]
        token = launcher.zygote.spawn("tests.processes:be_zygote", b"", "zygote", fds=fds)
        theirs.close()
        zygote = Zygote(Grandchild(launcher, token), ours)  # type: ignore[arg-type]
        zygote.preload(preload)
        return zygote

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Zygote, "start", staticmethod(start))
        yield


class RunLauncher:
    """Starts launchers, one after the other."""

    def __init__(self, zygote: Zygote) -> None:
        self.zygote = zygote
        self.seen: list[Event] = []

    def note(self) -> list[Event]:
        self.seen += self.zygote.events()
        return self.seen

    def all(self, kind: type[E2], token: int) -> list[E2]:
        """Return the events of one of the processes that were started from here."""
        return [event for event in self.note() if isinstance(event, kind) and event.token == token]

    def processes(self) -> list[psutil.Process]:
        """All that run below: the launcher, its zygote, workers, servers, also those whose parent has died."""
        below = []
        for process in psutil.Process(self.zygote.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    below.append(process)
        return below

    @contextmanager
    def run(
        self,
        path: Path,
        strategy: str = "downpour",
        *,
        workers: int = 2,
        servers: int = 2,
        task: str = "tests.gated:Gated",
        transport: str = "shm",
        timeout_s: float = 5.0,
        optimizer: str = "sgd",
        gated: bool = True,
        stage_plan: StagePlan | None = None,
        eval_every_s: float = 10.0,
        options: Mapping[str, Any] = MappingProxyType({}),
        namespace: str = "",
        folder: str = "",
        **settings: Any,
    ) -> Iterator[Run]:
        """Start a run; afterwards see that nothing is left of it, whatever happened to it.

        The strategy "shared" is sync whose workers share each batch, without servers.
        """
        directory = path / "run"
        directory.mkdir()
        gate = Gate(path / "gate") if gated else None
        config = RunConfig(
            task=task,
            task_settings=settings | ({"gate": str(gate.folder)} if gate else {}),
            strategy="sync" if strategy == "shared" else strategy,
            strategy_settings={"lr": LR, "optimizer": optimizer}
            | ({"batch_per_worker": True} if strategy == "sync" else {}),
            num_workers=workers,
            num_servers=0 if strategy == "shared" else servers,
            parts="equal" if strategy == "shared" else "speed",
            transport=transport,
            failure_timeout_s=timeout_s,
            directory=str(directory),
            stage_plan=stage_plan,
            eval_every_s=eval_every_s,
            **options,
        )
        order = Order(str(path / "launcher"), config, namespace=namespace, folder=folder)
        with self._launched(order, directory, gate) as run:
            yield run

    @contextmanager
    def command(self, path: Path, *words: str, deaf: bool = False) -> Iterator[Run]:
        """Do what `rainband train` does, from parsing to its exit code; the run is not gated."""
        order = Order(str(path / "launcher"), None, ("train", *words, "--runs", str(path / "runs")), deaf)
        with self._launched(order, path / "runs", None) as run:
            yield run

    def typed(self, folder: Path, *words: str) -> tuple[int | None, str, str]:
        """Do what `rainband` does with these words in a folder; return its exit code, output and errors."""
        out, err = (folder / f"{name}-{time.monotonic_ns()}" for name in ("out", "err"))
        with self._launched(Order(str(out), None, words, folder=str(folder), errors=str(err)), folder, None) as run:
            exit_code = run.ended()
        return exit_code, *(path.read_text() if path.exists() else "" for path in (out, err))

    @contextmanager
    def _launched(self, order: Order, directory: Path, gate: Gate | None) -> Iterator[Run]:
        token = self.zygote.spawn("tests.processes:launch", msgspec.json.encode(order), "launcher")
        run = Run(self, token, order, directory, gate)
        try:
            yield run
            run.ended()
        finally:
            run.clear_up()
        run.left_nothing()


class Run:
    """One run, seen from outside."""

    def __init__(self, launcher: RunLauncher, token: int, order: Order, directory: Path, gate: Gate | None) -> None:
        self.starter = launcher
        self.token = token
        self.order = order
        self.directory = directory
        self._gate = gate
        self.sockets: set[str] = set()  # that its processes were seen to have
        self.pids: set[int] = set()

    @property
    def config(self) -> RunConfig:
        assert self.order.config is not None, "this run was typed"
        return self.order.config

    @property
    def gate(self) -> Gate:
        assert self._gate is not None, "this run has no gate"
        return self._gate

    @property
    def launcher(self) -> int:
        def started() -> list[Started]:
            return [e for e in self.starter.note() if isinstance(e, Started) and e.token == self.token]

        return wait_for(started, "the launcher")[0].pid

    @property
    def exited(self) -> Exited | None:
        return next((e for e in self.starter.note() if isinstance(e, Exited) and e.token == self.token), None)

    # ---- what has happened so far

    def events(self) -> list[events.AnyEvent]:
        """All events so far. Every line must be whole, also when the writer was killed."""
        path = self.directory / "events.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [_event_decoder.decode(line) for line in lines if line.endswith(b"\n")]

    def all(self, kind: type[E], **fields: Any) -> list[E]:
        """The events of a kind so far, those with these fields."""
        return [
            event
            for event in self.events()
            if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())
        ]

    def first(self, kind: type[E], **fields: Any) -> E:
        """Wait for an event."""

        def found() -> list[E]:
            if (some := self.all(kind, **fields)) or self.exited is None:
                return some
            raise AssertionError(f"the run ended without {kind.__name__} {fields}: {self.events()} {self.printed()}")

        return wait_for(found, f"{kind.__name__} {fields}")[0]

    def under_way(self) -> None:
        """Wait until all workers have come to the gate with work, and remember what the run holds."""

        def all_have_work() -> bool:
            # In rounds the first may have been given all there is: let it be done, so that the others get some, too.
            if self.config.strategy == "sync" and self.gate.begun() and self.gate.is_dry():
                self.gate.let(8)
            return len(self.gate.begun()) == self.config.num_workers

        wait_for(lambda: self.exited or all_have_work(), "all workers at the gate")
        assert self.exited is None, f"{self.events()} {self.printed()}"
        self.remember()

    def remember(self) -> None:
        processes = self.starter.processes()
        self.pids |= {process.pid for process in processes}
        self.sockets |= sockets_of(self.pids)

    def done(self, num_batches: int) -> None:
        """Wait until `num_batches` batches are applied on every block."""
        wait_for(lambda: [p for p in self.all(events.Progress) if p.batches_done >= num_batches], f"{num_batches} done")

    def printed(self) -> str:
        path = Path(self.order.output)
        return path.read_text() if path.exists() else ""

    # ---- what can be done to it

    def process(self, title: str) -> psutil.Process:
        """One of its processes: "rainband worker 2"."""

        def named() -> list[psutil.Process]:
            found = []
            for process in self.starter.processes():
                with suppress(psutil.NoSuchProcess):
                    if process.cmdline()[:1] == [title]:
                        found.append(process)
            return found

        (process,) = wait_for(named, title)
        return process

    def worker(self, index: int) -> psutil.Process:
        return self.process(f"rainband worker {index}")

    def server(self, index: int) -> psutil.Process:
        return self.process(f"rainband server {index}")

    def signal(self, signum: int) -> None:
        """To the launcher."""
        os.kill(self.launcher, signum)

    def drip(self) -> None:
        """Let one batch pass at a time until the run ends."""

        def ended() -> bool:
            if self.gate.is_dry():
                self.gate.let(1)
            return self.exited is not None

        wait_for(ended, "the end of the run")

    def join(self, namespace: str, *words: str, folder: str = "") -> Joined:
        """Do what `rainband join` does in a namespace and a folder, with this run's invitation."""
        invitation = self.directory / "invite.txt"
        wait_for(invitation.is_file, "the invitation")
        return self.command(namespace, "join", str(invitation), *words, folder=folder)

    def command(self, namespace: str, *words: str, folder: str = "") -> Joined:
        """Do what a command does in a namespace."""
        output = f"{self.order.output}-{namespace}-{time.monotonic_ns()}"
        order = Order(output, None, words, namespace=namespace, folder=folder)
        token = self.starter.zygote.spawn("tests.processes:launch", msgspec.json.encode(order), "joiner")
        return Joined(self, token, order)

    # ---- the end

    def ended(self) -> int | None:
        """Wait for the end; returns the launcher's exit code, None if a signal ended it."""
        exited = wait_for(lambda: self.exited, "the end of the run")
        assert exited is not None
        return exited.code

    def result(self) -> RunResult:
        self.ended()
        path = Path(self.order.output).with_suffix(".json")
        assert path.exists(), self.printed()
        return msgspec.json.decode(path.read_bytes(), type=RunResult)

    def parameters(self) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self.directory / "model.safetensors")

    def clear_up(self) -> None:
        """After a test that went wrong, too: the next one must find no process left."""
        if self.exited is None:
            with suppress(ProcessLookupError):
                os.kill(self.launcher, signal.SIGKILL)
        with suppress(AssertionError):
            wait_for(lambda: not self.starter.processes(), "the end of all processes", 5.0)
        for process in self.starter.processes():
            self.pids.add(-1)  # it did not end by itself: `left_nothing` says so
            process.kill()
        if self._gate is not None:
            self._gate.close()

    def left_nothing(self) -> None:
        assert -1 not in self.pids, "some processes outlived their run"
        assert not self.sockets & all_sockets(), "sockets are left"
        names = [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in self.pids)]
        assert not names, f"/dev/shm has {names}"
        assert not list(self.directory.rglob("*.part")), "half a file is left"


class Joined:
    """A machine that joins a run, seen from outside."""

    def __init__(self, run: Run, token: int, order: Order) -> None:
        self.run, self.token, self.order = run, token, order

    def interrupt(self) -> None:
        (started,) = wait_for(lambda: self.run.starter.all(Started, self.token), "the joining machine")
        os.kill(started.pid, signal.SIGINT)

    def printed(self) -> str:
        path = Path(self.order.output)
        return path.read_text() if path.exists() else ""

    def has_ended(self) -> bool:
        return bool(self.run.starter.all(Exited, self.token))

    def ended(self) -> int | None:
        """Wait for its end; returns its exit code."""
        (exited,) = wait_for(lambda: self.run.starter.all(Exited, self.token), "the end of the joining machine")
        return exited.code


def wait_for(found: Callable[[], T], what: str, deadline_s: float = DEADLINE_S) -> T:
    """Look again and again; fail, saying what was waited for."""
    until = time.monotonic() + deadline_s
    while not (result := found()):
        assert time.monotonic() < until, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(0.005)
    return result


def sockets_of(pids: set[int]) -> set[str]:
    """Names and ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    inodes.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {name for name, inode in _listening() if f"socket:[{inode}]" in inodes}


def all_sockets() -> set[str]:
    return {name for name, _ in _listening()}


def _listening() -> Iterator[tuple[str, str]]:
    """Yield the sockets that listen on this machine, with their numbers."""
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8:
            yield fields[7], fields[6]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            yield f"port {int(fields[1].split(':')[1], 16)}", fields[9]


def exact(run: Run) -> bool:
    """Return True if the parameters are those of every batch applied exactly once, to the last bit."""
    task = Gated(**{name: value for name, value in run.config.task_settings.items() if name != "gate"})
    per_worker = "batch_per_worker" in run.config.strategy_settings
    work_items = run.config.num_workers if per_worker else 1  # a round steps once, by their mean
    num_steps = task.samples // task.batch_size * task.epochs / work_items
    wanted = {"weight": task.linear.after(LR / work_items).tolist(), "bias": [-LR * num_steps]}
    return {name: values.flatten().tolist() for name, values in run.parameters().items()} == wanted
