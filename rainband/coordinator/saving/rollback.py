"""Begins again from the last checkpoint after the only replica was lost, whose workers had the parameters.

Its stages are at different updates when one of them is lost, so all of them begin again from one checkpoint. Batches
that were done after it are computed again: the accepted sets are those of the checkpoint, too.
"""

from __future__ import annotations

import msgspec

from rainband.coordinator.leases import Leases
from rainband.coordinator.saving.checkpoints import Checkpoints
from rainband.coordinator.state import RunState
from rainband.protocol import events
from rainband.protocol.saved_state import Restore


class Rollback:
    """Sets the coordinator back to the last checkpoint, or to the beginning of the run."""

    def __init__(self, state: RunState, leases: Leases, checkpoints: Checkpoints) -> None:
        self.state, self.leases, self.checkpoints = state, leases, checkpoints

    @property
    def is_due(self) -> bool:
        """Return whether a replica that joins replaces the one that had the parameters."""
        settings = self.state.settings
        return settings.workers_per_replica > 1 and not settings.num_servers and self.state.plan is not None

    @property
    def must_wait(self) -> bool:
        """Return whether a checkpoint is nearly there: afterwards, older ones may be removed."""
        return self.is_due and self.checkpoints.complete is not None

    def begin(self, now: float) -> None:
        """Forget what was done after the last checkpoint, and let workers that join begin with it."""
        state, checkpoints = self.state, self.checkpoints
        assert state.plan is not None and state.welcome is not None and state.join is not None
        done, restore = state.batches_done(), state.settings.restore
        if checkpoints.last_name:
            restore = Restore(
                place=checkpoints.last_name,
                step=checkpoints.last_step,
                plan=state.plan,
                layout=state.join.layout,
                num_replicas=state.settings.num_replicas,
                blocks=checkpoints.last_blocks,
                samples=state.plan.samples_of(checkpoints.last_step),
            )
            state.welcome = msgspec.structs.replace(state.welcome, checkpoint=checkpoints.last_name)
        checkpoints.give_up(now)
        state.servers.clear()  # the lost workers, which reported what they had accepted
        self.leases.begin_again(restore)
        place, step, samples = ("", 0, 0) if restore is None else (restore.place, restore.step, restore.samples)
        state.events.append(
            events.Restored(at_s=now, place=place, step=step, samples=samples, repeated=max(0, done - step))
        )
