# size: every kind of message, which one decoder must know
"""All messages between nodes: typed records, encoded by msgspec; decoding never runs code.

Tensor bytes travel raw beside a message, as its payload. Who sent a message is known from the connection's
handshake, so no message says who it is from.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from rainband.protocol.data_plan import DataPlan, PushId
from rainband.protocol.layout import BlockSpec, Layout
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.protocol.saved_state import SavedBlock, SavedFile
from rainband.protocol.vectors import Operation


class Peer(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A node: its role, its number within the role, and its incarnation (the number of restarts)."""

    role: str  # worker, server, coordinator; machine: one that has joined the run; tunnel: a way to another worker
    index: int
    incarnation: int = 0

    def __str__(self) -> str:
        return self.role if self.role == "coordinator" else f"{self.role} {self.index}"


COORDINATOR = Peer("coordinator", 0)


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base class of all messages; each kind has a number, its `tag`: used on the wire and in traces."""


# ---- worker to server -----------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag=1):
    """A worker opens its data connection; with shared memory, its mailbox is passed as a file descriptor."""

    slots: int = 0
    slot_bytes: int = 0


class InitBlock(Message, frozen=True, tag=2):
    """The initial values of a block, or before them a part of its optimizer's initial state, as the payload."""

    block: int
    dtype: str
    numel: int
    slot: int = -1
    part: str = ""  # the name of the optimizer state; empty: the parameters, which are sent last
    absent: tuple[int, ...] = ()  # parameters that have no such state yet
    numbers: dict[str, dict[int, float]] = {}  # state that is one number per parameter: name -> parameter -> number

    @property
    def payload(self) -> tuple[str, int]:
        """Return the dtype of the payload, and how many there are."""
        return self.dtype, self.numel


class Push(Message, frozen=True, tag=3):
    """One block of a gradient, with the IDs of the batches it sums; the payload is the gradient."""

    block: int
    worker: int  # must be the sender's rank
    sequence: int  # the sender's number for this push, the same on every block
    push_id: PushId
    samples: int
    clock: int  # work items the sender has pushed, including this one
    term: int  # of the parameters it was computed from
    version: int  # of the parameters it was computed from
    dtype: str
    numel: int  # of the payload
    at_version: int = -1  # the round, if the strategy has rounds
    absent: tuple[int, ...] = ()  # parameters of the block without a gradient, which the payload leaves out
    skip: str = ""  # a reason: mark the batches as skipped, there is no gradient
    want: bool = False  # send the block's parameters back as soon as the rule admits it
    slot: int = -1  # slot in the sender's mailbox; -1: the bytes follow the header
    groups: tuple[dict[str, Any], ...] = ()  # the sender's optimizer settings, when they changed since its last push
    began: int = -1  # the sender's clock when it started to compute this
    loss: float = 0.0  # in an evaluation: the mean over the samples; it travels with the gradient
    encoded: int = 0  # bytes of the payload, if a codec has made it; 0: the values as they are
    residual: bool = False  # what a codec has not sent of earlier gradients; it counts no batch

    @property
    def payload(self) -> tuple[str, int]:
        """Return the dtype of the payload, and how many there are."""
        return ("uint8", self.encoded) if self.encoded else (self.dtype, self.numel)


class RelayedMember(msgspec.Struct, frozen=True, array_like=True):
    """A worker's push inside a sum that inner servers of a tree have made."""

    incarnation: int  # of the worker
    push: Push


class RelayedPush(Message, frozen=True, tag=8):
    """One block of a sum of gradients, each times its samples, from an inner server to its parent in a tree.

    Of parameters in 16 bits the payload is the mean, because the sum may be too large for them.
    """

    block: int
    sequence: int  # the sender's
    dtype: str
    numel: int
    members: tuple[RelayedMember, ...]
    absent: tuple[int, ...] = ()  # as in a push: of all members


class FetchState(Message, frozen=True, tag=4):
    """A worker asks for the state of the servers' optimizers."""


