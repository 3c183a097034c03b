"""The run's side of several machines: where it listens, its invitation, and the machines that have joined."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rainband.coordinator.coordinator import Coordinator
from rainband.coordinator.liveness import LEFT
from rainband.coordinator.state import Phase
from rainband.protocol import events
from rainband.protocol.messages import (
    Address,
    Failed,
    FilePart,
    Leave,
    MachineJoin,
    MachineWelcome,
    Message,
    Peer,
    ProcessEnded,
    Restart,
    RestartRequest,
    RoundData,
    RoundWords,
    Shutdown,
    TunnelRequest,
)
from rainband.runtimes.config import RunConfig
from rainband.runtimes.coordinator_host import CoordinatorHost
from rainband.runtimes.machines.addresses import HostPort
from rainband.runtimes.machines.doors import Doors
from rainband.runtimes.machines.invitation import FILE_NAME, Invitation
from rainband.runtimes.machines.launchers import launched_by, shared_file
from rainband.runtimes.machines.rounds_relay import RunRelay
from rainband.runtimes.machines.software import own_software, software_differences
from rainband.transports.auth import role_keys
from rainband.transports.connect import this_machine
from rainband.transports.connection import Connection
from rainband.transports.hub import Hub
from rainband.transports.shared_rounds import RoundsMemory
from rainband.transports.tunnels.dial import ROLE as TUNNEL
from rainband.transports.tunnels.host import Tunnel, TunnelHost

MAX_JOINING = 60  # workers of other machines that may share batches, above those that the run is planned for
OVER = (Phase.FLUSHING, Phase.FINISHING, Phase.CONCLUDING, Phase.OVER)
MACHINE_ROLES = ("machine", TUNNEL)  # of connections that a MachineHost serves
MAX_PROCESSES = 10_000  # that a machine may bring at once


def _backlog(hub: Hub, machine: Peer) -> int:
    """Return how many bytes for a machine have not left."""
    connection = hub.peers.get(machine)
    return 0 if connection is None else connection.out_bytes


class MachineHost:
    """Admits machines to a run, and passes on what they report about their processes."""

    def __init__(
        self, config: RunConfig, run_id: bytes, secret: bytes, directory: Path, doors: Doors | None = None
    ) -> None:
        """`doors`: by default those at the address that the configuration names."""
        self.config = config
        self.doors = doors or Doors(config.listen, config.advertise, config.num_servers)
        self.secret = secret
        self.directory = directory
        self.invitation = Invitation(
            run=directory.name,
            run_id=run_id,
            host=self.doors.host,
            port=self.doors.ports[0],
            unix=f"rainband-{run_id.hex()}",
            machine=this_machine(),
            fingerprint=self.doors.fingerprint,
            key=role_keys(secret, "machine")["machine"],
        )
        self.machines: dict[Peer, MachineJoin] = {}  # those that have joined
        self.servers: dict[Peer, tuple[int, ...]] = {}  # that machines have brought
        self.left: set[Peer] = set()  # of these, those that are gone
        self.incarnations: dict[int, int] = {}  # worker -> the last one that was started
        self.shared: Path | None = None  # where other ranks of a job find the invitation
        self.relay: RunRelay | None = None  # where workers share batches
        self.most_workers = sys.maxsize  # of all machines
        self.ranks_move = False  # the launcher starts workers on the machines, which tell what they have
        self.tunnels: TunnelHost | None = None  # where workers have links to each other
        self.model: ReceivedModel | None = None  # that a worker of another machine sends

    @property
    def address(self) -> Address:
        return self.invitation.address

    @property
    def invitation_path(self) -> Path:
        return self.directory / FILE_NAME

    def begin(
        self,
        hub: Hub,
        host: CoordinatorHost,
        emit: Callable[[events.AnyEvent], None],
        rounds: RoundsMemory | None = None,
        ranks: Sequence[int] = (),
        max_replicas: int | None = None,
    ) -> None:
        """Listen, and write the invitation, if other machines are to join.

        `rounds`: the memory of workers that share batches, and `ranks` those of this machine. `max_replicas`: of the
        model; None: any number.
        """
        if max_replicas is not None:
            self.most_workers = max_replicas * host.coordinator.state.settings.workers_per_replica
        self.hub, self.host, self.emit = hub, host, emit
        if host.coordinator.state.settings.workers_per_replica > 1:
            self.tunnels = TunnelHost(hub, self._worker, lambda to, worker: hub.send(to, TunnelRequest(worker)))
        if rounds is not None:
            self.relay = RunRelay(rounds, ranks, hub.send, lambda machine: _backlog(hub, machine))
            hub.watch(self.relay.bell, self.relay.rang)
        hub.listen(self.doors.socks[0], self.doors.certificate)
        if not self.config.listen:
            return
        if self.doors.warning:
            self.emit(events.Warned(at_s=host.now(), text=self.doors.warning))
        self.invitation.write(self.invitation_path)
        if (launched := launched_by()) is not None and launched.rank == 0:
            self.shared = shared_file(launched)
            self.shared.unlink(missing_ok=True)  # of an earlier attempt of the same job
            self.invitation.write(self.shared)
        self.emit(
            events.Listening(
                at_s=host.now(),
                address=str(self._shown),
                servers=tuple(self.doors.ports[1:]),
                invitation=str(self.invitation_path),
            )
        )

    def _worker(self, rank: int) -> Peer | None:
        """Return a worker that is connected."""
        worker = self.host.coordinator.state.workers.get(rank)
        return worker.peer if worker is not None and worker.peer in self.hub.peers else None

    def look(self) -> None:
        """Report the tunnels that were opened, or closed."""
        if self.tunnels is not None:
            for tunnel in self.tunnels.opened:
                self.emit(events.Tunneled(at_s=self.host.now(), workers=tunnel.workers))
            self.tunnels.opened.clear()
            for tunnel in [one for one in self.tunnels.tunnels if not one.is_open]:
                self._close(self.tunnels, tunnel)

    def _close(self, tunnels: TunnelHost, tunnel: Tunnel) -> None:
        tunnel.close()
        tunnels.tunnels.remove(tunnel)
        passed = sum(tunnel.num_bytes)
        self.emit(events.Tunneled(at_s=self.host.now(), workers=tunnel.workers, num_bytes=passed, closed=True))

    @property
    def _shown(self) -> HostPort:
        return HostPort(self.doors.host, self.doors.ports[0])

    def close(self) -> None:
        """Close the sockets, and remove the invitation, which is of no more use."""
        if self.tunnels is not None:
            self.tunnels.close()
        self.doors.close()
        self.invitation_path.unlink(missing_ok=True)
        if self.shared is not None:
            self.shared.unlink(missing_ok=True)

    def end(self, reason: str) -> None:
        """Tell all machines that the run is over."""
        for machine in self.machines:
            self.hub.send(machine, Shutdown(reason))
        self.hub.flush()
        self.look()
        if self.tunnels is not None:  # the workers have ended
            for tunnel in list(self.tunnels.tunnels):
                self._close(self.tunnels, tunnel)

    def before_waiting(self) -> None:
        """Send what workers of this machine have written into the memory for shared batches, and watch it."""
        if self.relay is not None:
            self.relay.sleep()
            self.relay.look()

    def exclude(self, rank: int) -> None:
        """Let workers that share batches not wait any more for one of another machine."""
        if self.relay is not None:
            self.relay.memory.exclude(rank)

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        """Take a message of a machine."""
        if connection.peer.role == TUNNEL:
            return self._tunnel(connection, message)
        if not isinstance(message, RoundData | RoundWords):
            return self._control(connection.peer, message)
        if self.relay is not None:
            try:
                self.relay.receive(connection.peer, message, body)
            except (ValueError, msgspec.DecodeError) as error:
                self.hub.refuse(connection, str(error))

    def _tunnel(self, connection: Connection, message: Message) -> None:
        if self.tunnels is None:
            return self.hub.refuse(connection, f"workers of {self.config.strategy} have no links to each other")
        self.tunnels.receive(connection, message)

    def _control(self, sender: Peer, message: Message) -> None:
        """Take a message about the processes of a machine."""
        coordinator, now = self.host.coordinator, self.host.now()
        joined = self.machines.get(sender)
        match message:
            case MachineJoin():
                self.hub.send(sender, self._join(sender, message, coordinator))
            case RestartRequest() if joined is not None and message.rank in joined.ranks:
                self.incarnations[message.rank] = self.incarnations.get(message.rank, 0) + 1
                self.hub.send(sender, Restart(message.rank, self.incarnations[message.rank]))
            case ProcessEnded() if joined is not None and message.peer in self._processes_of(sender):
                if message.peer.role == "worker":
                    self.exclude(message.peer.index)
                self.host.lost(message.peer, message.cause)
            case Leave() if joined is not None:
                self._report_left(sender, "Ctrl-C there")
                self.host.send(coordinator.dismiss(joined.ranks, now))
                for worker in self._processes_of(sender):
                    if worker.role == "worker" and worker.index not in coordinator.state.workers:
                        self.hub.send(sender, ProcessEnded(worker, LEFT))  # it may import for long before it asks

    def _processes_of(self, machine: Peer) -> set[Peer]:
        """Return the processes that a machine may report: those that it has brought."""
        workers = {Peer("worker", rank, self.incarnations.get(rank, 0)) for rank in self.machines[machine].ranks}
        return workers | {Peer("server", number) for number in self.servers.get(machine, ())}

    def lost(self, machine: Peer) -> None:
        """Report that a machine's connection is closed: it connects again, or its workers are lost by themselves."""
        if machine.role == TUNNEL:
            if self.tunnels is not None:
                self.tunnels.lost(machine)
            return
        if self.relay is not None:
            self.relay.left(machine)
        if self.host.coordinator.state.phase not in OVER:
            self._report_left(machine, "its connection closed")

    def _report_left(self, machine: Peer, why: str) -> None:
        joined = self.machines.get(machine)
        if joined is not None and machine not in self.left and not self.ranks_move:
            self.left.add(machine)
            gone = events.MachineJoined(at_s=self.host.now(), machine=joined.name, workers=joined.ranks, left=why)
            self.emit(gone)

    def _join(self, sender: Peer, join: MachineJoin, coordinator: Coordinator) -> MachineWelcome:
        brings = bool(join.ranks or join.workers or join.servers)  # otherwise it only asks whether it may join
        if (refused := self._why_refused(join, self.machines.get(sender), coordinator)) or not brings:
            if brings and not join.ranks:
                self.emit(events.Warned(at_s=self.host.now(), text=f"the machine {join.name} was refused: {refused}"))
            return MachineWelcome(refused=refused, run=self.directory.name)
        if join.ranks:  # it is connected again
            self.machines[sender] = join
            self.left.discard(sender)
            if self.relay is not None:
                self.relay.joined(sender, join.ranks)
            if not self.ranks_move:
                self.emit(events.MachineJoined(at_s=self.host.now(), machine=join.name, workers=join.ranks))
            return MachineWelcome(run=self.directory.name)
        ranks = tuple(coordinator.admission.new_ranks(join.workers))
        servers = tuple(coordinator.admission.expect_servers(join.servers)) if join.servers else ()
        self.machines[sender], self.servers[sender] = msgspec.structs.replace(join, ranks=ranks), servers
        self.emit(events.MachineJoined(at_s=self.host.now(), machine=join.name, workers=ranks, servers=servers))
        keys = role_keys(self.secret, "worker", TUNNEL, "files", *(("server",) if servers else ()))
        config = msgspec.msgpack.encode(self.config)
        if self.relay is not None:
            self.relay.joined(sender, ranks)
        return MachineWelcome(
            run=self.directory.name,
            config=config,
            keys=keys,
            ranks=ranks,
            servers=servers,
            round_ranks=0 if self.relay is None else self.relay.memory.num_ranks,
        )

    def _why_refused(self, join: MachineJoin, known: MachineJoin | None, coordinator: Coordinator) -> str:
        if differs := software_differences(join.software, own_software(), join.name):
            return differs
        if join.ranks and not self.ranks_move and (known is None or known.ranks != join.ranks):
            return "it has not brought these workers."
        phase = coordinator.state.phase
        if phase in OVER:
            return "the run is ending: there is no work left."
        if join.servers and phase is not Phase.FORMING:
            return "the run has begun, and its servers cannot change any more: join without --servers."
        if join.workers + join.servers > MAX_PROCESSES:
            return f"a machine may bring at most {MAX_PROCESSES} processes."
        room = max(0, self.most_workers - coordinator.admission.next_rank)
        if join.workers > room:
            return (
                f"{self.config.strategy} has room for {room} more workers: use --workers {room}, or join another run."
            )
        if self.relay is not None and join.servers:
            return f"{self.config.strategy} has no servers: join without --servers."
        if self.relay is not None and coordinator.admission.next_rank + join.workers > self.relay.memory.num_ranks:
            room = self.relay.memory.num_ranks - coordinator.admission.next_rank
            return f"the run has room for {room} more workers: use --workers {room} or less."
        if join.script and not self.config.script:
            return f"the run trains the task {self.config.task}, not a script: omit the script."
        if self.config.script and not join.script and join.workers:
            return f"the run trains with the script {self.config.task}: rainband join {FILE_NAME} {self.config.task}"
        return ""

    def take_file(self, sender: Peer, part: FilePart, body: memoryview | None, path: Path) -> None:
        """Write a part of the model, which the worker that saves it has on another disk."""
        if body is None or sender.index != self.host.coordinator.shutdown.concluder:
            return
        if self.model is None:
            self.model = ReceivedModel(path)
        try:
            is_last = self.model.take(part, body)
        except OSError as error:  # another worker, or the servers, may have room elsewhere
            why = f"NotSaved: the model could not be saved ({type(error).__name__}: {error})"
            return self.host.receive(sender, Failed(0, why, ""), None)
        if is_last and self.model.place != path:
            text = f"the model could not be saved as {path}; it is in {self.model.place}"
            self.emit(events.Warned(at_s=self.host.now(), text=text))


class ReceivedModel:
    """The model of a run, as far as it has arrived. If its disk is full, it is written elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.elsewhere = Path(tempfile.gettempdir(), f"{path.parent.name}.safetensors")
        self.place = path

    def take(self, part: FilePart, body: memoryview) -> bool:
        """Write a part; return True if it was the last. Raise OSError if there is no room in either place."""
        if not part.offset:
            try:
                self._begin(self.path, part.num_bytes)
            except OSError:
                self._begin(self.elsewhere, part.num_bytes)
        beside = _beside(self.place)
        with beside.open("r+b") as file:
            file.seek(part.offset)
            file.write(body)
            is_last = part.offset + len(body) == part.num_bytes
            if is_last:
                file.flush()
                os.fsync(file.fileno())
        if is_last:
            beside.replace(self.place)
        return is_last

    def _begin(self, place: Path, num_bytes: int) -> None:
        """Make a file of this size, so that no later part lacks room."""
        self.place, beside = place, _beside(place)
        try:
            with beside.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


def _beside(place: Path) -> Path:
    return place.with_name(f"{place.name}.part")
