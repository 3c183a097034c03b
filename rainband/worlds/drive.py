"""Drive a strategy's coroutine in real time: compute what it wants computed, wait for what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rainband.client import Client, Handle, StillWanted
from rainband.errors import Stop
from rainband.types import Strategy
from rainband.worker import ModuleWorker, Work
from rainband.worlds.spans import Watch

Kind = TypeVar("Kind")


def drive(
    strategy: Strategy,
    worker: ModuleWorker,
    wait: Callable[..., object],
    watch: Watch | None = None,
    before_step: Callable[[], None] | None = None,
) -> None:
    """Run the strategy to its end. `wait` blocks until messages came, or for so many seconds, and delivers them."""
    if watch is not None:
        watch.follow(worker)
        wait = watch.looking(wait)
    coroutine = strategy.run(worker)  # type: ignore[arg-type]
    thrown = False
    try:
        wanted = coroutine.send(None)
        while True:
            started = time.monotonic()
            if isinstance(wanted, Work):
                if before_step is not None:
                    before_step()
                began = time.monotonic()
                wanted.perform()
                worker.client.stats.computed_s += time.monotonic() - began
                if watch is not None:
                    watch.span("compute", started, wanted.label)
            elif isinstance(wanted, StillWanted):
                wait(0.0)
                wanted.looked = True
            elif not wait_for(wanted, worker.client, wait, may_stop=not thrown):
                thrown = True
                wanted = coroutine.throw(Stop())
                continue
            elif watch is not None:
                watch.span("wait", started)
            wanted = coroutine.send(None)
    except (StopIteration, Stop):
        return


def wait_for(wanted: object, client: Client, wait: Callable[[], object], may_stop: bool = True) -> bool:
    """Wait for what a strategy awaits. False: the run stops, and what others would have to do may never come."""
    assert isinstance(wanted, Handle), f"a strategy may only await what its worker gave, not {wanted!r}"
    started = time.monotonic()
    while not wanted.ready():
        if may_stop and wanted.is_vain(client.stopping):
            break
        client.stats.waiting = True
        wait()
    client.stats.waiting = False
    client.stats.waited(time.monotonic() - started)
    return wanted.ready()


def drive_to_end(coroutine: Coroutine[Any, None, Kind], wait: Callable[[], object]) -> Kind:
    """Run something that is no strategy, while nothing else happens here; returns its result."""
    try:
        wanted = coroutine.send(None)
        while True:
            if isinstance(wanted, Work):
                wanted.perform()
            else:
                while not wanted.ready():
                    wait()
            wanted = coroutine.send(None)
    except StopIteration as end:
        result: Kind = end.value
        return result
