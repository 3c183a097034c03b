"""Compressed gradients in whole runs: what arrives is what was computed, however little each message has.

The task is linear, so each gradient is the samples' mean, whatever the parameters are. With whole numbers, and rates
that are powers of two, every sum is exact: so the final model must have the same bits with and without a codec.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rainband
from rainband.codecs.codec import key_of
from rainband.codecs.find import load_codec
from rainband.codecs.pushes import CompressedPushes, EncodedValues
from rainband.codecs.topk import TopK
from rainband.coordinator.coordinator import RunSettings
from rainband.fit import FitResult
from rainband.options import OptionError
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import LayoutEntry, arrange, cut
from rainband.protocol.messages import Lease, Revoke
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.run import make_scenario
from rainband.strategies.downpour import Downpour
from rainband.strategies.sandblaster import Sandblaster
from rainband.strategies.soft_sync import SoftSync
from rainband.strategies.stale_sync import StaleSync
from rainband.strategies.sync import Sync
from rainband.strategy import Batch, Strategy
from rainband.tasks.task import TensorData
from rainband.worker.leases import HeldLeases
from tests.test_simulation import INSTANT

WIDTH, SAMPLES, RATE = 4000, 64, 0.25
EXACT: dict[str, Any] = {"lr": RATE, "optimizer": "sgd", "guard": False}
EXACT_ROUNDS: dict[str, Any] = {"lr": RATE, "optimizer": "sgd", "scaling": "none"}
STRATEGIES = [
    Downpour(**EXACT),
    Downpour(n_push=2, **EXACT),
    StaleSync(**EXACT),
    SoftSync(n=4, scaling="none", **EXACT),
    Sync(batch_per_worker=True, **EXACT_ROUNDS),
]


@dataclass(frozen=True)
class Slopes:
    """The loss is the mean of w . x: the gradient of a batch is the mean of its samples."""

    batch_size: int = 2
    epochs: int = 1
    width: int = WIDTH
    equal: bool = False  # all samples are twos

    def model(self) -> nn.Module:
        model = nn.Linear(self.width, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def data(self) -> TensorData:
        samples = torch.randint(-64, 64, (SAMPLES, self.width), generator=torch.Generator().manual_seed(1))
        return TensorData(torch.full((SAMPLES, self.width), 2.0) if self.equal else samples.float() * 2)

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        loss: Tensor = model(batch[0]).mean()
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"distance": -float(next(model.parameters()).detach().mean())}


def trained(strategy: Strategy, tmp_path: Path, **options: Any) -> FitResult:
    options = {"runtime": "sim", "servers": 2, **options}
    task = Slopes(equal=options.pop("equal", False))
    return rainband.fit(task, strategy, options.pop("workers", 4), runs=tmp_path, **options)


def weights(result: FitResult) -> Tensor:
    return next(result.module.parameters()).detach().view(-1)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
def test_with_error_feedback_the_model_is_that_of_all_gradients_exactly(strategy: Strategy, tmp_path: Path) -> None:
    plain = trained(strategy, tmp_path)
    compressed = trained(strategy, tmp_path, codec="topk:0.01")
    assert torch.equal(weights(compressed), weights(plain))
    assert compressed.accounting.applied == plain.accounting.applied == SAMPLES // 2
    assert compressed.accounting.untracked_pushes == 0
    assert compressed.history[-1].pushed_bytes < plain.history[-1].pushed_bytes / 3  # with the residuals at the end


@pytest.mark.parametrize("codec", ["randk:0.02", "significant:1", "deep_gradient:0.01,momentum=0,warmup=0"])
def test_every_codec_that_sends_values_as_they_are_is_exact(codec: str, tmp_path: Path) -> None:
    plain, compressed = trained(STRATEGIES[0], tmp_path), trained(STRATEGIES[0], tmp_path, codec=codec)
    assert torch.equal(weights(compressed), weights(plain))


@pytest.mark.parametrize("codec", ["fp16", "bf16", "sign", "qsgd:8", "powersgd:2"])
def test_every_other_codec_comes_near(codec: str, tmp_path: Path) -> None:
    plain = weights(trained(STRATEGIES[0], tmp_path))
    compressed = weights(trained(STRATEGIES[0], tmp_path, codec=codec))
    assert float((compressed - plain).norm() / plain.norm()) < (1e-4 if codec in ("sign", "powersgd:2") else 0.35)


def test_without_feedback_most_of_the_gradients_is_left_out(tmp_path: Path) -> None:
    plain = weights(trained(STRATEGIES[0], tmp_path))
    without = weights(trained(STRATEGIES[0], tmp_path, codec="topk:0.01,feedback=no"))
    assert 0.5 < float((without - plain).norm() / plain.norm()) < 1.1


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("downpour", EXACT),
        ("sync", {"lr": RATE, "optimizer": "sgd"}),
        ("sync", {**EXACT_ROUNDS, "batch_per_worker": True}),
    ],
)
def test_a_run_that_is_stopped_sends_what_was_kept_before_it_saves(strategy: str, settings: dict[str, Any]) -> None:
    config = RunConfig(
        task="tests.test_compressed_pushes:Slopes",
        task_settings={"equal": True},
        strategy=strategy,
        strategy_settings=settings,
        num_workers=2,
        num_servers=0 if settings == {"lr": RATE, "optimizer": "sgd"} else 2,
        codec="topk:0.01",
        runtime="sim",
    )
    run_settings = RunSettings(num_workers=2, num_servers=config.num_servers)
    cluster = SimulatedCluster(make_scenario(config), run_settings, INSTANT, Notes())
    cluster.start()
    cluster.run(until_s=7.05)
    cluster.coordinator_node.send(cluster.coordinator.shutdown.stop("stopped", "enough"))
    cluster.run()
    accounting = cluster.coordinator.reporting.accounting()
    assert accounting is not None and 5 < accounting.applied < 32
    client = cluster.workers[0].client
    assert client is not None
    # each batch moves each weight by the rate times 2, which is 0.5; in a round, two batches move it by that
    moved = accounting.applied / (2 if "batch_per_worker" in settings else 1) * -0.5
    assert torch.cat([vector[:WIDTH] for vector in client.flat.vectors]).tolist() == [moved] * WIDTH
    assert accounting.lost_residuals == ()


def test_pushed_and_saved_bytes_are_those_of_plain_gradients(tmp_path: Path) -> None:
    plain = trained(STRATEGIES[0], tmp_path).history[-1]
    last = trained(STRATEGIES[0], tmp_path, codec="qsgd:4").history[-1]
    assert plain.saved_bytes == 0
    assert last.pushed_bytes + last.saved_bytes == plain.pushed_bytes


def test_what_a_lost_worker_had_not_sent_is_counted(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.write_text("0.05 kill worker 1\n")
    result = trained(STRATEGIES[0], tmp_path, codec="topk:0.01", faults=faults, compute={"step_s": 0.01}, epochs=8)
    (norm,) = result.accounting.lost_residuals
    assert norm > 100  # of one gradient: 74 in each of 4,000 places, over the root of 2
    assert result.accounting.lost == 0


@pytest.mark.processes
def test_real_processes_are_exact_over_tcp_and_in_shared_memory(tmp_path: Path) -> None:
    plain = weights(trained(STRATEGIES[0], tmp_path))
    for transport in ("tcp", "shm"):
        compressed = trained(
            STRATEGIES[0],
            tmp_path,
            codec=TopK(fraction=0.01),
            pull_codec="fp16",
            runtime="processes",
            transport=transport,
            workers=2,
            servers=1,
        )
        assert torch.equal(weights(compressed), plain)
        assert compressed.history[-1].saved_bytes > 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
def test_parameters_are_sent_as_casts_and_saved_as_they_are(strategy: Strategy, tmp_path: Path) -> None:
    plain = trained(strategy, tmp_path)
    cast = trained(strategy, tmp_path, pull_codec="bf16")
    assert torch.equal(weights(cast), weights(plain))  # gradients of this task do not depend on the parameters
    assert weights(cast).bfloat16().float().tolist() != weights(cast).tolist()
    final = 4 * WIDTH
    assert 0 < cast.history[-1].pulled_bytes - final <= (plain.history[-1].pulled_bytes + 4 * final) / 2


def test_a_worker_computes_with_what_it_has_received() -> None:
    received = weights_in_the_middle(pull_codec="bf16")
    assert torch.equal(received, received.bfloat16().float())
    plain = weights_in_the_middle()
    assert not torch.equal(plain, plain.bfloat16().float())


def weights_in_the_middle(**options: Any) -> Tensor:
    """Return the parameters of a worker in the middle of a run."""
    config = RunConfig(
        task="tests.test_compressed_pushes:Slopes",
        strategy="downpour",
        strategy_settings=EXACT,
        num_workers=1,
        num_servers=1,
        runtime="sim",
        **options,
    )
    settings = RunSettings(num_workers=1, num_servers=1)
    cluster = SimulatedCluster(make_scenario(config), settings, INSTANT, Notes())
    cluster.start()
    cluster.run(until_s=20.05)
    client = cluster.workers[0].client
    assert client is not None
    return client.flat.vectors[0][:WIDTH].clone()


@pytest.mark.parametrize(
    ("strategy", "options", "says"),
    [
        (Sandblaster(iterations=1), {}, "exact gradients"),
        (STRATEGIES[0], {"codec": "topj"}, "did you mean topk"),
        (STRATEGIES[0], {"codec": "topk:7"}, "at most 1"),
        (STRATEGIES[0], {"codec": 3}, "is not a codec"),
        (STRATEGIES[0], {"pull_codec": "topk"}, "for gradients, and servers send parameters. Choose from bf16, fp16"),
        (Sync(lr=RATE), {"codec": None, "pull_codec": "bf16", "servers": None}, "no servers that send them"),
    ],
)
def test_what_cannot_be_compressed_is_refused(
    strategy: Strategy, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises((OptionError, ValueError), match=says):
        trained(strategy, tmp_path, **{"codec": "topk:0.01", **options})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("codec", ["topk:0.1", "fp16"])
def test_what_is_not_encoded_has_the_dtype_of_its_block(codec: str, dtype: str) -> None:
    layout = arrange([LayoutEntry("bias", (2,), dtype)])
    (block,) = cut(layout)
    pushes = CompressedPushes(load_codec(codec), 0, layout)
    values = torch.zeros(block.numel, dtype=getattr(torch, dtype))
    values[:2] = torch.tensor([1.0, 2.0])
    sent = pushes.encode(EncodedValues(values, block), block, (), block.numel, sequence=1)
    tensor = sent.contiguous()
    assert tensor is not None and tensor.dtype == (torch.uint8 if sent.encoded else values.dtype)
    assert len(tensor) == (sent.encoded or block.numel)
    assert sent.encoded < values.nbytes
    out = torch.empty_like(tensor)
    sent.write(out)
    assert torch.equal(out, tensor)


def test_what_was_kept_of_different_parameters_is_sent_for_each() -> None:
    """A parameter may have no gradient in some batches: then the values of a push are others."""
    layout = arrange([LayoutEntry("one", (640,)), LayoutEntry("two", (640,))])
    (block,) = cut(layout)
    pushes = CompressedPushes(load_codec("topk:0.1"), 0, layout)
    for absent in ((), (1,)):
        numel = block.numel_without(absent)
        ones = EncodedValues(torch.ones(numel), block)
        assert pushes.encode(ones, block, absent, numel, sequence=1).encoded
    unsent = {one.absent: one.values.contiguous() for one in pushes.take_unsent()}
    assert {absent: int(values.sum()) for absent, values in unsent.items()} == {(): 1280 - 128, (1,): 640 - 64}  # type: ignore[union-attr]
    assert pushes.take_unsent() == []


@pytest.mark.parametrize("codec", ["topk:0.1", "sign", "deep_gradient:0.1,momentum=0,warmup=0"])
def test_a_push_that_is_refused_gives_back_what_it_had_of_earlier_gradients(codec: str) -> None:
    layout = arrange([LayoutEntry("one", (640,))])
    (block,) = cut(layout)
    pushes = CompressedPushes(load_codec(codec), 0, layout)
    gradients = torch.randint(-64, 64, (4, 640), generator=torch.Generator().manual_seed(1)).float()
    taken = torch.zeros(640)
    for sequence, gradient in enumerate(gradients):
        sent = pushes.encode(EncodedValues(gradient, block), block, (), 640, sequence).contiguous()
        assert sent is not None
        if sequence != 2:
            taken += pushes.codec.decode(sent, 640, key_of(0, sequence, 0))
        pushes.answered(sequence, 0, is_taken=sequence != 2)
    (rest,) = pushes.take_unsent()
    kept = rest.values.contiguous()
    assert kept is not None
    torch.testing.assert_close(taken + kept, gradients[[0, 1, 3]].sum(0), rtol=0, atol=0 if codec != "sign" else 1e-4)
    assert not pushes.unanswered


def test_batches_that_are_computed_again_move_no_parameter_twice(tmp_path: Path) -> None:
    """A worker is killed between two pushes: what others compute again is applied once."""
    faults = tmp_path / "faults"
    faults.write_text("0.33 kill worker 1\n")
    options = {
        "faults": faults,
        "compute": {"step_s": 0.01},
        "servers": 3,
        "equal": True,
        "epochs": 4,
        "network": "wan",
    }
    plain = weights(trained(STRATEGIES[0], tmp_path, **options))
    result = trained(STRATEGIES[0], tmp_path, codec="topk:0.3", **options)
    missing = (weights(result) - plain) / RATE
    assert float(missing.min()) == 0 < float(missing.max())  # only what the killed worker had kept
    assert len(result.accounting.lost_residuals) == 1


def test_batches_that_another_worker_continues_are_compressed_unless_some_block_has_them() -> None:
    """Reassigned under lease 2: block 0 alone has batches 1 and 2. Before, all were sent uncompressed."""
    sizes: dict[str, int] = {"num_samples": 64, "batch_size": 8, "epochs": 1, "portion_batches": 8}
    plan = DataPlan(fingerprint="", layout="", seed=0, **sizes)
    leases = HeldLeases(plan, tell=lambda message: None)
    leases.add(Lease(0, 2, ((1, 2), (3, 4)), partly_accepted=(1, 2)))
    assert [leases.is_new_to_all(Batch(0, k, 2)) for k in (1, 2, 3, 4)] == [False, False, True, True]
    leases.revoke(Revoke(0, 3))
    assert not leases.is_new_to_all(Batch(0, 3, 2)) and leases.is_new_to_all(Batch(7, 0, 1))
