"""The training time of a run: without starting processes and saving the model."""

from __future__ import annotations

from dataclasses import dataclass

from rainband.protocol.events import AnyEvent, PhaseChanged


@dataclass
class TrainingTime:
    """The time from the phase `running`, when the first step begins, to the next phase."""

    began_s: float | None = None
    ended_s: float | None = None

    def absorb(self, event: AnyEvent) -> None:
        if not isinstance(event, PhaseChanged):
            return
        if event.phase == "running":
            self.began_s = event.at_s if self.began_s is None else self.began_s
        elif self.began_s is not None and self.ended_s is None:
            self.ended_s = event.at_s

    @property
    def seconds(self) -> float:
        """Return the training time, or 0 while it has not ended."""
        return 0.0 if self.began_s is None or self.ended_s is None else self.ended_s - self.began_s
