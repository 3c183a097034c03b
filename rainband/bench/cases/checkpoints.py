"""Checkpoints: the cost for training, the rates of writing and reading, and the time until a run continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch

from rainband.bench.cases.startup import MAIN, first_step_s
from rainband.bench.harness.processes import BenchProcess
from rainband.bench.harness.rows import Effort, Row, at_least, at_most
from rainband.checkpoints import commit
from rainband.checkpoints.manifest import Manifest, RunFacts
from rainband.checkpoints.read import Checkpoint
from rainband.checkpoints.store import LocalStore
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import LayoutEntry, arrange, cut, deal
from rainband.protocol.messages import COORDINATOR, Assign, Message, Saved, TakeSnapshot
from rainband.runtimes.checkpoints.background import BackgroundThread
from rainband.runtimes.checkpoints.restore import restore_server
from rainband.runtimes.checkpoints.write import ServerWriter
from rainband.runtimes.processes.zygote import Zygote
from rainband.runtimes.simulation.nodes import publish
from rainband.server.server import Server
from rainband.strategies.downpour import Downpour

COUNTED = 8 << 20  # bytes of each write of the baseline
READERS = 3  # servers of the run that continues
RUN = ["mlp", "downpour", "--workers", "2", "--servers", "1", "--eval-every", "0"]


def run(effort: Effort) -> Iterator[Row]:
    megabytes, seconds = (1024, 30.0) if effort == "full" else (256, 12.0)
    torch.set_num_threads(1)  # as in a server
    with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
        yield from rates(Path(folder), megabytes)
        yield from _cost(Path(folder), seconds)
        yield from _start(Path(folder), effort)


# ---- rates of one server ----


def rates(folder: Path, megabytes: int) -> list[Row]:
    """Write and read the blocks of a server that has this much, and compare with plain files on the same disk."""
    layout = arrange([LayoutEntry(f"layer{i}", (1 << 20,)) for i in range(megabytes // 12)])  # with Adam, 12 MB each
    blocks = cut(layout, 1)
    plan = DataPlan(fingerprint="", layout="", num_samples=64, batch_size=1, epochs=1, seed=0, portion_batches=1)
    server = _server(plan, blocks, layout.groups)
    for block in server.blocks.values():
        block.parameters.step(torch.ones(block.spec.numel), (), 1.0, 0, 1)  # so that Adam has its state
    store = LocalStore(folder / "checkpoints")
    began = time.perf_counter()
    saved = _written(server, store)
    files = [file for message in saved for file in message.files]
    facts = RunFacts(run="bench", task="", strategy="", num_workers=1, num_servers=1)
    manifest = Manifest(
        step=0,
        created_at="",
        facts=facts,
        plan=plan,
        layout=layout,
        num_replicas=1,
        files=tuple(files),
        blocks=tuple(block for message in saved for block in message.blocks),
    )
    name = commit.commit(store, commit.begin(store, "step-0000000000"), manifest)
    num_bytes = manifest.num_bytes
    wrote = num_bytes / (time.perf_counter() - began)
    limit_w = max(_plain_write(folder / "plain", num_bytes) for _ in range(2))
    _forget([folder / "plain", *(folder / "checkpoints" / name).iterdir()])
    limit_r = _plain_read(folder / "plain", num_bytes)
    _forget([folder / "plain"])
    kept_r = _plain_read(folder / "plain", num_bytes, keeps=True)
    read = num_bytes / _read_s(store, name)
    (folder / "plain").unlink()
    store.remove(name)
    size = f"{num_bytes / 1e9:.2f} GB"
    return [
        Row(f"writing {size}", wrote / 1e9, "GB/s"),
        at_least(f"writing {size}", wrote / limit_w, 0.8, "the disk, writing one file"),
        Row(f"reading {size} for three servers", read / 1e9, "GB/s"),
        at_least(f"reading {size} for three servers", read / limit_r, 0.8, "the disk, reading one file"),
        Row(f"reading {size} for three servers", read / kept_r, "x", "one process, reading one file into new memory"),
    ]


class ReadOrder(msgspec.Struct, frozen=True):
    """The order for a server that reads its blocks of a checkpoint."""

    root: str
    name: str
    server: int


def _read_s(store: LocalStore, name: str) -> float:
    """Return the seconds in which several servers, each in a process, read their blocks at the same time."""
    zygote = Zygote.start(("torch",))
    go_read, go_write = os.pipe()
    try:
        orders = [ReadOrder(str(store.root), name, server) for server in range(READERS)]
        entry = "rainband.bench.cases.checkpoints:read_main"
        processes = [BenchProcess(zygote, entry, order, "reading server", [go_read]) for order in orders]
        os.close(go_read)
        for process in processes:
            process.read_byte()
        os.close(go_write)
        spans: list[tuple[float, float]] = [process.result(tuple[float, float]) for process in processes]
    finally:
        zygote.close(0.0)
    return max(end for _, end in spans) - min(began for began, _ in spans)


def read_main(job: bytes, fds: list[int]) -> None:
    """Restore a server's blocks when all servers are ready; report when that began and ended."""
    order = msgspec.msgpack.decode(job, type=ReadOrder)
    checkpoint = Checkpoint(LocalStore(Path(order.root)), order.name)
    manifest = checkpoint.manifest
    blocks = cut(manifest.layout, 1)
    server = _server(manifest.plan, [blocks[i] for i in deal(blocks, READERS)[order.server]], manifest.layout.groups)
    os.write(fds[0], b"r")
    os.read(fds[1], 1)
    began = time.perf_counter()
    restore_server(server, Checkpoint(checkpoint.store, order.name))
    os.write(fds[0], msgspec.msgpack.encode((began, time.perf_counter())))
    os.close(fds[0])


