"""Fixtures of all tests: deterministic hypothesis, one thread per process, and no process left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Tests would otherwise fight for cores, with each other and with the processes they start. Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import psutil
import pytest

from tests.machines import machines  # noqa: F401 (fixtures for all)
from tests.processes import launcher, warm  # noqa: F401 (fixtures for all)

# No deadline: a busy machine is not a bug. The same examples each time, except when one searches on purpose.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.register_profile("search", deadline=None, max_examples=500)
hypothesis.settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left_behind() -> Iterator[None]:
    """Fail the session, naming them, when tests leave processes running; and end those."""
    before = set(psutil.Process().children())
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child not in before and is_ours(child)]
    names = [" ".join(child.cmdline()) or child.name() for child in left]
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=10)
    assert not left, f"tests left {len(left)} processes running: {names}"


def is_ours(process: psutil.Process) -> bool:
    """Return True if the process is alive and not a helper of Python's multiprocessing."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
