"""Servers with copies, simulated: exact whatever is killed, and every piece of the protocol is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rainband.server.contents
from rainband.cli.main import build_app
from rainband.coordinator.coordinator import RunSettings
from rainband.coordinator.saving.server_copies import ServerCopies
from rainband.coordinator.state import FailureCause
from rainband.errors import Deadlock, Refused
from rainband.protocol import events
from rainband.protocol.data_plan import PushId
from rainband.protocol.messages import Ack, Copied, CopyCounts, Message, Peer, Push, PushResult, ServerMoved
from rainband.rules.clocks import Clocks
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.fault_injector import FaultInjector
from rainband.runtimes.simulation.message_bus import Node
from rainband.runtimes.simulation.models.faults import Fault, Script, parse, text
from rainband.runtimes.simulation.models.trace import Trace
from rainband.runtimes.simulation.nodes import ServerNode
from rainband.runtimes.simulation.oracle.check import LIMIT_S, MODEL, RunCheck, parameters
from rainband.runtimes.simulation.oracle.ledger import Ledger
from rainband.runtimes.simulation.oracle.scenarios import LR, TIMEOUT_S, Case, CaseSetup
from rainband.server import copied
from rainband.server.copied import CopiedServer
from rainband.server.readers import ServerOutput
from rainband.server.server import Server
from rainband.tasks.linear import Linear
from rainband.worker.server_blocks import ServerBlocks

TASK = Linear(dimension=48, samples=128, batch_size=2, epochs=1)
EXACT = ("downpour", "stale_sync", "bounded_delay", "adaptive_bound", "ragged")  # whatever happens to workers
IN_FOURS = ("per_worker", "soft_sync")  # each update is the mean of four gradients
WORKERS = 4


@lru_cache(maxsize=16)
def setup_of(strategy: str) -> CaseSetup:
    return CaseSetup(strategy, TASK)


@dataclass
class Played:
    """A run with copies, and what was wrong with it."""

    cluster: SimulatedCluster
    script: Script
    wrong: list[str] = field(default_factory=list)
    seen: list[events.AnyEvent] = field(default_factory=list)
    sent: dict[tuple[Peer, int, int], PushId] = field(default_factory=dict)  # by worker, block and sequence
    answered: dict[tuple[int, int], list[PushId]] = field(default_factory=dict)  # by server and block: accepted

    def all(self, kind: type[events.AnyEvent]) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]

    @property
    def outcome(self) -> str:
        return self.cluster.coordinator.state.outcome

    def watch(self) -> None:
        """See all messages: what a server has accepted and answered, its copy has when it takes over."""
        send = self.cluster.bus.send

        def seen(source: Node, to: Peer, message: Message | None, *rest: Any, **more: Any) -> None:
            if isinstance(message, Push):
                self.sent[source.peer, message.block, message.sequence] = message.push_id
            if isinstance(message, Ack) and message.result is PushResult.ACCEPTED:
                self._accepted(source.peer, to, message)
            if isinstance(message, ServerMoved):
                self._moved(message.server)
            send(source, to, message, *rest, **more)

        self.cluster.bus.send = seen  # type: ignore[method-assign]

    def _accepted(self, server: Peer, to: Peer, ack: Ack) -> None:
        push_id = self.sent[to, ack.block, ack.sequence]
        current = self.cluster.servers[server.index]
        assert isinstance(current, ServerNode)
        if current.peer == server:
            self.answered.setdefault((server.index, ack.block), []).append(push_id)
        elif not current.server.blocks[ack.block].accounting.accepted_set.has_all(push_id):
            self.wrong.append(f"{server}, which was replaced, has accepted {push_id}")

    def _moved(self, server: Peer) -> None:
        node = self.cluster.bus.nodes.get(server)
        if not isinstance(node, ServerNode):
            return  # it was lost at this moment
        for index, block in node.server.blocks.items():
            has_all = block.accounting.accepted_set.has_all
            lost = [push_id for push_id in self.answered.get((server.index, index), ()) if not has_all(push_id)]
            if lost:
                self.wrong.append(f"server {server.index} had accepted {lost} on block {index}; its copy lacks them")

    def __str__(self) -> str:
        return f"{text(self.script)}\n{self.outcome} {self.cluster.coordinator.state.reason}\n{self.wrong}"


def play(strategy: str, script: Script, seed: int = 0, servers: int = 2, copies: int = 2) -> Played:
    setup = setup_of(strategy)
    settings = RunSettings(num_workers=WORKERS, num_servers=servers, failure_timeout_s=TIMEOUT_S, copies=copies)
    seen: list[events.AnyEvent] = []
    notes = Notes(Trace(), show=seen.append)
    shuffle = Random(f"shuffle {seed}")
    cluster = SimulatedCluster(setup.scenario(WORKERS), settings, MODEL, notes, TIMEOUT_S / 5, shuffle, seed)
    run = Played(cluster, script, seen=seen)
    run.watch()
    injector = FaultInjector(cluster, script, seed)
    cluster.start()
    try:
        cluster.run(until_s=LIMIT_S)
    except (Deadlock, Refused, AssertionError, KeyError, ValueError) as error:
        run.wrong.append(f"{type(error).__name__}: {error}")
        return run
    check = RunCheck(Case(seed, strategy, WORKERS, servers, script), cluster, Ledger(setup), injector)
    run.wrong += check._accounting() + check._bound()
    if cluster.coordinator.state.phase != "over":
        run.wrong.append("not over")
    elif run.outcome == "finished":
        run.wrong += wrong_parameters(strategy, cluster)
    elif not may_fail(run):
        run.wrong.append(f"failed for no fault: {cluster.coordinator.state.reason}")
    return run


def wrong_parameters(strategy: str, cluster: SimulatedCluster) -> list[str]:
    got, expected = parameters(cluster)[: TASK.dimension], TASK.after(LR / (WORKERS if strategy in IN_FOURS else 1))
    return [] if torch.equal(got, expected) else [f"the parameters differ: {got - expected}"]


def may_fail(run: Played) -> bool:
    """Return True if a server and its copy were lost, or a server before it had a copy, or all workers."""
    state = run.cluster.coordinator.state
    if state.cause is FailureCause.NO_WORKER_LEFT:
        return not any(node.alive for node in run.cluster.workers.values())
    return any(fault.what in ("kill", "crash") and "worker" not in fault.node for fault in run.script)


def random_faults(seed: int, workers_too: bool) -> Script:
    """Kill and pause servers and copies; half of the faults follow another one closely."""
    random, faults = Random(f"copies {seed}"), list[Fault]()
    for _ in range(random.randint(1, 5)):
        at_s = random.choice((random.uniform(0.2, 0.5), random.uniform(0.3, 2.5)))
        if faults and random.random() < 0.5:
            at_s = random.choice(faults).at_s + random.uniform(0, 0.3)
        node = f"{random.choice(('server', 'server', 'copy'))} {random.randrange(2)}"
        match random.choice(("kill", "kill", "pause", "slow", "netsplit") + ("worker",) * workers_too):
            case "kill":
                faults.append(Fault(at_s, "kill", node))
            case "pause":
                faults.append(Fault(at_s, "pause", node, for_s=random.choice((0.3, 1.5, 4.0))))
            case "slow":
                copy = f"copy {node.split()[1]}"
                faults.append(Fault(at_s, "slow", f"server {node.split()[1]}", copy, for_s=1.0, by_s=0.2))
            case "netsplit":
                other = random.choice((f"copy {node.split()[1]}", "coordinator"))
                faults.append(
                    Fault(at_s, "netsplit", f"server {node.split()[1]}", other, for_s=random.choice((0.5, 3)))
                )
            case "worker":
                worker = f"worker {random.randrange(WORKERS)}"
                faults += [Fault(at_s, "kill", worker), Fault(at_s + 0.4, "start", worker)]
    return tuple(sorted((replace(f, at_s=round(f.at_s, 3)) for f in faults), key=lambda f: (f.at_s, str(f))))


# ---- what a user sees ----


@pytest.mark.parametrize("strategy", [*EXACT, *IN_FOURS])
def test_a_killed_server_is_replaced_by_its_copy_and_a_new_copy_is_made(strategy: str) -> None:
    run = play(strategy, parse("0.8 kill server 0\n1.6 kill server 0\n1.7 kill server 1"))
    assert not run.wrong and run.outcome == "finished", run
    assert [event.server for event in run.all(events.ServerReplaced)] == [0, 0, 1]
    assert len(run.all(events.ServerCopied)) >= 3
    assert all(event.seconds < 2 * TIMEOUT_S for event in run.all(events.ServerReplaced))


def test_a_killed_copy_is_made_again_and_nothing_waits_for_it() -> None:
    run = play("downpour", parse("0.8 kill copy 1"))
    assert not run.wrong and run.outcome == "finished", run
    assert [event.node for event in run.all(events.Lost)] == ["copy of server 1"]
    assert [event.server for event in run.all(events.ServerCopied)].count(1) == 2
    assert not run.all(events.ServerReplaced)


def test_a_paused_server_is_replaced_within_two_failure_timeouts_and_fenced_when_it_goes_on() -> None:
    run = play("downpour", parse("0.8 pause server 0 for 3"))
    assert not run.wrong and run.outcome == "finished", run
    (replaced,) = run.all(events.ServerReplaced)
    assert replaced.at_s < 0.8 + 2 * TIMEOUT_S
    old = next(node for node in run.cluster.bus.nodes.values() if node.peer == Peer("server", 0))
    assert isinstance(old, ServerNode) and old.copied is not None and old.copied.replaced


def test_a_server_and_its_copy_that_are_lost_together_end_the_run() -> None:
    run = play("downpour", parse("0.8 kill server 0\n0.8 kill copy 0"))
    state = run.cluster.coordinator.state
    assert (state.outcome, state.cause) == ("failed", FailureCause.SERVER_LOST)
    assert "It held the last copy of 1 blocks" in state.reason


def test_without_copies_no_message_is_held_or_forwarded() -> None:
    run = play("downpour", parse(""), copies=1)
    assert not run.wrong and not run.all(events.ServerCopied) and not run.cluster.copies


def test_a_server_whose_copies_die_while_they_are_made_gets_three_and_then_a_warning() -> None:
    kills = "\n".join(f"{0.2 + 0.05 * k:.2f} kill copy 0" for k in range(40))
    run = play("downpour", parse(kills))
    assert not run.wrong and run.outcome == "finished", run
    assert ["3 copies of server 0" in event.text for event in run.all(events.Warned)] in ([True], [])


@pytest.mark.parametrize("strategy", [*EXACT, *IN_FOURS])
@pytest.mark.parametrize("seed", range(6))
def test_every_batch_counts_once_whatever_servers_and_copies_are_killed(strategy: str, seed: int) -> None:
    run = play(strategy, random_faults(seed, strategy in EXACT), seed)
    assert not run.wrong, run


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*EXACT, *IN_FOURS, "backup", "corrected"])
def test_many_seeds(strategy: str) -> None:
    for seed in range(100, 300):
        run = play(strategy, random_faults(seed, strategy in EXACT), seed)
        wrong = [one for one in run.wrong if "parameters differ" not in one or strategy in (*EXACT, *IN_FOURS)]
        assert not wrong, f"seed {seed}: {run}"


# ---- mutations: each breaks a piece of the protocol, and must be noticed ----

Mutation = Callable[[pytest.MonkeyPatch], None]


def answer_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """A server answers at once, whatever its copy has."""
    forward = CopiedServer._forward

    def at_once(self: CopiedServer, *given: Any) -> list[ServerOutput]:
        outs = forward(self, *given)
        held = [out for _, some in self.held for out in some]
        self.held.clear()
        return [*outs, *held]

    patch.setattr(CopiedServer, "_forward", at_once)


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A server that was replaced goes on without a copy."""
    receive = CopiedServer.receive

    def never_replaced(self: CopiedServer, sender: Peer, message: Message, payload: Any = None) -> list[ServerOutput]:
        if isinstance(message, copied.ReplacedByCopy) and self.copy is not None:
            return self._drop(self.copy.incarnation)
        return receive(self, sender, message, payload)

    patch.setattr(CopiedServer, "receive", never_replaced)


