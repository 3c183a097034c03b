"""Codecs: encoding and decoding against a copy of the same memory, bytes, the loss at equal steps, and when it pays.

One thread. A codec pays for one hop of a network below the bandwidth at which what it saves takes as long as encoding
and decoding; error feedback, which adds about three passes over the memory, is part of encoding.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from rainband.bench.harness.rows import Effort, Row
from rainband.codecs.codec import Codec, Piece
from rainband.codecs.find import load_codec
from rainband.protocol.events import AnyEvent, Progress
from rainband.runtimes.config import RunConfig
from rainband.runtimes.simulation import run as sim

CODECS = (
    *("fp16", "bf16", "sign", "qsgd:8", "qsgd:4", "ternary", "topk:0.01", "randk:0.01", "significant:2"),
    *("powersgd:2", "deep_gradient:0.01"),
)
NUMEL = 1 << 18  # 1 MB, as a block has
COLUMNS = 512
EPOCHS = {"full": 8, "quick": 2}
LAST = 5  # reports of the loss at the end, which are averaged


def run(effort: Effort) -> Iterator[Row]:
    torch.set_num_threads(1)
    blocks, epochs = (15, EPOCHS["full"]) if effort == "full" else (5, EPOCHS["quick"])
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    out = torch.empty(NUMEL)
    copy_s = _seconds(lambda: out.copy_(values), blocks)
    yield Row("copy of 1 MB", values.nbytes / copy_s / 1e9, "GB/s")
    plain = _loss("", epochs)
    yield Row(f"digits, 2 workers, {epochs} epochs: loss without a codec", plain, "")
    for typed in CODECS:
        yield from _rows(load_codec(typed), typed, values, copy_s, blocks)
        yield Row(f"{typed}: loss at equal steps", _loss(typed, epochs), "", f"{plain:.3g} without a codec")


def _rows(codec: Codec, typed: str, values: torch.Tensor, copy_s: float, blocks: int) -> Iterator[Row]:
    sender = codec.sender([Piece(0, NUMEL, COLUMNS)])
    for _ in range(500 if typed.startswith("deep") else 1):  # after its warm-up
        body = sender.encode(values, 1)
    encode_s = _seconds(lambda: sender.encode(values, 1), blocks)
    decode_s = _seconds(lambda: codec.decode(body, NUMEL, 1), blocks)
    saved = values.nbytes - len(body)
    yield Row(f"{typed}: encode", values.nbytes / encode_s / 1e9, "GB/s", f"{copy_s / encode_s:.3f} of a copy")
    yield Row(f"{typed}: decode", values.nbytes / decode_s / 1e9, "GB/s", f"{copy_s / decode_s:.3f} of a copy")
    yield Row(
        f"{typed}: bytes in place of one", len(body) / values.nbytes, "B", f"{values.nbytes / len(body):.1f} times"
    )
    yield Row(f"{typed}: pays for one hop below", saved * 8 / (encode_s + decode_s) / 1e9, "Gbit/s")


def _seconds(do: Callable[[], object], blocks: int) -> float:
    """Return the median time of some blocks of calls."""
    do()
    began = time.perf_counter()
    do()
    calls, found = max(1, int(0.03 / (time.perf_counter() - began))), []
    for _ in range(blocks):
        began = time.perf_counter()
        for _ in range(calls):
            do()
        found.append((time.perf_counter() - began) / calls)
    return median(found)


def _loss(codec: str, epochs: int) -> float:
    """Return the training loss at the end of a simulated run, which has the same steps with every codec."""
    seen: list[AnyEvent] = []
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(
            task="digits",
            strategy="downpour",
            strategy_settings={"optimizer": "sgd", "lr": 0.05},
            num_workers=2,
            num_servers=1,
            epochs=epochs,
            codec=codec,
            runtime="sim",
            directory=folder,
        )
        sim.run(config, seen.append)
    losses = [event.loss for event in seen if isinstance(event, Progress) and event.loss is not None]
    return sum(losses[-LAST:]) / LAST
