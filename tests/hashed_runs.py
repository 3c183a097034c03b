"""Seeded simulated runs whose results must survive every change that is meant to change nothing.

`python -m tests.hashed_runs` prints their hashes; `--record` stores them. Record them only with a change that is meant
to change results, in a commit of its own that says why.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation.run import run
from tests.stage_tasks import Shaped, planned

FILE = Path(__file__).parent / "data" / "hashed_runs.json"
CORES = str(Path(__file__).parent / "data" / "cores.toml")
ITERATIONS = {"iterations": "3"}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that must stay equal: the schedule of messages, the results, and the bytes of the saved model."""

    trace_hash: str
    model_hash: str
    outcome: str
    samples: int
    seconds: float
    metrics: dict[str, float]


def digits(strategy: str, workers: int = 4, servers: int = 2, faults: str = "", **given: Any) -> RunConfig:
    if strategy not in ("sandblaster", "conjugate_gradient"):
        given.setdefault("epochs", 1)
    given.setdefault("sim", SimSettings(faults=faults))
    return RunConfig(task="digits", strategy=strategy, num_workers=workers, num_servers=servers, **given)


def stages(strategy: str, count: int, replicas: int, faults: str = "", servers: int = 2, **settings: Any) -> RunConfig:
    """Return a run of a model in `count` stages, placed by hand: a measured placement would differ from run to run."""
    task = Shaped("chain", samples=48)
    return RunConfig(
        task="tests.stage_tasks:Shaped",
        task_settings={"name": "chain", "samples": 48},
        strategy=strategy,
        strategy_settings=settings,
        num_workers=count * replicas,
        num_servers=servers,
        runtime="sim",
        epochs=2,
        sim=SimSettings(faults=faults),
        stage_plan=planned(task, count, kind="pipeline"),
    )


def configurations() -> Mapping[str, RunConfig]:
    return {
        "downpour": digits("downpour", 5),
        "downpour_evaluated": digits("downpour", 3, eval_every_s=0.02),
        "sync": digits("sync"),
        "stale_sync": digits("stale_sync"),
        "adaptive_bound": digits("adaptive_bound"),
        "soft_sync": digits("soft_sync"),
        "bounded_delay": digits("bounded_delay"),
        "sandblaster": digits("sandblaster", 3, strategy_settings=ITERATIONS),
        "conjugate_gradient": digits("conjugate_gradient", 3, strategy_settings=ITERATIONS),
        "single": digits("single", 1, 0),
        "hogwild": digits("hogwild", 3, 0),
        "worker_killed": digits("downpour", faults="0.03 kill worker 1\n0.05 pause worker 2 for 1"),
        "worker_late": digits(
            "sync",
            faults="0.01 crash worker 1\n0.05 start worker 1\n"
            "0.0 disk worker 0 by 4.0\n0.0 duplicate worker 0 > server 1 for 9.0",
        ),
        "server_lost": digits("downpour", faults="0.05 kill server 1"),
        "coordinator_restarted": digits(
            "sandblaster", 3, strategy_settings=ITERATIONS, faults="0.2 kill coordinator\n0.3 start coordinator"
        ),
        "shared_cores": digits("downpour", sim=SimSettings(model=CORES), eval_every_s=0.02),
        "time_only": digits("downpour", 20, sim=SimSettings(time_only=True)),
        "aggregated": digits("downpour", 50, sim=SimSettings(time_only=True, aggregated=True)),
        "aggregated_sync": digits("sync", 50, sim=SimSettings(time_only=True, aggregated=True)),
        "stages_downpour": stages("downpour", 2, 3),
        "stages_sync": stages("sync", 3, 2),
        "stages_single": stages("single", 3, 1, servers=0, lr=0.05),
        "stages_worker_killed": stages("downpour", 3, 2, faults="0.05 kill worker 4"),
        "pipedream": stages("pipedream", 3, 1, servers=0, lr=0.05),
        "pipedream_double_buffered": stages("pipedream", 3, 1, servers=0, lr=0.05, pipedream_2bw=True),
    }


def outcome_of(config: RunConfig) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        result = run(msgspec.structs.replace(config, directory=directory), lambda event: None)
        model = Path(directory) / "model.safetensors"
        return Outcome(
            trace_hash=result.trace_hash,
            model_hash=xxhash.xxh3_64_hexdigest(model.read_bytes()) if model.exists() else "",
            outcome=result.outcome,
            samples=result.samples,
            seconds=round(result.seconds, 9),
            metrics=result.metrics,
        )


def arithmetic() -> str:
    """Return a hash of what this machine's torch computes: other processors give other last bits."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(64, 64, generator=generator, requires_grad=True) for _ in range(3)]
    values = torch.randn(32, 64, generator=generator)
    for layer in layers:
        values = torch.tanh(values @ layer / 8)
    torch.nn.functional.cross_entropy(values, torch.arange(32)).backward()
    return xxhash.xxh3_64_hexdigest(
        b"".join(layer.grad.numpy().tobytes() for layer in layers if layer.grad is not None)
    )


class Stored(msgspec.Struct, frozen=True):
    """The outcomes, and the arithmetic of the machine that recorded them."""

    arithmetic: str
    runs: dict[str, Outcome]


def stored() -> Stored:
    return msgspec.json.decode(FILE.read_bytes(), type=Stored)


def main() -> None:
    found = {name: outcome_of(config) for name, config in configurations().items()}
    for name, outcome in found.items():
        print(f"{name:26s} {outcome.trace_hash} {outcome.model_hash or '-':16s} {outcome.outcome} {outcome.metrics}")
    if "--record" in sys.argv:
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(Stored(arithmetic(), found)), indent=1) + b"\n")


if __name__ == "__main__":
    main()
