"""The coordinator of custom training loops: they start together, report their data later, and end when all left."""

from __future__ import annotations

from collections.abc import Sequence

from rainband.coordinator.coordinator import Coordinator, CoordinatorOutput, RunSettings
from rainband.protocol.events import Lost, PlanMade
from rainband.protocol.layout import LayoutEntry, arrange
from rainband.protocol.messages import (
    Address,
    Assign,
    Conclude,
    Concluded,
    Dataset,
    Ended,
    Finish,
    Flush,
    Forget,
    Go,
    Halt,
    Join,
    Lease,
    LeaseEnd,
    LeaseRequest,
    Message,
    NoWork,
    Paused,
    Peer,
    Planned,
    Ready,
    Report,
    Return,
    ServerJoin,
    Shutdown,
    StopRequest,
    Tally,
    Welcome,
)
from rainband.protocol.optimizer_spec import OptimizerSpec

A, B, SERVER = Peer("worker", 0), Peer("worker", 1), Peer("server", 0)
LAYOUT = arrange([LayoutEntry("w", (16,))])
DATA = Dataset("data", 32, 1, 1)  # 32 batches of one


class CommandExecutor:
    """A coordinator of two workers and one server; `say` tells it something and notes its answers."""

    def __init__(self, optimizers: Sequence[str] = (), saved_at: str = "model") -> None:
        self.coordinator = Coordinator(
            RunSettings(num_workers=2, num_servers=1, model_path=saved_at, optimizers=tuple(optimizers))
        )

    def say(self, sender: Peer, message: Message) -> list[CoordinatorOutput]:
        return self.coordinator.receive(sender, message, now=0.0)

    def begun(self) -> CommandExecutor:
        self.say(SERVER, ServerJoin(Address("", 0)))
        self.say(A, joining())
        self.say(B, joining())
        self.say(SERVER, Ready())
        return self

    def drawing(self, dataset: Dataset = DATA) -> CommandExecutor:
        self.begun()
        self.say(A, dataset)
        self.say(SERVER, Ready())
        return self


def joining(optimizer: str = "sgd") -> Join:
    return Join("", 0, LAYOUT, 1, 1, 1, False, custom_loop=True, optimizer=OptimizerSpec(optimizer))


def kinds(outs: list[CoordinatorOutput]) -> list[tuple[Peer, type[Message]]]:
    return [(out.to, type(out.message)) for out in outs]


def report(accepted: int, flushed: bool = False) -> Report:
    return Report(0, (), accepted, accepted, (Tally(accepted, accepted, 0, 0),), flushed=flushed)


def test_they_begin_together() -> None:
    coordinated = CommandExecutor()
    coordinated.say(SERVER, ServerJoin(Address("", 0)))
    assert coordinated.say(A, joining()) == []
    outs = coordinated.say(B, joining())
    assert kinds(outs) == [(SERVER, Assign), (A, Welcome), (B, Welcome)]
    assert isinstance(outs[0].message, Assign) and outs[0].message.optimizer == OptimizerSpec("sgd")
    assert kinds(coordinated.say(SERVER, Ready())) == [(A, Go), (B, Go)]


def test_the_first_to_draw_makes_the_plan_when_the_servers_know_it() -> None:
    coordinated = CommandExecutor().begun()
    assert coordinated.say(A, LeaseRequest()) == [CoordinatorOutput(A, NoWork())]  # nothing is known to be leased
    assert kinds(coordinated.say(A, DATA)) == [(SERVER, Planned)]
    assert coordinated.say(B, DATA) == []
    assert kinds(coordinated.say(SERVER, Ready())) == [(A, Planned), (B, Planned)]
    assert kinds(coordinated.say(B, DATA)) == [(B, Planned)]
    [made] = [event for event in coordinated.coordinator.state.events if isinstance(event, PlanMade)]
    assert (made.num_samples, made.num_batches, made.epochs) == (32, 32, 1)


def test_who_draws_from_other_data_is_sent_away() -> None:
    coordinated = CommandExecutor().drawing()
    out = coordinated.say(B, Dataset("data", 33, 1, 1))[0]
    assert isinstance(out.message, Shutdown)
    assert "loads 1 epochs of 33 samples" in out.message.reason
    [lost] = [event for event in coordinated.coordinator.state.events if isinstance(event, Lost)]
    assert (lost.node, lost.why) == ("worker 1", out.message.reason)
    assert coordinated.coordinator.state.refused == [out.message.reason]


def test_who_brings_another_optimizer_is_sent_away() -> None:
    coordinated = CommandExecutor()
    coordinated.say(SERVER, ServerJoin(Address("", 0)))
    coordinated.say(A, joining())
    [bye] = [out.message for out in coordinated.say(B, joining("adam")) if isinstance(out.message, Shutdown)]
    assert "the optimizer is adam, not sgd" in bye.reason


def test_servers_import_no_class_that_only_a_message_names() -> None:
    [out] = CommandExecutor().say(A, joining("mylab:Mine"))
    assert isinstance(out.message, Shutdown) and "--optimizer" in out.message.reason
    assert CommandExecutor(["mylab:Mine"]).say(A, joining("mylab:Mine")) == []


def test_when_all_is_leased_a_worker_that_asks_gets_an_answer() -> None:
    coordinated = CommandExecutor().drawing()
    answers = [coordinated.say(A, LeaseRequest()) for _ in range(9)]  # eight leases of four batches
    assert [kinds(outs) for outs in answers] == [[(A, Lease)]] * 8 + [[(A, NoWork)]]


