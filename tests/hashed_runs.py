"""Seeded simulated runs whose results must survive every change that is meant to change nothing.

`python -m tests.hashed_runs` prints their hashes; `--record` stores those of new runs, `--record NAME ...` those of
the named ones too. Record a run again only with a change that is meant to change results, in a commit of its own that
says why.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import xxhash

from rainband.runtimes.config import RunConfig, SimSettings
from rainband.runtimes.simulation.models.trace import Trace
from rainband.runtimes.simulation.run import run
from tests.stage_tasks import Shaped, planned

FILE = Path(__file__).parent / "data" / "hashed_runs.json"
CORES = str(Path(__file__).parent / "data" / "cores.toml")
ITERATIONS = {"iterations": "3"}
SLOW = SimSettings(compute={"step_s": 0.4})  # so that a run of seconds has several ticks of the divergence guard

# Runs whose order of messages depends on values: the guard and a line search decide by the loss.
DECIDED_BY_VALUES = {
    *("adaptive_bound_loosened", "adaptive_bound_tightened", "guard_lowers_lr", "guard_after_momentum"),
    *("sandblaster", "conjugate_gradient", "coordinator_restarted"),
}
HOT_IN_BOUNDS = {"optimizer": "adagrad", "lr": "0.3", "warmup_fraction": "0.9"}
HOT_WITH_MOMENTUM = {"optimizer": "sgd", "lr": "0.2", "momentum": "0.9"}
COMPENSATED = {"optimizer": "sgd", "lr": "0.05", "compensation": "1.0", "compensation_decay": "0.95"}
SCHEDULED = {"lr_schedule": "cosine", "warmup_fraction": "0.2", "momentum": "0.9"}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that must stay equal: the schedule of messages, the results, and the bytes of the saved model."""

    trace_hash: str = ""
    model_hash: str = ""
    outcome: str
    samples: int
    seconds: float = 0.0
    metrics: dict[str, float] = {}
    order_hash: str = ""  # of the messages alone: the trace's hash covers the final parameters, too

    def without_values(self, name: str) -> Outcome:
        """Return the facts that are equal on a processor that rounds differently; the others are empty."""
        if name in DECIDED_BY_VALUES:
            by_guard = name not in ("sandblaster", "conjugate_gradient", "coordinator_restarted")
            return Outcome(outcome=self.outcome, samples=self.samples if by_guard else 0)
        return Outcome(outcome=self.outcome, samples=self.samples, order_hash=self.order_hash, seconds=self.seconds)


def digits(strategy: str, workers: int = 4, servers: int = 2, faults: str = "", **given: Any) -> RunConfig:
    if strategy not in ("sandblaster", "conjugate_gradient"):
        given.setdefault("epochs", 1)
    given.setdefault("sim", SimSettings(faults=faults))
    if strategy == "sync":
        given["strategy_settings"] = {"batch_per_worker": "true", **given.get("strategy_settings", {})}
    if strategy == "downpour":
        given["strategy_settings"] = {"overlap": "true", **given.get("strategy_settings", {})}
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
        "adaptive_bound_loosened": digits("adaptive_bound", epochs=2, sim=SLOW),
        "adaptive_bound_tightened": digits("adaptive_bound", epochs=4, sim=SLOW, strategy_settings=HOT_IN_BOUNDS),
        "guard_lowers_lr": digits("downpour", epochs=3, sim=SLOW, strategy_settings={"lr": "0.3"}),
        "guard_after_momentum": digits("downpour", epochs=4, sim=SLOW, strategy_settings=HOT_WITH_MOMENTUM),
        "compensation": digits("downpour", strategy_settings=COMPENSATED),
        "compensation_in_bounds": digits("stale_sync", strategy_settings={"compensation": "2.0"}),
        "backup_workers": digits(
            "sync",
            strategy_settings={"backup_workers": "1"},
            sim=SimSettings(compute={"kind": "exponential", "step_s": 0.01}),
        ),
        "n_push": digits("downpour", strategy_settings={"n_push": "3", "n_fetch": "2"}),
        "n_push_in_bounds": digits("stale_sync", strategy_settings={"n_push": "3"}),
        "schedule": digits("sync", strategy_settings=SCHEDULED),
        "schedule_asynchronous": digits("downpour", strategy_settings={**SCHEDULED, "optimizer": "sgd", "lr": "0.02"}),
        "schedule_single": digits("single", 1, 0, strategy_settings=SCHEDULED),
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
        "shared_batches": digits("sync", 3, 0, strategy_settings={**SCHEDULED, "batch_per_worker": "false"}),
        "shared_batches_faults": digits(
            "sync",
            4,
            0,
            strategy_settings={"batch_per_worker": "false"},
            failure_timeout_s=0.5,
            faults="0.03 kill worker 1\n0.05 pause worker 2 for 1\n0.06 crash worker 0\n0.3 start worker 1",
        ),
        "downpour_in_step": digits("downpour", strategy_settings={"overlap": "false"}),
        "stages_downpour": stages("downpour", 2, 3, overlap=True),
        "stages_sync": stages("sync", 3, 2, batch_per_worker=True),
        "stages_single": stages("single", 3, 1, servers=0, lr=0.05),
        "stages_worker_killed": stages("downpour", 3, 2, faults="0.05 kill worker 4", overlap=True),
        "pipedream": stages("pipedream", 3, 1, servers=0, lr=0.05),
        "pipedream_double_buffered": stages("pipedream", 3, 1, servers=0, lr=0.05, pipedream_2bw=True),
    }


def outcome_of(config: RunConfig) -> Outcome:
    orders: list[str] = []
    hash_values = Trace.values

    def note_order(trace: Trace, data: bytes) -> None:
        hash_values(trace, b"")
        orders.append(trace.hasher.hexdigest())
        trace.hasher.update(data)

    with tempfile.TemporaryDirectory() as directory, patch.object(Trace, "values", note_order):
        result = run(msgspec.structs.replace(config, directory=directory), lambda event: None)
        model = Path(directory) / "model.safetensors"
        return Outcome(
            trace_hash=result.trace_hash,
            model_hash=xxhash.xxh3_64_hexdigest(model.read_bytes()) if model.exists() else "",
            outcome=result.outcome,
            samples=result.samples,
            seconds=round(result.seconds, 9),
            metrics=result.metrics,
            order_hash=orders[0] if orders else result.trace_hash,
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
        before = stored()
        kept = {name: old for name, old in before.runs.items() if name in found and name not in sys.argv}
        if kept and before.arithmetic != arithmetic():  # of new runs, store what is equal on all processors
            print("this processor rounds differently from the one that recorded the other runs")
            found = {name: outcome.without_values(name) for name, outcome in found.items()}
        after = Stored(
            before.arithmetic if kept else arithmetic(),
            {name: kept.get(name, outcome) for name, outcome in found.items()},
        )
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(after), indent=1) + b"\n")


if __name__ == "__main__":
    main()
