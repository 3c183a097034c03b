"""Run the actions of a schedule on one machine, in order: the only loop over actions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Protocol

from rainband.model_parallel.execution.microbatch_run import MicrobatchRun
from rainband.model_parallel.schedules.table import Action


class ActionMachine(Protocol):
    """Supplies the runs, fragments and updates of one machine."""

    def run_of(self, action: Action) -> MicrobatchRun:
        """Return the run of an action's microbatch; its first forward starts it."""

    def fragments(self, action: Action) -> Sequence[int]:
        """Return the fragments that an action computes."""

    def finish(self, action: Action, run: MicrobatchRun) -> None:
        """Account for a backward that is done."""

    async def update(self, action: Action) -> None:
        """Make the next version of a stage's parameters."""


async def run_actions(actions: Iterable[Action] | AsyncIterator[Action], machine: ActionMachine) -> None:
    """Run forwards, backwards and updates, each after the one before."""
    if isinstance(actions, AsyncIterator):
        async for action in actions:
            await _run(action, machine)
    else:
        for action in actions:
            await _run(action, machine)


async def _run(action: Action, machine: ActionMachine) -> None:
    match action.kind:
        case "F":
            await machine.run_of(action).forward(machine.fragments(action))
        case "B":
            run = machine.run_of(action)
            await run.backward(machine.fragments(action))
            machine.finish(action, run)
        case "U":
            await machine.update(action)
