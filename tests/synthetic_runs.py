"""Made-up runs for tests: the events of one, and its directory on disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rainband.protocol import events

ACCOUNTING = {
    "batches": 900,
    "applied": 898,
    "skipped": {"not finite": 2},
    "lost": 0,
    "applied_twice": 0,
    "not_processed": 0,
    "reassigned": 3,
    "refused": {"revoked": 5, "wrong_server": 1},
    "updates": 1796,
}
STALENESS = {"mean": 0.5, "max": 2, "histogram": {"0": 6, "1": 3, "2": 1}, "per_worker_mean": {"0": 0.5}}


def started(workers: int = 2, servers: int = 1, at: str = "2026-11-16T09:30:00.000+00:00") -> events.RunStarted:
    return events.RunStarted(
        at_s=0.0,
        task="digits",
        strategy="downpour",
        settings={"n_push": 4, "overlap": True, "local_lr": None},
        num_workers=workers,
        num_servers=servers,
        version="0.1.0",
        started_at=at,
    )


def planned(samples: int = 1000, epochs: int = 2) -> events.PlanMade:
    return events.PlanMade(
        at_s=1.0,
        num_samples=samples,
        num_batches=900,
        num_portions=9,
        num_parameters=38282,
        num_blocks=2,
        batch_size=32,
        epochs=epochs,
    )


def progress(
    at_s: float,
    done: int,
    rates: Sequence[float] = (60.0, 40.0),
    waited: Sequence[float] = (0.0, 0.0),
    loss: float | None = 1.0,
    samples: int = 2000,
) -> events.Progress:
    return events.Progress(
        at_s=at_s,
        batches_done=done // 32,
        batches=900,
        samples_done=done,
        samples=samples,
        loss=loss,
        samples_per_s=dict(enumerate(rates)),
        staleness_mean=0.5,
        staleness_max=2,
        waited_s=dict(enumerate(waited)),
    )


def ended(outcome: str = "finished", reason: str = "", **metrics: float | None) -> events.RunEnded:
    return events.RunEnded(
        at_s=20.0,
        outcome=outcome,
        reason=reason,
        seconds=20.0,
        samples=2000,
        metrics=metrics or {"accuracy": 0.975},
        accounting=dict(ACCOUNTING),
        staleness=dict(STALENESS),
        training_s=20.0,
    )


def whole_run() -> list[events.AnyEvent]:
    """Two workers and a server: 100 samples a second from second 2 on, all 2,000 of them."""
    return [
        started(),
        *(events.Joined(at_s=1.0, node=node) for node in ("server 0", "worker 0", "worker 1")),
        planned(),
        events.PhaseChanged(at_s=2.0, phase="running"),
        *(progress(2.0 + s, 100 * s, loss=2.0 / (1 + s)) for s in range(18)),
        events.PhaseChanged(at_s=19.0, phase="concluding"),
        ended(),
    ]


def write_run(
    directory: Path,
    story: Sequence[events.AnyEvent],
    config: dict[str, object] | None = None,
    tail: bytes = b"",
) -> Path:
    """A run's directory; `tail` is what comes after the last whole line."""
    directory.mkdir(parents=True)
    lines = b"".join(msgspec.json.encode(event) + b"\n" for event in story)
    (directory / "events.jsonl").write_bytes(lines + tail)
    (directory / "config.json").write_text(json.dumps(config or a_config()))
    return directory


def a_config(**changed: object) -> dict[str, object]:
    plain = {"task": "digits", "strategy": "downpour", "num_workers": 2, "num_servers": 1, "seed": 0}
    return {**plain, "task_settings": {}, "strategy_settings": {"lr": 0.02}, **changed}
