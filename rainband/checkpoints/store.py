"""The place of checkpoints: a folder of this machine, or a URL of fsspec, such as s3://bucket/folder.

A store has few operations, so that tests can stop after any of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

WRITE_BYTES = 8 << 20  # after which the disk begins to write


class Store(Protocol):
    """Files and folders below one place; paths are relative to it, with slashes."""

    renames: bool  # a folder can be renamed in one step

    def make_folder(self, path: str) -> None: ...

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file; a crash may lose it until it and its folder are synced."""

    def sync(self, path: str) -> None:
        """Return when a file, or the list of names of a folder, is on the disk."""

    def rename(self, old: str, new: str) -> None: ...

    def remove(self, path: str) -> None:
        """Remove a file, or a folder with everything in it."""

    def names(self, path: str = "") -> list[str]:
        """Return the names in a folder; none if there is no such folder."""

    def size(self, path: str) -> int:
        """Return the bytes of a file; raise OSError if there is none."""

    def read(self, path: str, first: int, number: int) -> bytes | bytearray:
        """Read a part of a file; at its end, fewer bytes."""

    def describe(self, path: str = "") -> str:
        """Return the place as a user would write it."""


class LocalStore:
    """A folder of this machine."""

    renames = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def make_folder(self, path: str) -> None:
        (self.root / path).mkdir(parents=True, exist_ok=True)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        with (self.root / path).open("wb", buffering=0) as file:
            begun = written = 0
            for chunk in chunks:
                view = memoryview(chunk)
                while len(view):
                    number = file.write(view[:WRITE_BYTES])
                    view, written = view[number:], written + number
                    if written - begun >= WRITE_BYTES:  # the disk begins now, and not when the file is synced
                        os.posix_fadvise(file.fileno(), begun, written - begun, os.POSIX_FADV_DONTNEED)
                        begun = written

    def sync(self, path: str) -> None:
        descriptor = os.open(self.root / path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        (self.root / old).rename(self.root / new)

    def remove(self, path: str) -> None:
        target = self.root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)

    def names(self, path: str = "") -> list[str]:
        folder = self.root / path
        return sorted(item.name for item in folder.iterdir()) if folder.is_dir() else []

    def size(self, path: str) -> int:
        return (self.root / path).stat().st_size

    def read(self, path: str, first: int, number: int) -> bytearray:
        with (self.root / path).open("rb", buffering=0) as file:
            file.seek(first)
            found, memory = 0, bytearray(max(0, min(number, os.fstat(file.fileno()).st_size - first)))
            with memoryview(memory) as view:
                while found < len(memory) and (more := file.readinto(view[found:])):
                    found += more
            del memory[found:]
            return memory

    def describe(self, path: str = "") -> str:
        return str(self.root / path)


class UrlStore:
    """A place that fsspec reaches. Its folders have no names of their own, so nothing is renamed there."""

    renames = False

    def __init__(self, url: str) -> None:
        import fsspec  # not every run needs it

        self.url = url.rstrip("/")
        self.files: Any
        self.files, root = fsspec.core.url_to_fs(url)
        self.root = str(root).rstrip("/")

    def _at(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    @contextmanager
    def _using(self, path: str) -> Iterator[str]:
        """Raise OSError for any error inside: file systems have errors of their own, such as missing credentials."""
        try:
            yield self._at(path)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.describe(path)}: {type(error).__name__}: {error}") from error

    def make_folder(self, path: str) -> None:
        with self._using(path) as at:
            self.files.makedirs(at, exist_ok=True)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        with self._using(path) as at, self.files.open(at, "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def sync(self, path: str) -> None:
        """Do nothing: a file is there, and complete, once it is closed."""

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("a folder behind a URL is not renamed in one step")

    def remove(self, path: str) -> None:
        with self._using(path) as at:
            if self.files.exists(at):
                self.files.rm(at, recursive=True)

    def names(self, path: str = "") -> list[str]:
        try:
            with self._using(path) as at:
                self.files.invalidate_cache()
                found = self.files.ls(at, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def size(self, path: str) -> int:
        with self._using(path) as at:
            return int(self.files.size(at))

    def read(self, path: str, first: int, number: int) -> bytes:
        with self._using(path) as at:
            return bytes(self.files.cat_file(at, start=first, end=first + number))

    def describe(self, path: str = "") -> str:
        return f"{self.url}/{path}" if path else self.url


def is_url(place: str) -> bool:
    """Return True for s3://bucket and the like, False for a path."""
    scheme, separator, _ = place.partition("://")
    return bool(separator) and scheme.replace("+", "").isalnum()


def open_store(place: str) -> Store:
    """Return the store at a path or URL; raise ValueError if fsspec does not know the URL."""
    if not is_url(place):
        return LocalStore(Path(place))
    if place.startswith("file://"):
        return LocalStore(Path(place.removeprefix("file://")))
    try:
        return UrlStore(place)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{place}: {error}") from None