def no_contents(patch: pytest.MonkeyPatch) -> None:
    """A copy begins with the assignment alone, without the state of its server."""

    def only_loaded(server: Server, contents: bytes, values: Any) -> None:
        for block in server.blocks.values():
            block.loaded = True

    patch.setattr(copied, "fill_server", only_loaded)


def without(name: str) -> Mutation:
    def forgets(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(rainband.server.contents, "MADE", rainband.server.contents.MADE | {name})

    forgets.__name__ = f"without_{name}"
    return forgets


def counts_too_early(patch: pytest.MonkeyPatch) -> None:
    """A copy counts when it has the contents, although its server has answered without it since."""
    copied_ = CopiedServer._copied

    def at_once(self: CopiedServer, number: int) -> list[ServerOutput]:
        first = self.counts_at is None
        outs = copied_(self, number)
        if first and self.counts_at is not None and not self.reported and self.copy is not None:
            self.reported = True
            outs.append(ServerOutput(copied.COORDINATOR, CopyCounts(self.copy.incarnation)))
        return outs

    patch.setattr(CopiedServer, "_copied", at_once)


def answers_alone_too_early(patch: pytest.MonkeyPatch) -> None:
    """A server that cannot reach its copy answers before the coordinator knows."""
    lost = CopiedServer.lost

    def alone(self: CopiedServer, peer: Peer) -> list[ServerOutput]:
        return self._drop(peer.incarnation) if peer == self.copy else lost(self, peer)

    patch.setattr(CopiedServer, "lost", alone)


def nothing_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    move = ServerBlocks.move

    def forgets(self: ServerBlocks, server: int, port: Any) -> None:
        kept, self.unanswered = self.unanswered, {}
        move(self, server, port)
        self.unanswered = kept

    patch.setattr(ServerBlocks, "move", forgets)


def confirmed_before_it_is_taken(patch: pytest.MonkeyPatch) -> None:
    """A copy confirms a message of the stream, and loses every fifth one."""
    follow = CopiedServer._follow

    def loses(self: CopiedServer, sender: Peer, message: Any, payload: Any) -> list[ServerOutput]:
        if isinstance(message, copied.Forwarded) and message.number % 5 == 0 and sender == self.primary:
            self.number = message.number
            return [ServerOutput(sender, Copied(message.number))]
        return follow(self, sender, message, payload)

    patch.setattr(CopiedServer, "_follow", loses)


def promoted_before_it_counts(patch: pytest.MonkeyPatch) -> None:
    """A copy takes over although it is still being made."""

    def may_replace(self: ServerCopies, server: Any) -> bool:
        copy = self.of.get(server.peer.index)
        return copy is not None and copy.address is not None and not copy.is_promoted

    patch.setattr(ServerCopies, "may_replace", may_replace)


def clocks_begin_again(patch: pytest.MonkeyPatch) -> None:
    """The copy does not know how far each worker is."""
    patch.setattr(rainband.server.contents, "OWN", tuple(k for k in rainband.server.contents.OWN if k is not Clocks))
    patch.setattr(rainband.server.contents, "MADE", rainband.server.contents.MADE | {"clocks"})


MUTATIONS: list[tuple[Mutation, str]] = [
    (answer_before_the_copy, "downpour"),
    (no_fence, "downpour"),
    (no_contents, "downpour"),
    (without("accounting"), "downpour"),
    (without("total"), "soft_sync"),
    (without("turn"), "per_worker"),
    (clocks_begin_again, "stale_sync"),
    (counts_too_early, "downpour"),
    (answers_alone_too_early, "downpour"),
    (nothing_is_sent_again, "downpour"),
    (confirmed_before_it_is_taken, "downpour"),
    (promoted_before_it_counts, "downpour"),
]
# Faults that strike where a mutation shows, where few seeds would.
AIMED = {
    "answers_alone_too_early": (
        "0.800 netsplit server 0 > coordinator for 2\n0.801 reset server 0 > copy 0\n0.9 kill server 0",
    ),
    "counts_too_early": tuple(
        f"0.21 slow server 0 > copy 0 for 3 by 0.2\n{0.4 + 0.02 * k:.2f} kill server 0" for k in range(15)
    ),
}


@pytest.mark.parametrize(("mutation", "strategy"), MUTATIONS, ids=[mutation.__name__ for mutation, _ in MUTATIONS])
def test_some_seed_notices(monkeypatch: pytest.MonkeyPatch, mutation: Mutation, strategy: str) -> None:
    mutation(monkeypatch)
    scripts = [parse(aimed) for aimed in AIMED.get(mutation.__name__, ())]
    cases = [
        *((script, seed) for seed in range(4) for script in scripts),
        *((random_faults(k, False), k) for k in range(60)),
    ]
    assert any(play(strategy, script, seed).wrong for script, seed in cases)


@pytest.mark.parametrize("name", AIMED)
def test_the_sound_protocol_survives_what_is_aimed_at_it(name: str) -> None:
    for aimed in AIMED[name]:
        assert not (run := play("downpour", parse(aimed))).wrong, run


# ---- the option ----


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("downpour", "--copies", "2"), "copies of servers are only simulated so far: add --runtime sim"),
        (("sync", "--copies", "2"), "sync has no servers, and every worker has all parameters"),
        (("hogwild", "--copies", "2"), "its parameters lie in memory that all workers share"),
        (("sandblaster", "--copies", "2", "--runtime", "sim"), "the servers of sandblaster cannot be copied"),
        (("tree", "--copies", "2", "--runtime", "sim"), "the servers of tree cannot be copied"),
        (("downpour", "--copies", "2", "--runtime", "sim", "--stages", "2"), "servers of models in stages"),
        (("downpour", "--copies", "2", "--runtime", "sim", "--time-only"), "simulates no parameters"),
        (("downpour", "--copies", "3", "--runtime", "sim"), "use --copies 2"),
    ],
)
def test_where_servers_cannot_have_copies_the_option_is_refused(
    words: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    said = CliRunner().invoke(build_app(), ["train", "digits", *words, "--runs", str(tmp_path)], prog_name="rainband")
    assert said.exit_code == 2 and why in said.stderr


def test_a_run_with_copies_says_when_it_is_degraded_and_who_has_taken_over(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.write_text("0.06 kill server 1\n")
    words = ["train", "digits", "downpour", "--runtime", "sim", "--copies", "2", "--faults", str(faults)]
    said = CliRunner().invoke(build_app(), [*words, "--runs", str(tmp_path)], prog_name="rainband")
    assert said.exit_code == 0
    assert "degraded: no copy of server 0, server 1" in said.output
    assert "the copy of server 1 has taken over after" in said.output
    assert re.search(r"(\d+) of \1 applied, 0 lost, 0 applied twice", said.output)
