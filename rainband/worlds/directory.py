"""A run's directory: its configuration, its events, its model. Two runs never share one."""

from __future__ import annotations

import datetime
from pathlib import Path

import msgspec

from rainband.events import AnyEvent
from rainband.worlds.config import RunConfig


def new_directory(root: Path, task: str, strategy: str) -> Path:
    """Make a directory that nobody has: the time, what runs, and a number where that is taken."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{stamp}-{_plain(task)}-{_plain(strategy)}"
    root.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
            return path
        except FileExistsError:
            continue
    raise ValueError(f"cannot make a directory for the run in {root}: clear it, or give another with --runs.")


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.rpartition(":")[2])


def write_config(directory: Path, config: RunConfig) -> None:
    """What reproduces the run. The secret is no part of it."""
    data = msgspec.json.encode(config)
    (directory / "config.json").write_bytes(msgspec.json.format(data, indent=2) + b"\n")


class EventLog:
    """Writes events as lines of JSON; each line is whole as soon as it is there, so a crash leaves it readable."""

    def __init__(self, directory: Path) -> None:
        self.file = (directory / "events.jsonl").open("ab", buffering=0)
        self.encoder = msgspec.json.Encoder()

    def write(self, event: AnyEvent) -> None:
        self.file.write(self.encoder.encode(event) + b"\n")

    def close(self) -> None:
        self.file.close()
