"""From the options that were given to the configuration of a run; mistakes are reported here, before anything starts.

Torch is not imported for this, except to split a model into stages, or to try an optimizer that is not built in.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin

import msgspec

from rainband.errors import did_you_mean
from rainband.model_parallel.placement.placement import Placement
from rainband.model_parallel.placement.placement import load as load_placement
from rainband.optimizer_settings import OptimizerSettings
from rainband.options import (
    FAULTS_HINT,
    PLACEMENT_HINT,
    DeclaredOption,
    Duration,
    OptionError,
    RunOptions,
    ThreadCount,
    check_value,
    declared,
    num_threads,
    opt,
    reading,
)
from rainband.plugins import search_current_folder, where_to_run
from rainband.protocol.optimizer_spec import BUILT_IN
from rainband.runtimes.checkpoints.choose import with_checkpoints
from rainband.runtimes.codecs import check_codecs, with_codec_text
from rainband.runtimes.config import RAY_FIELDS, RaySettings, RunConfig, SimSettings, check_ray, ray_settings
from rainband.runtimes.machines.addresses import check_machines
from rainband.runtimes.simulation.models.cluster_model import compute_model, load_model
from rainband.runtimes.simulation.models.faults import check_nodes
from rainband.runtimes.simulation.models.faults import parse as parse_faults
from rainband.runtimes.stage_options import (
    PIPELINE_OPTIONS,
    check_stages,
    check_versions,
    replica_size,
    stage_lines,
    typed_splits,
)
from rainband.runtimes.stage_plan import PipelineOptions, WideStages, make_stage_plan
from rainband.strategy import Requirements, ServerPart, Strategy
from rainband.tasks.load import task_names
from rainband.tasks.source import check_values as check_task_values
from rainband.tasks.source import read_task

if TYPE_CHECKING:
    from rainband.stage import StageVersions
    from rainband.tasks.task import Task

WORKERS, SERVERS = 4, 2  # unless the options say otherwise
EVAL_EVERY_S = 1.0  # with a target
MOST_PER_CORE = 32  # processes; more would only wait for each other

# Options that are fields of RunConfig or of SimSettings, under these names.
PLAIN_FIELDS = (
    *(
        "threads",
        "transport",
        "failure_timeout_s",
        "epochs",
        "batch_size",
        "drop_last",
        "seed",
        "eval_every_s",
        "runtime",
    ),
    *("record", "timeline", "parts", "stuck_timeout_s", "target", "codec", "pull_codec", "copies"),
)
SIM_FIELDS = {"network": "model", "time_only": "time_only", "steps": "steps", "compute": "compute"}
OPTION_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "True or False"),
    int: ((Integral,), "a whole number"),
    float: ((Real,), "a number"),
    str: ((str,), "text"),
    ThreadCount: ((str, Integral), "a number, or auto"),
    Duration: ((str, Real), 'seconds, or text such as "5m"'),
    Path: ((str, Path), "the path of a file or folder"),
    Mapping: ((Mapping,), "a dictionary, such as"),
    list: ((list, tuple), 'a list, such as ["fc1=2"]'),
}
DICTIONARIES = {"compute": "dict(step_s=0.05)", "runtime_env": 'dict(pip=["timm"])'}  # examples
RESOURCES = "dict(CPU=2, GPU=1)"
ELEMENT_WISE = ("sgd", "adam", "adagrad")  # examples


def configure(
    base: RunConfig,
    strategy: Strategy,
    options: RunOptions,
    make_task: Callable[[], Task] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> RunConfig:
    """Return `base` with these options; a model that is to be split is measured here."""
    given = given_options(with_codec_text(options))
    merged: RunOptions = {**_options_of(base, given), **given}  # type: ignore[typeddict-item]
    placement = _placement(base, merged)
    base, strategy = _as_one_replica(base, strategy, merged, placement)
    resolved = resolve(merged, base.strategy, strategy.requires, placement, base)
    size = replica_size(resolved, placement, strategy.requires)
    sim = _sim_settings(base, resolved)
    if strategy.requires.tree_arity:
        sim = msgspec.structs.replace(sim, aggregated=False)  # its servers differ: they are simulated one by one
    if resolved.get("runtime") == "sim":
        _check_faults(sim.faults, resolved, base.strategy, strategy.requires, size)
    if not base.script:  # a script brings an optimizer of its own, which is checked when the script joins
        _check_optimizer(base.strategy, strategy, resolved["workers"] or 1)
    config = msgspec.structs.replace(
        base,
        num_workers=max(resolved["workers"] or 1, resolved.get("min_workers") or 1),
        num_local=resolved["workers"] if "listen" in resolved else None,
        listen=resolved.get("listen") or "",
        advertise=resolved.get("advertise") or "",
        min_workers=resolved.get("min_workers") or 0,
        num_servers=resolved["servers"],
        microbatches=(resolved.get("microbatches") or base.microbatches) if size == 1 else 1,
        sim=sim,
        ray=ray_settings(base.ray, resolved),
        **{name: value for name, value in resolved.items() if name in PLAIN_FIELDS},
    )
    _check_unused(given, merged, base.strategy, strategy.requires, size)
    known = base.stage_plan is not None and not _any(
        given, "stages", "split", "placement", "recompute", *PIPELINE_OPTIONS
    )
    if make_task is not None and size > 1 and not known:
        config = _in_stages(config, make_task, resolved, placement, size, say, strategy.requires.stages)
    return with_checkpoints(config, given, say)


def _in_stages(
    config: RunConfig,
    make_task: Callable[[], Task],
    resolved: RunOptions,
    placement: Placement | None,
    size: int,
    say: Callable[[str], None],
    versions: StageVersions | None,
) -> RunConfig:
    """Split the model into stages, which is measured for this. `versions`: of stages that step by themselves."""
    simulated = config.runtime == "sim"
    before = config.stage_plan is not None and config.stage_plan.recompute
    stages, splits = resolved.get("stages") or 1, typed_splits(resolved)
    wide = WideStages(stages, splits) if placement is None and (splits or size > stages) else None
    how = "counting the multiplications of" if simulated else "measuring"
    what = "split it into stages" if placement is None else "predict its speed"
    say(f"{how} {config.task} to {what} with {size} workers ...")
    stage_plan = make_stage_plan(
        make_task(),
        config.task,
        size,
        plan=placement,
        batch_size=config.batch_size,
        flow=PipelineOptions(*(resolved.get(name) for name in PIPELINE_OPTIONS))._replace(  # type: ignore[arg-type]
            wide=wide, flushes=versions is None
        ),
        seed=config.seed,
        threads=None if simulated else config.threads,
    )
    if versions is not None:
        check_versions(versions, stage_plan.plan.replicas())
    stage_plan = msgspec.structs.replace(stage_plan, recompute=bool(resolved.get("recompute", before)))
    for line in stage_lines(stage_plan):
        say(line)
    return msgspec.structs.replace(config, stage_plan=stage_plan)


def given_options(options: RunOptions) -> RunOptions:
    """Return the options without those that are None, each checked by itself."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name not in declared():
            raise OptionError(f"there is no option {name}{did_you_mean(name, declared())}.")
        _check_type(declared()[name], value)
        check_value(declared()[name], value)
    return given  # type: ignore[return-value]