class Pull(Message, frozen=True, tag=5):
    """Requests the parameters: those of a round (at_version), or the current ones once the rule admits this clock."""

    sequence: int
    clock: int = -1  # work items the reader has pushed; -1: not a training read, which never waits
    at_version: int = -1
    base: int = 0  # the clock at which the reader joined; it has pushed nothing before
    part: int = 0  # the blocks of this part of the model


class RoundChosen(Message, frozen=True, tag=6):
    """The owner of block 0 has chosen the work items of a round; the coordinator forwards it to the other servers."""

    round: int
    positions: tuple[int, ...]


class Idle(Message, frozen=True, tag=7):
    """A worker is idle: no reader needs to wait for it until it pulls again."""


# ---- server to worker -----------------------------------------------------------------------------------------------


class Opened(Message, frozen=True, tag=20):
    """Answer to Hello; with shared memory, the published parameters are passed as a file descriptor."""

    buffers: int = 1


class BlockReady(Message, frozen=True, tag=21):
    """A block has its initial values."""

    block: int
    slot: int = -1


class PushResult(IntEnum):
    """The result of a push on one block. After `ACCEPTED` to `LATE` the sender continues."""

    ACCEPTED = 1  # applied, or buffered until its round is complete
    DUPLICATE = 2  # the block has already accepted exactly these batches
    OVERLAPS = 3  # the block has already accepted some of these batches, under another push ID
    REVOKED = 4  # the lease is no longer valid
    LATE = 5  # its round is over
    BAD = 6  # malformed; the sender is at fault
    EARLY = 7  # its round has not begun here
    WRONG_SERVER = 8  # the block is not on this server, or not in this term


class LeaseEnd(IntEnum):
    """The reason why a worker returns a lease."""

    DONE = 1
    REVOKED = 2
    OVERLAPS = 3
    STOPPED = 4
    UNUSED = 5


class Ack(Message, frozen=True, tag=22):
    """The result of a push on one block."""

    block: int
    sequence: int
    result: PushResult
    term: int
    version: int
    slot: int = -1
    reason: str = ""


class Params(Message, frozen=True, tag=23):
    """One block's parameters may be read; the payload is the values, unless they lie in shared memory."""

    block: int
    sequence: int
    term: int
    version: int
    at_version: int = -1
    round_over: bool = False  # the requested round is over, and its parameters no longer exist
    asks: bool = False  # readers must ask each time, even with shared memory: the rule admits them
    clock: int = -1  # the reader's, as this block counts it; a larger one: the reader was forgotten, and starts there
    kept: int = -1  # the reader, if the rule keeps a copy of what it received
    encoded: int = 0  # bytes of the payload, if a codec has made it; until it is read, 1: it will be encoded


class PullDelayed(Message, frozen=True, tag=24):
    """A pull is delayed: the reader is too far ahead of this worker."""

    sequence: int
    worker: int


class StatePart(Message, frozen=True, tag=25):
    """A part of one block's optimizer state, as the payload. The last part has no name, and carries the numbers."""

    block: int
    part: str
    absent: tuple[int, ...] = ()
    numbers: dict[str, dict[int, float]] = {}


# ---- worker to worker -----------------------------------------------------------------------------------------------


class PeerValue(Message, frozen=True, tag=40):
    """A pytree of values for another worker; the payload is its tensors, unless they are in shared memory."""

    tag: tuple[int | str, ...]  # the receiver requests it by this tag
    pytree: bytes  # all but the tensors' contents, see transports/pytrees.py
    segment: int = -1  # of the sender's; -1: the bytes follow the header


class Lend(Message, frozen=True, tag=41):
    """Memory for values, passed as a file descriptor. A segment number that is used again replaces the old one."""

    segment: int
    num_bytes: int


class GiveBack(Message, frozen=True, tag=42):
    """The values in a shared segment were read; its owner may write to it again."""

    segment: int


# ---- coordinator and server -----------------------------------------------------------------------------------------


