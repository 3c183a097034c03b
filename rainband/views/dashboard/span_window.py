"""An excerpt of a run's spans, merged to what can be told apart at the width of the page."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rainband.views.spans import FILES, Span

MAX_KEPT = 100_000  # spans, of all nodes: the newest
MAX_SHOWN = 5_000
MAX_NODES = 64
READ_BYTES = 16 << 20
HALF_A_PIXEL = 0.4
WIDE, MAX_MERGED = 1.0, 3.0  # pixels: shorter spans are merged, up to this length

_decode = msgspec.json.Decoder(Span).decode


class SpanExcerpt(msgspec.Struct, frozen=True, kw_only=True):
    """Spans of each node by kind, in seconds since the run's start; `end_s`: of all."""

    from_s: float
    to_s: float
    end_s: float
    nodes: dict[str, dict[str, list[tuple[float, float]]]]


class SpanWindow:
    """Reads the spans of a run as they are written, and keeps the newest."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.offsets: dict[Path, int] = {}
        self.spans: list[Span] = []

    def read(self) -> None:
        """Read what is new."""
        for path in sorted(self.directory.glob(FILES)):
            more = True
            while more:
                more = self._read_slice(path)
        if len(self.spans) > MAX_KEPT:
            self.spans.sort(key=lambda span: span.to_s)
            del self.spans[:-MAX_KEPT]

    def _read_slice(self, path: Path) -> bool:
        with path.open("rb") as file:
            file.seek(self.offsets.get(path, 0))
            data = file.read(READ_BYTES)
        end = data.rfind(b"\n") + 1
        self.offsets[path] = self.offsets.get(path, 0) + end
        for line in data[:end].split(b"\n"):
            try:
                self.spans.append(_decode(line))
            except msgspec.MsgspecError:
                continue
        return bool(end) and len(data) == READ_BYTES

    def excerpt(self, zero_s: float, begin_s: float | None, length_s: float, width: int) -> SpanExcerpt:
        """Return the spans of some seconds, or of the last ones; `zero_s`: the clock of spans at the run's start."""
        end_s = max((span.to_s for span in self.spans), default=zero_s) - zero_s
        begin_s = max(0.0, end_s - length_s) if begin_s is None else begin_s
        to_s = min(begin_s + length_s, max(end_s, begin_s + 1e-3))
        pixel_s = (to_s - begin_s) / max(50, width)
        nodes: dict[str, dict[str, list[tuple[float, float]]]] = {}
        inside = [s for s in self.spans if s.to_s - zero_s >= begin_s and s.from_s - zero_s <= to_s]
        for span in sorted(inside, key=lambda span: span.from_s):
            begin, end = span.from_s - zero_s, span.to_s - zero_s
            row = nodes.setdefault(span.node, {}).setdefault(kind_of(span), [])
            last = row[-1] if row else None
            near = last is not None and begin <= last[1] + HALF_A_PIXEL * pixel_s
            if last is not None and near and (begin - last[0] < MAX_MERGED * pixel_s or end - begin < WIDE * pixel_s):
                row[-1] = last[0], max(last[1], end)
            else:
                row.append((begin, end))
        kept = dict(sorted(nodes.items(), key=lambda node: _order(node[0]))[:MAX_NODES])
        most = MAX_SHOWN // max(1, sum(len(kinds) for kinds in kept.values()))
        return SpanExcerpt(
            from_s=begin_s,
            to_s=to_s,
            end_s=end_s,
            nodes={
                node: {
                    kind: [(round(begin, 5), round(end, 5)) for begin, end in row[-max(1, most) :]]
                    for kind, row in kinds.items()
                }
                for node, kinds in kept.items()
            },
        )


def kind_of(span: Span) -> str:
    """Return the kind of work; for a model in stages, forward or backward."""
    return {"F": "forward", "B": "backward"}.get(span.label[:1], span.what)


def _order(name: str) -> tuple[bool, int, str]:
    """Return the key that puts workers first, by number."""
    number = name.split(" ")[-1].split("'")[0]
    return not name.startswith("worker"), int(number) if number.isdigit() else 0, name
