"""What an event says in words: the lines that stay on the screen, whatever the view."""

from __future__ import annotations

import re
from pathlib import Path

from rainband.protocol.events import (
    AnyEvent,
    BatchesReassigned,
    GuardActed,
    IterationDone,
    Joined,
    Lost,
    PhaseChanged,
    PlanMade,
    ProcessOutput,
    Returned,
    RunStarted,
    UpdateSizeChanged,
    UserError,
)
from rainband.views.formatting import assignment, count, cut, duration, percent, short, whole
from rainband.views.history import RunSoFar

PACKAGE = str(Path(__file__).parents[1])
MOST_NAMED = 3  # nodes, in a sentence


def lasting(event: AnyEvent, so_far: RunSoFar, verbose: bool = False) -> list[str]:
    """Lines worth keeping: who was lost, what the processes printed, what went wrong."""
    match event:
        case Lost():
            return [_lost(event, so_far)]
        case UpdateSizeChanged():
            return [f"workers have come or gone: one update is the mean of {count(event.gradients, 'gradient')} now"]
        case GuardActed():
            return [_guarded(event)]
        case Returned():
            return [f"{event.node} works again"]
        case IterationDone() if event.end:
            return [f"done at iteration {event.iteration}: {event.end}"]
        case PhaseChanged(reason=str(reason)) if reason and event.phase == "finishing" and not so_far.error:
            return [f"stopping ({reason}): workers finish what they have begun; Ctrl-C again ends it now"]
        case ProcessOutput() if so_far.error is None:  # after it, they only tell how they were ended
            before = [f"| ... {count(event.left_out, 'line')} before this in output.log"] if event.left_out else []
            return [*before, *(f"| {line}" for line in event.lines)]
        case UserError():
            return user_error(event, verbose)
    return _details(event) if verbose else []


def _guarded(event: GuardActed) -> str:
    bound = "" if event.bound is None else f", the bound is {event.bound} now"
    rate = "" if event.lr_factor == 1 else f", the learning rate is {event.lr_factor:g} of what was set"
    return f"guard: {event.why}{bound}{rate}"


def user_error(event: UserError, verbose: bool = False) -> list[str]:
    """The traceback once, with rank and step; a mistake that we noticed ourselves needs none."""
    where = f"worker {event.worker} " + (f"failed at step {event.step}" if event.step else "could not start")
    if event.traceback and (verbose or not noticed_by_us(event)):
        return [f"{where}:", *event.traceback.rstrip().splitlines()]
    return [f"{where}: {event.error.removeprefix('ValueError: ')}"]


def noticed_by_us(event: UserError) -> bool:
    """Whether rainband itself raised a ValueError, whose message says what to do."""
    files = re.findall(r'^  File "([^"]*)"', event.traceback, re.MULTILINE)
    return event.error.startswith("ValueError: ") and bool(files) and files[-1].startswith(PACKAGE)


def headline(so_far: RunSoFar) -> str:
    """What runs, in a few words."""
    started = so_far.started
    if started is None:
        return ""
    who = crew(started.num_workers, started.num_servers)
    return f"{started.task} with {started.strategy}: {who}{', in virtual time' if so_far.is_virtual else ''}"


def crew(num_workers: int, num_servers: int) -> str:
    servers = f" and {count(num_servers, 'server')}" if num_servers else ", no servers"
    return count(num_workers, "worker") + servers


def waiting_for(so_far: RunSoFar) -> str:
    """What the quiet time before the first step is spent on."""
    started = so_far.started
    if started is None:
        return ""
    everyone = [f"server {i}" for i in range(started.num_servers)]
    everyone += [f"worker {i}" for i in range(started.num_workers)]
    missing = [node for node in everyone if node not in so_far.joined]
    if len(missing) == len(everyone):
        return f"starting {crew(started.num_workers, started.num_servers)} ..."
    if so_far.phase == "loading":
        return "the first worker gives the servers its parameters ..."
    if missing:
        return f"{len(everyone) - len(missing)} of {len(everyone)} are there, waiting for {_named(missing)} ..."
    return "waiting for the first steps ..."


def plan_made(plan: PlanMade) -> str:
    if not plan.epochs:
        return (
            f"{count(plan.num_parameters, 'parameter')} in {count(plan.num_blocks, 'block')}, "
            f"{count(plan.num_samples, 'sample')} in batches of {plan.batch_size}, as many passes as it takes"
        )
    return (
        f"{count(plan.num_parameters, 'parameter')} in {count(plan.num_blocks, 'block')}, "
        f"{count(plan.epochs, 'epoch')} of {count(plan.num_samples, 'sample')}, "
        f"{count(plan.num_batches, 'batch')} of {plan.batch_size}"
    )


