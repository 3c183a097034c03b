"""Makes a checkpoint of what the nodes have written. It does not import torch, which the launcher does not need."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec

from rainband.checkpoints import commit
from rainband.checkpoints.manifest import Manifest, RunFacts
from rainband.checkpoints.store import Store
from rainband.checkpoints.write import write_tensors
from rainband.coordinator.coordinator import Coordinator
from rainband.coordinator.saving.checkpoints import Collected
from rainband.protocol.saved_state import SavedCommands
from rainband.runtimes.checkpoints.background import Background
from rainband.runtimes.checkpoints.place import COORDINATOR_FILE, RESULTS

FAILURES = (OSError, ValueError)


class Committer:
    """Makes a checkpoint of the parts that the coordinator has collected, and removes old ones."""

    def __init__(
        self,
        coordinator: Coordinator,
        store: Store,
        facts: RunFacts,
        keep: int,
        background: Background,
        calendar_time: Callable[[], str],
    ) -> None:
        self.coordinator = coordinator
        self.store = store
        self.facts = facts
        self.keep = keep
        self.background = background
        self.calendar_time = calendar_time
        self.under_way = False

    def advance(self, committed: Callable[[Collected, str, str], None]) -> None:
        """Begin to commit what is complete; `committed` is called with the name, or with what went wrong."""
        self.background.settle()
        checkpoints = self.coordinator.checkpoints
        while checkpoints.left:
            self.background.submit(partial(self._discard, checkpoints.left.pop()))
        collected = checkpoints.complete
        if collected is None or self.under_way:
            return
        self.under_way = True
        manifest = self._manifest(collected)
        self.background.submit(partial(self._commit, collected, manifest, committed))

    def _commit(
        self, collected: Collected, manifest: Manifest, committed: Callable[[Collected, str, str], None]
    ) -> Callable[[], None]:
        name, error = "", ""
        try:
            name = commit.finish(self.store, collected.folder, self._with_results(collected, manifest))
            following = self.coordinator.checkpoints.current
            commit.prune(self.store, self.keep, "" if following is None else following.folder)
        except FAILURES as raised:
            error = "" if name else str(raised)

        def done() -> None:
            self.under_way = False
            committed(collected, name, error)

        return done

    def _discard(self, folder: str) -> Callable[[], None]:
        """Remove what the nodes have written for a checkpoint that failed: it may fill the disk."""
        checkpoints = self.coordinator.checkpoints
        used = [one.folder for one in (checkpoints.current, checkpoints.complete) if one is not None]
        if folder not in used:
            with suppress(OSError):
                commit.discard(self.store, folder)
        return lambda: None

    def _with_results(self, collected: Collected, manifest: Manifest) -> Manifest:
        """Write the results of a full-batch strategy's commands, if it has any."""
        position = collected.position
        if position is None:
            return manifest
        folder = commit.begin(self.store, collected.folder)
        file = write_tensors(self.store, folder, COORDINATOR_FILE, {RESULTS: position.results})
        commands = SavedCommands(position.number, position.version, position.evaluates, file.name)
        return msgspec.structs.replace(manifest, files=(*manifest.files, file), commands=commands)

    def _manifest(self, collected: Collected) -> Manifest:
        state = self.coordinator.state
        assert state.plan is not None and state.join is not None
        restore = state.settings.restore
        return Manifest(
            step=collected.step,
            created_at=self.calendar_time(),
            facts=self.facts,
            plan=state.plan,
            layout=state.join.layout,
            num_replicas=restore.num_replicas if restore and state.join.rounds else state.settings.num_replicas,
            files=tuple(collected.files),
            metrics=next((w.heartbeat.metrics for w in state.workers.values() if w.heartbeat.metrics), {}),
            blocks=tuple(sorted(collected.blocks, key=lambda block: block.index)),
        )
