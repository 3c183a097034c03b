"""Drive a strategy's coroutine in real time: compute what it wants computed, wait for what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable

from rainband.client import Handle, PullHandle
from rainband.errors import Stop
from rainband.types import Strategy
from rainband.worker import Compute, ModuleWorker


def drive(strategy: Strategy, worker: ModuleWorker, wait: Callable[[], object]) -> None:
    """Run the strategy to its end. `wait` blocks until messages came, and delivers them."""
    coroutine = strategy.run(worker)  # type: ignore[arg-type]
    stats = worker.client.stats
    thrown = False
    try:
        wanted = coroutine.send(None)
        while True:
            if isinstance(wanted, Compute):
                wanted.result = worker.compute(wanted.batch)
            else:
                assert isinstance(wanted, Handle), (
                    f"a strategy may only await what its worker gave, not {wanted!r}"
                )
                started = time.monotonic()
                while not wanted.ready():
                    if worker.client.stopping and isinstance(wanted, PullHandle) and not thrown:
                        break
                    stats.waiting = True
                    wait()
                stats.waiting = False
                stats.waited_s += time.monotonic() - started
                if not wanted.ready():
                    thrown = True
                    wanted = coroutine.throw(Stop())
                    continue
            wanted = coroutine.send(None)
    except (StopIteration, Stop):
        return
