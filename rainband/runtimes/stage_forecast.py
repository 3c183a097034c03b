"""The prediction for a run in stages: its schedule, microbatches, replicas, runtime and network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rainband.model_parallel.placement.profile import LinkSpeed
from rainband.model_parallel.schedules.forecast import NEVER_FLUSHED, PARTITION, Forecast, as_batch
from rainband.protocol import events
from rainband.runtimes.configure import usable_cores
from rainband.runtimes.simulation.message_bus import HEADER_BYTES

if TYPE_CHECKING:
    from rainband.model_parallel.placement.stage_plan import StagePlan
    from rainband.runtimes.config import RunConfig
    from rainband.runtimes.simulation.models.cluster_model import ClusterModel
    from rainband.strategy import Strategy

# Measured with `rainband bench peers` on one machine: 64 kB in 0.26 ms, 64 MB in 17 ms; over TCP 0.38 and 65 ms.
ONE_MACHINE = LinkSpeed(bytes_per_s=4e9, latency_s=200e-6)  # shared memory: a copy, and waking another process
BY_TCP = LinkSpeed(bytes_per_s=1e9, latency_s=300e-6)


def predicted_of(
    config: RunConfig, strategy: Strategy, model: ClusterModel | None = None
) -> events.PipelinePredicted | None:
    """Return the prediction; None if every worker computes the whole model, or nothing was measured."""
    if config.stage_plan is None:
        return None
    forecast = forecast_of(config, _schedule(config.stage_plan, strategy), model)
    if forecast is None:
        return None
    cores = model.nodes.cores if model is not None else usable_cores()
    batches_per_s = config.num_replicas / forecast.batch_s
    if cores:  # with fewer cores than workers, workers compute in turns
        batches_per_s = min(batches_per_s, cores / forecast.alone_s)
    return events.PipelinePredicted(
        at_s=0.0,
        samples_per_s=batches_per_s * forecast.profile.batch_size,
        busy=batches_per_s * forecast.alone_s / config.num_workers,
        batch_s=forecast.batch_s,
        schedule=forecast.schedule,
        microbatches=forecast.microbatches,
        stages=tuple(events.StagePredicted(*submodel) for submodel in forecast.shares),
        left_out=tuple(_left_out(config, forecast, model)),
    )


def forecast_of(config: RunConfig, schedule: str, model: ClusterModel | None = None) -> Forecast | None:
    """Return the forecast. `schedule`: of the pipeline, or PARTITION; `model`: of a simulation."""
    stage_plan = config.stage_plan
    if stage_plan is None or stage_plan.profile is None:
        return None
    profile, network = stage_plan.profile, BY_TCP if config.transport == "tcp" else ONE_MACHINE
    alone_s = profile.seconds(profile.names)
    if not alone_s:
        return None
    microbatches = 1 if schedule in NEVER_FLUSHED else min(stage_plan.microbatches, profile.batch_size)
    if schedule == "interleaved":  # it deals whole rounds, even if some microbatches of one have no samples
        microbatches = stage_plan.microbatches
    if model is not None:  # a simulated gradient takes the time of the compute model
        profile = profile.scaled(model.compute.mean_s / alone_s)
        network = _as_simulated(model)
    elif microbatches > 1 and stage_plan.microbatch_profile is not None:
        profile = as_batch(stage_plan.microbatch_profile, profile.batch_size)
    return Forecast(stage_plan.plan, profile, schedule, microbatches, network)


def _schedule(stage_plan: StagePlan, strategy: Strategy) -> str:
    if stage_plan.plan.kind == "partition":
        return PARTITION
    versions = strategy.requires.stages
    if versions is None:
        return stage_plan.schedule
    return "pipedream_2bw" if versions.pipedream_2bw else "pipedream"


def _as_simulated(model: ClusterModel) -> LinkSpeed:
    """Return the link with the header's time and the mean jitter added to its latency."""
    network = model.network
    header_s = HEADER_BYTES / network.bytes_per_s
    return LinkSpeed(bytes_per_s=network.bytes_per_s, latency_s=network.latency_s + network.jitter_s + header_s)


def _left_out(config: RunConfig, forecast: Forecast, model: ClusterModel | None) -> list[str]:
    left_out = ["reading data", "the loss", "updates"] if model is None else []
    if config.num_servers:
        left_out.append("servers")
    if model is not None and model.compute.slow_workers:
        left_out.append("slow workers")
    if model is not None and model.network.rack_size:
        left_out.append("racks")
    if model is None and forecast.profile.counted:
        left_out.append("the speed of this machine (the model was built without values, so nothing was measured)")
    return left_out
