"""The spans of a run, as its directory has them: what each node did from when to when."""

from __future__ import annotations

from pathlib import Path

import msgspec

FILES = "spans*.jsonl"  # in a run's directory; real workers write one each


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stretch of a node's time."""

    node: str  # "worker 0"
    what: str  # compute, wait: its own thread; push, pull: under way; apply: a server's thread
    from_s: float
    to_s: float
    label: str = ""  # with stages: F3 and B3, forward and backward of microbatch 3


def read_spans(directory: Path) -> list[Span]:
    """Read all spans of a run, in seconds since the first one; ignores an incomplete last line of a killed process."""
    decoder = msgspec.json.Decoder(Span)
    spans: list[Span] = []
    for path in sorted(directory.glob(FILES)):
        for line in path.read_bytes().splitlines():
            try:
                spans.append(decoder.decode(line))
            except msgspec.MsgspecError:
                continue
    first = min((span.from_s for span in spans), default=0.0)
    return [Span(s.node, s.what, s.from_s - first, s.to_s - first, s.label) for s in spans]