def _check_type(one: DeclaredOption, value: Any) -> None:
    """Raise if a value is of another type than its option; only Python can give such a value."""
    types, expected = OPTION_TYPES[get_origin(one.kind) or one.kind]
    if Mapping in types:
        expected = f"{expected} {DICTIONARIES.get(one.name, RESOURCES)}"
    if not isinstance(value, types) or (isinstance(value, bool) and one.kind is not bool):
        typed = f'"{value}"' if isinstance(value, str) else repr(value)
        raise OptionError(f"{one.name}={typed}: must be {expected}.")


def _options_of(base: RunConfig, given: RunOptions) -> dict[str, Any]:
    """Return the options of an earlier run that are not the defaults, except its numbers of workers and servers."""
    plain, sim = RunConfig(task="", strategy="", num_workers=0, num_servers=0), SimSettings()
    options = {name: getattr(base, name) for name in PLAIN_FIELDS if getattr(base, name) != getattr(plain, name)}
    if given.get("runtime", base.runtime) == "ray":
        plain_ray = RaySettings()
        options |= {
            name: getattr(base.ray, name) for name in RAY_FIELDS if getattr(base.ray, name) != getattr(plain_ray, name)
        }
    if given.get("runtime", base.runtime) == "sim":
        options |= {
            name: getattr(base.sim, field)
            for name, field in SIM_FIELDS.items()
            if getattr(base.sim, field) != getattr(sim, field)
        }
    return options


