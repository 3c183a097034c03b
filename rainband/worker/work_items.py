"""The cells of an evaluation that a worker has in hand: which is next, and which others have delivered meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rainband.protocol.data_plan import Plan
from rainband.protocol.messages import Cells, Delivered, Message, Want
from rainband.strategy import Batch, Cell


class Handed:
    """Asks for more while the last cell is computed, and says so when there is none."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self.tell = tell  # the coordinator
        self.point = -1  # of the evaluation at hand
        self.cells: deque[int] = deque()  # not begun
        self.spare: set[int] = set()  # others have delivered these
        self.asked = False
        self.said_idle = False

    def take(self, message: Cells) -> None:
        """More cells; those of the evaluation before are over."""
        self._go_on_to(message.point)
        if message.point == self.point:
            self.asked = self.said_idle = False
            self.cells += [cell for cell in message.cells if cell not in self.cells]
            self.spare.difference_update(message.cells)

    def leave_off(self, message: Delivered) -> None:
        """Others have delivered these cells: they need not be begun, nor ended."""
        self._go_on_to(message.point)
        if message.point == self.point:
            self.spare.update(message.cells)
            self.cells = deque(cell for cell in self.cells if cell not in self.spare)

    def ask_again(self) -> None:
        self.asked = self.said_idle = False

    def _go_on_to(self, point: int) -> None:
        if point > self.point:
            self.point = point
            self.cells.clear()
            self.spare.clear()

    def next(self, plan: Plan) -> Cell | None:
        """The next cell to compute; None: there is none now."""
        idle = not self.cells
        if (len(self.cells) <= 1 and not self.asked) or (idle and not self.said_idle):
            self.asked, self.said_idle = True, idle
            self.tell(Want(idle))
        if idle:
            return None
        cell = self.cells.popleft()
        batches = tuple(Batch(cell, k, self.point) for k in range(plan.batches_in(cell)))
        return Cell(batches, self.point, bool(self.cells))

    def after(self, batch: Batch, plan: Plan) -> Batch | None:
        """What will be computed after this batch, as far as is known."""
        if batch.k + 1 < plan.batches_in(batch.portion):
            return Batch(batch.portion, batch.k + 1, batch.lease)
        return Batch(self.cells[0], 0, self.point) if self.cells else None

    def wants(self, cell: Cell) -> bool:
        """Is it worth going on with a cell that was begun?"""
        return cell.round == self.point and cell.batches[0].portion not in self.spare
