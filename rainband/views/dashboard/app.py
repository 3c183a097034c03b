"""The dashboard's routes: the page, a run's state, its stream, spans and older log lines, and the list of runs."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rainband.views.dashboard.fold import RunFile, log_before
from rainband.views.dashboard.guard import Guard
from rainband.views.dashboard.page import NOTHING, RunPage, Sent
from rainband.views.dashboard.prometheus import as_metrics
from rainband.views.dashboard.runs_list import list_newest
from rainband.views.dashboard.span_window import SpanWindow
from rainband.views.history import is_run

STATIC = Path(__file__).parent / "static"
TICK_S = 0.5
SILENT_S = 10.0  # then a comment is sent, so that nothing between closes the connection
MAX_OPEN = 8  # runs whose events are kept folded
MAX_SPAN_S, MIN_SPAN_S, MAX_WIDTH = 3600.0, 1e-4, 4000
MAX_LINES = 200


class OpenRun:
    """A run whose events are being read, once for all who look at it."""

    def __init__(self, directory: Path) -> None:
        self.file = RunFile(directory)
        self.page = RunPage(self.file)
        self.spans = SpanWindow(directory)
        self.lock = asyncio.Lock()

    @property
    def clock_s(self) -> float:
        """Return the clock of spans at the run's start; a simulation's clock begins there."""
        started = self.file.folded.so_far.started
        return started.clock_s if started else 0.0

    async def read_slice(self) -> bool:
        async with self.lock:
            return await asyncio.to_thread(self.file.read_slice)

    async def read(self) -> None:
        while await self.read_slice():
            pass


class Dashboard:
    """Answers requests for the runs of one folder; `chosen`: the run that is shown if none is named."""

    def __init__(self, root: Path, chosen: str) -> None:
        self.root, self.chosen = root, chosen
        self.open: OrderedDict[str, OpenRun] = OrderedDict()
        self.stopping = asyncio.Event()

    def app(self, token: str, hosts: tuple[str, ...]) -> Guard:
        """Return the application; the guard is outermost, so that answers to errors have its headers, too."""
        routes = [
            Route("/", self.index),
            Route("/api/runs", self.runs),
            Route("/api/run", self.run),
            Route("/api/stream", self.stream),
            Route("/api/spans", self.spans),
            Route("/api/events", self.events),
            Route("/metrics", self.metrics),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        return Guard(Starlette(routes=routes), token, hosts)

    async def index(self, request: Request) -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")

    async def runs(self, request: Request) -> Response:
        found = await asyncio.to_thread(list_newest, self.root)
        return _json({"chosen": self.chosen, "runs": found})

    async def run(self, request: Request) -> Response:
        if (opened := self._opened(request)) is None:
            return _unknown()
        await opened.read()
        return _json({"now": opened.page.now(), "history": opened.page.history()[0]})

    async def metrics(self, request: Request) -> Response:
        if (opened := self._opened(request)) is None:
            return _unknown()
        await opened.read()
        return PlainTextResponse(as_metrics(opened.page.now()))

    async def stream(self, request: Request) -> Response:
        if (opened := self._opened(request)) is None:
            return _unknown()
        return StreamingResponse(
            self._messages(opened), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def _messages(self, opened: OpenRun) -> AsyncIterator[bytes]:
        """Yield the whole page, then what is new; `end` when nothing more can come."""
        sent, silent_s, offset, state = NOTHING, 0.0, -1, ""
        while True:
            stopping = self.stopping.is_set()  # then this is the last look
            before = opened.file.state  # read before the events: a run that ends meanwhile is looked at once more
            while await opened.read_slice():
                yield _message("reading", {"share": opened.file.share_read})
            if (opened.file.offset, before) != (offset, state):
                offset, state, silent_s = opened.file.offset, before, 0.0
                data, sent = _update(opened.page, sent)
                yield data
            elif silent_s >= SILENT_S:
                yield b": still here\n\n"
                silent_s = 0.0
            if before not in ("starting", "running"):
                yield _message("end", {})
                return
            if stopping:
                return
            silent_s += TICK_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), TICK_S)

    async def spans(self, request: Request) -> Response:
        if (opened := self._opened(request)) is None:
            return _unknown()
        query = request.query_params
        try:
            begin_s = float(query["from"]) if "from" in query else None
            length_s, width = float(query.get("seconds", "2")), int(query.get("width", "800"))
        except ValueError:
            return PlainTextResponse("from, seconds and width must be numbers", 400)
        finite = begin_s is None or math.isfinite(begin_s)
        if not finite or not MIN_SPAN_S <= length_s <= MAX_SPAN_S or not 1 <= width <= MAX_WIDTH:
            limits = f"{MIN_SPAN_S:g} to {MAX_SPAN_S:g}, and width 1 to {MAX_WIDTH}"
            return PlainTextResponse(f"seconds must be {limits}", 400)
        async with opened.lock:
            await asyncio.to_thread(opened.spans.read)
            found = opened.spans.excerpt(opened.clock_s, begin_s, length_s, width)
        return _json(found)

    async def events(self, request: Request) -> Response:
        if (opened := self._opened(request)) is None:
            return _unknown()
        query = request.query_params
        try:
            before, number = int(query["before"]), int(query.get("n", "100"))
        except (KeyError, ValueError):
            return PlainTextResponse("before (a byte of events.jsonl) and n must be numbers", 400)
        if not 0 <= before <= opened.file.offset or not 1 <= number <= MAX_LINES:
            return PlainTextResponse(f"before must be in the file, and n 1 to {MAX_LINES}", 400)
        return _json(await asyncio.to_thread(log_before, opened.file.path, before, number))

    def _opened(self, request: Request) -> OpenRun | None:
        """Return the run that is asked for; None if there is no such run in the folder."""
        name = request.query_params.get("run", self.chosen)
        is_name = Path(name).name == name and name not in ("", ".", "..")
        if not is_name or not (name == self.chosen or is_run(self.root / name)):
            return None
        opened = self.open.pop(name, None) or OpenRun(self.root / name)
        self.open[name] = opened
        while len(self.open) > MAX_OPEN:
            self.open.popitem(last=False)
        return opened


def _update(page: RunPage, sent: Sent) -> tuple[bytes, Sent]:
    version = sent.version
    history, sent = page.history(sent)
    kind = "tick" if history.version == version else "all"
    return _message(kind, {"now": page.now(), "history": history}, page.file.offset), sent


def _message(kind: str, value: Any, offset: int | None = None) -> bytes:
    number = b"" if offset is None else b"id: %d\n" % offset
    return b"event: " + kind.encode() + b"\n" + number + b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _unknown() -> Response:
    return PlainTextResponse("there is no such run", 404)