def _server(plan: DataPlan, blocks: Sequence[Any], groups: Any) -> Server:
    part = Downpour(optimizer="adam").server(1)
    server = Server(lambda _: part, publish)
    server.receive(COORDINATOR, Assign(plan, tuple(blocks), groups, 1))
    return server


def _written(server: Server, store: LocalStore) -> list[Saved]:
    """Write a server's part of a checkpoint; return what it reports."""
    background, saved = BackgroundThread(), []

    def tell(message: Message) -> None:
        assert isinstance(message, Saved) and not message.error, message
        saved.append(message)

    writer = ServerWriter("server-0", server, lambda: store, background)
    server.receive(COORDINATOR, TakeSnapshot(1, "step-0000000000"))
    while not saved or saved[-1].more:
        writer.advance(tell)
        background.wait(0.01)
    return saved


def _plain_write(path: Path, num_bytes: int) -> float:
    """Return the rate of writing and syncing one file."""
    chunk = os.urandom(COUNTED)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(num_bytes // COUNTED):
            file.write(chunk)
        os.fsync(file.fileno())
    return num_bytes // COUNTED * COUNTED / (time.perf_counter() - began)


def _plain_read(path: Path, num_bytes: int, keeps: bool = False) -> float:
    """Return the rate of reading one file: into the same memory again and again, or into new memory, as servers do."""
    began, memory, kept = time.perf_counter(), bytearray(COUNTED), []
    with path.open("rb", buffering=0) as file:
        while file.readinto(memory):
            if keeps:
                kept.append(memory)
                memory = bytearray(COUNTED)
    return num_bytes / (time.perf_counter() - began)


def _forget(paths: Sequence[Path]) -> None:
    """Drop files from the page cache, so that they are read from the disk."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- runs ----


def _cost(folder: Path, seconds: float) -> list[Row]:
    """Train with and without checkpoints every 10 s."""
    rates: dict[str, list[float]] = {"0": [], "10s": []}
    probe = _trained(folder, "0", 1)
    epochs = max(1, round(seconds * probe["samples_per_s"] / probe["samples"]))
    for _ in range(2):
        for every, found in rates.items():
            found.append(_trained(folder, every, epochs)["samples_per_s"])
    with_, without = median(rates["10s"]), median(rates["0"])
    return [
        Row("training without checkpoints", without, "samples/s"),
        at_most("lost with checkpoints every 10 s", 1 - with_ / without, 0.05, "training without"),
    ]


def _trained(folder: Path, every: str, epochs: int) -> dict[str, Any]:
    words = ["train", *RUN, "--epochs", str(epochs), "--checkpoint-every", every, "--json", "--runs", str(folder)]
    done = subprocess.run([sys.executable, "-c", MAIN, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _start(folder: Path, effort: Effort) -> list[Row]:
    """Compare the time until the first step of a run that continues with that of a run that begins."""
    pairs = [start_and_resume_s(folder / f"pair-{i}", RUN) for i in range(5 if effort == "full" else 2)]
    fresh, resumed = (median(column) for column in zip(*pairs, strict=True))
    return [
        Row("rainband resume to the first step", resumed, "s"),
        at_most("rainband resume to the first step", resumed / fresh, 1.5, "a fresh start"),
    ]


def start_and_resume_s(folder: Path, words: Sequence[str]) -> tuple[float, float]:
    """Return the seconds to the first step of a run that begins, is stopped then, and is continued.

    A run that is stopped writes a checkpoint, however short it was.
    """
    began, continued = folder / "began", folder / "continued"
    fresh = first_step_s(["train", *words, "--epochs", "40"], began)
    (run,) = began.iterdir()
    return fresh, first_step_s(["resume", str(run)], continued)
