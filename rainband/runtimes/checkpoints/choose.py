"""The options of checkpoints: how often, where, and from which one a run continues."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from rainband.checkpoints.manifest import Manifest
from rainband.checkpoints.read import Checkpoint
from rainband.checkpoints.store import Store, is_url, open_store
from rainband.errors import BadCheckpoint
from rainband.options import OptionError, RunOptions, opt, seconds
from rainband.protocol.saved_state import begun_epochs, step_of
from rainband.runtimes.checkpoints.place import FOLDER, differences, find, store_of
from rainband.runtimes.config import RunConfig
from rainband.runtimes.run_directory import read_config
from rainband.views.history import find_run, is_locked

MODEL = "model.safetensors"
EVERY_S = 300.0  # unless the options say otherwise; of virtual time, there are none
Say = Callable[[str], None]


def with_checkpoints(config: RunConfig, given: RunOptions, say: Say) -> RunConfig:
    """Return the configuration with the options of checkpoints."""
    place = given.get("checkpoints") or config.checkpoints
    if place and not is_url(place):
        place = str(Path(place).absolute())
    if place.startswith("memory://") and config.runtime != "sim":
        raise OptionError(
            f"{opt('checkpoints', place)} is the memory of one process, which no other can read: give a folder, or a "
            "URL such as s3://bucket/folder."
        )
    if place:
        open_store(place)  # raises if nothing knows such URLs
    return msgspec.structs.replace(
        config,
        checkpoint_every_s=_every_s(config, given),
        keep=given.get("keep") or config.keep,
        checkpoints=place,
        force=bool(given.get("force")),
        resume_from=_resume_from(config, given, say),
        from_weights=_weights(config, given, say),
    )


def _weights(config: RunConfig, given: RunOptions, say: Say) -> str:
    """Return the file or the checkpoint with the initial weights; "" if the task makes them."""
    word = given.get("from_weights")
    if word is None:
        return "" if "resume" in given else config.from_weights
    if "resume" in given:
        raise OptionError(f"{opt('from_weights', word)} begins a new run, and {opt('resume')} continues one: omit one.")
    if config.stage_plan is not None:
        raise OptionError(f"{opt('from_weights', word)} is for workers with the whole model: omit it, or the stages.")
    if names_checkpoint(str(word)):
        return find(str(word) if is_url(str(word)) else str(Path(word).absolute()), say).place
    path = Path(word)
    if not path.exists():
        path = find_run(Path(given.get("runs") or "runs"), str(word))
    if path.is_dir() and not (path / MODEL).is_file() and _has_checkpoints(path):
        checkpoint = find(str(path.absolute()), say)
        say(f"{path} has no {MODEL}: beginning with the parameters of {checkpoint.place}")
        return checkpoint.place
    path = path / MODEL if path.is_dir() else path
    if not path.is_file():
        raise OptionError(
            f"{opt('from_weights', word)}: there is no {path}. Give a safetensors file, its folder, a run or "
            "a checkpoint."
        )
    if path.suffix != ".safetensors":
        raise OptionError(
            f"{opt('from_weights', word)} is not a safetensors file, and pickled files are not read, because they can "
            "run code. Write safetensors.torch.save_file(model.state_dict(), 'model.safetensors') where you made it."
        )
    return str(path.absolute())


def _has_checkpoints(path: Path) -> bool:
    return (path / FOLDER).is_dir() or any(step_of(inside.name) is not None for inside in path.iterdir())


def _every_s(config: RunConfig, given: RunOptions) -> float:
    every = given.get("checkpoint_every")
    if every is not None:
        return seconds("checkpoint_every", every)
    if config.checkpoint_every_s or config.runtime == "sim":
        return config.checkpoint_every_s
    return EVERY_S


def _resume_from(config: RunConfig, given: RunOptions, say: Say) -> str:
    """Return the checkpoint from which the run continues; "" if it begins anew."""
    if (run := given.get("resume")) is None:
        if given.get("force"):
            raise OptionError(f"{opt('force', True)} requires {opt('resume')}.")
        return ""
    runs = Path(given.get("runs") or "runs")
    say_if_running(str(run), runs, say)
    checkpoint = checkpoint_of(str(run), runs, say)
    differing, fixed = differences(checkpoint.manifest, config)
    if fixed:
        raise OptionError(
            f"{opt('resume', run)} is a checkpoint of another run: {'; '.join([*fixed, *differing])}. Use the same, or "
            f"begin a new run with its parameters: {opt('from_weights', run)}."
        )
    if differing:
        if not given.get("force"):
            raise OptionError(
                f"{opt('resume', run)} is a checkpoint of another run: {'; '.join(differing)}. Use the same, or add "
                f"{opt('force', True)} to continue with the new values."
            )
        say(f"continuing although {'; '.join(differing)}")
    _check_epochs(checkpoint.manifest, config.epochs, str(run))
    return checkpoint.place


def _check_epochs(manifest: Manifest, epochs: int | None, run: str) -> None:
    """Raise if the run is to end before batches that the checkpoint has."""
    if epochs is None or manifest.plan.coordinated:
        return
    begun = begun_epochs(manifest.plan, manifest.step, manifest.blocks)
    if epochs < begun:
        raise OptionError(
            f"{opt('epochs', epochs)}: {run} has {manifest.step:,} batches, some of them of epoch {begun}, so it "
            f"cannot end before. Type {opt('epochs', begun)} or more, or begin a new run: {opt('from_weights', run)}."
        )


def names_checkpoint(word: str) -> bool:
    """Return True for one checkpoint, or a URL: no run has such a name."""
    return is_url(word) or step_of(word.rstrip("/").rpartition("/")[2]) is not None


def store_with(run: str, runs: Path) -> Store:
    """Return the place with the checkpoints of a run, or the folder or URL that is given."""
    if is_url(run):
        return open_store(run)
    path = Path(run) if Path(run).is_dir() else find_run(runs, run)
    if not (path / "config.json").is_file():
        return open_store(str(path))
    return store_of(read_config(path), path)


def say_if_running(run: str, runs: Path, say: Say) -> None:
    """Warn if the run that is to be continued has not ended: both would train on."""
    if is_url(run) or names_checkpoint(run):
        return
    path = Path(run) if Path(run).is_dir() else find_run(runs, run)
    if (path / "config.json").is_file() and is_locked(path / "events.jsonl"):
        say(f"{run} is still running, and both runs train on from here: end it (Ctrl-C) if you want only one.")


def checkpoint_of(run: str, runs: Path, say: Say) -> Checkpoint:
    """Return the newest valid checkpoint of a run, or the one that is named.

    Raise ValueError if there is none, and BadCheckpoint if all are damaged.
    """
    is_one = step_of(run.rstrip("/").rpartition("/")[2]) is not None
    is_folder = Path(run).is_dir() and not (Path(run) / "config.json").exists()
    if not (is_url(run) or is_one or is_folder):
        run = str(find_run(runs, run))
    try:
        return find(run if is_url(run) else str(Path(run).absolute()), say)
    except BadCheckpoint as error:
        if is_one:
            raise
        raise BadCheckpoint(error.file, f"{error.why}. {run} has no other checkpoint that is valid") from None
