"""The configuration of a run, as config.json has it and as every process receives it in inherited memory."""

from __future__ import annotations

from typing import Any

import msgspec

from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.options import OptionError, RunOptions, opt
from rainband.protocol.messages import Address, Dataset
from rainband.strategy import Requirements
from rainband.tasks.task import Data, Task, drops_last, fingerprint
from rainband.transports.tls.certificate import Certificate


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a simulation: runtime="sim"."""

    model: str = "lan"  # a network by name, or a TOML file of `rainband calibrate`
    compute: dict[str, Any] = {}  # settings of the compute model, which override those of the file
    time_only: bool = False  # simulate timing without gradients
    steps: int | None = None  # per worker, time only; None: as many as the task's data has
    aggregated: bool | None = None  # time only: simulate all servers as one; None: if there are very many
    faults: str = ""  # a fault script: see runtimes/simulation/models/faults.py
    trace: bool = False  # write every message to trace.jsonl in the run's directory


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run on a Ray cluster: runtime="ray"."""

    address: str = ""  # of the cluster; none: that of RAY_ADDRESS, or Ray is started on this machine
    max_workers: int | None = None  # workers that join as soon as the cluster has room; None: no more than num_workers
    worker_resources: dict[str, float] = {}  # what Ray reserves for each worker; none: as many CPUs as it has threads
    server_resources: dict[str, float] = {}  # none: one CPU
    runtime_env: dict[str, Any] = {}  # of Ray: packages to install, variables of the environment

    def worker_needs(self, threads: int) -> dict[str, float]:
        return {"CPU": float(threads), **self.worker_resources}

    def server_needs(self) -> dict[str, float]:
        return {"CPU": 1.0, **self.server_resources}


# size: one field for each option of a run, which config.json lists side by side
class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One run: its task, its strategy and its options. It has no secrets."""

    task: str
    task_settings: dict[str, Any] = {}
    strategy: str
    strategy_settings: dict[str, Any] = {}
    num_workers: int
    num_servers: int
    runtime: str = "processes"
    batch_size: int | None = None  # None: the task's own
    drop_last: bool = False  # leave out short batches, also if the task does not
    epochs: int | None = None
    seed: int = 0
    transport: str = "auto"
    codec: str = ""  # with which workers encode what they send; none: it is sent as it is
    pull_codec: str = ""  # with which servers encode the parameters that they send
    eval_every_s: float = 10.0  # seconds between evaluations on one worker; 0: only at the end
    target: str = ""  # METRIC=VALUE at which the run ends; none: all data is processed
    failure_timeout_s: float = 5.0
    stuck_timeout_s: float = 600.0  # how long these workers wait for one that sends heartbeats
    threads: int = 1  # torch threads of each worker
    microbatches: int = 1  # of each batch, where workers have the whole model; of stages, their plan says it
    parts: str = "speed"  # of batches that workers share: in proportion to their speeds, or "equal"
    directory: str = ""
    script: str = ""  # with a custom training loop, and its arguments; then `task` is only its name
    arguments: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()  # module:Class of optimizers that servers may import
    listen: str = ""  # HOST:PORT where other machines join; none: the run has one machine
    advertise: str = ""  # HOST or HOST:PORT that other machines connect to; none: that of `listen`
    copies: int = 1  # of each server
    min_workers: int = 0  # that must have joined before the run begins
    num_local: int | None = None  # workers of this machine; None: all
    from_weights: str = ""  # a safetensors file with the initial weights; none: the task's own
    checkpoint_every_s: float = 0.0  # 0: no checkpoints
    keep: int = 3  # checkpoints; older ones are removed
    checkpoints: str = ""  # URL or folder; none: in the run's directory
    resume_from: str = ""  # the checkpoint from which the run continues
    force: bool = False  # continue although the data or the settings differ
    timeline: bool = False  # record spans of computing, waiting, pushing and pulling; simulations always do
    record: bool = False  # record the order of pushes and pulls, so that the run can be repeated bit for bit
    message_cost: bool = False  # write processor times, for rainband calibrate
    sim: SimSettings = SimSettings()
    ray: RaySettings = RaySettings()
    stage_plan: StagePlan | None = None  # how the workers of a replica share a model; None: each worker has all of it

    @property
    def equal_parts(self) -> bool:
        return self.parts == "equal"

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the model that are trained in parallel."""
        return self.num_workers // (self.stage_plan.size if self.stage_plan else 1)


class Door(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which other machines reach a node, which inherits the listening socket."""

    host: str
    port: int
    certificate: Certificate | None = None  # None: only processes of this machine can reach it


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a run, and the keys with which it authenticates. It is never written to a file.

    The files that it inherits are, at the end: `memory`, `group_files`, `round_files`, the socket of `door`.
    """

    role: str
    index: int
    run_id: bytes
    keys: dict[str, bytes]  # of its own role, and of those that may connect to it
    coordinator: Address
    config: RunConfig
    incarnation: int = 0
    machine: str = ""  # the name of the machine that it runs on
    shows_errors: bool = False  # prints them, also, because the display of the run is on another machine
    remote: bool = False  # that is not the machine of the run, which has the run's directory
    door: Door | None = None  # where a server accepts connections from other machines
    memory: bool = False  # the last inherited file is the memory for the parameters of all workers
    group_files: int = 0  # number of files for all-reduces, which come before those
    round_files: int = 0  # number of files for rounds of split batches, which are the last inherited ones


# Made here, and not by the first use: msgspec crashes if two threads are the first ones to decode a type.
_job_decoder = msgspec.msgpack.Decoder(Job)


def decode_job(data: bytes) -> Job:
    return _job_decoder.decode(data)


def encode_job(job: Job) -> bytes:
    return msgspec.msgpack.encode(job)


RAY_FIELDS = ("address", "max_workers", "worker_resources", "server_resources", "runtime_env")


def ray_settings(base: RaySettings, options: RunOptions) -> RaySettings:
    """Return the settings of an earlier run with the options that were given."""
    changed = {name: options[name] for name in RAY_FIELDS if name in options}  # type: ignore[literal-required]
    return msgspec.structs.replace(base, **changed)


def check_ray(options: RunOptions, name: str, requires: Requirements) -> None:
    """Raise if an option is for Ray only, or if a run on a Ray cluster cannot have it."""
    if options.get("runtime") != "ray":
        for name in RAY_FIELDS:
            if name in options:
                raise OptionError(f"{opt(name)} requires {opt('runtime', 'ray')}.")
        return
    if options.get("timeline"):
        raise OptionError(f"{opt('timeline', True)} is for one machine, so omit it with {opt('runtime', 'ray')}.")
    most, workers = options.get("max_workers"), options["workers"] or 0
    if most is not None and most < workers:
        raise OptionError(f"{opt('max_workers', most)} must be at least {opt('workers', workers)}.")
    for needs in ("worker_resources", "server_resources"):
        for resource, amount in (options.get(needs) or {}).items():  # type: ignore[attr-defined]
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount >= 0:
                raise OptionError(f"{opt(needs)}: {resource}={amount} must be a number of at least 0.")


def dataset_of(task: Task, data: Data, config: RunConfig) -> Dataset:
    """Return the description of a task's data with the options of this run."""
    batch_size, drop_last = config.batch_size or task.batch_size, config.drop_last or drops_last(task)
    if drop_last and len(data) < batch_size:
        raise ValueError(
            f"no batch is left: with drop_last, the batch size must be at most {len(data)}, the samples of an epoch, "
            f"and it is {batch_size}."
        )
    return Dataset(fingerprint(data), len(data), batch_size, config.epochs or task.epochs, drop_last)