def how_far(so_far: RunSoFar) -> str:
    """One line that says it all."""
    last = so_far.last
    if last is None or not (so_far.samples or last.batches_done):
        return waiting_for(so_far)
    parts = [
        f"{duration(so_far.at_s):>9} {percent(so_far.samples_done / so_far.samples) if so_far.samples else '':>6}",
        f"{whole(so_far.samples_done)} of {count(so_far.samples, 'sample')}" if so_far.samples else done(so_far),
        iteration(so_far) or ("" if so_far.loss is None else f"loss {short(so_far.loss)}"),
        measured(so_far),
        evaluations(so_far),
        rate(so_far),
        staleness(so_far),
        time_left(so_far),
        noteworthy(so_far),
    ]
    return "  ".join(part for part in parts if part)


def measured(so_far: RunSoFar) -> str:
    """What the task measured last; its loss, which is not the one of the training, only at the end."""
    metrics = so_far.last.metrics if so_far.last else {}
    return ", ".join(f"{name} {short(value)}" for name, value in metrics.items() if name != "loss")


def done(so_far: RunSoFar) -> str:
    """How much is done, where nobody has said how much there is to do."""
    return count(so_far.done, so_far.unit)


def iteration(so_far: RunSoFar) -> str:
    """Where a strategy is that goes by iterations."""
    now = so_far.iterated
    if now is None:
        return ""
    loss, gradient = ("not finite" if x is None else short(x) for x in (now.loss, now.gradient_norm))
    return f"iteration {now.iteration}  loss {loss}  |gradient| {gradient}  step {short(now.step)}"


def evaluations(so_far: RunSoFar) -> str:
    """What the iterations have taken."""
    now = so_far.iterated
    if now is None:
        return ""
    backups = f", {count(now.backups, 'backup')}" if now.backups else ""
    return f"{count(now.evaluations, 'evaluation')}, {count(now.work_items, 'cell')}{backups}"


def rate(so_far: RunSoFar) -> str:
    """Of all together; nothing while it cannot be known."""
    return f"{short(so_far.per_s)} {so_far.unit}s/s" if so_far.per_s else ""


def staleness(so_far: RunSoFar) -> str:
    last = so_far.last
    if last is None or not (so_far.started and so_far.started.num_servers) or so_far.iterated is not None:
        return ""
    return f"staleness {last.staleness_mean:.1f}, at most {last.staleness_max}{bound(so_far)}"


def bound(so_far: RunSoFar) -> str:
    """What the strategy promises, in its own unit."""
    last = so_far.last
    if last is None or last.staleness_bound is None:
        return ""
    return f" (bound {f'{last.staleness_bound:g} {last.staleness_unit}'.rstrip()})"


def time_left(so_far: RunSoFar) -> str:
    if so_far.samples_done >= so_far.samples:
        return ""
    return "" if so_far.left_s is None else f"{duration(so_far.left_s)} left"


def noteworthy(so_far: RunSoFar) -> str:
    """Who is slow, who is gone."""
    slow = [f"worker {worker.index}" for worker in so_far.workers() if worker.slow]
    parts = [
        f"slow: {_named(slow)}" if slow else "",
        f"gone: {_named(list(so_far.gone))}" if so_far.gone else "",
    ]
    return "  ".join(part for part in parts if part)


def _lost(event: Lost, so_far: RunSoFar) -> str:
    others = so_far.started is not None and so_far.started.num_workers > 1
    goes_on = "; the others go on with its data" if event.node.startswith("worker") and others else ""
    return f"lost {event.node} ({event.why}){goes_on if so_far.phase == 'running' else ''}"


def _details(event: AnyEvent) -> list[str]:
    match event:
        case RunStarted():
            settings = " ".join(assignment(name, value) for name, value in event.settings.items())
            return [f"{event.strategy} {settings}"]
        case PlanMade():
            return [plan_made(event)]
        case Joined():
            return [f"{event.node} is there"]
        case BatchesReassigned():
            whose = f" of worker {event.from_worker}" if event.from_worker >= 0 else ""
            return [f"portion {event.portion}{whose}: {count(event.batches, 'batch')} to be done again"]
        case PhaseChanged():
            return [f"phase: {event.phase}" + (f" ({cut(event.reason, 200)})" if event.reason else "")]
    return []


def _named(nodes: list[str]) -> str:
    more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
    return ", ".join(nodes[:MOST_NAMED]) + more
