"""The user's code, as an archive that travels to the nodes of a cluster: tasks, strategies, and what they import."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rainband.options import OptionError, opt

MAX_FILE_BYTES = 1 << 20  # larger files are data, which belongs where all nodes can read it
MAX_TOTAL_BYTES = 64 << 20
MAX_FILES = 10_000
NO_CODE = {"__pycache__", "node_modules", "runs"}  # folders
PREFIX, LOCK = "rainband-code-", "lock"


def code_folders() -> list[Path]:
    """Return the folders from which this process imports the user's code: the current one, and that of its script."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [Path.cwd()]
    if script is not None and not _is_installed(Path(script).absolute()):
        folders.append(Path(script).absolute().parent)
    return list(dict.fromkeys(folders))


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix))


def pack(folders: Sequence[Path]) -> bytes:
    """Return an archive of these folders; raise OptionError if they hold too much."""
    packed = io.BytesIO()
    total, number = 0, 0
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1, strict_timestamps=False) as archive:
        for place, folder in enumerate(folders):
            archive.writestr(f"{place}/", b"")
            for path, num_bytes in _files(folder):
                total, number = total + num_bytes, number + 1
                if total > MAX_TOTAL_BYTES or number > MAX_FILES:
                    raise OptionError(
                        f"{opt('runtime', 'ray')}: {folder} holds more than {MAX_TOTAL_BYTES >> 20} MB of small files, "
                        f"or more than {MAX_FILES} of them, and all would be sent to the nodes of the cluster: start "
                        "the run in a folder that holds only your code."
                    )
                archive.write(path, f"{place}/{path.relative_to(folder)}")
    return packed.getvalue()


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """Return the files that may be code or go with it, not those that are hidden, installed, or data."""
    for where, folders, names in os.walk(folder):
        here = Path(where)
        folders[:] = sorted(name for name in folders if not _is_left_out(here / name))
        for name in sorted(names):
            path = here / name
            if not name.startswith(".") and path.is_file() and (size := path.stat().st_size) <= MAX_FILE_BYTES:
                yield path, size


def _is_left_out(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name in NO_CODE or (folder / "pyvenv.cfg").exists()


class UnpackedCode:
    """An archive that is unpacked into a folder of its own, until it is closed.

    A lock marks the folder as used. The kernel releases it if this process is killed; the next one removes the folder.
    """

    def __init__(self, code: bytes) -> None:
        remove_orphans()
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.lock = (self.root / LOCK).open("wb")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        with zipfile.ZipFile(io.BytesIO(code)) as archive:
            archive.extractall(self.root)
        self.folders = [str(self.root / name) for name in sorted(os.listdir(self.root)) if name != LOCK]

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.lock.close()


def remove_orphans() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # it is used, or another user's, or was removed meanwhile
