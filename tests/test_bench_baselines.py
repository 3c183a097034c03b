"""The baselines of the benchmarks: they are measured in processes with the settings of Rainband's workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rainband.bench.cases import checkpoints, machines, peers, startup
from rainband.bench.harness.processes import BenchProcess
from rainband.protocol import events
from rainband.runtimes.processes.zygote import Zygote
from rainband.views.history import read_run

BYTES_64_MIB = 64 << 20


class Nothing(msgspec.Struct, frozen=True):
    """An order without settings."""


def where_memory_lies(job: bytes, fds: list[int]) -> None:
    """Report the mapping of a large tensor, and the number of threads."""
    address = torch.empty(BYTES_64_MIB, dtype=torch.uint8).data_ptr()
    with open("/proc/self/maps") as maps:
        (mapping,) = [line for line in maps if _holds(line, address)]
    os.write(fds[0], msgspec.msgpack.encode([mapping.split()[-1], str(torch.get_num_threads())]))
    os.close(fds[0])


def _holds(mapping: str, address: int) -> bool:
    start, end = (int(part, 16) for part in mapping.split()[0].split("-"))
    return start <= address < end


@pytest.mark.processes
def test_baselines_keep_freed_memory_and_have_one_thread_as_workers_do() -> None:
    """Memory from the heap is kept when it is freed; a mapping of its own would be paged in again at every step."""
    zygote = Zygote.start(("torch",))
    try:
        process = BenchProcess(zygote, "tests.test_bench_baselines:where_memory_lies", Nothing(), "baseline")
        assert process.result(list[str]) == ["[heap]", "1"]
        copied = BenchProcess(zygote, "rainband.bench.cases.peers:copy_main", peers.CopyOrder(4096, 5), "copy")
        assert len(copied.result()) == 5  # without those that warm up
    finally:
        zygote.close(0.0)


def test_a_copy_in_one_process_is_measured_in_a_process_like_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the benchmark's own process, two threads waited for each other: a median of 8 ms for 1 MB."""
    started: list[Any] = []

    class Measured:
        def __init__(self, zygote: Any, entry: str, order: msgspec.Struct, title: str, fds: Sequence[int] = ()) -> None:
            started.append((entry.partition(":")[2], order))

        def result(self) -> list[float]:
            return [0.004, 0.002, 0.009]

    monkeypatch.setattr(peers, "BenchProcess", Measured)
    rows = peers._size(None, "1 MB", 1 << 20, 3)  # type: ignore[arg-type]
    assert ("copy_main", peers.CopyOrder(1 << 20, 3)) in started
    assert [row.value for row in rows if row.name == "1 MB copied in one process"] == [4.0]


@pytest.mark.processes
def test_a_run_that_is_timed_as_it_continues_begins_with_a_checkpoint_of_the_one_before(tmp_path: Path) -> None:
    """The run before was once too short for a checkpoint: nothing continued, and nothing was measured."""
    began_s, continued_s = checkpoints.start_and_resume_s(tmp_path, ["mlp", "single", "--eval-every", "0"])
    assert min(began_s, continued_s) > 0
    (began,), (continued,) = ((tmp_path / name).iterdir() for name in ("began", "continued"))
    (checkpoint,) = (began / "checkpoints").iterdir()
    (restored,) = [event for event in read_run(continued).events if isinstance(event, events.Restored)]
    assert restored.place == str(checkpoint)


def test_a_run_that_ends_before_its_first_step_is_reported_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"resume nothing ended before its first step: .*there are no runs in"):
        startup.first_step_s(["resume", "nothing"], tmp_path)


@pytest.mark.processes
def test_servers_read_a_checkpoint_in_processes_of_their_own(tmp_path: Path) -> None:
    rows = checkpoints.rates(tmp_path, 24)
    assert [row.name for row in rows if row.unit == "GB/s"] == ["writing 0.03 GB", "reading 0.03 GB for three servers"]
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_worker_works_from_its_first_counted_samples_on() -> None:
    """Measured sooner, a run over 100 Mbit had made no samples, and the error of a prediction was a division by 0."""
    progress = [{"event": "Progress", "samples_per_s": rates} for rates in ({"0": 9.0, "1": 0.0}, {"0": 0.0, "2": 3.0})]
    assert machines.working([{"event": "Linked", "worker": 1}, *progress]) == {"0", "2"}
