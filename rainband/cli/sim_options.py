"""The options of `rainband train` for virtual time and for what a run notes, checked before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rainband.plugins import load_strategy
from rainband.runtimes.config import RunConfig, coordination_of
from rainband.runtimes.simulation.models.cluster_model import load_model
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.faults import parse
from rainband.settings import build, parse_pairs

COMPUTE = "compute."  # before settings of how long gradients take: compute.step_s=0.05


def in_virtual_time(
    config: RunConfig,
    network: str | None,
    time_only: bool,
    steps: int | None,
    compute: Sequence[str],
    faults: Path | None,
) -> RunConfig:
    """The run with what was typed about virtual time; what is wrong with it is told here."""
    typed = {
        "--network": network is not None,
        "--time-only": time_only,
        "--steps": steps is not None,
        "--faults": faults is not None,
    }
    pairs = parse_pairs([word.removeprefix(COMPUTE) for word in compute])
    if config.runtime != "sim":
        if asked := [option for option, given in typed.items() if given]:
            raise ValueError(f"{asked[0]} is for virtual time: add --runtime sim.")
        return _at_a_pace(config, pairs)
    sim = msgspec.structs.replace(
        config.sim,
        model=network or config.sim.model,
        time_only=time_only or config.sim.time_only,
        steps=steps or config.sim.steps,
        compute={**config.sim.compute, **pairs},
        faults=config.sim.faults if faults is None else faults.read_text(encoding="utf-8"),
    )
    if sim.steps is not None and not sim.time_only:
        raise ValueError("--steps is for --time-only; with gradients the data says how many there are: use --epochs.")
    if sim.time_only and config.num_servers == 0:
        raise ValueError(f"{config.strategy} has no servers, so there are no messages to time: leave out --time-only.")
    if sim.time_only and _is_led(config):
        raise ValueError(f"what {config.strategy} does next depends on the loss: leave out --time-only.")
    load_model(sim.model, sim.compute)
    if parse(sim.faults) and sim.time_only:
        raise ValueError("--faults is for runs with gradients: leave out --time-only.")
    return msgspec.structs.replace(config, sim=sim)


def _is_led(config: RunConfig) -> bool:
    return coordination_of(load_strategy(config.strategy, config.strategy_settings)) is not None


def _at_a_pace(config: RunConfig, pairs: dict[str, str]) -> RunConfig:
    """Real steps that take as long as was typed, at least: as on a slower device, or with one slow worker."""
    if not pairs:
        return config
    settings = {**config.sim.compute, **pairs}
    build(ComputeModel, settings)  # what is wrong with them is told here
    return msgspec.structs.replace(config, sim=msgspec.structs.replace(config.sim, compute=settings))


def noted(config: RunConfig, record: bool, timeline: bool) -> RunConfig:
    """The run with what was typed about the notes it makes."""
    if record and not config.num_servers:
        raise ValueError(f"{config.strategy} has no servers, and it is their order that is noted: leave out --record.")
    if record and config.runtime == "sim":
        raise ValueError("a run in virtual time needs no --record: rainband replay repeats it from its seed.")
    if record and _is_led(config):
        raise ValueError(
            f"--record is for asynchronous runs, and {config.strategy} goes by iterations: run it in virtual time "
            "(--runtime sim), and rainband replay repeats it bit for bit."
        )
    if record and config.transport == "shm":
        raise ValueError(
            "--record needs reads of one version, and shared memory may change while it is read: "
            "leave out --transport shm."
        )
    return msgspec.structs.replace(config, record=record or config.record, timeline=timeline or config.timeline)
