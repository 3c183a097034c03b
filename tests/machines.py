"""Machines, for tests: network namespaces that are joined by a bridge. Processes in different ones share no memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import pytest

NETWORK = "10.233.87."


class Machines:
    """Some machines, of which the first has the bridge."""

    def __init__(self, number: int) -> None:
        self.names = [f"rb{os.getpid()}-{index}" for index in range(number)]

    def make(self) -> None:
        first = self.names[0]
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", first, "link", "add", "bridge", "type", "bridge")
        _ip("-n", first, "addr", "add", f"{NETWORK}1/24", "dev", "bridge")
        _ip("-n", first, "link", "set", "bridge", "up")
        for index, name in enumerate(self.names[1:], 1):
            port = f"port{index}"
            _ip("link", "add", port, "netns", first, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", first, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")

    def address(self, index: int) -> str:
        return f"{NETWORK}{index + 1}"

    def cut(self, index: int) -> None:
        """Lose all that is sent to and by a machine."""
        _ip("-n", self.names[0], "link", "set", f"port{index}", "nomaster")

    def restore(self, index: int) -> None:
        _ip("-n", self.names[0], "link", "set", f"port{index}", "master", "bridge")

    def break_connections(self, index: int) -> None:
        """End all TCP connections of a machine, as a router does that has lost its state."""
        command = ["ip", "netns", "exec", self.names[index], "ss", "-K", "-t", "dst", f"{NETWORK}0/24"]
        killed = subprocess.run(command, capture_output=True, text=True)
        if killed.returncode or "ESTAB" not in killed.stdout:
            pytest.skip(f"this kernel cannot end connections: {killed.stderr or killed.stdout}")

    def remove(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines() -> Iterator[Machines]:
    """Two machines; skipped where the kernel or the user may not make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces require root and the program ip")
    made = Machines(2)
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        yield made
    finally:
        made.remove()
