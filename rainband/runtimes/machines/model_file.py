"""The file of a model that a worker of another machine sends in parts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rainband.protocol.messages import FilePart


class ReceivedModel:
    """The model of a run, as far as it has arrived. If its disk is full, it is written elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.elsewhere = Path(tempfile.gettempdir(), f"{path.parent.name}.safetensors")
        self.place = path

    def take(self, part: FilePart, body: memoryview) -> bool:
        """Write a part; return True if it was the last. Raise OSError if there is no room in either place."""
        if not part.offset:
            try:
                self._begin(self.path, part.num_bytes)
            except OSError:
                self._begin(self.elsewhere, part.num_bytes)
        beside = _beside(self.place)
        with beside.open("r+b") as file:
            file.seek(part.offset)
            file.write(body)
            is_last = part.offset + len(body) == part.num_bytes
            if is_last:
                file.flush()
                os.fsync(file.fileno())
        if is_last:
            beside.replace(self.place)
        return is_last

    def _begin(self, place: Path, num_bytes: int) -> None:
        """Make a file of this size, so that no later part lacks room."""
        self.place, beside = place, _beside(place)
        try:
            with beside.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError:
            beside.unlink(missing_ok=True)
            raise


def _beside(place: Path) -> Path:
    return place.with_name(f"{place.name}.part")