class ServerJoin(Message, frozen=True, tag=60):
    """A server announces its address."""

    address: Address
    capability: str = ""  # torch version and CPU capability


class Address(msgspec.Struct, frozen=True, array_like=True):
    """The address at which a node listens: a TCP port, and a Unix socket for its own machine."""

    host: str
    port: int
    unix: str = ""  # abstract name: no file, so nothing is left behind
    machine: str = ""  # equal on one machine only
    fingerprint: bytes = b""  # of the certificate that it shows; none: TCP without TLS, on loopback


class Assign(Message, frozen=True, tag=61):
    """The blocks a server owns from now on."""

    plan: DataPlan
    blocks: tuple[BlockSpec, ...]
    groups: tuple[dict[str, Any], ...]
    num_replicas: int
    term: int = 1
    optimizer: OptimizerSpec | None = None  # of a custom training loop; None: the strategy's
    restores: bool = False  # the blocks continue from the checkpoint that the configuration names
    parent: int = -1  # the server above this one in a tree, which then relays these blocks; -1: it owns them
    parent_address: Address | None = None


class Planned(Message, frozen=True, tag=62):
    """The data of a custom training loop is known; sent to servers, then to workers when all servers have it."""

    plan: DataPlan


class Ready(Message, frozen=True, tag=63):
    """All blocks have their initial values."""


class Revoke(Message, frozen=True, tag=64):
    """To servers: fence a portion (reject smaller lease numbers) and answer with the accepted batches.

    To the worker that had the lease: stop working on it.
    """

    portion: int
    lease: int


class AcceptedBatches(Message, frozen=True, tag=65):
    """The batches of a portion that each block has accepted, as masks."""

    portion: int
    lease: int
    masks: tuple[int, ...]


class Forget(Message, frozen=True, tag=66):
    """Stop waiting for a worker; what it pushed stays."""

    worker: int


class AdjustRule(Message, frozen=True, tag=67):
    """Change the learning rate or the bound."""

    number: int  # a decision that arrives twice counts once
    lr_factor: float = 1.0  # on the current learning rate
    bound: int | None = None


class ReportRequest(Message, frozen=True, tag=68):
    """Requests a Report."""


class Flush(Message, frozen=True, tag=69):
    """Apply what is buffered; answered with a Report.

    From then on, refuse pushes of lost workers: the model is about to be read, and must have all accepted gradients.
    """

    lost: tuple[tuple[int, int], ...] = ()  # (worker, its last lost incarnation)


RuleChange = Forget | AdjustRule | Flush  # of the update rules of all blocks of a server


class Command(Message, frozen=True, tag=70):
    """Vector operations on every block, and the start of an evaluation of the loss, if any.

    Numbered by (term, number): a server that receives one again repeats its answer, and does nothing else.
    """

    term: int  # the coordinator's
    number: int
    operations: tuple[Operation, ...]
    work_items: int = 0  # of the evaluation that begins; the sum of its gradients becomes the vector `gradient`


class Answer(Message, frozen=True, tag=71):
    """The results of a command on one server: its dot products and squared norms, in order."""

    term: int
    number: int
    results: tuple[float, ...]
    version: int  # of every block, now
    refused: str = ""  # why nothing was done


class Evaluated(Message, frozen=True, tag=72):
    """Every block of a server has accepted every work item of an evaluation."""

    at_version: int
    loss: float  # the sum over the samples; of the server with block 0
    samples: int


class TakeSnapshot(Message, frozen=True, tag=74):
    """Write this node's part of a checkpoint, in place of an earlier one; answered with Saved."""

    number: int
    folder: str  # of the checkpoint, in the place that the configuration names
    at_version: int = -1  # of every block: in rounds, and of full-batch strategies; -1: each as it is now
    at_once: bool = False  # before the next message is handled: a flush would apply a part of a round


