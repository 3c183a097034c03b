"""How the coordinator leads own loops: they begin together, say later what they draw from, end when all have left."""

from __future__ import annotations

from collections.abc import Sequence

from rainband.coordinator.coordinator import Coordinator, Out, RunSettings
from rainband.protocol.events import PlanMade
from rainband.protocol.layout import Entry, arrange
from rainband.protocol.messages import (
    Address,
    Assign,
    Away,
    Bye,
    Conclude,
    Concluded,
    Dataset,
    Dry,
    Ended,
    Finish,
    Flush,
    Forget,
    Go,
    Join,
    Lease,
    LeaseEnd,
    Message,
    Peer,
    Planned,
    Ready,
    Report,
    Return,
    ServerJoin,
    Tally,
    Want,
    Welcome,
)
from rainband.protocol.optimizer_spec import OptimizerSpec

A, B, SERVER = Peer("worker", 0), Peer("worker", 1), Peer("server", 0)
LAYOUT = arrange([Entry("w", (16,))])
DATA = Dataset("data", 32, 1, 1)  # 32 batches of one


class Led:
    """A coordinator of two workers and one server; `say` tells it something and notes its answers."""

    def __init__(self, optimizers: Sequence[str] = (), saved_at: str = "model") -> None:
        self.coordinator = Coordinator(
            RunSettings(num_workers=2, num_servers=1, model_path=saved_at, optimizers=tuple(optimizers))
        )

    def say(self, sender: Peer, message: Message) -> list[Out]:
        return self.coordinator.receive(sender, message, now=0.0)

    def begun(self) -> Led:
        self.say(SERVER, ServerJoin(Address("", 0)))
        self.say(A, joining())
        self.say(B, joining())
        self.say(SERVER, Ready())
        return self

    def drawing(self, dataset: Dataset = DATA) -> Led:
        self.begun()
        self.say(A, dataset)
        self.say(SERVER, Ready())
        return self


def joining(optimizer: str = "sgd") -> Join:
    return Join("", 0, LAYOUT, 1, 1, 1, False, own_loop=True, optimizer=OptimizerSpec(optimizer))


def kinds(outs: list[Out]) -> list[tuple[Peer, type[Message]]]:
    return [(out.to, type(out.message)) for out in outs]


def report(had: int, flushed: bool = False) -> Report:
    return Report(0, (), had, had, (Tally(had, had, 0, 0),), flushed=flushed)


def test_they_begin_together() -> None:
    led = Led()
    led.say(SERVER, ServerJoin(Address("", 0)))
    assert led.say(A, joining()) == []
    outs = led.say(B, joining())
    assert kinds(outs) == [(SERVER, Assign), (A, Welcome), (B, Welcome)]
    assert isinstance(outs[0].message, Assign) and outs[0].message.optimizer == OptimizerSpec("sgd")
    assert kinds(led.say(SERVER, Ready())) == [(A, Go), (B, Go)]


def test_the_first_to_draw_makes_the_plan_when_the_servers_know_it() -> None:
    led = Led().begun()
    assert led.say(A, Want()) == [Out(A, Dry())]  # nothing is known to be leased
    assert kinds(led.say(A, DATA)) == [(SERVER, Planned)]
    assert led.say(B, DATA) == []
    assert kinds(led.say(SERVER, Ready())) == [(A, Planned), (B, Planned)]
    assert kinds(led.say(B, DATA)) == [(B, Planned)]
    [made] = [event for event in led.coordinator.events if isinstance(event, PlanMade)]
    assert (made.num_samples, made.num_batches, made.epochs) == (32, 32, 1)


def test_who_draws_from_other_data_is_sent_away() -> None:
    [out] = Led().drawing().say(B, Dataset("data", 33, 1, 1))
    assert isinstance(out.message, Bye)
    assert "draws from 1 passes over 33 samples" in out.message.reason


def test_who_brings_another_optimizer_is_sent_away() -> None:
    led = Led()
    led.say(SERVER, ServerJoin(Address("", 0)))
    led.say(A, joining())
    [bye] = [out.message for out in led.say(B, joining("adam")) if isinstance(out.message, Bye)]
    assert "the optimizer is adam, not sgd" in bye.reason


