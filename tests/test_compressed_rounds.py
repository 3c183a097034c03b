"""Codecs in the rounds of workers without servers: gradients of shared batches, and models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rainband.codecs.find import load_codec
from rainband.options import OptionError
from rainband.protocol.worker_stats import Stats
from rainband.rounds.encoded import EncodedExchange
from rainband.rounds.view import Header
from rainband.runtimes.machines.rounds_relay import MachineView, Rooms, taken
from rainband.strategies.all_reduce import AllReduce
from rainband.strategies.averaging.averaging import Averaging
from rainband.strategies.neighbors.gossip import Gossip
from rainband.strategies.sync import Sync
from rainband.strategies.tree import Tree
from rainband.strategy import Strategy
from rainband.transports.shared_rounds import AREA_BYTES, RoundsMemory, SharedBoard
from tests.test_compressed_pushes import RATE, trained, weights

SYNC = Sync(lr=RATE, optimizer="sgd")


@pytest.mark.parametrize("codec", ["topk:0.01", "randk:0.02", "bf16", "significant:2"])
def test_the_model_is_that_of_all_gradients_exactly(codec: str, tmp_path: Path) -> None:
    plain = trained(SYNC, tmp_path, servers=None, workers=2)
    compressed = trained(SYNC, tmp_path, servers=None, workers=2, codec=codec)
    assert torch.equal(weights(compressed), weights(plain))
    last = compressed.history[-1]
    sent = sum(last.sent_bytes.values())
    assert (sent + last.saved_bytes) % (32 * 4000 * 4) == 0  # of each worker whose last heartbeat has arrived
    assert 0 < sent < last.saved_bytes + 2 * 16_000 * 2
    assert compressed.accounting.lost_residuals == ()


def test_a_worker_that_is_killed_loses_only_what_it_had_kept(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.write_text("0.2 kill worker 1\n")
    result = trained(
        SYNC, tmp_path, servers=None, codec="topk:0.01", faults=faults, compute={"step_s": 0.1}, epochs=2, batch_size=8
    )
    assert result.accounting.applied == 16
    assert len(result.accounting.lost_residuals) == 1


def test_servers_that_pass_on_sums_take_no_codec(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="pass on sums of gradients"):
        trained(Tree(), tmp_path, codec="topk:0.02", servers=None)


def test_an_all_reduce_takes_what_it_can_sum(tmp_path: Path) -> None:
    strategy = AllReduce(lr=RATE, optimizer="sgd")
    plain = trained(strategy, tmp_path, servers=None)
    assert torch.equal(weights(trained(strategy, tmp_path, servers=None, codec="randk:0.02")), weights(plain))
    with pytest.raises(OptionError, match="cannot sum what it encodes. Choose from bf16, fp16, randk, or use sync"):
        trained(strategy, tmp_path, servers=None, codec="topk:0.02")


@pytest.mark.parametrize("strategy", [Averaging(lr=RATE, optimizer="sgd"), Gossip(lr=RATE, optimizer="sgd")])
def test_models_are_sent_as_casts(strategy: Strategy, tmp_path: Path) -> None:
    plain = trained(strategy, tmp_path, servers=None)
    cast = trained(strategy, tmp_path, servers=None, codec="fp16")
    assert torch.allclose(weights(cast), weights(plain), rtol=0.01, atol=0.1)
    sent = sum(cast.history[-1].sent_bytes.values())
    assert sent + cast.history[-1].saved_bytes == sum(plain.history[-1].sent_bytes.values())
    with pytest.raises(OptionError, match="exchange models, and it is for gradients. Choose from bf16, fp16, qsgd:8"):
        trained(strategy, tmp_path, servers=None, codec="topk:0.02")


def test_between_machines_only_the_encoded_bytes_are_sent() -> None:
    memory = RoundsMemory(1)
    try:
        memory.words.of[0][AREA_BYTES] = 4000
        board = SharedBoard(memory.fds, 0, [torch.zeros(1000)])
        header = Header("mean", 1, 2, 3, present=b"\x01", encoded=(100,))
        board.publish(0, 7, header)
        sent = MachineView(()).messages(0, taken(memory.words.bytes[0]), Rooms(memory))
        assert [len(body) for _, body in sent if body is not None] == [100]
    finally:
        memory.close()


# ---- one contribution ----


def exchange(codec: str, number: int) -> EncodedExchange:
    return EncodedExchange(load_codec(codec), number, Stats())


def test_a_member_goes_on_with_what_the_others_decode() -> None:
    one, other = exchange("topk:0.1", 2), exchange("topk:0.1", 2)
    tensors = [torch.randn(30, 10), None, torch.randn(7)]
    like, area = [torch.zeros(30, 10), torch.zeros(5), torch.zeros(7)], torch.zeros(1300, dtype=torch.uint8)
    last = tensors[2]
    sizes = one.encode(tensors, area, position=3)
    assert sizes == (4 + 4 + 6 * 30, 28)  # the first is encoded, the second has no value, the last one is a buffer
    decoded = other.decode(area, sizes, 0b101, like, position=3)
    assert torch.equal(decoded[0], tensors[0]) and int((decoded[0] != 0).sum()) == 30  # type: ignore[arg-type]
    assert torch.equal(decoded[2], last)  # type: ignore[arg-type]
    assert one.stats.sent_bytes == sum(sizes) and one.stats.saved_bytes == 1200 - sizes[0]


def test_what_was_kept_goes_with_the_last_contribution() -> None:
    one, area = exchange("topk:0.1", 1), torch.zeros(400, dtype=torch.uint8)
    first = torch.arange(1.0, 101)
    one.encode([first.clone()], area, position=1)
    one.last = True
    tensors = [torch.zeros(100)]
    assert one.encode(tensors, area, position=2) == (400,)
    assert torch.equal(tensors[0], torch.where(first > 90, 0.0, first))
    assert one.stats.unsent_norm == 0


def test_a_member_that_missed_a_round_keeps_nothing_and_counts_it() -> None:
    one, area = exchange("topk:0.1", 1), torch.zeros(400, dtype=torch.uint8)
    one.encode([torch.ones(100)], area, position=1)
    one.forget()
    assert one.stats.unsent_norm == pytest.approx(90**0.5)
    one.last = True
    tensors = [torch.zeros(100)]
    one.encode(tensors, area, position=2)
    assert not tensors[0].any()  # what others have computed again is not sent
    assert one.stats.unsent_norm == pytest.approx(90**0.5)


def test_a_gradient_that_is_not_finite_arrives_as_it_is() -> None:
    one, area = exchange("topk:0.1", 1), torch.zeros(400, dtype=torch.uint8)
    tensors = [torch.full((100,), torch.nan)]
    assert one.encode(tensors, area, position=1) == (400,)
    assert bool(one.decode(area, (400,), 1, [torch.zeros(100)], position=1)[0].isnan().all())


@pytest.mark.parametrize("sizes", [(), (-1,), (500,), (30, 30)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        exchange("topk:0.1", 1).decode(torch.zeros(400, dtype=torch.uint8), sizes, 1, [torch.zeros(100)], position=1)
