"""Synthetic events for the tests of the dashboard: plausible runs of any size, also hostile ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rainband.protocol import events
from rainband.protocol.events import AnyEvent

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script></script>\u2028<b>"\'&'
COUNTS = {"skipped": {}, "lost": 0, "applied_twice": 0, "reassigned": 0, "refused": {}, "untracked_pushes": 0}


def made_run(
    num_workers: int = 4, seconds: int = 20, lost: Sequence[int] = (), text: str = "digits", seed: int = 0
) -> list[AnyEvent]:
    """Return the events of a run in which worker 1 has waited for worker 0, and some workers are lost halfway."""
    random_ = random.Random(seed)
    made: list[AnyEvent] = [
        events.RunStarted(
            at_s=0.0,
            task=text,
            strategy=text,
            settings={"note": text},
            num_workers=num_workers,
            num_servers=2,
            version=text,
            started_at="2026-11-16T09:30:00+00:00",
        ),
        *(events.Joined(at_s=0.5, node=f"worker {k}") for k in range(num_workers)),
        events.PlanMade(
            at_s=0.6,
            num_samples=1000,
            num_batches=seconds * num_workers,
            num_portions=10,
            num_parameters=100,
            num_blocks=2,
            batch_size=8,
            epochs=seconds,
        ),
        events.PhaseChanged(at_s=1.0, phase="running"),
        events.FirstStep(at_s=1.1, worker=0),
    ]
    missed, gone = [0] * num_workers, False
    for second in range(1, seconds + 1):
        if lost and second > seconds // 2 and not gone:
            made += [events.Lost(at_s=second + 0.5, node=f"worker {k}", why=text) for k in lost]
            gone = True
        alive = [k for k in range(num_workers) if not (gone and k in lost)]
        for k in alive:
            missed[k] += random_.randrange(20)
        made += measured(num_workers, second, seconds, alive, missed)
    made += [
        events.ProcessOutput(at_s=seconds + 1.5, lines=(text, text)),
        events.PhaseChanged(at_s=seconds + 1.6, phase="flushing", reason=text),
        events.RunEnded(
            at_s=seconds + 2.0,
            outcome="finished",
            reason=text,
            seconds=seconds + 2.0,
            samples=1000 * seconds,
            metrics={"loss": 0.1, text[:9]: 0.97},
            accounting=made_accounting(seconds * num_workers, seconds * num_workers),
            staleness={},
            training_s=seconds + 0.6,
            cpu_s=12.5,
        ),
    ]
    return made


def made_accounting(done: int, batches: int) -> dict[str, object]:
    return {**COUNTS, "batches": batches, "applied": done, "not_processed": batches - done, "updates": 2 * done}


def measured(
    num_workers: int, second: int, seconds: int, alive: Sequence[int], missed: Sequence[int]
) -> list[AnyEvent]:
    """Return what the coordinator reports of one second: `missed` updates in all, of a gradient for each second."""
    columns = range(min(num_workers, 256))
    rates = {k: 10.0 * (1 + k % 3) for k in alive[:256]}
    return [
        events.Progress(
            at_s=1.0 + second,
            batches_done=second * num_workers,
            batches=seconds * num_workers,
            samples_done=1000 * second,
            samples=1000 * seconds,
            loss=2.0 / second,
            samples_per_s=rates,
            staleness_mean=4.0,
            staleness_max=9,
            waited_s=dict.fromkeys(alive[:256], 0.5 * second),
            metrics={"accuracy": 1 - 1 / (second + 1)} if second % 5 == 0 else {},
            pushed_bytes=1000 * second * num_workers,
            pulled_bytes=1000 * second * num_workers,
        ),
        events.NodesMeasured(
            at_s=1.0 + second,
            workers=tuple(columns),
            num_workers=num_workers,
            samples=tuple(10 * second for _ in columns),
            waited_s=tuple(0.5 * second for _ in columns),
            cpu_s=tuple(0.25 * second for _ in columns),
            pushed_bytes=tuple(1000 * second for _ in columns),
            pulled_bytes=tuple(1000 * second for _ in columns),
            sent_bytes=tuple(0 for _ in columns),
            staleness=tuple((0, 0, 0, 0, second) for _ in columns),
            missed=tuple(missed[k] for k in columns),
            max_missed=tuple(9 for _ in columns),
            waiting=(1,) if num_workers > 1 else (),
            waited_for=((1, 0, 0.4 * second),) if num_workers > 1 else (),
            all_staleness=(0, 0, 0, 0, second * num_workers),
            updates=(second * num_workers, second * num_workers),
            blocks=((4.0, 9), (4.0, 9)),
            accounting=made_accounting(second * num_workers, seconds * num_workers),
        ),
    ]


def written(directory: Path, made: Sequence[AnyEvent], rest: bytes = b"") -> Path:
    """Write a run's directory: its events, and perhaps the beginning of a line."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in made)
    (directory / "events.jsonl").write_bytes(lines + rest)
    return directory