def test_servers_import_no_class_that_only_a_message_names() -> None:
    [out] = Led().say(A, joining("mylab:Mine"))
    assert isinstance(out.message, Bye) and "--optimizer" in out.message.reason
    assert Led(["mylab:Mine"]).say(A, joining("mylab:Mine")) == []


def test_when_all_is_leased_who_asks_is_told() -> None:
    led = Led().drawing()
    answers = [led.say(A, Want()) for _ in range(9)]  # eight leases of four batches
    assert [kinds(outs) for outs in answers] == [[(A, Lease)]] * 8 + [[(A, Dry)]]


def test_a_lease_that_was_not_used_is_leased_again_without_a_word() -> None:
    led = Led().drawing()
    [lease] = [out.message for out in led.say(A, Want())]
    assert isinstance(lease, Lease)
    assert led.say(A, Return(lease.portion, lease.lease, LeaseEnd.UNUSED)) == []
    [again] = [out.message for out in led.say(B, Want())]
    assert again == Lease(lease.portion, lease.lease + 1, lease.groups)
    assert led.coordinator.facts.leased_again == 0


def test_the_run_ends_when_all_have_left_and_everyone_takes_the_result_home() -> None:
    led = Led().drawing(Dataset("data", 32, 1, 0))
    led.say(SERVER, report(had=20))
    assert kinds(led.say(A, Ended(10))) == [(SERVER, Forget)]  # nobody waits for it any more
    assert kinds(led.say(B, Ended(10))) == [(SERVER, Forget), (SERVER, Flush)]
    outs = led.say(SERVER, report(had=20, flushed=True))
    finished = [(A, Finish), (B, Finish)]
    assert [pair for pair in kinds(outs) if pair[1] in (Finish, Conclude)] == [*finished, (A, Conclude), (B, Conclude)]
    assert [out.message.path for out in outs if isinstance(out.message, Conclude)] == ["model", ""]
    led.say(SERVER, report(had=20))
    assert led.say(A, Concluded({})) == []
    assert (B, Bye) in kinds(led.say(B, Concluded({})))
    books = led.coordinator.books()
    assert books is not None and (books.batches, books.not_done) == (32, 12)  # the one pass that was begun


def test_the_end_does_not_wait_for_who_is_lost_but_for_who_is_away_by_its_own_word() -> None:
    led = Led().drawing()
    led.say(B, Away())
    assert kinds(led.say(A, Ended(10))) == [(SERVER, Forget)]
    assert kinds(led.say(B, Ended(0))) == [(SERVER, Forget), (SERVER, Flush)]
    other = Led().drawing()
    other.say(A, Ended(10))
    assert (SERVER, Flush) in kinds(other.coordinator.lost(B, now=0.0))


def test_away_gives_the_leases_to_others() -> None:
    led = Led().drawing()
    led.say(A, Want())
    assert "Revoke" in [type(out.message).__name__ for out in led.say(A, Away())]
    assert not led.coordinator.workers[0].leases


def test_if_the_one_who_saves_is_lost_another_does() -> None:
    led = Led().drawing()
    led.say(A, Ended(1))
    led.say(B, Ended(1))
    led.say(SERVER, report(had=2, flushed=True))
    outs = led.coordinator.lost(A, now=0.0)
    assert [out.message.path for out in outs if isinstance(out.message, Conclude)] == ["model"]
    assert (B, Conclude) in kinds(outs)


def test_who_was_given_up_and_ends_all_the_same_takes_the_result_home_too() -> None:
    led = Led().drawing()
    led.coordinator.workers[1].here = False  # not heard of for too long
    led.say(A, Ended(1))
    assert (A, Conclude) in kinds(led.say(SERVER, report(had=2, flushed=True)))
    led.say(SERVER, report(had=2))
    assert (B, Conclude) in kinds(led.say(B, Ended(1)))
    assert led.say(A, Concluded({})) == []  # B has yet to take it
    assert (B, Bye) in kinds(led.say(B, Concluded({})))
