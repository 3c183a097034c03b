"""The options of a run, declared once for `rainband train`, `rainband run`, `rainband.fit` and `rainband.minimize`.

Each interface collects what was given into a `RunOptions`: a mapping in which an absent key, or None, was not given.
`rainband.runtimes.configure.resolve` checks it. A mistake is an `OptionError`; each interface writes the options that
its text names in its own way:

    OptionError(f"{opt('workers', 5)} is not a multiple of {opt('stages', 2)}: use {opt('workers', 4)}.")
    command line     --workers 5 is not a multiple of --stages 2: use --workers 4.
    Python           workers=5 is not a multiple of stages=2: use workers=4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict, get_args, get_type_hints

from rainband.errors import did_you_mean

DEFAULT_STRATEGY = "sync"  # if none is named: the updates of one process
FAULTS_HINT = "Give a file with one fault per line, such as  0.25 kill worker 1."
PLACEMENT_HINT = "rainband placement TASK --out FILE writes one."
MAX_NUMBER = 10**9  # of whole numbers: what is computed from them fits into messages
MAX_SEED = 2**32 - 1  # the largest that all random number generators accept


class Option(NamedTuple):
    """The description of an option. Its type is that of the key."""

    help: str
    metavar: str = ""
    default: str = ""  # in words, for --help
    min: float | None = None
    max: float | None = None
    choices: tuple[str, ...] = ()
    flag: str = ""  # on the command line, if it is not --the-name; "-": not on the command line


class NodeOptions(TypedDict, total=False):
    """Workers and servers"""

    workers: Annotated[
        int | None,
        Option("Number of worker processes, which compute gradients; 0 with --listen.", "N", "4; 1 for single", min=0),
    ]
    servers: Annotated[
        int | None,
        Option("Number of server processes, which hold the parameters.", "N", "2 if the strategy has servers", min=0),
    ]


class ListenOptions(TypedDict, total=False):
    """Several machines"""

    listen: Annotated[
        str | None,
        Option(
            "Let other machines join (rainband join) at this address of this machine; port 0: any that is free.",
            "HOST:PORT",
            "only this machine",
        ),
    ]
    advertise: Annotated[
        str | None,
        Option("With --listen: the address that other machines connect to.", "HOST[:PORT]", "that of --listen"),
    ]
    min_workers: Annotated[
        int | None,
        Option(
            "With --listen: begin when N workers have joined; the run is planned for them.", "N", "--workers", min=1
        ),
    ]


class ThreadCount(str):
    """A number of threads, or auto, as an option takes it."""


class ProcessOptions(TypedDict, total=False):
    """Workers and servers"""

    threads: Annotated[
        int | str | ThreadCount | None,
        Option("Torch threads of each worker; auto: divide the cores of its machine among its workers.", "N", "1"),
    ]
    transport: Annotated[
        str | None,
        Option(
            "Transport of gradients and parameters: shm (shared memory), tcp, or auto (shm where possible).",
            "NAME",
            "auto",
            choices=("auto", "tcp", "shm"),
        ),
    ]
    failure_timeout_s: Annotated[
        float | None,
        Option(
            "Seconds without a heartbeat before a worker is declared lost and its batches are reassigned.",
            "SECONDS",
            "5",
            min=0.1,
            flag="--failure-timeout",
        ),
    ]
    copies: Annotated[
        int | None,
        Option(
            "Copies of each server's parameters: with 2, a lost server is replaced by its copy (with --runtime sim).",
            "N",
            "1",
            min=1,
        ),
    ]


class CodecOptions(TypedDict, total=False):
    """Slow networks"""

    codec: Annotated[
        str | None,
        Option(
            "Compress the gradients or models that workers send: topk:0.01, sign, bf16, ... (rainband explain topk).",
            "CODEC",
            "none",
        ),
    ]
    pull_codec: Annotated[
        str | None,
        Option("Compress the parameters that servers send: bf16, fp16 or qsgd:8.", "CODEC", "none"),
    ]


class SharedBatchOptions(TypedDict, total=False):
    """Batches that workers share"""

    parts: Annotated[
        str | None,
        Option(
            "Parts of a batch: speed (faster workers get more samples) or equal (reproducible).",
            "NAME",
            "speed",
            choices=("speed", "equal"),
        ),
    ]
    stuck_timeout_s: Annotated[
        float | None,
        Option(
            "Seconds to wait for a worker that sends heartbeats and does not finish its part of a batch.",
            "SECONDS",
            "600",
            min=0.1,
            flag="--stuck-timeout",
        ),
    ]


class TrainingOptions(TypedDict, total=False):
    """Training"""

    epochs: Annotated[int | None, Option("Passes over the data.", "N", "the task's own", min=1)]
    batch_size: Annotated[int | None, Option("Samples per gradient.", "N", "the task's own", min=1)]
    drop_last: Annotated[bool | None, Option("Leave out the last batch of an epoch if it is short.")]
    seed: Annotated[int | None, Option("Seed of all random numbers.", "N", "0", min=0, max=MAX_SEED)]
    eval_every_s: Annotated[
        float | None,
        Option(
            "Evaluate every SECONDS on one worker (with --target, each second); 0: only at the end. With --runtime "
            "sim, virtual seconds.",
            "SECONDS",
            "10",
            min=0,
            flag="--eval-every",
        ),
    ]
    target: Annotated[
        str | None,
        Option(
            "End when a metric is at least (loss, error, perplexity: at most) this, such as accuracy=0.95.",
            "METRIC=VALUE",
        ),
    ]
    from_weights: Annotated[
        str | Path | None,
        Option(
            "Begin with these weights: a safetensors file, its folder, an earlier run, or a checkpoint.",
            "FILE",
            "the task's own",
            flag="--from",
        ),
    ]
    config: Annotated[
        str | Path | None,
        Option("Repeat an earlier run: its config.json, or its directory. Other options override it.", "FILE"),
    ]


class Duration(str):
    """Seconds, or a text such as 5m, as an option takes it."""


class CheckpointOptions(TypedDict, total=False):
    """Checkpoints"""

    checkpoint_every: Annotated[
        str | float | Duration | None,
        Option(
            "Write a checkpoint every 30s, 5m or 1h, for example, and when the run is stopped; 0: none.",
            "TIME",
            "5m; none with --runtime sim",
        ),
    ]
    keep: Annotated[int | None, Option("Checkpoints to keep: the newest N.", "N", "3", min=1)]
    checkpoints: Annotated[
        str | None,
        Option(
            "Write checkpoints below this folder or URL, such as s3://bucket/folder.", "PLACE", "the run's directory"
        ),
    ]
    resume: Annotated[
        str | Path | None,
        Option("Continue from the newest checkpoint of an earlier run (rainband resume RUN does the same).", "RUN"),
    ]
    force: Annotated[bool | None, Option("Continue a run although the task, the strategy or the data differ.")]


class StageOptions(TypedDict, total=False):
    """Model parallelism"""

    stages: Annotated[
        int | None,
        Option(
            "Split the model into N pipeline stages, one worker each; --workers must be a multiple of N.",
            "N",
            "1",
            min=1,
        ),
    ]
    split: Annotated[
        list[str] | None,
        Option(
            "Split a layer into shards on workers of their own: fc1=2, fc1=rows:2, mlp=pair:2 or conv=2x2; may be "
            "repeated, and combined with --stages.",
            "LAYER=HOW",
        ),
    ]
    placement: Annotated[
        str | Path | None, Option("Split the model according to this file of rainband placement.", "FILE")
    ]
    microbatches: Annotated[
        int | None,
        Option(
            "Compute each batch in N microbatches, one after the other, which takes less memory.",
            "N",
            "1; with --stages 2 for each stage",
            min=1,
        ),
    ]
    schedule: Annotated[str | None, Option("With --stages: one_f_one_b, gpipe or interleaved.", "NAME", "one_f_one_b")]
    recompute: Annotated[
        bool | None,
        Option("With --stages or --split: compute each stage again before its backward pass, which takes less memory."),
    ]
    stages_per_worker: Annotated[int | None, Option("With --schedule interleaved: stages per worker.", "N", "2", min=2)]


class SimulationOptions(TypedDict, total=False):
    """Simulation"""

    runtime: Annotated[
        str | None,
        Option(
            "Runtime of the run: processes (on this machine), ray (on a Ray cluster) or sim (simulation in virtual "
            "time).",
            "NAME",
            "processes",
            choices=("processes", "ray", "sim"),
        ),
    ]
    network: Annotated[
        str | None,
        Option("Simulated network: lan, 1gbit, wan, datacenter, or a file of rainband calibrate.", "NAME", "lan"),
    ]
    time_only: Annotated[
        bool | None, Option("Simulate message timing only, without gradients (for thousands of workers).")
    ]
    steps: Annotated[int | None, Option("With --time-only: steps per worker.", "N", "as many as the data has", min=1)]
    faults: Annotated[
        str | Path | None, Option("File of faults to inject, one per line, such as  0.25 kill worker 1.", "FILE")
    ]
    compute: Annotated[
        Mapping[str, Any] | None, Option("Model of computing times, such as {'step_s': 0.05}.", flag="-")
    ]


class RayOptions(TypedDict, total=False):
    """Ray"""

    address: Annotated[
        str | None,
        Option(
            "With --runtime ray: address of the cluster, or auto (the one of this machine).",
            "HOST:PORT",
            "that of RAY_ADDRESS, or start Ray on this machine",
        ),
    ]
    max_workers: Annotated[
        int | None,
        Option("With --runtime ray: more workers, up to N in all, join when the cluster has room.", "N", min=1),
    ]
    worker_resources: Annotated[
        Mapping[str, float] | None,
        Option(
            "With --runtime ray: what each worker needs, such as CPU=2,GPU=1.", "NAME=N,...", "one CPU for each thread"
        ),
    ]
    server_resources: Annotated[
        Mapping[str, float] | None, Option("With --runtime ray: what each server needs.", "NAME=N,...", "one CPU")
    ]
    runtime_env: Annotated[Mapping[str, Any] | None, Option("Ray's runtime_env, such as {'pip': ['timm']}.", flag="-")]


class OutputOptions(TypedDict, total=False):
    """Output"""

    runs: Annotated[str | Path | None, Option("Create the run's directory in DIR.", "DIR", "runs")]
    record: Annotated[
        bool | None,
        Option(
            "Record the order of pushes and pulls, so that rainband replay can repeat the run bit for bit (forces TCP)."
        ),
    ]
    timeline: Annotated[
        bool | None,
        Option("Record when each process computes and waits, for rainband timeline (simulations always do)."),
    ]
    csv: Annotated[bool | None, Option("Also write progress.csv.")]
    tensorboard: Annotated[bool | None, Option("Also write files for TensorBoard.")]
    dashboard: Annotated[
        bool | None, Option("Show the run in the browser while it lasts, at an address that is printed.")
    ]


# size: one key for each option of a run
class FitOptions(
    ListenOptions,
    ProcessOptions,
    CodecOptions,
    SharedBatchOptions,
    TrainingOptions,
    CheckpointOptions,
    StageOptions,
    SimulationOptions,
    RayOptions,
    OutputOptions,
    total=False,
):
    """The options of a run without its numbers of workers and servers, which are parameters of `rainband.fit`."""


# size: one key for each option of a run
class RunOptions(NodeOptions, FitOptions, total=False):
    """The options of a run, besides its task and its strategy."""


GROUPS = (
    NodeOptions,
    ListenOptions,
    ProcessOptions,
    CodecOptions,
    SharedBatchOptions,
    TrainingOptions,
    CheckpointOptions,
    StageOptions,
    SimulationOptions,
    RayOptions,
    OutputOptions,
)


class DeclaredOption(NamedTuple):
    """One option of a group."""

    name: str
    group: str  # the heading in --help
    kind: Any  # int, float, bool, str, Path, list[str] or a Mapping
    option: Option

    @property
    def flag(self) -> str:
        return self.option.flag or flag_of(self.name)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@cache
def declared(*groups: type) -> dict[str, DeclaredOption]:
    """Return the options of these classes (none: those of a run) by name, in the order of declaration."""
    found = {}
    for group in groups or GROUPS:
        for name, hint in get_type_hints(group, include_extras=True).items():
            kind, option = get_args(hint)
            if type(None) in get_args(kind):
                *_, kind, _ = get_args(kind)  # the widest of the union, before None
            found[name] = DeclaredOption(name, (group.__doc__ or "").strip(), kind, option)
    return found


def num_threads(name: str, value: str | int, workers: int, servers: int = 0, cores: int = 1) -> int:
    """Return the threads of each worker of a machine: a number that was typed, or a share of its cores.

    Servers use a core each, but no more than half of them all: they mostly wait.
    """
    if value == "auto":
        return max(1, max(cores - servers, -(-cores // 2)) // max(1, workers))
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise OptionError(f"{opt(name, value)}: must be at least 1, or auto.")
    return number


UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(name: str, value: str | float) -> float:
    """Return the seconds that an option gives, as a number or as a text such as 5m."""
    text = str(value).strip()
    unit = UNITS_S.get(text[-1:], 0.0)
    try:
        number = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1e9:
        raise OptionError(f"{opt(name, value)}: must be a time, such as 30s, 5m or 1h.")
    return number


def opt(name: str, value: object = None) -> str:
    """Return an option, with its value, as the text of an `OptionError` names it."""
    return f"{{{name}}}" if value is None else f"{{{name}={re.sub('[{}]', '', str(value))}}}"


class OptionError(ValueError):
    """A mistake in the options of a run; `str()` names them as Python does."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(self.written(in_python))

    def written(self, name: Callable[[str, str | None], str]) -> str:
        """Return the text with each option as `name(option, value)` writes it."""
        return re.sub(r"\{(\w+)(?:=([^}]*))?\}", lambda found: name(found[1], found[2]), self.text)


