"""A cut model on machines that are objects of this process: messages in a queue, in a fixed order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rainband.model_parallel.execution.fragment_run import FragmentMessage, FragmentRun
from rainband.model_parallel.graph.fragments import by_level
from rainband.model_parallel.graph.graph import Cut


class Partitioned:
    """Computes what the whole module computes, on several machines; `messages` is what the last pass sent."""

    def __init__(self, cut: Cut, placement: Mapping[str, int]) -> None:
        self.cut = cut
        self.layout = by_level(cut, placement)
        machines = sorted({self.layout.answer_machine, *self.layout.machines()})
        self.parts = {machine: FragmentRun(cut, self.layout, machine) for machine in machines}
        self.messages: list[FragmentMessage] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's answer, without gradients."""
        with torch.no_grad():
            return self.cut.answer(self._forward(args, kwargs))

    def loss_and_gradients(
        self, loss: Callable[[Any], Tensor], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Return the loss of the answer; parameters get their gradients, added to what they have."""
        value = loss(self.cut.answer(self._forward(args, kwargs or {})))
        value.backward()  # type: ignore[no-untyped-call]
        self._carry(self.parts[self.layout.answer_machine].backward())
        return value.detach()

    def _forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        self.messages = []
        bound = self.cut.bind(args, kwargs)
        first = [message for part in self.parts.values() for message in part.begin(bound)]
        self._carry(first)
        waiting = {machine: part.missing() for machine, part in self.parts.items() if part.missing()}
        assert not waiting, f"machines wait for values that nobody sends: {waiting}"
        return self.parts[self.layout.answer_machine].outputs()

    def _carry(self, messages: list[FragmentMessage]) -> None:
        queue = deque(messages)
        while queue:
            message = queue.popleft()
            self.messages.append(message)
            queue.extend(self.parts[message.destination].receive(message))
