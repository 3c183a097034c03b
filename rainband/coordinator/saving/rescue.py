"""Fetches the model from the servers when no worker is left that could save it."""

from __future__ import annotations

from typing import Any

from rainband.coordinator.state import CoordinatorOutput, Phase, RunState
from rainband.protocol.messages import Params, Pull

HAS_PARAMETERS = frozenset({Phase.RUNNING, Phase.FLUSHING, Phase.FINISHING, Phase.CONCLUDING})


class Rescue:
    """The parameters of a model, block by block. The runtime saves them, because the coordinator does no I/O."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.begun = False
        self.over = False  # every block has arrived
        self.sequence = 0
        self.values: dict[int, Any] = {}  # by block: bytes, or in a simulation a tensor
        self.versions: dict[int, int] = {}

    @property
    def is_possible(self) -> bool:
        """Return True if servers hold parameters."""
        state = self.state
        return bool(state.settings.num_servers and state.welcome and state.phase in HAS_PARAMETERS)

    def begin(self) -> list[CoordinatorOutput]:
        """Request the parameters of all blocks."""
        self.begun = True
        return self._pull(at_version=-1)

    def _pull(self, at_version: int) -> list[CoordinatorOutput]:
        assert self.state.welcome
        self.values.clear()
        self.sequence += 1
        parts = sorted({block.part for block in self.state.welcome.blocks})
        pulls = [Pull(self.sequence, at_version=at_version, part=part) for part in parts]
        return [CoordinatorOutput(s.peer, pull) for _, s in sorted(self.state.servers.items()) for pull in pulls]

    def receive(self, params: Params, body: Any) -> list[CoordinatorOutput]:
        """Take one block; set `over` with the last one."""
        assert self.state.welcome and self.state.plan
        if not self.begun or params.sequence != self.sequence:
            return []
        self.values[params.block] = bytes(body) if isinstance(body, memoryview) else body  # a connection reuses memory
        self.versions[params.block] = params.version
        if len(self.values) < len(self.state.welcome.blocks):
            return []
        if self.state.plan.items_per_round and self.sequence == 1 and len(set(self.versions.values())) > 1:
            return self._pull(min(self.versions.values()))  # a block also has the version before its newest
        self.over = True
        return []

    @property
    def is_complete(self) -> bool:
        """Return True if every block has arrived with its values."""
        return self.over and all(values is not None for values in self.values.values())
