"""Pipelines beat data parallelism on VGG-16, and on ResNet-50 they do not (Narayanan et al. 2019).

The models have their real shapes. Times are computed, not measured: operations of each layer at a given rate.
PipeDream's dynamic program places the models on sixteen machines, four per server with a fast network inside; the
network between servers varies from slow to fast. The script compares the time of a batch with that of data parallelism,
in its best case: ring all-reduces, first in each server and then between servers, that overlap completely with
computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from rainband.model_parallel.placement.pipedream_planner import pipedream
from rainband.model_parallel.placement.placement import PlacedStage, Placement
from rainband.model_parallel.placement.predict import predicted
from rainband.model_parallel.placement.profile import LinkSpeed, Profile, Resources
from rainband.model_parallel.schedules.builders import pipedream as table_of
from rainband.model_parallel.schedules.check import Costs
from rainband.model_parallel.schedules.check import check as play
from reproduce.claim import Check, Claim, Method, Values
from reproduce.image_nets import profile_of

TERAFLOPS = (7, 14)  # a V100 peaks at 14 in float32, and often reaches half of it
BATCH_SIZES = {"VGG-16": 64, "ResNet-50": 128}  # of one machine
MACHINES, PER_SERVER = 16, 4
INSIDE_BYTES_PER_S = 10e9
GBITS = (1, 2.5, 5, 10, 25, 50)  # between servers
MAIN_TERAFLOPS, MAIN_GBIT = 14, 10
MICROS = 400  # simulated to measure the rate


def cluster(gbit: float) -> Resources:
    network = LinkSpeed(
        bytes_per_s=INSIDE_BYTES_PER_S,
        latency_s=20e-6,
        machines_per_group=PER_SERVER,
        between_bytes_per_s=gbit * 1e9 / 8,
        between_latency_s=50e-6,
    )
    return Resources(num_machines=MACHINES, network=network)


def data_parallel(numbers: Profile, resources: Resources) -> Placement:
    """Return the placement with the whole model on every machine."""
    everything = PlacedStage(tuple(range(MACHINES)), numbers.names)
    plan = Placement(
        model=numbers.model, kind="pipeline", partitioner="none", num_machines=MACHINES, stages=(everything,)
    )
    return predicted(plan, numbers, resources)


def batch_s(plan: Placement) -> float:
    assert plan.predicted is not None
    return plan.predicted.batch_s


def played_s(plan: Placement, numbers: Profile) -> float:
    """Return the seconds per batch of the simulated schedule, without communication, to check the formula."""
    units = [[numbers.by_name[name] for name in stage.units] for stage in plan.stages]
    costs = Costs(
        forward_s=tuple(sum(unit.forward_s for unit in stage) for stage in units),
        backward_s=tuple(sum(unit.backward_s for unit in stage) for stage in units),
    )
    half, full = (
        play(table_of(plan.replicas(), microbatches), costs).total_s for microbatches in (MICROS // 2, MICROS)
    )
    return (full - half) / (MICROS - MICROS // 2)


def sent_bytes(plan: Placement, numbers: Profile) -> float:
    """Return the bytes all machines send per batch: gradients and parameters of replicas, and values between stages."""
    assert plan.predicted is not None
    replicated = [(len(stage.machines), numbers.parameter_bytes(stage.units)) for stage in plan.stages]
    return sum(2 * (m - 1) / m * size for m, size in replicated) + plan.predicted.crossing_bytes


@cache
def profile(net: str, teraflops: float) -> Profile:
    return profile_of(net, BATCH_SIZES[net], teraflops * 1e12)


@dataclass(frozen=True)
class Compared:
    plan: Placement
    shape: str  # machines of each stage: 15-1; of data parallelism: 16
    images_per_s: float
    gain: float  # over data parallelism
    saved: float  # of the bytes that data parallelism sends


def compare(net: str, teraflops: float, gbit: float) -> Compared:
    numbers, resources = profile(net, teraflops), cluster(gbit)
    plan, everywhere = pipedream(numbers, resources), data_parallel(numbers, resources)
    return Compared(
        plan,
        shape="-".join(map(str, plan.replicas())),
        images_per_s=BATCH_SIZES[net] / batch_s(plan),
        gain=batch_s(everywhere) / batch_s(plan),
        saved=1 - sent_bytes(plan, numbers) / sent_bytes(everywhere, numbers),
    )


def point(seed: int, x: float, net: str, teraflops: float) -> Values:
    found = compare(net, teraflops, x)
    return {"gain": found.gain, "saved": 100 * found.saved, "stages": len(found.plan.stages)}


def at(net: str, measure: str) -> Any:
    return lambda r: r(f"{net}, {MAIN_TERAFLOPS} Tflop/s", measure, MAIN_GBIT)


CLAIM = Claim(
    paper="Narayanan et al. 2019",
    text="stages beat data parallelism on VGG-16, and ResNet-50 stays data-parallel",
    part="Model parallelism",
    methods=tuple(
        Method(f"{net}, {teraflops} Tflop/s", {"net": net, "teraflops": teraflops})
        for net in BATCH_SIZES
        for teraflops in TERAFLOPS
    ),
    tasks={"": {}},
    how="computation",
    repeated=False,
    point=point,
    x=GBITS,
    x_label="Gbit/s between servers of 4 of 16 machines",
    log_x=True,
    shown={"gain": "times as fast as data parallelism", "saved": "less traffic, %"},
    checks=(
        Check("VGG-16 at 10 Gbit/s", at("VGG-16", "gain"), above=1.2, unit="times as fast as data parallelism"),
        Check("VGG-16", at("VGG-16", "saved"), above=85.0, unit="% less traffic"),
        Check("ResNet-50 is placed as one stage", at("ResNet-50", "stages"), below=1.5, unit="stages", control=True),
    ),
)