class Saved(Message, frozen=True, tag=75):
    """A node has written its part of a checkpoint, or could not."""

    number: int
    files: tuple[SavedFile, ...] = ()
    blocks: tuple[SavedBlock, ...] = ()
    step: int = 0  # batches that the state of a worker has
    more: bool = False  # other files of this node follow
    newest: int = -1  # the version was too old: a block has this one now
    error: str = ""


class Tally(msgspec.Struct, frozen=True, array_like=True):
    """One block's batch counts: accepted must equal applied + skipped + buffered."""

    accepted: int
    applied: int
    skipped: int
    buffered: int
    untracked_pushes: int = 0  # pushes without batch IDs


class Missed(msgspec.Struct, frozen=True, array_like=True):
    """The staleness of the gradients that one block applied."""

    block: int
    pushes: int
    total: int
    most: int


class StalenessLimit(msgspec.Struct, frozen=True, array_like=True):
    """A rule's staleness bound, in its own unit, and the largest staleness measured."""

    bound: float
    unit: str
    largest: float  # of any gradient's reader
    exceeded: int = 0  # gradients whose readers exceeded the bound


class Report(Message, frozen=True, tag=73):
    """The accepted batches and the measurements of one server."""

    first_open: int  # every portion below is complete on all of this server's blocks
    full: tuple[int, ...]  # and these above it
    accepted: int  # batches accepted, the minimum over its blocks
    updates: int  # applied to its blocks so far
    blocks: tuple[Tally, ...] = ()
    skipped: dict[str, int] = {}  # reason -> batches, on the block that has skipped most for it
    refused: dict[str, int] = {}
    staleness: dict[int, dict[int, int]] = {}  # worker -> updates missed -> how often
    flushed: bool = False
    measured: bool = True  # False: the staleness is omitted, the last report's holds
    missed: tuple[Missed, ...] = ()  # by each block
    limit: StalenessLimit | None = None  # of the worst block
    bound: int | None = None  # the current one
    gradients_per_update: int | None = None  # gradients averaged into an update now; none: not a fixed number
    lock_free: bool = False  # workers add in place: lost updates cannot be counted
    in_pairs: bool = False  # they add to models of their own, under locks
    cut_short: int = 0  # updates that a worker was writing when it was lost


# ---- copies of servers ----------------------------------------------------------------------------------------------


class AddCopy(Message, frozen=True, tag=160):
    """To a server: from now on, keep a copy on the server of this incarnation."""

    incarnation: int
    address: Address


class DropCopy(Message, frozen=True, tag=161):
    """To a server: its copy was lost and never takes over, so it answers without one."""

    incarnation: int


class CopyContents(Message, frozen=True, tag=162):
    """A server's state, from which the receiver becomes its copy; the payload is the bytes of its tensors."""

    number: int  # of the messages that the copy receives
    assign: Assign  # of the blocks
    contents: bytes


class Forwarded(Message, frozen=True, tag=163):
    """A message that a server has taken, for its copy, which takes the same ones in the same order."""

    number: int
    sender: Peer
    message: bytes  # encoded; empty: the connection to the sender closed
    num_bytes: int = 0  # of the payload


class Copied(Message, frozen=True, tag=164):
    """A copy has taken all messages up to this one."""

    number: int


class CopyCounts(Message, frozen=True, tag=165):
    """A server's copy has everything that the server has answered: it may take over."""

    incarnation: int


class CopyUnreachable(Message, frozen=True, tag=166):
    """A server's connection to its copy closed."""

    incarnation: int


class Promote(Message, frozen=True, tag=167):
    """To a copy: take over, in a term that fences the server that it is a copy of."""

    term: int


class Promoted(Message, frozen=True, tag=168):
    """A copy has taken over."""

    term: int


class ReplacedByCopy(Message, frozen=True, tag=169):
    """To a server whose copy has taken over: it answers nothing more."""

    term: int


class ServerMoved(Message, frozen=True, tag=170):
    """To workers: the copy of a server has taken over; send it again what was not answered."""

    server: Peer
    address: Address