def test_an_unused_lease_is_reassigned_without_an_event() -> None:
    coordinated = CommandExecutor().drawing()
    [lease] = [out.message for out in coordinated.say(A, LeaseRequest())]
    assert isinstance(lease, Lease)
    assert coordinated.say(A, Return(lease.portion, lease.lease, LeaseEnd.UNUSED)) == []
    [again] = [out.message for out in coordinated.say(B, LeaseRequest())]
    assert again == Lease(lease.portion, lease.lease + 1, lease.groups)
    assert coordinated.coordinator.state.reassigned == 0


def test_a_worker_that_leaves_does_not_get_back_a_lease_that_it_returns() -> None:
    """It has asked for more before; in rounds, the others would wait for its batches for ever."""
    coordinated = CommandExecutor().drawing()
    leases = [out.message for _ in range(9) for out in coordinated.say(A, LeaseRequest())]
    assert kinds(coordinated.say(B, LeaseRequest())) == [(B, NoWork)]  # after A, which waits for a ninth lease
    last = leases[7]
    assert isinstance(last, Lease)
    outs = coordinated.say(A, Return(last.portion, last.lease, LeaseEnd.UNUSED))
    assert outs == [CoordinatorOutput(B, Lease(last.portion, last.lease + 1, last.groups))]


def test_the_run_ends_when_all_have_left_and_everyone_gets_the_result() -> None:
    coordinated = CommandExecutor().drawing(Dataset("data", 32, 1, 0))
    coordinated.say(SERVER, report(accepted=20))
    assert kinds(coordinated.say(A, Ended(10))) == [(SERVER, Forget)]  # nobody waits for it any more
    assert kinds(coordinated.say(B, Ended(10))) == [(SERVER, Forget), (SERVER, Flush)]
    outs = coordinated.say(SERVER, report(accepted=20, flushed=True))
    finished = [(A, Finish), (B, Finish)]
    assert [pair for pair in kinds(outs) if pair[1] in (Finish, Conclude)] == [*finished, (A, Conclude), (B, Conclude)]
    assert [out.message.path for out in outs if isinstance(out.message, Conclude)] == ["model", ""]
    coordinated.say(SERVER, report(accepted=20))
    assert coordinated.say(A, Concluded({})) == []
    assert (B, Shutdown) in kinds(coordinated.say(B, Concluded({})))
    accounting = coordinated.coordinator.reporting.accounting()
    assert accounting is not None and (accounting.batches, accounting.not_processed) == (
        32,
        12,
    )  # the one pass that was begun


def test_the_end_does_not_wait_for_who_is_lost_but_for_who_is_away_by_its_own_word() -> None:
    coordinated = CommandExecutor().drawing()
    coordinated.say(B, Paused())
    assert kinds(coordinated.say(A, Ended(10))) == [(SERVER, Forget)]
    assert kinds(coordinated.say(B, Ended(0))) == [(SERVER, Forget), (SERVER, Flush)]
    other = CommandExecutor().drawing()
    other.say(A, Ended(10))
    assert (SERVER, Flush) in kinds(other.coordinator.lost(B, now=0.0))


def test_a_worker_that_stops_the_run_ends_it_for_all() -> None:
    coordinated = CommandExecutor().drawing()
    assert coordinated.say(B, StopRequest("converged")) == [
        CoordinatorOutput(A, Halt("converged")),
        CoordinatorOutput(B, Halt("converged")),
    ]
    assert coordinated.say(A, StopRequest("too late")) == []  # the first reason counts
    coordinated.say(A, Ended(4))
    assert kinds(coordinated.say(B, Ended(4))) == [(SERVER, Flush)]
    state = coordinated.coordinator.state
    assert (state.outcome, state.reason) == ("stopped", "converged")


def test_away_gives_the_leases_to_others() -> None:
    coordinated = CommandExecutor().drawing()
    coordinated.say(A, LeaseRequest())
    assert "Revoke" in [type(out.message).__name__ for out in coordinated.say(A, Paused())]
    assert not coordinated.coordinator.state.workers[0].leases


def test_if_the_one_who_saves_is_lost_another_does() -> None:
    coordinated = CommandExecutor().drawing()
    coordinated.say(A, Ended(1))
    coordinated.say(B, Ended(1))
    coordinated.say(SERVER, report(accepted=2, flushed=True))
    outs = coordinated.coordinator.lost(A, now=0.0)
    assert [out.message.path for out in outs if isinstance(out.message, Conclude)] == ["model"]
    assert (B, Conclude) in kinds(outs)


def test_who_was_given_up_and_ends_all_the_same_gets_the_result_too() -> None:
    coordinated = CommandExecutor().drawing()
    coordinated.coordinator.state.workers[1].active = False
    coordinated.say(A, Ended(1))
    assert (A, Conclude) in kinds(coordinated.say(SERVER, report(accepted=2, flushed=True)))
    coordinated.say(SERVER, report(accepted=2))
    assert (B, Conclude) in kinds(coordinated.say(B, Ended(1)))
    assert coordinated.say(A, Concluded({})) == []  # B has yet to take it
    assert (B, Shutdown) in kinds(coordinated.say(B, Concluded({})))


def test_if_nobody_is_left_to_save_the_reason_says_what_happened_to_the_last_one() -> None:
    coordinated = CommandExecutor().drawing()
    coordinated.say(A, Ended(1))
    coordinated.say(B, Ended(1))
    coordinated.say(SERVER, report(accepted=2, flushed=True))
    coordinated.say(B, Concluded({}))  # it has gone on to other things
    coordinated.coordinator.lost(A, now=0.0, why="its disk is full; the model is in /tmp/model")
    reason = coordinated.coordinator.state.reason
    assert reason.startswith("no worker is left to save the model: worker 0 was the last (its disk is full; the model")
