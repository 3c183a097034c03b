"""Serve the dashboard on a port, until Ctrl-C or until the process that started it ends."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn

from rainband.views.dashboard.app import Dashboard
from rainband.views.dashboard.listener import LOOPBACK

CLOSE_WITHIN_S = 2


# size: it inherits the methods of uvicorn's server
class DashboardServer(uvicorn.Server):  # type: ignore[misc]
    """A server whose open streams end when it is asked to stop; otherwise it would wait for them."""

    def __init__(self, config: uvicorn.Config, dashboard: Dashboard) -> None:
        super().__init__(config)
        self.dashboard = dashboard

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.dashboard.stopping.set()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        self.dashboard.stopping.set()
        self.should_exit = True


def serve(
    listener: socket.socket,
    root: Path,
    chosen: str,
    token: str,
    *,
    hosts: tuple[str, ...] = (),
    until: Callable[[], object] | None = None,
) -> None:
    """Serve the runs of a folder; end at Ctrl-C, or when `until`, which is called on a thread, returns."""
    dashboard = Dashboard(root, chosen)
    config = uvicorn.Config(
        dashboard.app(token, (*LOOPBACK, *hosts)),
        log_level="warning" if until is None else "critical",  # beside a run, the terminal is for the run
        access_log=False,
        timeout_graceful_shutdown=CLOSE_WITHIN_S,
        server_header=False,
        date_header=False,
        lifespan="off",
    )
    server = DashboardServer(config, dashboard)

    async def run() -> None:
        if until is not None:
            loop = asyncio.get_running_loop()
            threading.Thread(target=stop_after, args=(until, loop, server.stop), daemon=True).start()
        await server.serve(sockets=[listener])

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


def stop_after(until: Callable[[], object], loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Stop the server when `until` returns, unless it has ended by itself."""
    until()
    with suppress(RuntimeError):  # its loop is closed
        loop.call_soon_threadsafe(stop)


def serve_beside() -> None:
    """Serve the run of the process that started this one, which passes a socket, and a token on standard input."""
    number, directory = sys.argv[1:]
    token = sys.stdin.readline().strip()
    listener, path = socket.socket(fileno=int(number)), Path(directory)
    serve(listener, path.parent, path.name, token, until=sys.stdin.read)