# ---- coordinator and worker -----------------------------------------------------------------------------------------


class Join(Message, frozen=True, tag=100):
    """A worker has built the task: the first one's description decides the data plan, the others' must agree."""

    fingerprint: str
    num_samples: int
    layout: Layout
    batch_size: int
    epochs: int
    batches_per_item: int
    rounds: bool
    warm_start_batches: int = 0
    custom_loop: bool = False  # its data is known later or never, and the run ends when the loops do
    optimizer: OptimizerSpec | None = None  # of a custom loop, to be run by the servers
    coordinated: bool = False  # full-batch: the coordinator part decides how often the data is used
    address: Address | None = None  # where the other workers of its replica reach it; none: it computes the whole model
    shares_batches: bool = False  # the workers share each batch, and average gradients among themselves
    drop_last: bool = False  # the task leaves out an epoch's last batch if it is short


class Dataset(Message, frozen=True, tag=101):
    """The dataset of a custom training loop; all workers must report the same."""

    fingerprint: str
    num_samples: int
    batch_size: int
    epochs: int  # 0: not known; the loops decide
    drop_last: bool = False


class Paused(Message, frozen=True, tag=102):
    """A worker pauses: its batches are reassigned, but the run does not end without it."""


class NoWork(Message, frozen=True, tag=103):
    """Answer to LeaseRequest: all data is leased or done; leases may still be revoked."""


class Welcome(Message, frozen=True, tag=104):
    """The data plan, and which server holds which block."""

    plan: DataPlan
    servers: tuple[Address, ...]
    owners: tuple[int, ...]  # server of each block
    blocks: tuple[BlockSpec, ...]
    load: bool = False  # send the servers your parameters: they are the initial values
    replica_addresses: tuple[Address, ...] = ()  # of the workers of its replica, in the order of their machines
    via: int = -1  # in a tree of servers, the one to which this worker pushes and from which it pulls
    checkpoint: str = ""  # of this run, to begin with: a worker was lost that had parameters
    copies: int = 1  # of each server: with a second one, what is not answered is kept, and sent again if it takes over


class Go(Message, frozen=True, tag=105):
    """The servers are ready: start training."""


class LeaseRequest(Message, frozen=True, tag=106):
    """A worker asks for a lease."""

    idle: bool = False  # it is idle until it receives one


class Lease(Message, frozen=True, tag=107):
    """A portion, or what is missing of it, is leased to this worker."""

    portion: int
    lease: int
    groups: tuple[tuple[int, ...], ...]
    partly_accepted: tuple[int, ...] = ()  # batches that some block has accepted under an earlier lease


class AssignItems(Message, frozen=True, tag=108):
    """Work items of an evaluation for a worker, in this order; some may be backup copies of slow workers' items."""

    at_version: int  # the version of every block at which they are computed
    work_items: tuple[int, ...]


class ItemsDelivered(Message, frozen=True, tag=109):
    """Other workers have delivered these work items: a worker that also has them may drop them."""

    at_version: int
    work_items: tuple[int, ...]


class Return(Message, frozen=True, tag=110):
    """A worker returns a lease."""

    portion: int
    lease: int
    reason: LeaseEnd


class SampleAccount(msgspec.Struct, frozen=True):
    """The samples of a run whose workers share each batch, by what became of them; all workers know the same."""

    rounds: int = 0  # batches of the script so far, of all workers together
    total: int = 0  # samples of the whole run; 0: not known
    applied: int = 0
    skipped: dict[str, int] = {}  # reason -> samples
    carried_over: int = 0  # to a later batch: a worker was lost, or had missed a step of the others
    not_seen: int = 0  # carried over when their pass ended
    transfers: int = 0  # times that a worker received the state of another one
    drifted: int = 0  # of these, because its parameters differed


