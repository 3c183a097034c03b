"""What every process of a run is told when it starts. It travels from the launcher through inherited memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rainband.model_parallel.placement.stage_plan import StagePlan
from rainband.protocol.messages import Address

if TYPE_CHECKING:
    from rainband.strategy import Strategy


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How virtual time passes, for the world `sim`."""

    model: str = "lan"  # a network by name, or a TOML file with all models
    compute: dict[str, Any] = {}  # settings of the compute model, on top of the file's
    time_only: bool = False  # simulate timing without gradients
    steps: int | None = None  # of each worker, time only; None: by the task's data
    aggregated: bool | None = None  # time only: simulate all servers as one; None: if there are very many
    faults: str = ""  # a fault script: see runtimes/simulation/models/faults.py
    trace: bool = False  # keep every message, as trace.jsonl in the run's directory


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Its secret never appears in arguments, logs or files."""

    task: str
    task_settings: dict[str, Any] = {}
    strategy: str
    strategy_settings: dict[str, Any] = {}
    num_workers: int
    num_servers: int
    runtime: str = "processes"
    batch_size: int | None = None  # None: the task's own
    epochs: int | None = None
    seed: int = 0
    transport: str = "auto"
    eval_every_s: float = 10.0  # one worker measures so often while it trains; 0: only at the end
    failure_timeout_s: float = 5.0
    threads: int = 1  # of torch, in each worker
    directory: str = ""
    script: str = ""  # a user's own training loop, with its arguments; then `task` is only its name
    arguments: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()  # module:Class of optimizers that servers may import for it
    timeline: bool = False  # record who computed, waited, pushed and pulled when; virtual time always does
    record: bool = False  # note the order of everything, so that the run can be repeated bit for bit
    pieces: bool = False  # take the time of every piece of a step: rainband calibrate does
    sim: SimSettings = SimSettings()
    stage_plan: StagePlan | None = None  # how several workers compute one model together; none: each computes all of it

    @property
    def num_replicas(self) -> int:
        """Copies of the model that are trained side by side."""
        return self.num_workers // (self.stage_plan.size if self.stage_plan else 1)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run, and how to prove that it belongs to it."""

    role: str
    index: int
    run_id: bytes
    secret: bytes
    coordinator: Address
    config: RunConfig
    memory: bool = False  # the last file that it inherits is to be the parameters of all workers


def decode_job(data: bytes) -> Job:
    return msgspec.msgpack.decode(data, type=Job)


def encode_job(job: Job) -> bytes:
    return msgspec.msgpack.encode(job)


def is_one_memory(strategy: Strategy) -> bool:
    """Are the parameters of all workers one memory, in which each makes its own steps?"""
    return strategy.requires.shared_memory
