"""The place where a run writes its checkpoints, and the checkpoint from which it continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rainband.checkpoints.manifest import Manifest, RunFacts
from rainband.checkpoints.read import Checkpoint, all_names, newest
from rainband.checkpoints.store import Store, is_url, open_store
from rainband.coordinator.journal import samples_of_results
from rainband.protocol.saved_state import Restore, step_of
from rainband.runtimes.config import RunConfig
from rainband.runtimes.run_directory import read_config

FOLDER = "checkpoints"
WORKER_FILE = "worker.safetensors"  # of the worker with rank 0 in its replica
COORDINATOR_FILE, RESULTS = "coordinator.safetensors", "results"  # of commands; the name of its tensor


def store_of(config: RunConfig, moved_to: Path | None = None) -> Store:
    """Return the place of a run's checkpoints: its directory, or its own folder below a URL or path.

    `moved_to`: where the run's directory is now, perhaps under another name.
    """
    if not config.checkpoints:
        return open_store(str((moved_to or Path(config.directory)) / FOLDER))
    return open_store(f"{config.checkpoints.rstrip('/')}/{Path(config.directory).name}")


def worker_file(worker: int, workers_per_replica: int) -> str:
    """Return the name of a worker's file: several, if they compute one model together, each have a part of it."""
    rank = worker % workers_per_replica if workers_per_replica > 1 else 0
    return f"worker-{rank}.safetensors" if rank else WORKER_FILE


def find(place: str, tell: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint to continue from: one by its folder, or the newest valid one of a run or of a folder.

    `tell` gets a sentence about each damaged one that is passed over.
    """
    parent, _, name = place.rstrip("/").rpartition("/")
    if step_of(name) is not None:
        checkpoint = Checkpoint(open_store(parent or "."), name)
        checkpoint.verify()
        return checkpoint
    if not is_url(place):
        path = Path(place)
        if (path / "config.json").is_file():
            config = read_config(path)
            store = store_of(config, path)
            if config.resume_from and not all_names(store):
                tell(f"{path} has no checkpoint of its own yet: continuing from the one that it began with.")
                return find(config.resume_from, tell)
            return newest(store, tell)
        if not path.is_dir():
            raise ValueError(f"there is no run or checkpoint {place}: type rainband runs to list the runs, or a path.")
        if (path / FOLDER).is_dir():
            return newest(open_store(str(path / FOLDER)), tell)
    return newest(open_store(place), tell)


def opened(place: str) -> Checkpoint:
    """Return a checkpoint that was found and verified before."""
    parent, _, name = place.rstrip("/").rpartition("/")
    return Checkpoint(open_store(parent or "."), name)


def restore_of(config: RunConfig) -> Restore | None:
    """Return from what a run continues; None: it begins anew."""
    if not config.resume_from:
        return None
    checkpoint = opened(config.resume_from)
    manifest, commands = checkpoint.manifest, checkpoint.manifest.commands
    results = b"" if commands is None else checkpoint.file(commands.file).content(RESULTS)
    return Restore(
        place=config.resume_from,
        step=manifest.step,
        plan=manifest.plan,
        layout=manifest.layout,
        num_replicas=manifest.num_replicas,
        blocks=manifest.blocks,
        samples=samples_of_results(results) if results else manifest.plan.samples_of(manifest.step),
        results=results,
        force=config.force,
    )


def facts_of(config: RunConfig) -> RunFacts:
    return RunFacts(
        run=Path(config.directory).name,
        task=config.task,
        task_settings=config.task_settings,
        strategy=config.strategy,
        strategy_settings=config.strategy_settings,
        num_workers=config.num_workers,
        num_servers=config.num_servers,
        script=config.script,
        seed=config.seed,
        config=msgspec.to_builtins(config, str_keys=True),
    )


def differences(manifest: Manifest, config: RunConfig) -> tuple[list[str], list[str]]:
    """Return in what a run differs from the one that a checkpoint is of, with both sides.

    First what can be forced, then what cannot: the state of another strategy or optimizer is another one, and the batch
    size decides which batches there are.
    """
    there, here = manifest.facts, facts_of(config)
    forced: dict[str, tuple[object, object]] = {
        "the task": (there.task, here.task),
        **_pairs("the task's setting", there.task_settings, here.task_settings),
        "the seed": (there.seed, here.seed),
    }
    fixed: dict[str, tuple[object, object]] = {
        "the strategy": (there.strategy, here.strategy),
        "the optimizer": (there.strategy_settings.get("optimizer"), here.strategy_settings.get("optimizer")),
        "the batch size": (manifest.plan.batch_size, config.batch_size or manifest.plan.batch_size),
    }
    if there.strategy == here.strategy:  # otherwise its settings are others, too
        forced |= _pairs("the setting", there.strategy_settings, here.strategy_settings)
        forced.pop("the setting optimizer", None)
    else:
        del fixed["the optimizer"]
    return _differing(forced), _differing(fixed)


def _pairs(what: str, there: dict[str, Any], here: dict[str, Any]) -> dict[str, tuple[object, object]]:
    return {f"{what} {name}": (there.get(name), here.get(name)) for name in (there | here)}


def _differing(pairs: dict[str, tuple[object, object]]) -> list[str]:
    return [
        f"{what} was {was}, now it is {now}"
        for what, (was, now) in pairs.items()
        if was != now and str(was) != str(now)
    ]
