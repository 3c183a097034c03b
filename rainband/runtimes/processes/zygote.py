"""The launcher's side of the fork server (zygote), a small process that has imported torch and never computes.

Forking it takes milliseconds, where a new interpreter takes seconds to import torch; the imported modules are
shared. `zygote_main` is the zygote itself. The two exchange messages over a Unix socket of type SOCK_SEQPACKET; the
bytes of a job are passed as a memory file, so they may have any size.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from rainband.transports.event_loop import readable_within

MAX_MESSAGE_BYTES = 64 * 1024  # well below the socket's buffer; only tracebacks are long
MAX_FDS = 253  # the kernel's limit for one message

_END_TIMEOUT_S = 10.0  # killing takes milliseconds
_BOOT = """
import sys
control_fd, sys.path[:] = int(sys.argv[1]), sys.argv[2:]
from rainband.runtimes.processes.zygote_main import main
main(control_fd)
"""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Started(_Message, frozen=True):
    """Job `token` runs as process `pid`."""

    token: int
    pid: int


class Exited(_Message, frozen=True):
    """Process `pid` has ended with exit code `code`, or was killed by `signal`; the other one is None.

    `error` is the error that it raised, if one ended it.
    """

    token: int
    pid: int
    code: int | None
    signal: int | None
    error: str = ""


class SpawnFailed(_Message, frozen=True):
    """Job `token` could not be started. Without a token: the zygote has ended, and all jobs with it."""

    token: int | None
    reason: str


class Preload(_Message, frozen=True):
    """Import these modules before the next job is started; jobs that run already do not get them."""

    modules: tuple[str, ...]


class Spawn(_Message, frozen=True):
    """Start a job. Sent with 1 + `num_fds` open files, the job's bytes first."""

    token: int
    entry: str
    title: str
    threads: int | None
    num_fds: int


class Signal(_Message, frozen=True):
    token: int
    signum: int


class Close(_Message, frozen=True):
    grace_s: float


Event = Started | Exited | SpawnFailed
Command = Preload | Spawn | Signal | Close

_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


class Starter(Protocol):
    """Starts the processes of a run: by forking a small process, or on the nodes of a cluster."""

    def preload(self, modules: Sequence[str]) -> None: ...

    def spawn(self, entry: str, job: bytes, title: str, fds: Sequence[int] = (), threads: int | None = None) -> int: ...

    def fileno(self) -> int: ...

    def events(self) -> list[Event]: ...

    def close(self, grace_s: float) -> None: ...


