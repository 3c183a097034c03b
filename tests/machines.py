"""Machines, for tests: network namespaces, which are removed afterwards."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rainband.bench.harness.machines import NETWORK, NoMachines
from rainband.bench.harness.machines import Machines as Machines


def break_connections(machines: Machines, index: int) -> None:
    """End all TCP connections of a machine, as a router does that has lost its state."""
    command = [*machines.inside(index), "ss", "-K", "-t", "dst", f"{NETWORK}0/24"]
    killed = subprocess.run(command, capture_output=True, text=True)
    if killed.returncode or "ESTAB" not in killed.stdout:
        pytest.skip(f"this kernel cannot end connections: {killed.stderr or killed.stdout}")


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Two machines."""
    with machines_of(2) as made:
        yield made


@contextmanager
def machines_of(number: int) -> Iterator[Machines]:
    """Some machines; the test is skipped where the kernel or the user may not make network namespaces."""
    made = Machines(number)
    try:
        made.make()
    except NoMachines as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.remove()
