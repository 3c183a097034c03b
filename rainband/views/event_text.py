"""Text of a run's events: the lines that stay on the screen, and the parts of a progress line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rainband.protocol import events
from rainband.protocol.events import AnyEvent
from rainband.views.formatting import assignment, count, cut, duration, percent, short, size, whole
from rainband.views.history import RunSoFar

PACKAGE = Path(__file__).parents[1]
MAX_NAMED = 3  # nodes in one sentence


def lasting_lines(event: AnyEvent, so_far: RunSoFar, verbose: bool = False) -> list[str]:
    """Return the lines to keep of an event: lost nodes, output of the processes, errors."""
    match event:
        case events.Lost():
            return [_lost(event, so_far)]
        case events.ServerReplaced():
            return [f"the copy of server {event.server} has taken over after {duration(event.seconds)}"]
        case events.UpdateSizeChanged():
            return [f"workers joined or left: each update now averages {count(event.gradients, 'gradient')}"]
        case events.GuardActed():
            return [_guard_acted(event)]
        case events.Listening():
            return _how_to_join(event, so_far)
        case events.MachineJoined(left=""):
            return [f"{event.machine} joined as {numbered(event.workers, event.servers)}"]
        case events.MachineJoined():
            return [f"{event.machine} with {numbered(event.workers, event.servers)} has left ({event.left})"]
        case events.Tunneled(closed=False):
            first, second = event.workers
            return [f"workers {first} and {second} cannot reach each other: linked through this machine"]
        case events.Returned():
            return [f"{event.node} is active again"]
        case events.IterationDone() if event.end:
            return [f"done at iteration {event.iteration}: {event.end}"]
        case events.PhaseChanged(reason=str(reason)) if reason and event.phase == "finishing" and not so_far.error:
            return [f"stopping ({reason}): workers finish their current batches; press Ctrl-C again to end now"]
        case events.ProcessOutput() if so_far.error is None:  # later output only shows how the processes were ended
            before = [f"| ... {count(event.left_out, 'line')} before this in output.log"] if event.left_out else []
            return [*before, *(f"| {line}" for line in event.lines)]
        case events.UserError():
            return user_error(event, verbose)
        case events.Restored():
            return [restored(event)]
        case events.CheckpointWritten() if verbose:
            return [f"checkpoint {event.name}: {size(event.num_bytes)} in {event.seconds:.1f} s"]
        case events.TargetReached():
            return [f"{event.metric} {short(event.value)}: the target is reached"]
        case events.Warned():
            return [f"warning: {event.text}"]
    return _details(event) if verbose else []


def _how_to_join(event: events.Listening, so_far: RunSoFar) -> list[str]:
    """Return what to type on another machine. The invitation itself is secret, and is not shown."""
    servers = f", servers on {', '.join(map(str, event.servers))}" if event.servers else ""
    host = event.address.rpartition(":")[0]
    return [
        f"listening on {event.address}{servers}. To join from another machine, copy the invitation, which is secret:",
        f"  scp {host}:{event.invitation} .",
        f"  {join_command(so_far)}",
    ]


def join_command(so_far: RunSoFar) -> str:
    """Return what to type on a machine that has the invitation."""
    task = so_far.started.task if so_far.started else ""
    return "rainband join invite.txt --workers 4" + (f" {task}" if task.endswith(".py") else "")


def _lost(event: events.Lost, so_far: RunSoFar) -> str:
    has_others = so_far.started is not None and so_far.started.num_workers > 1
    shares = so_far.started is not None and so_far.started.shares_batches
    has_servers = so_far.started is not None and so_far.started.num_servers > 0  # otherwise it held parameters
    reassigns = event.node.startswith("worker") and has_others and so_far.phase == "running" and (has_servers or shares)
    goes_on = "the others share its part" if shares else "its batches are reassigned"
    after = f"; {goes_on}" if reassigns else ""
    match event.state:
        case "paused":
            return f"{event.node} {event.why}{after}"
        case "inactive":
            return f"{event.node} is {event.why}{after}"
        case "left":
            return f"{event.node} has left{after}"
        case "lost":
            return f"lost {event.node} ({event.why}){after}"


def _guard_acted(event: events.GuardActed) -> str:
    bound = "" if event.bound is None else f"; the bound is now {event.bound}"
    rate = "" if event.lr_factor == 1 else f"; the learning rate is now {event.lr_factor:g} times its setting"
    return f"divergence guard: {event.why}{bound}{rate}"


def restored(event: events.Restored) -> str:
    """Return from where a run continues, and what is computed again."""
    done = f"{count(event.step, 'batch')} done"
    if event.repeated is None:
        return f"continuing from {event.place}, with {done}"
    place = (
        f"continuing from {event.place}, with {done}" if event.place else "there is no checkpoint yet: beginning again"
    )
    some = f"{count(event.repeated, 'batch')} or more" if event.repeated else "what was done after it"
    return f"{place}; {some} computed again"


def user_error(event: events.UserError, verbose: bool = False) -> list[str]:
    """Return the traceback with rank and step, or the message alone where rainband itself found the mistake."""
    where = f"worker {event.worker} " + (f"failed at step {event.step}" if event.step else "could not start")
    if event.traceback and (verbose or not raised_by_rainband(event.error, event.traceback)):
        return [f"{where}:", *event.traceback.rstrip().splitlines()]
    return [f"{where}: {event.error.removeprefix('ValueError: ')}"]


def raised_by_rainband(error: str, trace: str) -> bool:
    """Return True for a ValueError of rainband's own code, whose message says what to do."""
    files = re.findall(r'^  File "([^"]*)"', trace, re.MULTILINE)
    return error.startswith("ValueError: ") and bool(files) and Path(files[-1]).is_relative_to(PACKAGE)


