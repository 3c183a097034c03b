"""The fork server (zygote): imports slow modules once, forks a process for each job, ends with its launcher.

It never computes: a forked child would hang in its first OpenMP parallel region if its parent has had one.
"""

from __future__ import annotations

import ctypes
import gc
import io
import linecache
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import NamedTuple

import msgspec
import setproctitle

from rainband.runtimes.processes.children import LAST_WORDS_BYTES, Children
from rainband.runtimes.processes.zygote import (
    MAX_FDS,
    MAX_MESSAGE_BYTES,
    Close,
    Command,
    Event,
    Preload,
    Signal,
    Spawn,
    SpawnFailed,
    Started,
)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # glibc's malloc.h

NAME_BYTES = 15  # that the kernel keeps of a thread's name

_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)


class ForkJob(NamedTuple):
    """The job of a forked child."""

    spawn: Spawn
    content_fd: int
    fds: list[int]
    words_fd: int  # for the error that ends it


def main(control_fd: int) -> None:
    """Serve as the zygote; in each forked child, do its job and leave by the interpreter's normal exit."""
    del sys.argv[1:]
    set_title("rainband zygote")
    job = _serve(socket.socket(fileno=control_fd))
    if job is None:
        os._exit(0)  # unloading torch would take half a second, and the launcher may be waiting
    _do(job)


def _serve(control: socket.socket) -> ForkJob | None:
    control.set_inheritable(False)
    _set_zygote_signals()
    _share_one_heap()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned descendants become children of this process, so that it can kill them
    return Loop(control).run()


class Loop:
    """Takes commands, reports events, and reaps children."""

    def __init__(self, control: socket.socket) -> None:
        self.pid = os.getpid()
        self.control = control
        self.children = Children()
        self.outbox: deque[Event] = deque()
        self.deadline: float | None = None  # set by Close
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.wake_reader.setblocking(False)
        self.wake_writer.setblocking(False)
        self.selector = selectors.PollSelector()  # not epoll, whose registrations a forked child would share
        self.selector.register(control, selectors.EVENT_READ)
        self.selector.register(self.wake_reader, selectors.EVENT_READ)
        signal.set_wakeup_fd(self.wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)

    def run(self) -> ForkJob | None:
        """Serve until the launcher has ended or closed; a forked child returns from here with its job."""
        while not self._closed():
            for key, mask in self.selector.select(self._timeout_s()):
                if key.fileobj is self.wake_reader:
                    self._reap()
                    continue
                if mask & selectors.EVENT_WRITE:
                    self._flush()
                if mask & selectors.EVENT_READ:
                    command, fds = _receive(self.control)
                    if command is None or (isinstance(command, Preload) and not self._preload(command.modules)):
                        self.children.end()
                        return None
                    if (job := self._obey(command, fds)) is not None:
                        return job
        self.outbox += self.children.end()
        self._flush(flag=0)  # blocking, because nothing else is left to do
        return None

    def _obey(self, command: Command, fds: list[int]) -> ForkJob | None:
        match command:
            case Spawn():
                return self._spawn(command, fds)
            case Signal():
                self.children.signal(command.token, command.signum)
            case Close():
                self.deadline = time.monotonic() + command.grace_s
                self.children.signal_groups(signal.SIGTERM)
        return None

    def _preload(self, names: Sequence[str]) -> bool:
        def gone() -> None:
            self.children.end()
            os._exit(0)

        if not _preload(self.control, names, gone):
            return False
        _give_back_freed_memory()
        gc.freeze()  # so that collections in children do not touch, and thus copy, the imported modules
        return True

    def _spawn(self, spawn: Spawn, fds: list[int]) -> ForkJob | None:
        try:
            if len(fds) != 1 + spawn.num_fds:
                raise OSError("too many open files: raise the limit (ulimit -n)")
            pid = self.children.fork(spawn.token)
        except OSError as error:
            self._report(SpawnFailed(spawn.token, f"cannot start {spawn.title!r}: {error}"))
        else:
            if pid == 0:
                return ForkJob(spawn, fds[0], fds[1:], self._leave(spawn.token))
            self._report(Started(spawn.token, pid))
        for fd in fds:
            os.close(fd)
        return None

    def _leave(self, token: int) -> int:
        """In a child: close the zygote's files but the one for its last words; end when the zygote does."""
        for theirs in (self.selector, self.control, self.wake_reader, self.wake_writer):
            theirs.close()
        words_fd = self.children.last_words.pop(token)
        for others in self.children.last_words.values():
            os.close(others)
        _die_with(self.pid)
        return words_fd

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            while self.wake_reader.recv(4096):
                pass
        for exited in self.children.reap():
            self._report(exited)

    def _report(self, event: Event) -> None:
        self.outbox.append(event)
        self._flush()

    def _flush(self, flag: int = socket.MSG_DONTWAIT) -> None:
        """Send as many events as the launcher has room for, without waiting: it may be waiting for the zygote."""
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self.outbox:
                self.control.send(msgspec.msgpack.encode(self.outbox[0]), socket.MSG_NOSIGNAL | flag)
                self.outbox.popleft()
        more = selectors.EVENT_WRITE if self.outbox else 0
        self.selector.modify(self.control, selectors.EVENT_READ | more)

    def _closed(self) -> bool:
        return self.deadline is not None and (not self.children.pids or time.monotonic() >= self.deadline)

    def _timeout_s(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())


def _receive(control: socket.socket) -> tuple[Command | None, list[int]]:
    """Wait for a command and its open files; return None if the launcher has ended."""
    try:
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, MAX_FDS)
    except ConnectionResetError:
        return None, []
    for fd in fds:
        os.set_inheritable(fd, False)
    return (_command_decoder.decode(message) if message else None), fds


