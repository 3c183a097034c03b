"""The runtime `processes`: the coordinator runs here, workers and servers are processes on this machine.

Nothing outlives a run: the processes are children of a fork server (the zygote), which ends them when this process
ends in any way; memory files and sockets have no names in the file system.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rainband.coordinator.coordinator import Coordinator
from rainband.observer import Observer
from rainband.plugins import load_strategy
from rainband.protocol import events
from rainband.protocol.messages import COORDINATOR, Address, FilePart, Message, Peer
from rainband.runtimes.checkpoints.background import BackgroundThread
from rainband.runtimes.checkpoints.committer import Committer
from rainband.runtimes.checkpoints.place import facts_of, store_of
from rainband.runtimes.checkpoints.remote import ROLE as FILES
from rainband.runtimes.checkpoints.remote import FileHost
from rainband.runtimes.config import Job, RunConfig, encode_job
from rainband.runtimes.coordinator_host import CoordinatorHost
from rainband.runtimes.hogwild.saving import MemoryWriter
from rainband.runtimes.hogwild.server import HogwildServer
from rainband.runtimes.machines.machine_host import MACHINE_ROLES, MAX_JOINING, MachineHost
from rainband.runtimes.processes.entries import (
    ENTRIES,
    FINE,
    KEYS_OF,
    SCRIPT,
    SERVERS_NEED,
    how_it_ended,
    modules_of_workers,
)
from rainband.runtimes.processes.restarts import Restarts
from rainband.runtimes.processes.zygote import Exited, SpawnFailed, Starter, Zygote
from rainband.runtimes.run import MODEL_FILE, Run, View
from rainband.runtimes.run import RunResult as RunResult
from rainband.runtimes.run_directory import OutputLog, calendar_time
from rainband.runtimes.stop_signals import stop_signals
from rainband.strategy import Strategy
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.collectives.memory import GroupMemory
from rainband.transports.connect import listen_unix, this_machine
from rainband.transports.connection import Connection
from rainband.transports.coordinator_link import MAX_BODY_BYTES
from rainband.transports.event_loop import readable_within
from rainband.transports.hub import Hub
from rainband.transports.shared_memory import SharedSegment
from rainband.transports.shared_rounds import RoundsMemory

CAN_CONTINUE = 75  # the exit code of a run that was stopped cleanly, and has a checkpoint
GRACE_S = 1.0
EXIT_KNOWN_S = 0.2  # how long after its connections have closed the zygote may report how a process ended
STOP_WITHIN_S = 0.2  # a worker that does not stop is in a call that cannot be interrupted: it is tried again later
STOPPED = frozenset("TtZX")  # states of threads that do not run
OBSERVED_AFTER_S = (0.06, 0.12, 0.22, 0.42, 0.82)  # after the first step: a run may be over soon
MAX_TICK_S = 1.0  # so that the progress is shown every second, even with a long failure timeout


def run(
    config: RunConfig,
    view: View,
    capture: bool = False,
    entries: Mapping[str, str] = ENTRIES,
    fds: Sequence[int] = (),
    strategy: Strategy | None = None,
) -> RunResult:
    """Run to the end, and return the result also if the run failed.

    With `capture`, the output of the processes goes to `ProcessOutput` events and output.log. `entries` are the
    functions that the processes call, by role; each process gets copies of `fds`. `strategy` replaces the one that
    the configuration names.
    """
    entries = {**entries, "worker": SCRIPT} if config.script else entries
    launcher = Launcher(config, view, capture, entries, fds, strategy)
    with launcher.signals():
        return launcher.run()


# size: it owns the processes, files and links of a run, and ends each of them
class Launcher(Run):
    """Starts the processes, hosts the coordinator, and cleans up."""

    def __init__(
        self,
        config: RunConfig,
        view: View,
        capture: bool = False,
        entries: Mapping[str, str] = ENTRIES,
        fds: Sequence[int] = (),
        strategy: Strategy | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`observer` is that of the coordinator."""
        super().__init__(config, view)
        self.entries = entries
        self.fds = fds
        self.output = OutputLog(self.directory) if capture else None
        # First, because its imports take the longest.
        self.zygote = self._start_zygote(self.output.file.fileno() if self.output else None)
        self.started_at = time.monotonic()
        self.cpu_at_start_s = time.process_time()
        self.observe_at: list[float] = []  # after the first step
        self.run_id, secret = new_run_id(), new_secret()
        self.keys = role_keys(secret)
        self.machines = self._listen(secret)
        strategy = strategy or load_strategy(config.strategy, config.strategy_settings)
        self.strategy = strategy
        self.shares_batches = strategy.requires.split_batches
        one_memory = strategy.requires.shared_memory
        self.memory = SharedSegment.reserve("rainband memory") if one_memory else None  # the parameters of all workers
        self.rounds = self._make_rounds() if strategy.requires.in_rounds else None
        self.group = GroupMemory(config.num_workers) if strategy.requires.algorithm else None
        hogwild_server = (
            HogwildServer(self._make_room, strategy.requires.in_pairs, config.resume_from) if one_memory else None
        )
        settings = msgspec.structs.replace(self.settings, num_servers=1) if hogwild_server else self.settings
        self.coordinator = Coordinator(settings, strategy)
        accepted = {role: key for role, key in self.keys.items() if role not in ("coordinator", "observer")}
        self.hub = Hub(COORDINATOR, accepted, self.run_id, self, MAX_BODY_BYTES, config.failure_timeout_s)
        self.processes: dict[int, Peer] = {}  # by token
        self.causes: dict[Peer, str] = {}  # how processes ended
        self.restarts = Restarts(self.coordinator.state, self.causes)
        self.host = CoordinatorHost(
            self.coordinator,
            self._now,
            lambda out: self.hub.send(out.to, out.message, out.body),
            self.emit,
            hogwild_server,
            observer,
            why_fatal=self._why_fatal,
        )
        self.background = BackgroundThread()
        store = store_of(config)
        self.host.committer = Committer(
            self.coordinator, store, facts_of(config), config.keep, self.background, calendar_time
        )
        under_way = self.coordinator.checkpoints.under_way
        last = lambda: self.coordinator.checkpoints.last_name  # noqa: E731
        self.files = FileHost(store, config.resume_from, under_way, last, self.background, self.hub.send)
        if hogwild_server is not None:
            self.host.memory_writer = MemoryWriter(hogwild_server, store_of(config), self.background)
        self.interrupts = 0

    def _start_zygote(self, output: int | None) -> Starter:
        """Start what starts the processes, which print into the file `output`."""
        return Zygote.start(SERVERS_NEED, output)

    def _listen(self, secret: bytes) -> MachineHost | None:
        """Return what admits other machines; None: the run has one machine."""
        return MachineHost(self.config, self.run_id, secret, self.directory) if self.config.listen else None

    def _make_rounds(self) -> RoundsMemory:
        """Make the memory for shared batches, with room for those of other machines, for which no worker waits."""
        number = max(self.config.num_workers, self.config.ray.max_workers or 0)
        rounds = RoundsMemory(number + MAX_JOINING if self.machines is not None else number)
        for rank in range(number, rounds.num_ranks):
            rounds.exclude(rank)
        return rounds

    @property
    def ranks_in_memory(self) -> Sequence[int]:
        """Return the workers that share batches in the memory of this process, not in that of another machine."""
        return self.settings.local_ranks

    @property
    def _round_fds(self) -> list[int]:
        """Return the files of that memory."""
        return [] if self.rounds is None or not self.ranks_in_memory else self.rounds.fds

    def stop_soon(self) -> None:
        """Stop as after Ctrl-C: workers finish their current work items."""
        self.interrupts += 1

    def run(self) -> RunResult:
        try:
            self.begin(calendar_time(), self.started_at)
            listener = listen_unix(f"rainband-{self.run_id.hex()}")
            self.hub.listen(listener)
            self.hub.watch(self.zygote.fileno(), self._children)
            self.hub.watch(self.background.fd, lambda: self.host.send([]))
            address = Address("", 0, f"rainband-{self.run_id.hex()}", this_machine())
            if self.machines is not None:
                most = self.strategy.requires.max_replicas
                self.machines.begin(self.hub, self.host, self.emit, self.rounds, self.ranks_in_memory, most)
                address = self.machines.address
            self._start_processes(address)
            self._predict()
            self._loop()
            if self.machines is not None:
                self.machines.end(self.coordinator.state.reason)
            self._await_scripts()
        finally:
            if self.machines is not None:
                self.machines.close()
            self.hub.close()
            self.zygote.close(0.0 if self.interrupts > 1 else GRACE_S)
            if self.memory is not None:
                os.close(self.memory)
            for memory in (self.rounds, self.group):
                if memory is not None:
                    memory.close()
            for unfinished in self.directory.glob("*.part"):  # of a process that ended while it saved
                unfinished.unlink()
        self.save_rescued(self.coordinator)
        return self._result()

    def _predict(self) -> None:
        """Emit the predicted speed of a model in stages."""
        if self.config.stage_plan is None:
            return
        from rainband.runtimes.stage_forecast import predicted_of

        if (predicted := predicted_of(self.config, self.strategy)) is not None:
            self.emit(predicted)

    def _start_processes(self, address: Address) -> None:
        self.address = address
        for index in range(self.config.num_servers):
            self._start(address, "server", index, threads=1)
        self.zygote.preload(modules_of_workers(self.config, self.strategy.requires))
        for rank in self.settings.local_ranks:
            self._start_worker(rank)

    def _start_worker(self, rank: int) -> None:
        self._start(self.address, "worker", rank, self.config.threads, self.restarts.next(rank))

    def _start(self, address: Address, role: str, index: int, threads: int | None, incarnation: int = 0) -> None:
        door = self.machines.doors.of_server(index) if self.machines is not None and role == "server" else None
        roles = KEYS_OF[role]
        job = Job(
            role=role,
            index=index,
            incarnation=incarnation,
            run_id=self.run_id,
            keys={name: self.keys[name] for name in roles},
            machine=platform.node(),
            door=door,
            coordinator=address,
            config=msgspec.structs.replace(self.config, directory=str(self.directory)),
            memory=self.memory is not None,
            group_files=0 if self.group is None else len(self.group.fds),
            round_files=len(self._round_fds),
        )
        title = f"rainband {role} {index}"
        fds = self.fds if self.memory is None else [*self.fds, self.memory]
        fds = fds if self.group is None else [*fds, *self.group.fds]
        fds = [*fds, *self._round_fds]
        if self.machines is not None and door is not None:
            fds = [*fds, self.machines.doors.socks[index + 1].fileno()]
        token = self.zygote.spawn(self.entries[role], encode_job(job), title, fds=fds, threads=threads)
        self.processes[token] = Peer(role, index, incarnation)

    def _loop(self) -> None:
        tick_s = min(MAX_TICK_S, self.config.failure_timeout_s / 5)
        ticked_at = time.monotonic()
        while self.coordinator.state.phase != "over" and self.interrupts < 2:
            next_s = min([ticked_at + tick_s, *self.observe_at[:1]])
            self._serve(max(0.0, self._look_at(next_s) - time.monotonic()))
            if self.observe_at and time.monotonic() >= self.observe_at[0]:
                del self.observe_at[0]
                self.host.observe()
            if self.interrupts and self.coordinator.state.outcome == "finished":
                self.host.send(self.coordinator.shutdown.stop("stopped", "interrupted"))
            if time.monotonic() - ticked_at >= tick_s:
                self.hub.run_once(0.0)  # after a suspend: receive first, before deciding which node is late
                ticked_at = time.monotonic()
                self.host.tick()
                if self.machines is not None:
                    self.machines.look()
                self._look_after_workers()
                self._show_output()
        self.hub.flush()

    def _serve(self, timeout_s: float) -> None:
        """Wait for messages, and for what workers write into the memory that they share with other machines."""
        if self.machines is not None:
            self.machines.before_waiting()
        self.hub.run_once(timeout_s)

    def _look_at(self, tick_at: float) -> float:
        """Return until when to wait for messages: the next tick, or the time at which a node becomes overdue."""
        due_at = self.coordinator.due_at()
        if due_at is None:
            return tick_at
        if due_at <= self._now():
            self.host.look()
            return tick_at
        return min(tick_at, self.started_at + due_at)

    def _await_scripts(self) -> None:
        """Wait for the user's scripts, which may evaluate and save after the run is over."""
        if not self.config.script or self.coordinator.state.outcome == "failed":
            return
        # Workers that were lost during training do not count, also if their processes are still there: others did their
        # work, and a process that hangs would be waited for without end.
        known = self.coordinator.state.workers
        workers = [peer for peer in self.processes.values() if peer.role == "worker" and peer.index in known]
        there = [peer for peer in workers if known[peer.index].active or known[peer.index].paused]
        while self.interrupts < 2 and not all(peer in self.causes for peer in there):
            self._serve(MAX_TICK_S)
            self._show_output()
        wrong = [f"{peer}: {self.causes[peer]}" for peer in there if self.causes.get(peer, FINE) != FINE]
        if wrong and not self.interrupts:
            self.coordinator.state.fail(f"the script failed after training ({'; '.join(wrong)})")

    def emit(self, event: events.AnyEvent) -> None:
        super().emit(event)
        if isinstance(event, events.FirstStep):
            now = time.monotonic()
            self.observe_at = [now + after_s for after_s in OBSERVED_AFTER_S]

    def own_cpu_s(self) -> float:
        return time.process_time() - self.cpu_at_start_s

    def _now(self) -> float:
        return time.monotonic() - self.started_at

    def _make_room(self, num_bytes: int) -> Any:
        """Give the shared parameters their size, which is known now."""
        assert self.memory is not None
        return SharedSegment.settle(self.memory, num_bytes).mapping

    def _show_output(self, to_the_end: bool = False) -> None:
        if self.output is None:
            return
        lines, left_out = self.output.new_lines(to_the_end)
        if lines:
            self.emit(events.ProcessOutput(at_s=self._now(), lines=tuple(lines), left_out=left_out))

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        if connection.peer.role == FILES:
            return self.files.receive(connection.peer, message, body)
        if self.machines is not None and connection.peer.role in MACHINE_ROLES:
            return self.machines.receive(connection, message, body)
        if self.machines is not None and isinstance(message, FilePart):
            return self.machines.take_file(connection.peer, message, body, self.directory / MODEL_FILE)
        self.host.receive(connection.peer, message, body)

    def lost(self, peer: Peer) -> None:
        """A connection closed; the zygote reports a moment later how the process ended."""
        if peer.role == FILES:
            return None
        if peer.role in MACHINE_ROLES and self.machines is not None:
            return self.machines.lost(peer)  # its workers have connections of their own
        if self.machines is not None and peer.role == "worker" and peer not in self.processes.values():
            known = self.coordinator.state.workers.get(peer.index)
            if known is None or known.peer == peer:  # otherwise its next incarnation is there
                self.machines.exclude(peer.index)
        deadline = time.monotonic() + EXIT_KNOWN_S
        while peer not in self.causes and peer in self.processes.values() and self.coordinator.state.phase != "over":
            if not readable_within(self.zygote, deadline - time.monotonic()):
                break
            self._children()
        self.host.lost(peer, self.causes.get(peer, "its connection closed"), for_good=self._is_lost_for_good(peer))

    def _note_exits(self) -> list[Peer]:
        ended = []
        for event in self.zygote.events():
            if isinstance(event, SpawnFailed):
                self.host.send(self.coordinator.shutdown.abort(event.reason))
            if isinstance(event, Exited):
                peer = self.processes[event.token]
                self.causes[peer] = how_it_ended(event)
                if peer.role == "worker":
                    self._exclude(peer)
                ended.append(peer)
        return ended

    def _exclude(self, worker: Peer) -> None:
        """Let workers that share batches not wait for one whose process was reaped, so that it writes no more."""
        if self.rounds is not None:
            self.rounds.exclude(worker.index)
            if self.group is not None:
                self.group.exclude(worker.index)

    def _children(self) -> None:
        for peer in self._note_exits():
            if peer not in self.hub.peers:
                self.host.lost(peer, self.causes[peer], for_good=self._is_lost_for_good(peer))

    def _is_lost_for_good(self, peer: Peer) -> bool:
        """Return True if a node's process has ended and is not started again."""
        returns = peer.role == "worker" and self._starts_again(peer) and self.restarts.may_return(peer)
        return peer in self.causes and not returns

    def _starts_again(self, worker: Peer) -> bool:
        """Return True if a lost worker is started again: one of a replica, whose servers have the parameters."""
        return self.settings.restarts and worker.index in self.settings.local_ranks

    def _start_lost_workers(self, now: float) -> None:
        def is_lost(peer: Peer) -> bool:
            return self._starts_again(peer) and self._is_lost(peer)

        for rank in self.restarts.due(now, is_lost, lambda peer: self.host.lost(peer, self.causes.get(peer, "lost"))):
            self._start_worker(rank)

    def _is_lost(self, peer: Peer) -> bool:
        """Return True if a worker's process has ended. One that does not, although it was dismissed, is killed."""
        worker = self.coordinator.state.workers.get(peer.index)
        if peer not in self.causes and worker is not None and worker.peer == peer and not worker.connected:
            silent_s = self._now() - worker.heartbeat_at
            token = next(token for token, started in self.processes.items() if started == peer)
            if silent_s > self.config.failure_timeout_s and isinstance(self.zygote, Zygote):
                self.zygote.signal(token, signal.SIGKILL)
        return peer in self.causes

    def _look_after_workers(self) -> None:
        """Start lost workers again; let no worker wait in rounds of split batches for one without heartbeats."""
        if self.settings.restarts:
            self._start_lost_workers(time.monotonic())
        if self.rounds is None or not isinstance(self.zygote, Zygote):
            return
        workers = self.coordinator.state.workers
        for token, peer in self.processes.items():
            worker = workers.get(peer.index) if peer.role == "worker" and peer not in self.causes else None
            if worker is None or worker.paused:  # a paused worker has excluded itself
                continue
            if worker.connected and not worker.active:
                fenced = fence(self.rounds, peer.index, self.zygote, token)
                if fenced and self.group is not None:
                    self.group.exclude(peer.index)
        if self.machines is not None:
            for rank, worker in workers.items():
                if rank not in self.settings.local_ranks and not worker.active and not worker.paused:
                    self.machines.exclude(rank)

    def _why_fatal(self, peer: Peer, cause: str) -> str:
        """Return why the run cannot start without a worker; others do the work of a lost one."""
        if self.config.script and cause == FINE:
            return f"{self.config.task} never joined: it needs `with rainband.join(model, optimizer) as run:`"
        return ""

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Stop cleanly after the first Ctrl-C, SIGTERM or SIGHUP, and at once after the second."""
        self.signal = 0

        def note(number: int) -> None:
            self.stop_soon()
            self.signal = number

        with stop_signals(note) as are_noted, ExitStack() as ended:
            if are_noted:
                ours, theirs = socket.socketpair()
                for end in (ours, theirs):
                    ended.callback(end.close)
                    end.setblocking(False)
                ended.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False))
                self.hub.watch(ours.fileno(), partial(_discard, ours))
            yield

    def _result(self) -> RunResult:
        self.host.send([])  # the last events
        self._show_output(to_the_end=True)
        twice = "interrupted twice" if self.interrupts > 1 else ""
        result = self.result(RunResult, self.coordinator, self._now(), self._exit_code(), twice)
        self.end(result)
        self.log.close()
        if self.output is not None:
            self.output.close()
        return result

    def _exit_code(self) -> int | None:
        if not self.interrupts:
            return None
        can_continue = self.interrupts == 1 and self.coordinator.checkpoints.last_name
        return CAN_CONTINUE if can_continue else 128 + (self.signal or signal.SIGINT)


def fence(memory: RoundsMemory, rank: int, zygote: Zygote, token: int) -> bool:
    """Exclude a worker while all its threads are stopped, so that its position is final; return True if it is excluded.

    A worker that goes on afterwards notices this, and asks to join again.
    """
    pid = zygote.pid_of(token)
    if pid is None or memory.is_excluded(rank):
        return memory.is_excluded(rank)
    was_stopped = is_stopped(pid)
    if not was_stopped:
        zygote.signal(token, signal.SIGSTOP)
    deadline = time.monotonic() + STOP_WITHIN_S
    while not (stopped := is_stopped(pid)) and time.monotonic() < deadline:
        os.sched_yield()
    if stopped:
        memory.exclude(rank)
    if not was_stopped:
        zygote.signal(token, signal.SIGCONT)
    return stopped


def is_stopped(pid: int) -> bool:
    """Return True if no thread of the process runs."""
    states = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            states.add(thread.read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue  # the thread has ended
    return states <= STOPPED


def _discard(sock: socket.socket) -> None:
    sock.recv(64)