def _details(event: AnyEvent) -> list[str]:
    match event:
        case events.RunStarted():
            settings = " ".join(assignment(name, value) for name, value in event.settings.items())
            return [f"{event.strategy} {settings}"]
        case events.PlanMade():
            return [plan_made(event)]
        case events.Joined():
            return [f"{event.node} joined"]
        case events.ServerCopied():
            return [f"server {event.server} has a copy"]
        case events.Linked():
            return [f"worker {event.worker} on {event.machine}: {links(event.links)}"]
        case events.BatchesReassigned():
            whose = f" of worker {event.from_worker}" if event.from_worker >= 0 else ""
            return [f"{count(event.batches, 'batch')}{whose} reassigned (portion {event.portion})"]
        case events.PhaseChanged():
            return [f"phase: {event.phase}" + (f" ({cut(event.reason, 200)})" if event.reason else "")]
    return []


def numbered(workers: Sequence[int], servers: Sequence[int]) -> str:
    """Return the numbers of some nodes, such as workers 4, 5 and server 2."""
    groups = (("worker", workers), ("server", servers))
    return " and ".join(
        f"{role}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}" for role, numbers in groups if numbers
    )


def links(transports: Sequence[str]) -> str:
    """Return how a worker reaches its servers: one word if it is the same for all."""
    if len(set(transports)) == 1:
        return transports[0]
    return ", ".join(f"server {number} {word}" for number, word in enumerate(transports) if word)


def headline(so_far: RunSoFar) -> str:
    """Return the task, the strategy and the number of processes."""
    started = so_far.started
    if started is None:
        return ""
    nodes = num_nodes(started.num_workers, started.num_servers)
    return f"{started.task} with {started.strategy}: {nodes}{', simulated' if so_far.is_virtual else ''}"


def num_nodes(num_workers: int, num_servers: int) -> str:
    servers = f" and {count(num_servers, 'server')}" if num_servers else ", no servers"
    return count(num_workers, "worker") + servers


def waiting_for(so_far: RunSoFar) -> str:
    """Return what the run waits for before its first step."""
    started = so_far.started
    if started is None:
        return ""
    nodes = [f"server {i}" for i in range(started.num_servers)]
    nodes += [f"worker {i}" for i in range(started.num_workers)]
    missing = [node for node in nodes if node not in so_far.joined]
    if len(missing) == len(nodes):
        return f"starting {num_nodes(started.num_workers, started.num_servers)} ..."
    if so_far.phase == "loading":
        return "the first worker sends the initial parameters to the servers ..."
    if missing:
        return f"{len(nodes) - len(missing)} of {len(nodes)} have joined, waiting for {_named(missing)} ..."
    return "waiting for the first steps ..."


def plan_made(plan: events.PlanMade) -> str:
    model = f"{count(plan.num_parameters, 'parameter')} in {count(plan.num_blocks, 'block')}"
    samples = count(plan.num_samples, "sample")
    if not plan.epochs:
        return f"{model}, {samples} in batches of {whole(plan.batch_size)}, as many passes as needed"
    batches = f"{count(plan.num_batches, 'batch')} of {whole(plan.batch_size)}"
    return f"{model}, {count(plan.epochs, 'epoch')} of {samples}, {batches}"


