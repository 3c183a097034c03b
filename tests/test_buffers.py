"""Buffers, such as BatchNorm's statistics: all workers begin with those of one, and the mean of all is saved."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rainband
from rainband.coordinator.buffers import BufferMean
from rainband.protocol import events
from rainband.protocol.messages import Conclude, Ended, Join, Peer, Shutdown, Welcome
from rainband.tasks.linear import Linear
from rainband.worker.worker import buffers_of, set_buffers
from tests.test_coordinator import Run, finished

NAN, INF = float("nan"), float("inf")


def body(*values: float) -> bytes:
    return np.array(values, dtype=np.float64).tobytes()


def mean_of(*contributions: tuple[tuple[float, ...], int]) -> list[float]:
    mean = BufferMean()
    for values, samples in contributions:
        mean.add(body(*values), samples)
    return np.frombuffer(mean.mean() or b"").tolist()


def test_the_mean_is_weighted_by_samples() -> None:
    assert mean_of(((1.0, 10.0), 1), ((5.0, 20.0), 3)) == [4.0, 17.5]


def test_a_worker_without_samples_does_not_count() -> None:
    assert mean_of(((7.0,), 0), ((5.0,), 3)) == [5.0]
    assert mean_of(((7.0,), 0)) == []


def test_values_that_are_not_finite_are_left_out_each_by_itself() -> None:
    assert mean_of(((NAN, 1.0, 2.0), 1), ((3.0, INF, 6.0), 3)) == [3.0, 1.0, 5.0]


def test_where_no_worker_has_a_finite_value_the_first_one_stays() -> None:
    mean = mean_of(((NAN, -INF), 2), ((INF, -INF), 3))
    assert np.isnan(mean[0])
    assert mean[1] == -INF


def test_a_number_that_is_equal_on_all_workers_stays_exactly_that() -> None:
    third = 0.1 + 0.2
    assert (third * 3 + third * 7) / 10 != third  # as a weighted mean would have it
    assert mean_of(((third, -INF), 3), ((third, -INF), 7)) == [third, -INF]


def test_buffers_go_there_and_back_through_one_vector() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("expanded", torch.tensor([1.0]).expand(3))  # cannot be written to
    module.register_buffer("mask", torch.tensor([True]))
    there = torch.frombuffer(bytearray(buffers_of(module)), dtype=torch.float64)
    assert there.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    set_buffers(module, body(0.5, -0.5, 2.0, 3.0, 6.6, 1.0, 1.0, 1.0))
    assert module.running_mean is not None
    assert module.running_mean.tolist() == [0.5, -0.5]
    assert module.num_batches_tracked is not None
    assert module.num_batches_tracked.item() == 7


# ---- the coordinator ----


def joining(*buffers: bytes | None) -> tuple[Run, list[bytes | None]]:
    """Let workers with these buffers join; return with what each is welcomed."""
    run = Run(num_workers=len(buffers))
    for server in range(2):
        run.server_joins(server)
    welcomed: list[bytes | None] = []
    for index, given in enumerate(buffers):
        outs = run.coordinator.receive(Peer("worker", index), _join(run), run.now, given)
        welcomed += [out.body for out in outs if isinstance(out.message, Welcome)]
    return run, welcomed


def _join(run: Run) -> Join:
    return Join(**run.join)


def test_all_workers_begin_with_the_buffers_of_the_first() -> None:
    first, other = body(1.0, 2.0), body(1.0, 3.0)
    assert joining(first, other, first)[1] == [None, first, None]
    assert joining(None, None)[1] == [None, None]


def test_a_worker_whose_model_has_other_buffers_is_sent_away_with_the_reason() -> None:
    run = Run(num_workers=2)
    run.server_joins(0)
    run.server_joins(1)
    run.from_worker(0, _join(run), body(1.0, 2.0))
    [told, *_] = run.from_worker(1, _join(run), body(1.0))
    assert told == Shutdown("worker 1 does not fit this run: its buffers have 1 numbers, not 2.")


def test_nan_in_the_buffers_of_one_worker_is_left_out_and_reported() -> None:
    run = finished()
    run.reports(accepted=8, first_open=8, flushed=True)
    run.from_worker(0, Ended(3), body(NAN, 1.0))
    outs = run.coordinator.receive(Peer("worker", 1), Ended(1), run.now, body(2.0, 5.0))
    [saved] = [out.body for out in outs if isinstance(out.message, Conclude)]
    assert saved == body(2.0, 2.0)
    [event] = run.events(events.Warned)
    assert event.text == (
        "1 of 2 numbers in the buffers of worker 0 are NaN: the saved model has the mean of the other workers, if "
        "there are any. Look for NaN in the data."
    )


# ---- real runs ----


@dataclasses.dataclass(frozen=True)
class Projected(Linear):
    """A model with two random buffers: of numpy's global generator, and of a generator that nobody can seed."""

    folder: str = ""

    def model(self) -> nn.Module:
        model = super().model()
        model.register_buffer("seeded", torch.from_numpy(np.random.rand(3)))
        model.register_buffer("unseeded", torch.from_numpy(np.random.default_rng().random(3)))
        Path(self.folder, f"built-{os.getpid()}").write_text(str(model.seeded.tolist()))
        return model

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        Path(self.folder, f"used-{os.getpid()}").write_text(str([model.seeded.tolist(), model.unseeded.tolist()]))
        return super().loss(model, batch)


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_random_buffers_are_equal_on_all_workers_and_saved_as_they_are(tmp_path: Path) -> None:
    task = Projected(dimension=4, samples=64, batch_size=1, epochs=1, folder=str(tmp_path))
    result = rainband.fit(
        task, rainband.Sync(batch_per_worker=True, optimizer="sgd"), workers=2, servers=1, runs=tmp_path / "runs"
    )
    built = [path.read_text() for path in tmp_path.glob("built-*") if path.name != f"built-{os.getpid()}"]
    used = [path.read_text() for path in tmp_path.glob("used-*")]
    assert (len(built), len(used)) == (2, 2)
    assert built[0] == built[1]
    saved = result.module
    assert set(used) == {str([saved.seeded.tolist(), saved.unseeded.tolist()])}
