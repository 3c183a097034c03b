"""The progress of a run where there is no terminal: one readable line every few seconds."""

from __future__ import annotations

from typing import TextIO

from rainband.protocol.events import AnyEvent, PhaseChanged, PlanMade, Progress, RunStarted
from rainband.views import event_text as sentences
from rainband.views.history import RunSoFar

LINE_EVERY_S = 5.0


class PlainView:
    """Time is that of the events, so a run read back gives the same lines."""

    def __init__(self, out: TextIO, verbose: bool = False) -> None:
        self.out = out
        self.verbose = verbose
        self.so_far = RunSoFar()
        self.next_line_s = 0.0

    def __call__(self, event: AnyEvent) -> None:
        self.so_far.absorb(event)
        for line in [*self._news(event), *sentences.lasting(event, self.so_far, self.verbose)]:
            self.say(line)

    def say(self, line: str) -> None:
        self.out.write(line + "\n")
        self.out.flush()

    def close(self) -> None:
        """Nothing to restore."""

    def _news(self, event: AnyEvent) -> list[str]:
        match event:
            case RunStarted():
                return [sentences.headline(self.so_far), sentences.waiting_for(self.so_far)]
            case PlanMade() if not self.verbose:
                return [sentences.plan_made(event)]
            case PhaseChanged(phase="concluding"):
                return ["measuring and saving the model ..."]
            case Progress() if event.at_s >= self.next_line_s and (
                event.samples_done < event.samples or (event.batches_done and not event.samples)
            ):
                self.next_line_s = event.at_s + LINE_EVERY_S
                return [sentences.how_far(self.so_far)]
        return []
