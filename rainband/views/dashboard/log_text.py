"""One line of text for each event, for the dashboard's log."""

from __future__ import annotations

import msgspec

from rainband.protocol import events
from rainband.protocol.events import AnyEvent
from rainband.views.event_text import numbered, plan_made, restored
from rainband.views.formatting import assignment, count, size

MAX_FIELD = 80  # characters of a field that has no words of its own


# size: one case for each kind of event
def one_line(event: AnyEvent) -> str:
    """Return what happened, in one line."""
    match event:
        case events.RunStarted():
            settings = " ".join(assignment(name, value) for name, value in event.settings.items())
            nodes = f"{count(event.num_workers, 'worker')}, {count(event.num_servers, 'server')}"
            return f"{event.task} with {event.strategy} {settings}".rstrip() + f": {nodes}"
        case events.PlanMade():
            return plan_made(event)
        case events.PhaseChanged():
            return event.phase + (f": {event.reason}" if event.reason else "")
        case events.Joined():
            return f"{event.node} has joined"
        case events.Linked():
            return f"worker {event.worker} on {event.machine}: {', '.join(sorted(set(event.links))) or 'no servers'}"
        case events.MachineJoined():
            nodes = numbered(event.workers, event.servers)
            return f"{event.machine} with {nodes} {f'has left: {event.left}' if event.left else 'has joined'}"
        case events.Listening():
            return f"other machines may join at {event.address}"
        case events.Lost():
            return f"{event.node}: {event.why}"
        case events.Returned():
            return f"{event.node} is active again"
        case events.FirstStep():
            return f"worker {event.worker} has computed the first gradient"
        case events.BatchesReassigned():
            whose = f" of worker {event.from_worker}" if event.from_worker >= 0 else ""
            return f"{count(event.batches, 'batch')}{whose} reassigned"
        case events.UpdateSizeChanged():
            return f"each update now averages {count(event.gradients, 'gradient')}"
        case events.GuardActed():
            return f"divergence guard: {event.why}"
        case events.CheckpointWritten():
            return f"{event.name}: {size(event.num_bytes)} in {event.seconds:.1f} s"
        case events.Restored():
            return restored(event)
        case events.TargetReached():
            return f"{event.metric} {event.value:.4g}: the target is reached"
        case events.Warned():
            return event.text
        case events.ProcessOutput():
            left_out = f"({count(event.left_out, 'line')} before) " if event.left_out else ""
            return left_out + " ⏎ ".join(event.lines)
        case events.UserError():
            return f"worker {event.worker}, step {event.step}: {event.error}"
        case events.RunEnded():
            return f"{event.outcome} after {event.seconds:.1f} s" + (f": {event.reason}" if event.reason else "")
    fields = {name: value for name, value in msgspec.to_builtins(event).items() if name not in ("event", "at_s")}
    return ", ".join(f"{name} {str(value)[:MAX_FIELD]}" for name, value in fields.items())
