"""The statistics that a worker sends in its heartbeats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rainband.protocol.messages import Heartbeat, SampleAccount


@dataclass(slots=True)
class Stats:
    """The statistics in a worker's heartbeats; written by the computing thread, read by another."""

    acked: int = 0
    waiting: bool = False
    steps: int = 0
    samples: int = 0
    loss_sum: float = 0.0
    loss_samples: float = 0  # the weight of the loss: samples, unless the task states another one
    pushed_bytes: int = 0
    pulled_bytes: int = 0
    saved_bytes: int = 0  # that codecs have not sent
    unsent_norm: float = 0.0  # of what a codec has kept of earlier gradients
    computed_s: float = 0.0  # seconds spent computing gradients, or parts of them
    sent_bytes: int = 0  # of tensors, to the others who compute the same model
    torn_reads: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # the last that were measured
    held_by: int | None = None  # the worker that is waited for now, as a server has reported
    waited_for: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # worker -> seconds
    waited_s: float = 0.0  # seconds spent waiting, for whatever it was
    account: SampleAccount | None = None  # of workers that share each batch
    disagreement: float | None = None  # of workers with models of their own
    usage: Callable[[], tuple[float, int]] | None = None  # seconds of the processor and bytes of memory of this process

    def waited(self, seconds: float) -> None:
        """Record a finished wait, and the worker that was waited for, if known."""
        self.waited_s += seconds
        if self.held_by is not None:
            self.waited_for[self.held_by] += seconds
            self.held_by = None

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to those that heartbeats report."""
        self.metrics = {**self.metrics, **{name: float(value) for name, value in metrics.items()}}

    def heartbeat(self) -> Heartbeat:
        """Return the numbers so far; the loss is that of the time since the last heartbeat."""
        loss_sum, samples, self.loss_sum, self.loss_samples = self.loss_sum, self.loss_samples, 0.0, 0
        cpu_s, memory_bytes = (0.0, 0) if self.usage is None else self.usage()
        return Heartbeat(
            acked=self.acked,
            waiting=self.waiting,
            waited_s=self.waited_s,
            steps=self.steps,
            samples=self.samples,
            loss=loss_sum / samples if samples else 0.0,
            loss_samples=samples,
            pushed_bytes=self.pushed_bytes,
            pulled_bytes=self.pulled_bytes,
            saved_bytes=self.saved_bytes,
            unsent_norm=self.unsent_norm,
            computed_s=self.computed_s,
            sent_bytes=self.sent_bytes,
            torn_reads=self.torn_reads,
            waited_for=dict(self.waited_for),
            metrics=self.metrics,
            held_by=self.held_by if self.waiting else None,
            account=self.account,
            disagreement=self.disagreement,
            cpu_s=cpu_s,
            memory_bytes=memory_bytes,
        )