def _preload(control: socket.socket, names: Sequence[str], gone: Callable[[], None]) -> bool:
    try:
        with _ending_with(control, gone):
            for name in names:
                _import_if_there(name)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()  # else each child would print it again
    except BaseException:
        reason = traceback.format_exc()[-MAX_MESSAGE_BYTES // 5 :]  # a character may take four bytes
        with suppress(BrokenPipeError):
            control.send(msgspec.msgpack.encode(SpawnFailed(None, reason)), socket.MSG_NOSIGNAL)
        return False
    return True


def _import_if_there(name: str) -> None:
    try:
        __import__(name)  # unlike importlib.import_module, without frames of its own in a traceback
    except ModuleNotFoundError as error:
        if not _is_missing(name, error):
            raise


def _is_missing(name: str, error: ModuleNotFoundError) -> bool:
    """Return True if the module itself or its package does not exist, not a module that it imports."""
    return error.name is not None and f"{name}.".startswith(f"{error.name}.")


@contextmanager
def _ending_with(control: socket.socket, gone: Callable[[], None]) -> Iterator[None]:
    """Call `gone` at once if the launcher ends during the imports, which take seconds."""
    stop_reader, stop_writer = socket.socketpair()
    poll = select.poll()
    poll.register(control, 0)  # only the end of the connection, not the queued jobs
    poll.register(stop_reader, 0)

    def watch() -> None:
        if control.fileno() in dict(poll.poll()):
            gone()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop_writer.close()
        watcher.join()  # a process should not fork while it has other threads
        stop_reader.close()


def _give_back_freed_memory() -> None:
    """Release memory that the imports have left over, because it counts for every child."""
    linecache.clearcache()  # torch reads its own sources while it is imported
    sys.path_importer_cache.clear()  # directory listings
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _keep_freed_memory() -> None:
    """Let malloc keep large blocks: a gradient returned to the kernel would be paged in again at every step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 64 * 2**20)


def _share_one_heap() -> None:
    """Use one heap for all threads; a second one would be returned to the kernel at every step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_ARENA_MAX, 1)


def _set_zygote_signals() -> None:
    """Ignore signals: only the end of the launcher ends the zygote.

    Schedulers and service managers send SIGTERM to all processes at once, and the jobs must get their grace period.
    """
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the launcher's thread may have blocked some


def _die_with(parent: int) -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def _do(job: ForkJob) -> None:
    try:
        set_title(job.spawn.title)
        if job.spawn.threads is not None:
            _set_num_threads(job.spawn.threads)
        _seed_anew()
        _print_by_line()
        _keep_freed_memory()
        function = _find(job.spawn)
        function(_read(job.content_fd), job.fds)
    except BaseException as error:
        with suppress(OSError):  # the job may have closed all files
            os.pwrite(job.words_fd, _last_words(error).encode(errors="replace")[:LAST_WORDS_BYTES], 0)
        sys.excepthook = partial(_show_without_our_frames, sys.excepthook)
        raise


def _last_words(error: BaseException) -> str:
    """Return what an error says; of sys.exit only a text, which is a reason, and no number."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else ""
    return f"{type(error).__name__}: {error}"


def set_title(title: str) -> None:
    """Show `title` as this process's command line (`ps`), and a short form of it as its name (`top`)."""
    setproctitle.setproctitle(title)
    setproctitle.setthreadtitle(short_title(title))  # second, because the first puts the cut-off title there


def short_title(title: str) -> str:
    """Shorten to 15 bytes, but keep the last word: "rainband worker 2" becomes "rb worker 2"."""
    title = title.replace("rainband", "rb", 1)
    if len(title.encode()) <= NAME_BYTES:
        return title
    head, space, last = title.rpartition(" ")
    end = _first_bytes(space + last, NAME_BYTES)
    return (_first_bytes(head, NAME_BYTES - len(end.encode())) + end).lstrip()


def _first_bytes(text: str, num_bytes: int) -> str:
    return text.encode()[:num_bytes].decode(errors="ignore")  # without a character that was cut


def _set_num_threads(threads: int) -> None:
    import torch  # usually imported by the zygote

    torch.set_num_threads(threads)


def _seed_anew() -> None:
    """Seed anew, else all children would draw the same numbers. Python's own `random` does that itself."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def _print_by_line() -> None:
    """Write each printed line at once, as one write, so that none is lost however the process ends."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)  # whatever PYTHONUNBUFFERED says


def _find(spawn: Spawn) -> Callable[[bytes, list[int]], object]:
    module_name, _, function_name = spawn.entry.partition(":")
    try:
        __import__(module_name)
    except ModuleNotFoundError as error:
        if not _is_missing(module_name, error):
            raise
        sys.exit(_not_found(spawn, f"there is no module {error.name!r} on the launcher's sys.path"))
    function = getattr(sys.modules[module_name], function_name, None)
    if not callable(function):
        sys.exit(_not_found(spawn, f"module {module_name!r} has no function {function_name!r}"))
    found: Callable[[bytes, list[int]], object] = function
    return found


def _not_found(spawn: Spawn, reason: str) -> str:
    return f"cannot start {spawn.title!r} at {spawn.entry!r}: {reason}."


def _read(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)  # the launcher has written it, and left the offset at the end
        return file.read()


def _show_without_our_frames(
    show: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Print a traceback from the first frame of the job's own code on."""
    first, frame = trace, trace
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == __file__ and frame.tb_next is not None:
            first = frame.tb_next
        frame = frame.tb_next
    show(kind, error.with_traceback(first), first)
