"""Compute when each task of a schedule runs: used to check schedules, to predict and to draw them.

A machine does the tasks of its row in order. A task starts when its machine is free and everything it reads has
arrived. Events are handled in the order of time, so messages queue at a machine's NIC in the order they arrive:

    leaves    max(last maker done, NIC of the sender free)         occupies that NIC for `occupies_s`
    arrives   max(left + latency_s, NIC of the reader free) + occupies_s

With occupies_s = 0 a message is a plain delay, and NICs do not matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, NamedTuple, TypeVar

Task = TypeVar("Task", bound=Hashable)


class Send(NamedTuple, Generic[Task]):
    """A message; between tasks of one machine it takes no time."""

    makers: tuple[Task, ...]  # all on one machine; it leaves when the last of them is done
    readers: tuple[Task, ...]  # all on one machine; none starts before it has arrived
    occupies_s: float = 0.0
    latency_s: float = 0.0


class ScheduleDeadlock(Exception):
    """Some machines wait for each other: `waiting` has the task at which each is stuck."""

    def __init__(self, waiting: Mapping[int, Any]) -> None:
        super().__init__(f"machines {', '.join(map(str, waiting))} wait for each other")
        self.waiting = waiting


@dataclass(frozen=True)
class Times(Generic[Task]):
    """The start and the end of each task."""

    start_s: Mapping[Task, float]
    end_s: Mapping[Task, float]

    @property
    def total_s(self) -> float:
        return max(self.end_s.values(), default=0.0)


def play(rows: Sequence[Sequence[Task]], seconds: Mapping[Task, float], sends: Iterable[Send[Task]]) -> Times[Task]:
    """Return when each task runs; raise ScheduleDeadlock, with the waiting tasks, if there is no end."""
    machine = {task: number for number, row in enumerate(rows) for task in row}
    position = {task: number for row in rows for number, task in enumerate(row)}
    missing = dict.fromkeys(machine, 0)
    leaving: dict[Task, list[Send[Task]]] = {}
    for send in sends:
        last = send.makers[0] if len(send.makers) == 1 else max(send.makers, key=position.__getitem__)
        leaving.setdefault(last, []).append(send)
        for reader in send.readers:
            missing[reader] += 1
    count = len(rows)
    at, idle, free = [0] * count, [True] * count, [0.0] * count
    sending, taking = [0.0] * count, [0.0] * count  # until when each NIC is busy, in each direction
    ready = dict.fromkeys(machine, 0.0)
    start_s: dict[Task, float] = {}
    end_s: dict[Task, float] = {}
    heap: list[tuple[float, int, Task | None, Send[Task] | None]] = []
    number = 0  # of an event: equal times keep their order

    def begin(here: int) -> None:
        nonlocal number
        row = rows[here]
        if not idle[here] or at[here] == len(row) or missing[task := row[at[here]]]:
            return
        start_s[task] = start = max(free[here], ready[task])
        end_s[task] = free[here] = start + seconds[task]
        idle[here] = False
        number += 1
        heappush(heap, (free[here], number, task, None))

    def deliver(send: Send[Task], now: float) -> None:
        for reader in send.readers:
            missing[reader] -= 1
            ready[reader] = max(ready[reader], now)
        begin(machine[send.readers[0]])

    for here in range(count):
        begin(here)
    while heap:
        now, _, task, message = heappop(heap)
        if message is not None:
            there = machine[message.readers[0]]
            taking[there] = max(now, taking[there]) + message.occupies_s
            deliver(message, taking[there])
            continue
        assert task is not None
        here = machine[task]
        at[here] += 1
        idle[here] = True
        for send in leaving.get(task, ()):
            if machine[send.readers[0]] == here:
                deliver(send, now)
            else:
                left = max(now, sending[here])
                sending[here] = left + send.occupies_s
                number += 1
                heappush(heap, (left + send.latency_s, number, None, send))
        begin(here)
    if waiting := {here: row[at[here]] for here, row in enumerate(rows) if at[here] < len(row)}:
        raise ScheduleDeadlock(waiting)
    return Times(start_s, end_s)