# size: one field for each statistic of a worker
class Heartbeat(Message, frozen=True, tag=111):
    """A worker is alive; its acknowledged pushes show that it makes progress."""

    acked: int = 0
    waiting: bool = False  # for other workers: then it counts as active
    waited_s: float = 0.0
    steps: int = 0
    samples: int = 0
    loss: float = 0.0  # mean over the samples since the last heartbeat
    loss_samples: float = 0.0
    pushed_bytes: int = 0
    pulled_bytes: int = 0
    torn_reads: int = 0
    waited_for: dict[int, float] = {}  # worker -> seconds that this one waited for it
    metrics: dict[str, float] = {}  # the last ones measured
    computed_s: float = 0.0  # computing gradients, or parts of them
    sent_bytes: int = 0  # to the other workers of its replica
    held_by: int | None = None  # the worker that it waits for now, if that is known
    account: SampleAccount | None = None  # of workers that share each batch
    disagreement: float | None = None  # of workers that train models of their own: their distance from the mean model
    cpu_s: float = 0.0  # of the processor, used by the process so far
    saved_bytes: int = 0  # that codecs have not sent
    unsent_norm: float = 0.0  # of what a codec has kept of earlier gradients
    memory_bytes: int = 0  # of the process, in use now


class Finish(Message, frozen=True, tag=112):
    """Every batch is processed: the loops over data end."""


class Halt(Message, frozen=True, tag=113):
    """End early: finish the current work item and return the leases."""

    reason: str
    leave: bool = False  # only this worker ends; the run goes on


class Ended(Message, frozen=True, tag=114):
    """A worker's strategy has returned; the payload is its buffers (BatchNorm statistics)."""

    samples: int


class Conclude(Message, frozen=True, tag=115):
    """Pull the final parameters, evaluate, and save the model there; the payload is the mean of all buffers."""

    path: str


class Concluded(Message, frozen=True, tag=116):
    """The final metrics."""

    metrics: dict[str, float]


class Failed(Message, frozen=True, tag=117):
    """The user's code raised on a worker, or a server cannot use the optimizer state that it was sent."""

    step: int
    error: str
    traceback: str  # none from a server


class Shutdown(Message, frozen=True, tag=118):
    """The run is over; no message will be answered any more."""

    reason: str = ""


NO_WORK_LEFT = Shutdown("the run is ending: there is no work left.")


class StopRequest(Message, frozen=True, tag=119):
    """A worker asks to end the run early and cleanly, because its loop has converged, for example."""

    reason: str


class CheckpointRequest(Message, frozen=True, tag=122):
    """A worker asks for a checkpoint as soon as possible."""


class LinksOpened(Message, frozen=True, tag=120):
    """A worker has connected to the servers."""

    machine: str  # the name of its machine
    links: tuple[str, ...]  # the transport to each server: shm, tcp or tls; "": it needs none
    peers: tuple[tuple[int, str], ...] = ()  # workers that it has connected to, and how: also tunnel


class TunnelRequest(Message, frozen=True, tag=123):
    """Another worker cannot reach this one: this one is to open a tunnel to it, too."""

    worker: int


class FilePart(Message, frozen=True, tag=121):
    """A part of the saved model, from a worker that has another disk than the run; the payload is its bytes."""

    offset: int
    num_bytes: int  # of the whole file


class FileWrite(Message, frozen=True, tag=124):
    """A node of another machine writes a part of a file of a checkpoint; the payload is its bytes."""

    folder: str
    name: str
    offset: int = 0
    sync: bool = False  # instead: let what was written be on the disk


class FileRead(Message, frozen=True, tag=125):
    """A node of another machine reads a part of a file of the checkpoint from which the run continues."""

    folder: str
    name: str
    offset: int
    num_bytes: int  # at most


class FileAnswer(Message, frozen=True, tag=126):
    """The answer to FileWrite and FileRead; the payload is what was read."""

    num_bytes: int = 0  # of the whole file, if it was read
    error: str = ""  # why it was not done


# ---- coordinator and joining machine --------------------------------------------------------------------------------