def _any(options: RunOptions, *names: str) -> bool:
    return any(name in options for name in names)


def _sim_settings(base: RunConfig, options: RunOptions) -> SimSettings:
    changed = {field: options[name] for name, field in SIM_FIELDS.items() if name in options}  # type: ignore[literal-required]
    if "compute" in changed:
        changed["compute"] = {**base.sim.compute, **changed["compute"]}
    if "faults" in options:
        file = Path(options["faults"] or "")
        with reading("faults", file, FAULTS_HINT):
            changed["faults"] = file.read_text(encoding="utf-8")
    settings = msgspec.structs.replace(base.sim, **changed)
    if options.get("runtime") == "sim":
        load_model(settings.model, settings.compute)  # raises if it cannot be read
        if parse_faults(settings.faults) and settings.time_only:
            raise OptionError(f"{opt('faults')} requires gradients: omit {opt('time_only', True)}.")
    elif settings.compute:
        compute_model(settings.compute)  # raises if a setting is wrong
    return settings


def resolve(
    options: RunOptions,
    name: str,
    requires: Requirements,
    placement: Placement | None = None,
    base: RunConfig | None = None,
) -> RunOptions:
    """Return the options with the numbers of workers and servers; raise OptionError if they do not fit the strategy.

    `base` has the numbers to use where none are given, and whether a script is run.
    """
    if base is not None and base.script:
        check_custom_loop(name, requires)
    if "epochs" in options and requires.coordinated:
        raise OptionError(
            f"{name} counts iterations, and uses the data as often as they need: "
            f"set iterations={options['epochs']} instead of {opt('epochs')}."
        )
    if options.get("drop_last") and requires.coordinated:
        raise OptionError(f"{name} uses every sample in each evaluation, so omit {opt('drop_last', True)}.")
    check_stages(options, name, requires, placement)
    size = replica_size(options, placement, requires)
    usual = (WORKERS, SERVERS) if base is None else (base.num_workers, base.num_servers)
    workers = _workers(options, name, requires, size, usual[0])
    servers = _servers(options, name, requires, usual[1])
    check_machines({**options, "workers": workers}, name, requires, size)
    check_ray({**options, "workers": workers}, name, requires)
    _check_simulation(options, name, requires, size)
    _check_record(options, name, requires, size)
    check_codecs(options, name, requires)
    _check_copies(options, name, requires, size)
    if options.get("target"):
        options = _check_target(options, name, requires)
    if options.get("runtime", "processes") == "processes":
        _check_cores(workers=workers, servers=servers)
    options = {**options, "workers": workers, "servers": servers}
    return {**options, "threads": _threads(options)} if "threads" in options else options


def _threads(options: RunOptions) -> int:
    """Return the threads of each worker on the machine of the run."""
    typed, runtime = options["threads"] or 1, options.get("runtime", "processes")
    if typed == "auto" and runtime == "ray":
        raise OptionError(
            f"{opt('threads', 'auto')} is for machines whose cores a run has to itself: with {opt('runtime', 'ray')}, "
            "give a number, which each worker reserves."
        )
    cores = 1 if runtime == "sim" else usable_cores()
    return num_threads("threads", typed, options["workers"] or 1, options["servers"] or 0, cores)


