"""A machine that joins a run: it starts workers, and servers before the run has begun, which only dial out.

Its connection to the coordinator, that of a `machine`, brings the numbers of its processes and reports how they end.
When connections break, it connects again, and starts workers again under the next incarnation: what the earlier
ones pushed counts once, and their leases are reassigned.
"""

from __future__ import annotations

import platform
import random
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from rainband.errors import HandshakeFailed, NoAnswer, NotListening, PeerLost, RainbandError
from rainband.plugins import load_strategy
from rainband.protocol.messages import (
    COORDINATOR,
    NO_WORK_LEFT,
    Leave,
    MachineJoin,
    MachineWelcome,
    Message,
    Peer,
    ProcessEnded,
    Restart,
    RestartRequest,
    RoundAudience,
    RoundData,
    RoundWords,
    Shutdown,
)
from rainband.runtimes.config import Job, RunConfig, encode_job
from rainband.runtimes.configure import check_task
from rainband.runtimes.machines.doors import Doors
from rainband.runtimes.machines.invitation import Invitation
from rainband.runtimes.machines.reach import why_not
from rainband.runtimes.machines.software import own_software
from rainband.runtimes.processes.entries import (
    ENTRIES,
    FINE,
    KEYS_OF,
    LINK_BROKEN,
    SCRIPT,
    SERVERS_NEED,
    WORKERS_NEED,
    how_it_ended,
    modules_of_workers,
)
from rainband.runtimes.processes.zygote import Exited, SpawnFailed, Zygote
from rainband.runtimes.stop_signals import stop_signals
from rainband.transports.connect import connect, is_here
from rainband.transports.connection import Connection
from rainband.transports.hub import Hub

if TYPE_CHECKING:  # importing torch takes longer than all else here, and the fork server imports it anyway
    from rainband.runtimes.machines.rounds_relay import MachineRelay
    from rainband.transports.shared_rounds import RoundsMemory

FIRST_PAUSE_S, LONGEST_PAUSE_S = (
    0.5,
    15.0,
)  # before connections are made again; doubled each time, times a random factor
GIVE_UP_S = 300.0  # without a connection to the coordinator
REFUSED_S = 20.0  # the same, while its machine answers that no process listens there
FIRST_TRY_S = 30.0  # for the first connection: the run's machine may be busy
TRY_S = 5.0  # for one attempt to connect again
TICK_S = 0.5
GRACE_S = 1.0
MAX_BODY_BYTES = 1 << 20
STOPPED_BY_USER = 130


class JoinOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The processes that a machine brings."""

    workers: int
    servers: int = 0
    threads: int = 1
    listen: str = ""  # HOST:PORT of the first server
    advertise: str = ""
    script: str = ""
    arguments: tuple[str, ...] = ()  # none: those of the run's own machine


def pause_s(attempt: int) -> float:
    """Return how long to wait before the next attempt: longer each time, and random, so that not all come at once."""
    return random.uniform(0.5, 1.0) * min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(attempt, 16))


def _is_refused(error: RainbandError) -> bool:
    """Return True if something answers at the address, and it is not this run."""
    return isinstance(error, HandshakeFailed | NotListening) and not isinstance(error, NoAnswer)


# size: the state of one machine in a run, which its connection, its processes and Ctrl-C change together
class Joiner:
    """One machine in a run of another machine."""

    def __init__(self, invitation: Invitation, options: JoinOptions, say: Callable[[str], None]) -> None:
        self.invitation = invitation
        self.options = options
        self.say = say
        self.name = platform.node()
        # Its number distinguishes it from other machines; the coordinator gives numbers to its processes.
        self.me = Peer("machine", secrets.randbelow(1 << 32))
        self.doors: Doors | None = None
        if options.servers:
            self.doors = Doors(options.listen, options.advertise, options.servers, for_servers_only=True)
        self.hub = Hub(self.me, {}, invitation.run_id, self, MAX_BODY_BYTES)
        self.welcome: MachineWelcome | None = None
        self.config: RunConfig | None = None
        self.rounds: RoundsMemory | None = None  # where workers share batches
        self.relay: MachineRelay | None = None
        self.processes: dict[int, Peer] = {}  # by token, those that run
        self.restarts: dict[int, float] = {}  # rank -> when to start the worker again
        self.awaited: set[int] = set()  # ranks whose next incarnation the coordinator has been asked for
        self.attempts: dict[int, int] = {}  # rank -> restarts so far
        self.failed = False  # a process has ended with an error
        self.over: str | None = None  # the run has ended, with this reason
        self.over_at = 0.0
        self.is_connected = False  # for the first time
        self.interrupts = 0
        self.said_leave = False
        self.lost_at: float | None = None  # since when there is no connection
        self.next_try_at = 0.0
        self.tries = 0

    # ---- the run ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Join, and stay until the run ends or the user interrupts; return the exit code."""
        # First, because its imports take the longest. It cannot know yet whether its workers need more.
        self.zygote = Zygote.start(SERVERS_NEED if self.options.servers else ("torch", *WORKERS_NEED[1:]))
        try:
            self.hub.watch(self.zygote.fileno(), self._children)
            with stop_signals(self._interrupted):
                with suppress(KeyboardInterrupt):
                    self._connect_first()
                while self._goes_on():
                    if self.relay is not None:
                        self.relay.sleep()
                        self.relay.look()
                    self.hub.run_once(TICK_S)
                    self._leave_if_interrupted()
                    self._keep_connected()
                    self._restart_due()
                self.hub.flush()
        finally:
            self.hub.close()
            self.zygote.close(0.0 if self.interrupts > 1 else GRACE_S)
            if self.doors is not None:
                self.doors.close()
            if self.rounds is not None:
                self.rounds.close()
        return self._conclude()

    def _goes_on(self) -> bool:
        if self.interrupts > 1:
            return False
        if self.over is not None and not (self.config is not None and self.config.script):
            return bool(self.processes) and time.monotonic() < self.over_at + GRACE_S
        return bool(self.processes or self.restarts or self.awaited) or (self.welcome is None and self.over is None)

    def _conclude(self) -> int:
        if self.interrupts and not self.is_connected:
            return STOPPED_BY_USER
        if self.interrupts:
            self.say("left the run: what its workers have pushed counts, and others get the rest of their batches.")
            return STOPPED_BY_USER
        if self.over:
            self.say(f"the run has ended: {self.over}")
        elif self.over is not None:
            self.say("the run has ended.")
        return int(self.failed)

    # ---- the connection to the coordinator --------------------------------------------------------------------------

    def _connect_first(self) -> None:
        """Connect; raise what is in the way, and what to do, if the run cannot be reached."""
        try:
            self._connect(FIRST_TRY_S)
        except RainbandError as error:
            found = "" if is_here(self.invitation.address) else why_not(self.invitation)
            where = f"{self.name} cannot join the run {self.invitation.run}"
            raise HandshakeFailed(f"{where}: {found or error}") from None
        self.is_connected = True

    def _connect(self, patience_s: float) -> None:
        """Connect and introduce this machine; raise the reason if that fails."""
        address, keys = self.invitation.address, {"machine": self.invitation.key}
        sock, peer, key = connect(address, is_here(address), keys, self.invitation.run_id, self.me, patience_s)
        self.hub.adopt(sock, peer, key)
        ranks = self.welcome.ranks if self.welcome is not None else ()
        options = self.options
        join = MachineJoin(self.name, own_software(), options.workers, options.servers, bool(options.script), ranks)
        self.hub.send(COORDINATOR, join)

    def lost(self, peer: Peer) -> None:
        if self.over is None:
            self.lost_at, self.next_try_at, self.tries = time.monotonic(), time.monotonic() + pause_s(0), 0
            self.restarts.update(dict.fromkeys(self.awaited, self.lost_at))
            self.awaited.clear()
            self.say("lost the connection to the run; connecting again ...")

    def _keep_connected(self) -> None:
        """Connect again when it is time; give up when the run cannot be reached for long."""
        now = time.monotonic()
        if self.lost_at is None or self.over is not None or now < self.next_try_at:
            return
        try:
            self._connect(TRY_S)
        except RainbandError as error:
            self.tries += 1
            if now - self.lost_at > (REFUSED_S if _is_refused(error) else GIVE_UP_S):
                self.failed = True
                self._run_over(f"it cannot be reached any more ({error})")
            self.next_try_at = time.monotonic() + pause_s(self.tries)
        else:
            self.lost_at = None

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        match message:
            case RoundData() | RoundWords() | RoundAudience() if self.relay is not None:
                self.relay.receive(message, body)
            case MachineWelcome():
                self._welcomed(message)
            case Restart() if message.rank in self.awaited:
                self.awaited.discard(message.rank)
                self._start("worker", message.rank, message.incarnation)
            case ProcessEnded():
                self._end(message.peer)
            case Shutdown():
                self._run_over(message.reason)

    def _run_over(self, reason: str) -> None:
        self.over, self.over_at = reason, time.monotonic()
        self.restarts.clear()
        self.awaited.clear()

    def _welcomed(self, welcome: MachineWelcome) -> None:
        if welcome.refused:
            raise HandshakeFailed(f"the run {self.invitation.run} refuses this machine: {welcome.refused}")
        if self.welcome is not None:
            self.say("connected to the run again.")
            if self.relay is not None:
                self.relay.connected()
            return
        self.welcome = welcome
        config = msgspec.msgpack.decode(welcome.config, type=RunConfig)
        if not config.script:
            check_task(config.task, config.task_settings)
        self.config = self._of_this_machine(config)
        strategy = f"{config.strategy} on {self.invitation.run}"
        parts = [f"worker {rank}" for rank in welcome.ranks] + [f"server {number}" for number in welcome.servers]
        self.say(f"joined {config.task} with {strategy} as {', '.join(parts)}. Ctrl-C leaves the run.")
        if welcome.round_ranks:
            from rainband.runtimes.machines.rounds_relay import MachineRelay
            from rainband.transports.shared_rounds import RoundsMemory

            self.rounds = RoundsMemory(welcome.round_ranks, is_mirror=True)
            self.relay = MachineRelay(self.rounds, welcome.ranks, self.hub.send, COORDINATOR)
            self.hub.watch(self.relay.bell, self.relay.rang)
        for number in welcome.servers:
            self._start("server", number)
        requires = load_strategy(config.strategy, config.strategy_settings).requires
        self.zygote.preload(modules_of_workers(config, requires))
        for rank in welcome.ranks:
            self._start("worker", rank)

    def _of_this_machine(self, config: RunConfig) -> RunConfig:
        """Return the configuration without what concerns files of the run's directory, which is elsewhere."""
        options = self.options
        return msgspec.structs.replace(
            config,
            directory=tempfile.gettempdir(),
            record=False,
            timeline=False,
            message_cost=False,
            threads=options.threads,
            script=options.script,
            arguments=options.arguments or config.arguments,
        )

    # ---- its processes ----------------------------------------------------------------------------------------------

    def _start(self, role: str, index: int, incarnation: int = 0) -> None:
        assert self.welcome is not None and self.config is not None
        first = min(self.welcome.servers, default=0)
        is_server = role == "server" and self.doors is not None
        job = Job(
            role=role,
            index=index,
            incarnation=incarnation,
            run_id=self.invitation.run_id,
            keys={name: self.welcome.keys[name] for name in KEYS_OF[role]},
            coordinator=self.invitation.address,
            config=self.config,
            machine=self.name,
            remote=True,
            shows_errors=True,
            door=self.doors.door(index - first) if is_server and self.doors is not None else None,
            round_files=len(self.rounds.fds) if self.rounds is not None and role == "worker" else 0,
        )
        if self.rounds is not None and role == "worker":
            fds = self.rounds.fds
        else:
            fds = [self.doors.socks[index - first].fileno()] if is_server and self.doors is not None else []
        entry = SCRIPT if role == "worker" and self.config.script else ENTRIES[role]
        threads = 1 if role == "server" else self.options.threads
        token = self.zygote.spawn(entry, encode_job(job), f"rainband {role} {index}", fds=fds, threads=threads)
        self.processes[token] = Peer(role, index, incarnation)

    def _end(self, peer: Peer) -> None:
        """End a worker that has not joined yet, when this machine leaves: it has nothing to finish."""
        for token in [token for token, process in self.processes.items() if process == peer]:
            self.zygote.signal(token, signal.SIGKILL)

    def _children(self) -> None:
        for event in self.zygote.events():
            if isinstance(event, SpawnFailed):
                raise PeerLost("the processes of this machine", f"starting them ({event.reason})")
            if isinstance(event, Exited):
                self._ended(self.processes.pop(event.token), event)

    def _ended(self, peer: Peer, exited: Exited) -> None:
        cause = how_it_ended(exited)
        goes_on = self.over is None and not self.interrupts
        if peer.role == "worker" and exited.code == LINK_BROKEN and goes_on:
            attempt = self.attempts[peer.index] = self.attempts.get(peer.index, -1) + 1
            self.restarts[peer.index] = time.monotonic() + pause_s(attempt)
            self.say(f"{peer} has lost its connections; it is started again.")
            return
        self.hub.send(COORDINATOR, ProcessEnded(peer, cause))
        if cause != FINE and goes_on:
            self.failed = self.failed or exited.error != NO_WORK_LEFT.reason
            self.say(f"{peer} has ended: {exited.error or cause}".rstrip(".") + ".")

    def _restart_due(self) -> None:
        """Ask for the numbers of workers that are to be started again; without a connection, later."""
        now = time.monotonic()
        for rank in [rank for rank, at in self.restarts.items() if at <= now and self.lost_at is None]:
            del self.restarts[rank]
            self.awaited.add(rank)
            self.hub.send(COORDINATOR, RestartRequest(rank))

    # ---- Ctrl-C -----------------------------------------------------------------------------------------------------

    def _leave_if_interrupted(self) -> None:
        if not self.interrupts or self.said_leave:
            return
        self.said_leave = True
        self.restarts.clear()
        self.awaited.clear()
        if self.lost_at is not None or self.welcome is None:  # the run cannot be told
            self.interrupts = 2
            return
        self.say("leaving: the workers finish their current batches; press Ctrl-C again to end now.")
        self.hub.send(COORDINATOR, Leave())

    def _interrupted(self, number: int) -> None:
        """Leave cleanly after the first Ctrl-C, SIGTERM or SIGHUP, and at once after the second."""
        self.interrupts += 1
        if not self.is_connected:  # nothing is to be left cleanly, and connecting may take long
            self.interrupts = 2
            raise KeyboardInterrupt