def in_python(name: str, value: str | None) -> str:
    if value is None:
        return name
    plain = re.fullmatch(r"-?[\d.]+(e-?\d+)?|True|False", value)
    return f"{name}={value}" if plain else f'{name}="{value}"'


def on_command_line(name: str, value: str | None) -> str:
    flag = declared()[name].flag if name in declared() else flag_of(name)
    return flag if value in (None, "True") else f"{flag} {value}"


@contextmanager
def reading(name: str, path: str | Path, hint: str) -> Iterator[None]:
    """Raise an OptionError if the file of this option cannot be read; `hint` says what file is required."""
    try:
        yield
    except OSError as error:
        raise OptionError(f"{opt(name, path)}: cannot read it ({error.strerror}). {hint}") from None
    except UnicodeDecodeError:
        raise OptionError(f"{opt(name, path)}: it is not a text file. {hint}") from None


def check_value(one: DeclaredOption, value: Any) -> None:
    """Raise if an option cannot have this value, whatever the others are."""
    name, option = one.name, one.option
    if one.kind is Duration:
        seconds(name, value)
    if one.kind is ThreadCount:
        num_threads(name, value, 1)
    number = {int: Integral, float: Real}.get(one.kind)
    if number is not None and (isinstance(value, bool) or not isinstance(value, number)):
        raise OptionError(f"{opt(name, value)}: must be {'a whole number' if one.kind is int else 'a number'}.")
    if option.min is not None and not value >= option.min:
        raise OptionError(f"{opt(name, value)}: must be at least {option.min:g}.")
    most = MAX_NUMBER if option.max is None and one.kind is int else option.max
    if most is not None and not value <= most:
        raise OptionError(f"{opt(name, value)}: must be at most {most}.")
    if option.choices and value not in option.choices:
        near = did_you_mean(str(value), option.choices)
        raise OptionError(f"{opt(name, value)}: choose from {', '.join(option.choices)}{near}.")