class Zygote:
    """Starts processes by forking a small process that has imported torch and never computes.

    The zygote and its processes end when the launcher does, in whatever way. To be used by one thread.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._num_jobs = 0
        self._running: dict[int, int] = {}  # pids by token
        self._unread: list[Event] = []  # events that arrived while closing
        self._closing = False
        self._gone = False
        # A process forked from the launcher (for example by a DataLoader) must not keep the connection open.
        os.register_at_fork(after_in_child=_closer(control))

    @classmethod
    def start(cls, preload: Sequence[str] = ("torch", "torch._dynamo"), output: int | None = None) -> Zygote:
        """Start a zygote and return at once; it imports in the background, while jobs are queued.

        A module that does not exist is skipped; an error in one that exists ends the zygote (`SpawnFailed`).

        It and its processes print into the open file `output`; by default where this process prints.
        """
        if sys.platform != "linux":
            raise RuntimeError(
                f"starting processes requires Linux (its prctl), and this is {sys.platform}: use Linux, a container or "
                "a virtual machine."
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(None)  # independent of socket.setdefaulttimeout
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
            )
        zygote = cls(process, ours)
        zygote.preload(preload)
        return zygote

    @property
    def pid(self) -> int:
        return self._process.pid

    def preload(self, modules: Sequence[str]) -> None:
        """Import more modules, for jobs that are spawned from now on."""
        self._send(Preload(tuple(modules)))

    def spawn(self, entry: str, job: bytes, title: str, fds: Sequence[int] = (), threads: int | None = None) -> int:
        """Queue a process that calls `entry`, "package.module:function", with (job, fds); return its token.

        `threads` is passed to torch.set_num_threads. The fds get other numbers there, and stay open here.
        """
        _check_entry(entry)
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}: must be at least 1 (--threads).")
        if len(fds) >= MAX_FDS:
            raise ValueError(f"a process can be given at most {MAX_FDS - 1} files, not {len(fds)}.")
        token = self._num_jobs
        self._num_jobs += 1
        job_fd = _memory_file(job)
        try:
            self._send(Spawn(token, entry, title, threads, len(fds)), [job_fd, *fds])
        finally:
            os.close(job_fd)
        return token

    def fileno(self) -> int:
        """Return a file that is readable when there are `events`, and always once the zygote has ended."""
        return self._control.fileno()

    def events(self) -> list[Event]:
        """Return the events since the last call, without waiting."""
        events = self._unread + self._receive()
        self._unread = []
        return events

    def pid_of(self, token: int) -> int | None:
        """Return the process of a job; None if it is not known to run."""
        return self._running.get(token)

    def signal(self, token: int, signum: int) -> None:
        """Send a signal to the job's process (not to its group), if it has not ended."""
        if signum not in signal.valid_signals():
            raise ValueError(f"{signum} is not a signal: use one of Python's signal module.")
        self._send(Signal(token, signum))

    def close(self, grace_s: float) -> None:
        """End all processes: SIGTERM to their groups, SIGKILL after `grace_s`; return when none is left.

        A job that has not been reported as started is killed at once. So are all if this call is interrupted (by a
        second Ctrl-C). `events` returns the exits afterwards.
        """
        if self._control.fileno() == -1:
            return
        try:
            self._unread += self._receive()
            self._closing = True
            if self._running:
                self._send(Close(grace_s))
                self._wait_until_ended(grace_s + _END_TIMEOUT_S)
        finally:
            self._gone = True
            self._control.close()  # then the zygote kills all remaining processes
            self._wait_for_zygote()

    def _send(self, command: Command, fds: Sequence[int] = ()) -> None:
        message = msgspec.msgpack.encode(command)
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"entry and title take {len(message)} of {MAX_MESSAGE_BYTES} bytes: put data into the job."
            )
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        with suppress(BrokenPipeError, ConnectionResetError):  # events() says why the zygote has ended
            self._control.sendmsg([message], rights, socket.MSG_NOSIGNAL)  # send_fds() ignores the flag

    def _receive(self) -> list[Event]:
        events: list[Event] = []
        while not self._gone:
            try:
                message = self._control.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                continue  # the zygote ended with unread commands; its last events follow
            if not message:
                events += self._zygote_lost()
                break
            event = _event_decoder.decode(message)
            self._note(event)
            events.append(event)
        return events

    def _note(self, event: Event) -> None:
        match event:
            case Started():
                self._running[event.token] = event.pid
            case Exited():
                del self._running[event.token]
            case SpawnFailed(token=None):
                self._gone = True

    def _zygote_lost(self) -> list[Event]:
        self._gone = True
        if self._closing:
            return []
        cause = self._how_it_ended()
        self._kill_groups()
        return [SpawnFailed(None, cause)]

    def _how_it_ended(self) -> str:
        code = self._wait_for_zygote()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the fork server (zygote, pid {self.pid}) {how}, and all processes ended with it."

    def _kill_groups(self) -> None:
        """Kill the children's own children, which do not end with the zygote but are in the children's groups."""
        for pid in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._running.clear()

    def _wait_until_ended(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._gone and (left_s := deadline - time.monotonic()) > 0:
            readable_within(self._control, left_s)
            self._unread += self._receive()

    def _wait_for_zygote(self) -> int:
        try:
            return self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _check_entry(entry: str) -> None:
    module, colon, function = entry.partition(":")
    if not (module and colon and function.isidentifier()):
        raise ValueError(f"{entry!r} is not the name of a function: use package.module:function.")


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("rainband-job")
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    return fd


def _closer(control: socket.socket) -> Callable[[], None]:
    reference = weakref.ref(control)

    def close() -> None:
        if (copy := reference()) is not None:
            copy.close()

    return close