def _check_copies(options: RunOptions, name: str, requires: Requirements, size: int) -> None:
    """Raise if servers cannot have copies in this run."""
    copies = options.get("copies") or 1
    if copies == 1:
        return
    why, advice = "", f"omit {opt('copies', copies)}"
    if copies > 2:
        why, advice = "a server has at most one copy besides itself", f"use {opt('copies', 2)}"
    elif requires.shared_memory:
        why = f"{name} has no servers: its parameters lie in memory that all workers share"
    elif not requires.servers:
        why = f"{name} has no servers, and every worker has all parameters, so none is lost with a process"
    elif requires.coordinated or requires.tree_arity:
        why = f"the servers of {name} cannot be copied while they run"
    elif size > 1:
        why = "servers of models in stages cannot be copied while they run"
    elif options.get("time_only"):
        why = f"{opt('time_only', True)} simulates no parameters that could be lost"
    elif options.get("runtime", "processes") != "sim":
        why = "copies of servers are only simulated so far"
        advice = f"add {opt('runtime', 'sim')}, or omit it: rainband resume continues a run that has lost a server"
    if why:
        raise OptionError(f"{opt('copies', copies)}: {why}: {advice}.")


def _check_target(options: RunOptions, name: str, requires: Requirements) -> RunOptions:
    """Return the options with the usual time between evaluations; raise if nothing would be evaluated."""
    metric, _, value = (options.get("target") or "").partition("=")
    try:
        is_number = math.isfinite(float(value))
    except ValueError:
        is_number = False
    if not metric.strip() or not is_number:
        raise OptionError(f"{opt('target', options.get('target'))}: type a metric and a number, such as accuracy=0.95.")
    if requires.stages is not None:
        raise OptionError(f"{name} evaluates only at its end, with an empty pipeline: omit {opt('target')}.")
    if options.get("time_only"):
        raise OptionError(f"{opt('target')}: with {opt('time_only', True)}, nothing is evaluated, so omit it.")
    every_s = options.get("eval_every_s", EVAL_EVERY_S)
    if not every_s:
        raise OptionError(f"{opt('target')} requires evaluations: omit {opt('eval_every_s', 0)}.")
    return {**options, "eval_every_s": every_s}


def _check_optimizer(name: str, strategy: Strategy, num_replicas: int) -> None:
    """Raise if servers or workers cannot run the strategy's optimizer; the built-in optimizers run on both."""
    part = strategy.server(num_replicas) if strategy.requires.optimizer == "servers" else None
    spec = part.optimizer if isinstance(part, ServerPart) else None
    if spec is None and isinstance(strategy, OptimizerSettings):
        spec = strategy.spec()
    if spec is None or spec.name in BUILT_IN:
        return
    search_current_folder()
    from rainband.model.block_optimizer import blockwise_obstacle, needs_closure

    kind = spec.name.rpartition(":")[2]
    if part is None and (reason := needs_closure(spec)):
        raise OptionError(f"{kind} cannot run with {name}: {reason}. Use an optimizer whose step needs none.")
    if part is not None and (reason := blockwise_obstacle(spec)):
        raise OptionError(
            f"{kind} cannot run block by block on the servers of {name}: {reason}. Use an element-wise optimizer, "
            f"such as {' or '.join(ELEMENT_WISE)}, or a strategy whose workers run it, such as sync or averaging."
        )


def _as_one_replica(
    base: RunConfig, strategy: Strategy, options: RunOptions, placement: Placement | None
) -> tuple[RunConfig, Strategy]:
    """Return the strategy that makes the same updates with stages, if workers would share each batch without them."""
    settings = strategy.requires.in_stages
    if not settings or (placement is None and not _any(options, "stages", "split")):
        return base, strategy
    made = dataclasses.replace(strategy, **settings)  # type: ignore[type-var]
    return msgspec.structs.replace(base, strategy_settings={**base.strategy_settings, **settings}), made


