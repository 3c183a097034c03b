"""Events of a run, as typed records: the only source of progress displays, reports and files."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

import msgspec

Absence = Literal["lost", "inactive", "paused", "left"]  # of a node that takes no part in a run


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=True, kw_only=True):
    """An event of the run, `at_s` seconds after the start."""

    at_s: float


class RunStarted(Event, frozen=True):
    """The first event of every run."""

    task: str
    strategy: str
    settings: dict[str, object]
    num_workers: int
    num_servers: int
    version: str
    target: str = ""  # METRIC=VALUE at which the run ends
    shares_batches: bool = False  # workers share each batch, and go on without a lost one
    started_at: str = ""  # UTC, such as 2026-11-16T09:30:00+00:00; "" in a simulation
    copies: int = 1  # of each server
    clock_s: float = 0.0  # the monotonic clock of this machine at `at_s` 0: spans are in seconds of that clock


class PlanMade(Event, frozen=True):
    """The data was divided into batches and the model into blocks."""

    num_samples: int
    num_batches: int
    num_portions: int
    num_parameters: int
    num_blocks: int
    batch_size: int
    epochs: int
    workers_per_replica: int = 1  # workers that compute one copy of the model together
    server_pairs: int = 0  # pairs of one of them and a server that holds its parameters
    server_imbalance: float = 0.0  # a server holds at most this fraction of the mean more or less bytes


class StagePredicted(msgspec.Struct, frozen=True):
    """Of one batch: what the workers of a stage compute and send, all of them together."""

    workers: int  # among whom batches are dealt
    compute_s: float
    sent_bytes: float


class PipelinePredicted(Event, frozen=True):
    """Several workers compute one model together: how fast that should be, by what was measured before the start."""

    samples_per_s: float  # of all replicas
    busy: float  # the part of the workers' time in which they compute
    batch_s: float  # between two batches of one copy
    schedule: str
    microbatches: int
    stages: tuple[StagePredicted, ...]  # in the order of a copy's workers; interleaved stages of a machine are one
    left_out: tuple[str, ...]  # what takes time, and was not thought of


class PhaseChanged(Event, frozen=True):
    """The run enters its next phase; `reason`: why it is stopped."""

    phase: str  # forming, loading, running, flushing, finishing, concluding, over
    reason: str = ""


class Joined(Event, frozen=True):
    """A node has joined."""

    node: str


class Linked(Event, frozen=True):
    """A worker has connected to the servers."""

    worker: int
    machine: str  # the name of its machine
    links: tuple[str, ...]  # the transport to each server: shm, tcp or tls; "": it needs none
    # Workers of its replica that it has connected to, and how; tunnel: through the run's machine
    peers: tuple[tuple[int, str], ...] = ()


class MachineJoined(Event, frozen=True):
    """Another machine has joined the run, or has left it."""

    machine: str
    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()
    left: str = ""  # why it is gone


class Tunneled(Event, frozen=True):
    """Two workers that cannot reach each other are connected through the run's machine."""

    workers: tuple[int, int]
    num_bytes: int = 0  # in both directions
    closed: bool = False


class Listening(Event, frozen=True):
    """Other machines may join the run."""

    address: str
    servers: tuple[int, ...]  # the ports of its servers
    invitation: str  # the file; it is secret, and so not part of any event


class FirstStep(Event, frozen=True):
    """The first gradient of the run was computed."""

    worker: int


class Lost(Event, frozen=True):
    """A node takes no part any more: it was lost, is inactive or paused, or has left."""

    node: str
    why: str
    state: Absence = "lost"


class Returned(Event, frozen=True):
    """A worker that was inactive makes progress again, or a node is back."""

    node: str


class ServerCopied(Event, frozen=True):
    """A server has a copy that can take over."""

    server: int


class ServerReplaced(Event, frozen=True):
    """A server was lost, and its copy has taken over; `seconds`: since the loss was noticed."""

    server: int
    why: str
    seconds: float


class BatchesReassigned(Event, frozen=True):
    """A lease was revoked; `batches` of its batches are reassigned."""

    portion: int
    batches: int
    from_worker: int


class GuardActed(Event, frozen=True):
    """The divergence guard changed the learning rate or the bound; `why`: the measurements."""

    why: str
    lr_factor: float  # on the learning rate, all changes so far
    bound: int | None  # from now on; none: the strategy has no bound


class UpdateSizeChanged(Event, frozen=True):
    """The number of live workers has changed, and with it the number of gradients averaged into an update."""

    gradients: int


# size: one field for each number that views show
class Progress(Event, frozen=True):
    """The progress of the run, reported every few seconds."""

    batches_done: int
    batches: int
    samples_done: int
    samples: int
    loss: float | None
    samples_per_s: dict[int, float]  # of each worker; 0: not known yet
    staleness_mean: float
    staleness_max: int
    waited_s: dict[int, float]
    steps_per_s: dict[int, float] = {}  # where loops draw their own data, only steps can be counted
    staleness_bound: float | None = None  # what the strategy promises; none: it promises nothing
    staleness_unit: str = ""  # of the bound, such as clocks; staleness itself is measured in updates
    metrics: dict[str, float] = {}  # the task's own, as last measured by a worker; none yet: empty
    pushed_bytes: int = 0  # to the servers, by all workers so far
    pulled_bytes: int = 0  # from them
    saved_bytes: int = 0  # that were not pushed, because a codec has encoded the gradients
    computed_s: dict[int, float] = {}  # where several workers compute one model together: of each, so far
    sent_bytes: dict[int, int] = {}  # of tensors, by workers to each other: of a model in stages, or of whole models
    waiting_for: dict[int, int] = {}  # worker -> the worker that it has been waiting for over several reports
    disagreement: float | None = (
        None  # of models that workers train by themselves: root mean square distance from the mean
    )


