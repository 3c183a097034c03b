"""The actor that hosts a server, a worker, or several workers that share memory, on a node of a Ray cluster.

It forks the same processes as a run on one machine, and supervises them: the user's code runs outside the actor, so an
error or `sys.exit` there does not end the actor. Gradients and parameters do not pass through Ray.
"""

from __future__ import annotations

import io
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec

from rainband.protocol.messages import Software
from rainband.runtimes.config import Job, decode_job, encode_job
from rainband.runtimes.machines.doors import Doors
from rainband.runtimes.machines.mirror import Mirror, MirrorOrder
from rainband.runtimes.machines.software import own_software, software_differences
from rainband.runtimes.processes.zygote import Exited, SpawnFailed, Zygote
from rainband.runtimes.ray.user_code import UnpackedCode
from rainband.transports.connect import host_and_port
from rainband.transports.event_loop import readable_within

ENDED_S = 0.01  # between two looks at a process that is being killed
CHECK_S = 0.2  # between two looks at the node and the driver
# In failure timeouts: a driver that is silent for longer is lost. The rest of the second timeout is for ending.
DRIVER_LOST_AFTER = 1.5
ABANDONED_S = 60.0
OUTPUT_BYTES = 1 << 18  # sent with one heartbeat
OF_RAY = "ray/thirdparty_files"  # Ray's own copies of packages, on the path of its workers only


class HostOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The settings with which an actor starts processes."""

    modules: tuple[str, ...]  # to import before the first process is forked
    failure_timeout_s: float
    software: Software  # of the driver
    folder: str  # the driver's current folder
    path: tuple[str, ...]  # and its sys.path
    mirror: MirrorOrder | None = None  # of the memory that workers share, if they share batches


class HostedEnd(msgspec.Struct, frozen=True):
    """The end of a hosted process: its exit code or signal, and its error."""

    code: int | None
    signal: int | None
    error: str


end_decoder = msgspec.msgpack.Decoder(HostedEnd)  # made before several threads use it


class RoleHost:
    """Starts processes when the launcher asks, and ends them when the node or the driver is lost.

    Ray calls its methods on several threads: `run_process` waits while its process runs.
    """

    def __init__(self, order: bytes, code: bytes) -> None:
        self.order = msgspec.msgpack.decode(order, type=HostOrder)
        self.archive = code
        self.raylet = os.getppid()  # the process that manages this node, as long as it lives
        self.silent_s = 0.0  # since the driver's last heartbeat
        self.running: dict[
            tuple[str, int], tuple[int, str]
        ] = {}  # role and index -> the token and title of the process
        self.ended: dict[int, HostedEnd] = {}  # by token
        self.mirror: Mirror | None = None
        self.over = threading.Event()
        self.abandoned = False
        self.zygote: Zygote | None = None
        self.zygote_lock = threading.Lock()
        self.code: UnpackedCode | None = None
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  # of the processes; it has no name
        threading.Thread(target=self._watch, name="watch node and driver", daemon=True).start()

    def run_process(self, entry: str, job: bytes, title: str, threads: int, *contents: bytes) -> bytes:
        """Run a process to its end, and return how it ended.

        `contents`: of the files that it inherits. Raises ValueError if this node cannot run it.
        """
        zygote = self._prepared()
        placed = decode_job(job)
        role = placed.role, placed.index
        self._end_earlier(role, zygote)
        doors, shared = None, list[int]()
        if placed.role == "server":
            doors = Doors(host_and_port(_node_host(), 0), "", 1, for_servers_only=True)
        elif self.mirror is not None:
            self.mirror.add(placed.index)
            shared = self.mirror.memory.fds
        placed = msgspec.structs.replace(_for_this_node(placed, doors), round_files=len(shared))
        fds = [_memory_file(content) for content in contents]
        try:
            sockets = [] if doors is None else [doors.socks[0].fileno()]
            with self.zygote_lock:
                given = [*fds, *shared, *sockets]
                token = zygote.spawn(entry, encode_job(placed), title, fds=given, threads=threads)
                self.running[role] = token, title
        finally:
            for fd in fds:
                os.close(fd)
            if doors is not None:
                doors.close()
        return msgspec.msgpack.encode(self._end_of(role, token, zygote))

    def _end_earlier(self, role: tuple[str, int], zygote: Zygote) -> None:
        """End an earlier process of a role, which hangs."""
        with self.zygote_lock:
            earlier = self.running.get(role)
            if earlier is not None:
                zygote.signal(earlier[0], signal.SIGKILL)
        while self.running.get(role) is not None and not self.over.wait(ENDED_S):
            pass

    def pulse(self, read_from: int) -> tuple[str, bytes]:
        """Take a heartbeat of the driver; return this node's ID, and output of the processes from an offset on."""
        self.silent_s = 0.0
        return _node_id(), os.pread(self.output.fileno(), OUTPUT_BYTES, read_from)

    def stop(self, grace_s: float) -> None:
        """End the process: SIGTERM, after `grace_s` SIGKILL; return when it has ended."""
        self.over.set()
        with self.zygote_lock:
            if self.zygote is not None:
                self.zygote.close(grace_s)
            if self.mirror is not None:
                self.mirror.close()
            if self.code is not None:
                self.code.close()

    def _prepared(self) -> Zygote:
        """Compare versions, unpack the user's code, and start the fork server, once."""
        with self.zygote_lock:
            if self.zygote is None:
                if differs := software_differences(own_software(), self.order.software, f"node {platform.node()}"):
                    raise ValueError(differs)
                self.zygote = self._start()
                if self.order.mirror is not None:
                    self.mirror = Mirror(self.order.mirror)
            return self.zygote

    def _start(self) -> Zygote:
        order, folders = self.order, list[str]()
        if self.archive:
            self.code = UnpackedCode(self.archive)
            folders = self.code.folders
        own = [entry for entry in sys.path if not entry.endswith(OF_RAY)]
        shared = [entry for entry in order.path if os.path.isdir(entry)]  # on a file system that both have
        sys.path[:] = list(dict.fromkeys([*folders, *own, *shared]))
        if os.path.isdir(order.folder):
            os.chdir(order.folder)
        elif folders:
            os.chdir(folders[0])
        return Zygote.start(order.modules, self.output.fileno())

    def _end_of(self, role: tuple[str, int], token: int, zygote: Zygote) -> HostedEnd:
        while True:
            if not self.over.is_set():
                readable_within(zygote, CHECK_S)
            with self.zygote_lock:
                self._note(zygote)
                end = self.ended.pop(token, None)
                if end is not None:
                    if self.running.get(role, (-1, ""))[0] == token:
                        del self.running[role]
                    if end.code is None and end.signal is None:
                        raise ValueError(end.error)
                    return end
            if self.abandoned:
                time.sleep(ABANDONED_S)  # this process ends: an answer would look as if it could start another one
            elif self.over.is_set() and zygote.fileno() == -1:
                return HostedEnd(None, signal.SIGKILL, "")

    def _note(self, zygote: Zygote) -> None:
        """Take note of the processes that have ended."""
        for event in zygote.events():
            if isinstance(event, SpawnFailed) and event.token is None:
                lost = HostedEnd(None, signal.SIGKILL, event.reason)
                self.ended |= {token: lost for token, _ in self.running.values()}
            elif isinstance(event, SpawnFailed) and event.token is not None:
                self.ended[event.token] = HostedEnd(None, None, event.reason)
            elif isinstance(event, Exited):
                self.ended[event.token] = HostedEnd(event.code, event.signal, event.error)

    def _watch(self) -> None:
        """End everything when this node's Ray or the driver is lost: another node has taken over, or none listens.

        The time of a pause of this process itself counts little, so that a heartbeat that waits is taken first.
        """
        limit_s = DRIVER_LOST_AFTER * self.order.failure_timeout_s
        looked_at = time.monotonic()
        while not self.over.wait(CHECK_S):
            now = time.monotonic()
            self.silent_s += min(now - looked_at, 2 * CHECK_S)
            looked_at = now
            if os.getppid() != self.raylet:
                self._abandon("Ray has ended on this node")
            elif self.silent_s > limit_s:
                self._abandon(f"the driver of the run is lost: no heartbeat for {limit_s:g} s")

    def _abandon(self, why: str) -> None:
        titles = " and ".join(title for _, title in self.running.values()) or "nothing"
        print(f"rainband: {why}, so {titles} ends.", file=sys.stderr, flush=True)  # into Ray's log of this actor
        self.abandoned = True
        self.stop(0.0)
        os._exit(1)


def _for_this_node(job: Job, doors: Doors | None) -> Job:
    """Return a job without what concerns files of the driver's machine, and with where its process listens."""
    run = Path(job.config.directory).name  # the folder of its checkpoints, where all nodes see it, has this name, too
    config = msgspec.structs.replace(job.config, directory=str(Path(tempfile.gettempdir(), run)))
    door = None if doors is None else doors.door(0)
    return msgspec.structs.replace(job, machine=platform.node(), remote=True, door=door, config=config)


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("rainband-content")
    with io.FileIO(fd, "wb", closefd=False) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
    return fd


def _node_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