def check_custom_loop(name: str, requires: Requirements) -> None:
    """Raise if the strategy cannot be used in a custom training loop."""
    use = f"use rainband train TASK {name}, or choose another strategy, such as averaging or downpour"
    if requires.coordinated:
        why, use = (
            "it uses the data as often as it needs",
            f"use rainband.minimize(task), or rainband train TASK {name}",
        )
    elif requires.shared_memory:
        why = "its workers train models in memory that all workers share"
    elif requires.stages is not None:
        why = "it is a pipeline of stages"
    elif not requires.custom_loop:
        why = "its `requires` declares custom_loop=False"
    else:
        return
    raise OptionError(f"{name} does not work in a custom training loop, because {why}: {use}.")


def _workers(options: RunOptions, name: str, requires: Requirements, size: int, usual: int) -> int:
    most = None if requires.max_replicas is None else requires.max_replicas * size
    workers = options.get("workers")
    if workers is None:
        workers = max(1, usual // size) * size
        workers = workers if most is None else min(most, workers)
    joining = max(workers, options.get("min_workers") or 0) if "listen" in options and size > 1 else workers
    if most is not None and joining != most:
        if "listen" in options and size > 1:
            raise OptionError(
                f"{name} runs one replica of the model, on {size} workers: use {opt('workers', most)}, or "
                f"{opt('min_workers', most)} if other machines bring some of them."
            )
        runs = "in one process" if size == 1 else f"one replica of the model, on {size} workers"
        raise OptionError(
            f"{name} runs {runs}: omit {opt('workers', workers)}, or choose a strategy with any number of workers, "
            "such as downpour."
        )
    _check_whole_replicas(options, workers, size)
    return workers


def _check_whole_replicas(options: RunOptions, workers: int, size: int) -> None:
    """Raise if some worker of the start belongs to no whole replica; others may join from other machines."""
    number, name = workers, "workers"
    if "listen" in options and (options.get("min_workers") or 0) > workers:
        number, name = options["min_workers"] or 0, "min_workers"
    if number % size:
        right = max(1, number // size) * size
        hint = ""
        if "listen" in options and name == "workers":
            hint = f", or {opt('min_workers', right + size * (right < number))} if other machines bring the rest"
        whole = opt("stages", size) if size == options.get("stages") else f"{size}, the workers of one replica"
        raise OptionError(
            f"{opt(name, number)} is not a multiple of {whole}: use {opt(name, right)} or "
            f"{opt(name, right + size)}{hint}."
        )


def _servers(options: RunOptions, name: str, requires: Requirements, usual: int) -> int:
    given = options.get("servers")
    if not requires.servers:
        if given:
            raise OptionError(
                f"{name} has no servers: omit {opt('servers', given)}, or choose a strategy with servers, such as "
                "downpour."
            )
        return 0
    servers = usual if given is None else given
    if servers < 1:
        raise OptionError(
            f"{opt('servers', servers)}: {name} requires servers, which hold the parameters, so use "
            f"{opt('servers', 1)} or more, or choose single, which needs none."
        )
    return servers


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_cores(**numbers: int) -> None:
    cores = usable_cores()
    for name, number in numbers.items():
        if number > MOST_PER_CORE * cores:
            raise OptionError(
                f"{opt(name, number)}: this machine has {cores} cores, so they would only wait for each other. Use at "
                f"most {MOST_PER_CORE * cores}; about {cores} is fastest."
            )


def _check_simulation(options: RunOptions, name: str, requires: Requirements, size: int) -> None:
    if options.get("runtime") != "sim":
        for simulated in ("network", "time_only", "steps", "faults"):
            if options.get(simulated):
                raise OptionError(f"{opt(simulated)} requires {opt('runtime', 'sim')}.")
        return
    if not options.get("time_only"):
        if "steps" in options:
            raise OptionError(
                f"{opt('steps')} requires {opt('time_only', True)}: with gradients, {opt('epochs')} says how many "
                "steps there are."
            )
        return
    time_only = opt("time_only", True)
    if not requires.servers and not requires.in_rounds:
        raise OptionError(f"{name} has no servers, so there are no messages to simulate: omit {time_only}.")
    if requires.coordinated:
        raise OptionError(f"{time_only} computes no loss, and {name} needs it: omit {time_only}.")
    if size > 1:
        raise OptionError(
            f"{time_only} does not work with stages: omit it, or type rainband placement TASK --schedule all."
        )


def _check_unused(given: RunOptions, merged: RunOptions, name: str, requires: Requirements, size: int) -> None:
    """Raise if an option that was given would have no effect; those of an earlier run are only unused."""
    for shared, has_effect in (("parts", requires.split_batches), ("stuck_timeout_s", requires.in_rounds)):
        if shared in given and not has_effect:
            raise OptionError(f"{opt(shared)}: with {name}, workers do not share batches, so omit it.")
    transport = given.get("transport", "auto")
    if transport != "auto":
        if merged.get("runtime") == "sim":
            raise OptionError(f"{opt('transport', transport)}: a simulation has only its network, so omit it.")
        if not requires.servers and size == 1:
            raise OptionError(f"{opt('transport', transport)}: {name} has no servers to send gradients to, so omit it.")
    if merged.get("time_only"):
        if "eval_every_s" in given:
            raise OptionError(
                f"{opt('eval_every_s')}: with {opt('time_only', True)}, nothing is evaluated, so omit it."
            )
        if "steps" in given and "epochs" in given:
            raise OptionError(f"{opt('steps')} and {opt('epochs')} both set the length of the run: omit one of them.")


def _check_faults(script: str, options: RunOptions, name: str, requires: Requirements, size: int) -> None:
    """Raise if a fault is for a node that the run does not have."""
    if size > 1:
        late_workers = "all workers of a model in stages start together"
    elif not requires.servers and not requires.in_rounds:
        late_workers = f"with {name} no worker joins after the start"
    else:
        late_workers = ""
    try:
        copies = options.get("copies") or 1
        check_nodes(parse_faults(script), options["workers"] or 0, options["servers"] or 0, late_workers, copies)
    except ValueError as error:
        raise OptionError(f"{opt('faults')}: {error}") from None


def _check_record(options: RunOptions, name: str, requires: Requirements, size: int) -> None:
    if not options.get("record"):
        return
    record = opt("record", True)
    if options.get("runtime") == "sim":
        raise OptionError(f"a simulated run needs no {opt('record')}: rainband replay repeats it from its seed.")
    if size > 1:
        raise OptionError(f"{record} is for workers with the whole model: omit it, or {opt('stages')}.")
    if obstacle := requires.replay_obstacle():
        instead = (
            f", or simulate the run ({opt('runtime', 'sim')}): rainband replay repeats it from its seed"
            if requires.servers
            else ""
        )
        raise OptionError(f"{record}: {name} {obstacle}, so omit {record}{instead}.")
    if options.get("transport") == "shm":
        raise OptionError(
            f"{record} requires reads of one version, and shared memory may change while it is read: "
            f"omit {opt('transport', 'shm')}."
        )


def _placement(base: RunConfig, options: RunOptions) -> Placement | None:
    """Return the placement that was given, or that of the earlier run; None: the model is yet to be placed."""
    if file := options.get("placement"):
        with reading("placement", file, PLACEMENT_HINT):
            return load_placement(Path(file))
    return base.stage_plan.plan if base.stage_plan is not None and "stages" not in options else None


def check_task(name: str, settings: Mapping[str, Any]) -> None:
    """Raise if there is no task of this name, or if it does not have these settings."""
    if ":" in name:
        return _check_module(name)
    if name not in task_names():
        raise ValueError(
            f"no task named '{name}'{did_you_mean(name, task_names())}: "
            f"choose from {', '.join(task_names())}, or give module:name of your own."
        )
    task = read_task(name)
    known = [setting.name for setting in task.settings]
    for setting in settings:
        if setting not in known:
            raise ValueError(
                f"the task {name} has no setting '{setting}'{did_you_mean(setting, known)}: it has {', '.join(known)}."
            )
    return check_task_values(task, settings)


def _check_module(name: str) -> None:
    module, _, _ = name.partition(":")
    folder = search_current_folder()
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        hint = f"Omit the ending: {name.replace('.py:', ':')}." if module.endswith(".py") else where_to_run(module)
        raise ValueError(f"no module named '{module}', neither installed nor in {folder}. {hint}")
