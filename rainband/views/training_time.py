"""How long a run trained, as its events tell it: starting processes and saving the model are no training."""

from __future__ import annotations

from dataclasses import dataclass

from rainband.protocol.events import AnyEvent, PhaseChanged


@dataclass
class TrainingTime:
    """From the beginning of the first step, when all are told to go, to the end of the last."""

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
        """0: it has not come to its end, or there was none."""
        return 0.0 if self.began_s is None or self.ended_s is None else self.ended_s - self.began_s
