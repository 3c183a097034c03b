r"""A greedy schedule of operations on p processors, and the bounds on its time T_p (Brent 1974, Graham 1969).

With work W and depth D, in units of a scalar operation,

    max(W / p, D)  <=  T_p  <=  W / p + D

The left side holds for every schedule, the right side for greedy ones: those in which no processor is idle while an
operation is ready. An operation on a tensor is level after level of scalar operations; its first level is ready when
the operations that it needs are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from rainband.analysis.count import TensorOp


class Bounds(NamedTuple):
    lower: float
    upper: float


def bounds(work: int, depth: int, processors: int) -> Bounds:
    """Return the bounds on the time with this number of processors."""
    if processors < 1:
        raise ValueError(f"{processors} processors: at least 1 is required.")
    return Bounds(max(work / processors, depth), work / processors + depth)


def greedy_time(operations: Sequence[TensorOp], processors: int) -> int:
    """Return the time of a greedy schedule: in each unit of time, as many ready operations as there are processors."""
    waits = [len(set(operation.needs)) for operation in operations]
    readers: list[list[int]] = [[] for _ in operations]
    for number, operation in enumerate(operations):
        for need in set(operation.needs):
            readers[need].append(number)
    ready: deque[tuple[int, int, int]] = deque()  # (operation, level, scalar operations that are left of it)

    def release(number: int) -> None:
        """Make the first level of an operation ready; if it has none, it is done."""
        pending = [number]
        while pending:
            one = pending.pop()
            if operations[one].levels:
                ready.append((one, 0, operations[one].levels[0]))
            else:
                pending += done(one)

    def done(number: int) -> list[int]:
        for reader in readers[number]:
            waits[reader] -= 1
        return [reader for reader in readers[number] if not waits[reader]]

    for number in [number for number, wait in enumerate(waits) if not wait]:
        release(number)
    time = 0
    while ready:
        number, level, left = ready[0]
        if left > processors:  # only this level is worked on, for some units of time
            units = (left - 1) // processors
            ready[0] = (number, level, left - units * processors)
            time += units
            continue
        free, finished = processors, list[tuple[int, int]]()
        while ready and free:
            number, level, left = ready.popleft()
            if left > free:
                ready.appendleft((number, level, left - free))
                break
            free -= left
            finished.append((number, level))
        time += 1
        for number, level in finished:
            if level + 1 < len(operations[number].levels):
                ready.append((number, level + 1, operations[number].levels[level + 1]))
            else:
                for reader in done(number):
                    release(reader)
    return time
