"""The baselines of the benchmarks: they are measured in processes with the settings of Rainband's workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from rainband.bench.cases import peers
from rainband.bench.harness.processes import BenchProcess
from rainband.runtimes.processes.zygote import Zygote

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
