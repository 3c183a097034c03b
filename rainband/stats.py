"""What a worker counts about itself and tells in its heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from rainband.messages import Beat


@dataclass
class Stats:
    """What a worker tells in its heartbeats; written by the computing thread, read by another."""

    acked: int = 0
    waiting: bool = False
    waited_s: float = 0.0
    steps: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    loss_samples: int = 0
    pushed_bytes: int = 0
    pulled_bytes: int = 0
    torn_reads: int = 0

    def beat(self) -> Beat:
        """The numbers so far; the loss is that of the time since the last beat."""
        loss_sum, samples, self.loss_sum, self.loss_samples = self.loss_sum, self.loss_samples, 0.0, 0
        return Beat(
            acked=self.acked,
            waiting=self.waiting,
            waited_s=self.waited_s,
            steps=self.steps,
            samples=self.samples,
            loss=loss_sum / samples if samples else 0.0,
            loss_samples=samples,
            pushed_bytes=self.pushed_bytes,
            pulled_bytes=self.pulled_bytes,
            torn_reads=self.torn_reads,
        )
