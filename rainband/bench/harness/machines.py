"""Machines for measurements and tests: network namespaces that a bridge joins. Processes in two share no memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress

NETWORK = "10.233.87."


class NoMachines(RuntimeError):
    """Network namespaces cannot be made here."""


class Machines:
    """Some machines, of which the first has the bridge, as a computer with a switch."""

    def __init__(self, number: int) -> None:
        self.names = [f"rb{os.getpid()}-{index}" for index in range(number)]

    def make(self) -> None:
        """Make them; raise NoMachines with the reason if the kernel or the user may not."""
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise NoMachines("network namespaces require root and the program ip.")
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.remove()
            raise NoMachines(f"network namespaces cannot be made here: {error.stderr.decode().strip()}") from None

    def _make(self) -> None:
        first = self.names[0]
        for name in self.names:
            _run("ip", "netns", "add", name)
            _ip(name, "link", "set", "lo", "up")
        _ip(first, "link", "add", "bridge", "type", "bridge")
        _ip(first, "addr", "add", f"{self.address(0)}/24", "dev", "bridge")
        _ip(first, "link", "set", "bridge", "up")
        for index, name in enumerate(self.names[1:], 1):
            port = f"port{index}"
            _run("ip", "link", "add", port, "netns", first, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip(first, "link", "set", port, "master", "bridge", "up")
            _ip(name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            _ip(name, "link", "set", "eth0", "up")

    def address(self, index: int) -> str:
        return f"{NETWORK}{index + 1}"

    def give(self, index: int, host: str) -> None:
        """Give a machine another address, of IPv6."""
        _ip(self.names[index], "addr", "add", f"{host}/64", "dev", self.card(index), "nodad")

    def card(self, index: int) -> str:
        """Return the name of a machine's network card."""
        return "eth0" if index else "bridge"

    def inside(self, index: int) -> list[str]:
        """Return the words that run a command on a machine."""
        return ["ip", "netns", "exec", self.names[index]]

    def limit(self, mbit: int) -> None:
        """Let each machine send this much per second, in all, and receive it from each other one."""
        burst = max(16, mbit // 4)  # kB
        for index, name in enumerate(self.names):
            words = ("dev", self.card(index), "root", "tbf", "rate", f"{mbit}mbit", "burst", f"{burst}kb")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "replace", *words, "latency", "50ms")

    def bytes_sent(self, index: int) -> int:
        """Return how many bytes a machine has sent since it was made."""
        path = f"/sys/class/net/{self.card(index)}/statistics/tx_bytes"
        found = subprocess.run([*self.inside(index), "cat", path], check=True, capture_output=True, text=True)
        return int(found.stdout)

    def cut(self, index: int) -> None:
        """Lose all that is sent to and by a machine."""
        _ip(self.names[0], "link", "set", f"port{index}", "nomaster")

    def separate(self) -> None:
        """Let machines reach the first one only, as if each was behind a router of its own."""
        for index in range(1, len(self.names)):
            _run("ip", "netns", "exec", self.names[0], "bridge", "link", "set", "dev", f"port{index}", "isolated", "on")

    def restore(self, index: int) -> None:
        _ip(self.names[0], "link", "set", f"port{index}", "master", "bridge")

    def remove(self) -> None:
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


def _ip(name: str, *words: str) -> None:
    _run("ip", "-n", name, *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