def progress_line(so_far: RunSoFar) -> str:
    """Return the whole state of the run in one line."""
    last = so_far.last
    if last is None or not (so_far.samples or last.batches_done):
        return waiting_for(so_far)
    parts = [
        f"{duration(so_far.at_s):>9} {percent(so_far.samples_done / so_far.samples) if so_far.samples else '':>6}",
        f"{whole(so_far.samples_done)} of {count(so_far.samples, 'sample')}" if so_far.samples else done(so_far),
        iteration(so_far) or ("" if so_far.loss is None else f"loss {short(so_far.loss)}"),
        metrics(so_far),
        evaluations(so_far),
        rate(so_far),
        staleness(so_far),
        time_left(so_far),
        slow_and_lost(so_far),
    ]
    return "  ".join(part for part in parts if part)


def metrics(so_far: RunSoFar) -> str:
    """Return the task's last metrics, without its loss, which is not the training loss."""
    measured = so_far.last.metrics if so_far.last else {}
    return ", ".join(f"{name} {short(value)}" for name, value in measured.items() if name != "loss")


def done(so_far: RunSoFar) -> str:
    """Return the number of samples or steps done, for runs whose length is unknown."""
    return count(so_far.done, so_far.unit)


def iteration(so_far: RunSoFar) -> str:
    """Return the last iteration of a full-batch strategy."""
    now = so_far.last_iteration
    if now is None:
        return ""
    loss, gradient = ("not finite" if x is None else short(x) for x in (now.loss, now.gradient_norm))
    return f"iteration {now.iteration}  loss {loss}  |gradient| {gradient}  step {short(now.step)}"


def evaluations(so_far: RunSoFar) -> str:
    """Return the cost of all iterations: evaluations of the loss and their work items."""
    now = so_far.last_iteration
    if now is None:
        return ""
    backups = f", {count(now.backups, 'backup')}" if now.backups else ""
    return f"{count(now.evaluations, 'evaluation')}, {count(now.work_items, 'work item')}{backups}"


def rate(so_far: RunSoFar) -> str:
    """Return the throughput of all workers together; "" while it is unknown."""
    return f"{short(so_far.per_s)} {so_far.unit}s/s" if so_far.per_s else ""


def staleness(so_far: RunSoFar) -> str:
    """Return the staleness of gradients, or the disagreement of models that workers train by themselves."""
    last = so_far.last
    if last is not None and last.disagreement is not None:
        return f"disagreement {short(last.disagreement)}"
    if last is None or not (so_far.started and so_far.started.num_servers) or so_far.last_iteration is not None:
        return ""
    return f"staleness mean {last.staleness_mean:.1f}, max {last.staleness_max}{bound(so_far)}"


def bound(so_far: RunSoFar) -> str:
    """Return the strategy's staleness bound in its own unit."""
    last = so_far.last
    if last is None or last.staleness_bound is None:
        return ""
    return f" (bound {f'{last.staleness_bound:g} {last.staleness_unit}'.rstrip()})"


def time_left(so_far: RunSoFar) -> str:
    if so_far.samples_done >= so_far.samples:
        return ""
    return "" if so_far.left_s is None else f"{duration(so_far.left_s)} left"


def slow_and_lost(so_far: RunSoFar) -> str:
    slow = [f"worker {worker.index}" for worker in so_far.workers() if worker.slow]
    holders = sorted(set(so_far.last.waiting_for.values())) if so_far.last else []
    parts = [
        f"waiting for: {_named([f'worker {i}' for i in holders])}" if holders else "",
        f"slow: {_named(slow)}" if slow else "",
        f"degraded: no copy of {_named([f'server {i}' for i in so_far.degraded])}" if so_far.degraded else "",
        *(f"{word}: {_named(nodes)}" for word, nodes in _gone(so_far).items()),
    ]
    return "  ".join(part for part in parts if part)


def _gone(so_far: RunSoFar) -> dict[str, list[str]]:
    """Return the nodes that take no part now: lost, inactive or paused ones."""
    gone: dict[str, list[str]] = {}
    for node, lost in so_far.lost.items():
        gone.setdefault(lost.state, []).append(node)
    return gone


def _named(nodes: list[str]) -> str:
    more = f" and {len(nodes) - MAX_NAMED} more" if len(nodes) > MAX_NAMED else ""
    return ", ".join(nodes[:MAX_NAMED]) + more
