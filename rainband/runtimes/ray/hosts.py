"""Starts the processes of a run on the nodes of a Ray cluster: the launcher's side of the actors.

It has the functions of a fork server (`Starter`): a process is started with its job, and its end is an event.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rainband.runtimes.config import decode_job
from rainband.runtimes.processes.zygote import Event, Exited, SpawnFailed
from rainband.runtimes.ray.cluster import (
    Resources,
    actor_options,
    answers,
    first_line,
    groups_of_workers,
    times,
    within,
)
from rainband.runtimes.ray.role_host import HostOrder, RoleHost, end_decoder

STOPPED_WITHIN_S = 2.0  # beyond the grace period
# At one time: each process has a call that waits for its end, and perhaps one that replaces it.
CALLS_OF_PROCESS, OTHER_CALLS = 2, 3
MOVED_AFTER = 2.0  # in failure timeouts
PULSES = 5  # heartbeats in a failure timeout


Role = tuple[str, int]  # such as ("worker", 3)


class Places(NamedTuple):
    """The numbers of workers and servers for which places are reserved, and what each of them needs."""

    workers: int
    servers: int
    worker_needs: Resources
    server_needs: Resources
    runtime_env: Mapping[str, Any]  # of Ray: packages to install, variables of the environment


class Host:
    """An actor, as far as it is known here."""

    def __init__(self, actor: Any, in_group: bool, may_move: bool) -> None:
        self.actor = actor
        self.in_group = in_group  # it has a reserved place, not any that is free
        self.may_move = may_move  # to the other kind of place, if it waits for long
        self.made_at = time.monotonic()
        self.running: dict[Role, int] = {}  # the tokens of its processes
        self.node = ""  # its node's ID; "": it has not answered yet
        self.read_to = 0  # in the output of its processes
        self.line = b""  # the beginning of a line of that
        self.is_asked = False  # for a heartbeat
        self.unanswered = 0  # how often it would have been asked again, since it was
        self.is_dead = False

    @property
    def hangs(self) -> bool:
        """Return True if it has not answered for a failure timeout, after it had begun to."""
        return bool(self.node) and self.unanswered > PULSES


class ActorStarter:
    """Has actors start processes, each in its place in the cluster."""

    def __init__(
        self,
        ray: Any,
        places: Places,
        order: HostOrder,
        code: bytes,
        output: int | None,
        together: bool = False,
    ) -> None:
        """`output`: the open file to which the output of all processes is appended.

        `together`: workers that are placed on one node have one actor, and share memory.
        """
        self.ray = ray
        self.places = places
        self.order = order
        self.together = together
        self.code = ray.put(code)
        self.output = output
        self.kind = ray.remote(RoleHost)
        self.modules: tuple[str, ...] = order.modules
        self.hosts: dict[Role, Host] = {}
        self.contents: dict[int, Any] = {}  # by inherited file: a reference to a copy of its content
        self.num_jobs = 0
        self.lock = threading.Lock()  # Ray delivers results on threads of its own
        self.ended: list[Event] = []
        self.reader, self.writer = socket.socketpair()
        self.reader.setblocking(False)
        self.writer.setblocking(False)
        self.closing = threading.Event()
        self.bundles: dict[Role, int] = {}
        self.group: Any = None  # the reserved places

    def _begin(self) -> None:
        """Reserve places for all workers and servers: servers spread over the nodes, workers close together."""
        from ray.util.placement_group import placement_group

        places = self.places
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        bundles = [times(1, places.server_needs) for _ in range(places.servers)]
        self.bundles = {("server", index): index for index in range(places.servers)}
        first = 0
        for size in groups_of_workers(places.workers, places.worker_needs, nodes, places.servers):
            self.bundles |= {("worker", rank): len(bundles) for rank in range(first, first + size)}
            bundles.append(times(size, places.worker_needs))
            first += size
        self.group = placement_group(bundles, strategy="SPREAD")
        threading.Thread(target=self._keep_pulse, name="heartbeats", daemon=True).start()

    # ---- the functions of a fork server -----------------------------------------------------------------------------

    def preload(self, modules: Sequence[str]) -> None:
        """Import more modules in actors that are made from now on."""
        self.modules += tuple(modules)

    def spawn(self, entry: str, job: bytes, title: str, fds: Sequence[int] = (), threads: int | None = None) -> int:
        """Start a process; return its token. It inherits copies of the files, which must not change any more."""
        if self.group is None:
            self._begin()
        decoded = decode_job(job)
        role = decoded.role, decoded.index
        host = self.hosts.get(role)
        if host is None or host.is_dead or (role in host.running and not self._can_replace(host)):
            host = self._new_host(role, host)
        token, self.num_jobs = self.num_jobs, self.num_jobs + 1
        host.running[role] = token
        result = host.actor.run_process.remote(entry, job, title, threads or 1, *(self._content(fd) for fd in fds))
        result.future().add_done_callback(partial(self._has_ended, role, token, host))
        return token

    def fileno(self) -> int:
        return self.reader.fileno()

    def events(self) -> list[Event]:
        """Return the events since the last call, without waiting."""
        with suppress(BlockingIOError):
            while self.reader.recv(4096):
                pass
        with self.lock:
            events, self.ended = self.ended, []
        return events

    def close(self, grace_s: float) -> None:
        """End all processes and actors, and give their places back."""
        from ray.util.placement_group import remove_placement_group

        if self.closing.is_set():
            return
        self.closing.set()
        hosts = set(self.hosts.values())
        there = [host for host in hosts if host.node and not host.is_dead]
        try:
            self._wait([host.actor.stop.remote(grace_s) for host in there], grace_s + STOPPED_WITHIN_S)
            self._take_rest_of_output(there)
        finally:
            kills = [self._kill(host) for host in hosts]
            for kill in kills:
                kill.join(STOPPED_WITHIN_S)
            if self.group is not None:  # this waits for the head of the cluster, which may be lost
                within(STOPPED_WITHIN_S, partial(remove_placement_group, self.group))
            self.contents.clear()
            self.reader.close()
            with self.lock:
                self.writer.close()

    # ---- actors -----------------------------------------------------------------------------------------------------

    def has_places(self) -> bool:
        """Return True if Ray has found places for all workers and servers of the start."""
        return bool(self.ray.util.placement_group_table(self.group)["state"] != "PENDING")

    def hangs(self, role: Role) -> bool:
        """Return True if the actor of a process does not answer, though it did before."""
        return self.hosts[role].hangs

    def should_move(self, role: Role) -> bool:
        """Return True if a process that was started again has waited for its place for long: start it once more."""
        host = self.hosts[role]
        waited_s = time.monotonic() - host.made_at
        return host.may_move and not host.node and waited_s > MOVED_AFTER * self.order.failure_timeout_s

    def _can_replace(self, host: Host) -> bool:
        """Return True if an actor can end a process that hangs, and start another one beside those of the others."""
        return self.together and not host.hangs and self._is_reachable(host.node)

    def _beside(self, role: Role) -> list[Role]:
        """Return the roles that one actor has: those in the same reserved place, if they share memory."""
        place = self.bundles.get(role)
        if not self.together or place is None:
            return [role]
        return [other for other, bundle in self.bundles.items() if bundle == place]

    def _new_host(self, role: Role, before: Host | None) -> Host:
        """Make an actor in the reserved place of its role, or where there is room if that place is lost with its node.

        After some seconds, Ray reserves another place for a lost one, perhaps all that is free: so an actor that has
        found none is made the other way. One that hangs is ended, and so its place becomes free.
        """
        has_place, roles = role in self.bundles, self._beside(role)
        if before is None:
            made = self._made(role, len(roles), has_place, may_move=False)
        else:
            self._kill(before)
            in_group = self._is_reachable(before.node) if before.node else not before.in_group
            made = self._made(role, len(roles), has_place and in_group, may_move=has_place)
        self.hosts |= dict.fromkeys(roles, made)
        return made

    def _made(self, role: Role, number: int, in_group: bool, may_move: bool) -> Host:
        """Make an actor with room for a number of processes of this kind."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        places = self.places
        options = actor_options(times(number, places.server_needs if role[0] == "server" else places.worker_needs))
        options["scheduling_strategy"] = (
            PlacementGroupSchedulingStrategy(self.group, self.bundles[role]) if in_group else "DEFAULT"
        )
        if places.runtime_env:
            options["runtime_env"] = dict(places.runtime_env)
        # The launcher starts lost workers again, with their next incarnation, and sooner than Ray would.
        calls = number * CALLS_OF_PROCESS + OTHER_CALLS
        made = self.kind.options(**options, max_restarts=0, max_task_retries=0, max_concurrency=calls)
        order = msgspec.structs.replace(self.order, modules=self.modules)
        return Host(made.remote(msgspec.msgpack.encode(order), self.code), in_group, may_move)

    def _kill(self, host: Host) -> threading.Thread:
        """End an actor, on a thread: Ray's call waits for its node, which may be lost."""
        kill = threading.Thread(target=self.ray.kill, args=(host.actor,), name="end an actor", daemon=True)
        kill.start()
        return kill

    def _is_reachable(self, node: str) -> bool:
        """Return True if a node still answers."""
        return any(one["NodeID"] == node and one["Alive"] and answers(one) for one in self.ray.nodes())

    def _content(self, fd: int) -> Any:
        """Return a reference to a copy of a file's content, which all nodes can read."""
        if fd not in self.contents:
            with open(f"/proc/self/fd/{fd}", "rb") as file:
                self.contents[fd] = self.ray.put(file.read())
        return self.contents[fd]

    def _has_ended(self, role: Role, token: int, host: Host, future: Any) -> None:
        error = future.exception()
        if error is None:
            end = end_decoder.decode(future.result())
            event: Event = Exited(token, 0, end.code, end.signal, end.error)
        elif isinstance(error, self.ray.exceptions.RayActorError) and not error.actor_init_failed:
            host.is_dead = True
            event = Exited(token, 0, 1, None, "the Ray actor that hosted it has ended")
        else:
            host.is_dead = True
            event = SpawnFailed(token, _why_not_started(error))
        with self.lock:
            if host.running.get(role) == token:
                del host.running[role]
            self.ended.append(event)
            if not self.closing.is_set():
                with suppress(BlockingIOError):  # it is awake already
                    self.writer.send(b".")

    # ---- heartbeats ----------------------------------------------------------------------------------------------

    def _keep_pulse(self) -> None:
        """Tell all actors regularly that the driver is there: without that, they end. They answer with their output."""
        while not self.closing.wait(self.order.failure_timeout_s / PULSES):
            for host in set(self.hosts.values()):
                if host.is_asked:
                    host.unanswered += 1
                elif not host.is_dead:
                    host.is_asked, host.unanswered = True, 0
                    answer = host.actor.pulse.remote(host.read_to)
                    answer.future().add_done_callback(partial(self._answered, host, host.read_to))

    def _answered(self, host: Host, read_from: int, future: Any) -> None:
        if future.exception() is None:
            host.node, output = future.result()
            self._take_output(host, read_from, output)
            host.unanswered = 0
        host.is_asked = False

    def _take_output(self, host: Host, read_from: int, output: bytes) -> None:
        """Append whole lines to the output of the run, once, so that those of different processes do not mix."""
        with self.lock:
            if host.read_to != read_from:
                return
            host.read_to += len(output)
            whole, newline, host.line = (host.line + output).rpartition(b"\n")
            if self.output is not None:
                os.write(self.output, whole + newline)

    def _take_rest_of_output(self, hosts: Sequence[Host]) -> None:
        for host in hosts:
            rest: list[Any] = self._wait([host.actor.pulse.remote(host.read_to)], STOPPED_WITHIN_S)
            while rest and (output := rest[0][1]):
                self._take_output(host, host.read_to, output)
                rest = self._wait([host.actor.pulse.remote(host.read_to)], STOPPED_WITHIN_S)
            self._take_output(host, host.read_to, b"\n" if host.line else b"")

    def _wait(self, results: Sequence[Any], timeout_s: float) -> list[Any]:
        """Return those results that arrive in time."""
        if not results:
            return []
        ready, _ = self.ray.wait(list(results), num_returns=len(results), timeout=timeout_s)
        arrived = []
        for result in ready:
            with suppress(self.ray.exceptions.RayError):
                arrived.append(self.ray.get(result))
        return arrived


def _why_not_started(error: Any) -> str:
    """Return why an actor could not start its process: our own reason, or what Ray says last."""
    text = str(error).strip()
    if "No module named 'rainband'" in text:
        return (
            "rainband is not installed on a node of the Ray cluster: install it on all nodes, or use "
            'runtime_env={"pip": ["rainband"]}.'
        )
    cause = getattr(error, "cause", None)
    return first_line(cause) if isinstance(cause, ValueError) else text.rpartition("\n")[2]