class Software(msgspec.Struct, frozen=True):
    """The versions of what computes: they must be the same on all machines of a run."""

    rainband: str
    torch: str
    python: str


class MachineJoin(Message, frozen=True, tag=140):
    """A machine asks to join with workers and servers; or it is connected again, with the workers that it has."""

    name: str
    software: Software
    workers: int
    servers: int = 0
    script: bool = False  # its workers run a script with a custom training loop
    ranks: tuple[int, ...] = ()  # of the workers that it has brought before


class MachineWelcome(Message, frozen=True, tag=141):
    """The run that a machine has joined, and the numbers of its processes; or why it may not join."""

    refused: str = ""
    run: str = ""  # the name of the run's directory
    config: bytes = b""  # a RunConfig
    keys: dict[str, bytes] = {}  # of the roles that its processes need
    ranks: tuple[int, ...] = ()
    servers: tuple[int, ...] = ()
    round_ranks: int = 0  # workers that the memory for shared batches has room for; 0: they share none


class RestartRequest(Message, frozen=True, tag=142):
    """A machine is about to start a worker again, whose connections have broken."""

    rank: int


class Restart(Message, frozen=True, tag=143):
    """Start a worker again, as this incarnation."""

    rank: int
    incarnation: int


class ProcessEnded(Message, frozen=True, tag=144):
    """A process of a machine has ended, and is not started again; to a machine: it is to end this one."""

    peer: Peer
    cause: str


class Leave(Message, frozen=True, tag=145):
    """A machine leaves: its workers finish their work items, and others get their remaining batches."""


class RoundData(Message, frozen=True, tag=146):
    """A part of the tensors that a worker contributes to a round, or of the state that it gives; the body has it."""

    rank: int
    life: int
    kind: int  # the slot; 2: the state
    offset: int
    num_bytes: int  # of all parts


class RoundWords(Message, frozen=True, tag=147):
    """The words of a worker in rounds of split batches: see `rainband/runtimes/machines/rounds_relay.py`."""

    rank: int
    control: bytes
    headers: tuple[bytes, bytes]


class RoundAudience(Message, frozen=True, tag=150):
    """Informs a machine whether workers elsewhere read the tensors and states of its workers; without this, they do."""

    is_there: bool


class OpenTunnel(Message, frozen=True, tag=148):
    """A worker asks the run's machine for a connection to another one, or answers such a request."""

    worker: int  # itself
    to: int
    answers: bool = False


class TunnelOpen(Message, frozen=True, tag=149):
    """Both ends of a tunnel are there: from now on, the connection carries their bytes, without this one's TLS."""


AnyMessage = (
    Hello | InitBlock | Push | RelayedPush | Pull | Opened | BlockReady | Ack | Params | ServerJoin | Assign | Ready
    | Revoke | AcceptedBatches | Forget | ReportRequest | Flush | Report | Join | Welcome | Go | LeaseRequest
    | Lease | Return | Heartbeat | Finish | Halt | Ended | Conclude | Concluded | Failed | Shutdown | FetchState
    | StatePart | TakeSnapshot | Saved | Planned | Dataset | Paused | NoWork | Idle | PullDelayed | AdjustRule
    | RoundChosen | StopRequest | CheckpointRequest | Command | Answer | Evaluated | AssignItems
    | ItemsDelivered | PeerValue | Lend | GiveBack | LinksOpened | FilePart
    | FileWrite | FileRead | FileAnswer | MachineJoin | MachineWelcome
    | RestartRequest | Restart | ProcessEnded | Leave | RoundData | RoundWords | RoundAudience
    | TunnelRequest | OpenTunnel | TunnelOpen | AddCopy | DropCopy | CopyContents | Forwarded | Copied | CopyCounts
    | CopyUnreachable | Promote | Promoted | ReplacedByCopy | ServerMoved
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Decode a message; raise msgspec.DecodeError for anything else."""
    try:
        message: Message = _decoder.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"a string is not UTF-8: {error}") from None
    return message
