"""The processes that a zygote has forked: it starts, signals and reaps them, and at the end kills the rest."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

from rainband.runtimes.processes.zygote import Exited

LAST_WORDS_BYTES = 1000


class Children:
    """The forked processes, each the leader of its own process group."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}  # by token; `tokens` is the inverse
        self.tokens: dict[int, int] = {}
        self.last_words: dict[int, int] = {}  # by token: a memory file in which the process leaves what ended it

    def fork(self, token: int) -> int:
        """Fork a child into its own process group; return 0 in the child."""
        self.last_words[token] = os.memfd_create("rainband last words")
        # A signal sent at once must wait until the child has reset its handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _reset_signals()
        except OSError:
            os.close(self.last_words.pop(token))
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # Parent and child both make the group, so that neither finds it missing; the second attempt may fail.
        with suppress(OSError):
            os.setpgid(pid, pid)
        if pid != 0:
            self.pids[token], self.tokens[pid] = pid, token
        return pid

    def signal(self, token: int, signum: int) -> None:
        if token in self.pids:
            os.kill(self.pids[token], signum)

    def signal_groups(self, signum: int) -> None:
        for pid in self.tokens:
            _signal_group(pid, signum)

    def reap(self) -> Iterator[Exited]:
        """Collect processes that have ended, and kill the rest of their groups (a DataLoader's workers)."""
        while (pid := _next_ended()) is not None:
            if pid in self.tokens:
                # Before collecting it: until then no other process can have its number.
                _signal_group(pid, signal.SIGKILL)
            yield from self._collect(pid)

    def end(self) -> list[Exited]:
        """Kill and collect all remaining processes, also orphans that have left their group."""
        import psutil  # imported here, because imports before a fork cost every child memory

        self.signal_groups(signal.SIGKILL)
        exited: list[Exited] = []
        while left := {*self.tokens, *(child.pid for child in psutil.Process().children())}:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            for pid in left:
                exited += self._collect(pid)
        return exited

    def _collect(self, pid: int) -> Iterator[Exited]:
        _, status = os.waitpid(pid, 0)
        token = self.tokens.pop(pid, None)
        if token is None:
            return  # an orphan
        del self.pids[token]
        code, words = os.waitstatus_to_exitcode(status), self.last_words.pop(token)
        error = os.pread(words, LAST_WORDS_BYTES, 0).decode(errors="ignore")
        os.close(words)
        yield Exited(token, pid, code if code >= 0 else None, -code if code < 0 else None, error)


def _signal_group(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):  # it may have changed its group
        os.killpg(pid, signum)


def _next_ended() -> int | None:
    with suppress(ChildProcessError):
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return dead.si_pid if dead else None
    return None


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_DFL)