# Gradients are counted by the updates that they missed: 0, 1, 2, 3 and 4, 5 to 8, ...; the last bin has no end.
STALENESS_BINS = (0, 1, 2, 3, 5, 9, 17, 33, 65, 129)


# size: one column for each number that views show
class NodesMeasured(Event, frozen=True):
    """The work of each worker and server so far, in columns; comes beside Progress, but may be rarer.

    Of many workers, the columns have a fixed selection and those that stand out. Lost workers stay.
    """

    workers: tuple[int, ...]  # the ranks that the columns are of
    num_workers: int  # in all
    samples: tuple[int, ...]
    waited_s: tuple[float, ...]
    cpu_s: tuple[float, ...]  # of the processor, by all threads of the process; 0 in a simulation
    pushed_bytes: tuple[int, ...]
    pulled_bytes: tuple[int, ...]
    sent_bytes: tuple[int, ...]  # to other workers
    staleness: tuple[tuple[int, ...], ...]  # of each: gradients in every bin of STALENESS_BINS, up to the last one used
    missed: tuple[int, ...]  # updates missed by all gradients of each
    max_missed: tuple[int, ...]
    waiting: tuple[int, ...]  # the ranks of those that wait now
    waited_for: tuple[tuple[int, int, float], ...]  # worker, the worker that it waited for, seconds; the longest ones
    all_staleness: tuple[int, ...]  # of all workers: gradients in every bin
    updates: tuple[int, ...]  # applied by each server
    blocks: tuple[tuple[float, int], ...]  # mean and largest staleness of the first blocks
    accounting: dict[str, object]  # the batch accounting so far
    memory_bytes: tuple[int, ...] = ()  # in use now, without what processes share; 0 in a simulation
    server_cpu_s: tuple[float, ...] = ()
    server_memory_bytes: tuple[int, ...] = ()


class EndCause(IntEnum):
    """The reason why a full-batch strategy ended; also the status of a `MinimizeResult`."""

    CONVERGED = 0  # a tolerance was reached
    OUT_OF_ITERATIONS = 1
    NO_LOWER_LOSS = 2
    NOT_FINITE = 3
    STOPPED = 4


class IterationDone(Event, frozen=True):
    """An iteration of a full-batch strategy is done."""

    iteration: int
    loss: float | None
    gradient_norm: float | None
    step: float  # the step along its direction
    evaluations: int  # of the loss, so far
    work_items: int  # of these evaluations, so far
    backups: int  # backup copies of work items of slow workers, so far
    end: str = ""  # why it was the last one, for people
    end_cause: EndCause | None = None


class ProcessOutput(Event, frozen=True):
    """Output of the run's processes; of too many lines only the last ones, and all are in output.log."""

    lines: tuple[str, ...]
    left_out: int = 0  # lines before these


class UserError(Event, frozen=True):
    """The user's code raised."""

    worker: int
    step: int
    error: str
    traceback: str


class CheckpointWritten(Event, frozen=True):
    """A checkpoint is complete: the run can be continued from it."""

    name: str  # of its folder
    step: int  # batches that are in it
    num_bytes: int
    seconds: float  # from its beginning; training went on meanwhile


class Restored(Event, frozen=True):
    """The run continues from a checkpoint, or the workers of a lost replica from the last one."""

    place: str  # "": there is none yet, so it begins again
    step: int  # batches that are in it
    samples: int  # of these batches
    repeated: int | None = None  # known batches after it, which are computed again; None: the run begins with it


class TargetReached(Event, frozen=True):
    """A worker has measured the metric at which the run ends."""

    metric: str
    value: float
    samples: int  # that were processed until then


class Warned(Event, frozen=True):
    """Something went wrong that does not end the run."""

    text: str
    no_worker_left: bool = False  # the run waits for one that joins


class RunEnded(Event, frozen=True):
    """The last event of every run, with metrics and batch accounting."""

    outcome: str  # finished, stopped, failed
    reason: str
    seconds: float  # from the start of the first process to the end
    samples: int
    metrics: Mapping[str, float | None]  # none: not finite, which JSON cannot say
    accounting: dict[str, object]
    staleness: dict[str, object]
    training_s: float = 0.0  # of these, from the beginning of the first step to the end of the last; 0: no step
    checkpoint: str = ""  # the last one that was written
    cpu_s: float = 0.0  # of the processor, by all processes together; 0 in a simulation


AnyEvent = (
    RunStarted
    | PlanMade
    | PipelinePredicted
    | PhaseChanged
    | Joined
    | Linked
    | MachineJoined
    | Tunneled
    | Listening
    | FirstStep
    | Lost
    | Returned
    | ServerCopied
    | ServerReplaced
    | BatchesReassigned
    | GuardActed
    | UpdateSizeChanged
    | Progress
    | NodesMeasured
    | IterationDone
    | ProcessOutput
    | UserError
    | CheckpointWritten
    | Restored
    | TargetReached
    | Warned
    | RunEnded
)
