"""Read checkpoints, after checks: a damaged file is named, and nothing of it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rainband.checkpoints import tree
from rainband.checkpoints.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode_manifest, hash_of
from rainband.checkpoints.store import Store
from rainband.checkpoints.tensor_file import TensorFile
from rainband.errors import BadCheckpoint
from rainband.protocol.saved_state import step_of


class Checkpoint:
    """One checkpoint whose manifest and headers have been checked; its tensors are checked when they are read."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self.manifest = _manifest(store, name)
        self._files: dict[str, TensorFile] = {}
        for file in self.manifest.files:
            self._files[file.name] = self._opened(file.name, file.num_bytes, file.header_hash)

    @property
    def place(self) -> str:
        return self.store.describe(self.name)

    def file(self, name: str) -> TensorFile:
        if name not in self._files:
            raise BadCheckpoint(self._described(MANIFEST), f"it has no file {name!r}")
        return self._files[name]

    def has(self, name: str) -> bool:
        return name in self._files

    def state(self, name: str, is_wanted: Callable[[str], bool] = lambda tensor: True) -> Any:
        """Return the nested state of a file, with None in the place of tensors that are not wanted."""
        file = self.file(name)
        try:
            return tree.joined(file.state, lambda tensor: file.tensor(tensor) if is_wanted(tensor) else None)
        except ValueError as error:
            raise BadCheckpoint(file.name, str(error)) from None

    def verify(self) -> None:
        """Read all tensors; raise BadCheckpoint with the name of the file in which one has changed."""
        for file in self._files.values():
            file.verify()

    def _opened(self, name: str, num_bytes: int, header_hash: str) -> TensorFile:
        path = f"{self.name}/{name}"
        try:
            found = self.store.size(path)
        except OSError:
            raise BadCheckpoint(self._described(name), "it is missing") from None
        if found != num_bytes:
            raise BadCheckpoint(
                self._described(name), f"it has {found:,} bytes instead of {num_bytes:,}: it is truncated or changed"
            )

        def read(first: int, number: int) -> bytes | bytearray:
            try:
                return self.store.read(path, first, number)
            except OSError as error:
                raise BadCheckpoint(self._described(name), f"it cannot be read ({error})") from None

        file = TensorFile(self._described(name), num_bytes, read)
        if hash_of(file.header) != header_hash:
            raise BadCheckpoint(self._described(name), "its header has changed since it was written")
        if file.hashes.keys() != file.entries.keys():
            raise BadCheckpoint(self._described(name), "it has no hashes of its tensors")
        return file

    def _described(self, file: str) -> str:
        return self.store.describe(f"{self.name}/{file}")


def _manifest(store: Store, name: str) -> Manifest:
    path = f"{name}/{MANIFEST}"
    described = store.describe(path)
    try:
        size = store.size(path)
        if size > MAX_MANIFEST_BYTES:
            raise BadCheckpoint(described, f"it has {size:,} bytes, too many for a manifest")
        data = store.read(path, 0, size)
    except OSError:
        raise BadCheckpoint(described, "it is missing, so the checkpoint is not complete") from None
    manifest = decode_manifest(bytes(data), described)
    if (step_of(name) or 0) > manifest.step:  # behind a URL, the name is that of the step at which it began
        raise BadCheckpoint(described, f"it is that of step {manifest.step}, before the one in its name")
    return manifest


def all_names(store: Store) -> list[str]:
    """Return the names of all checkpoints, the newest first, without looking into them."""
    return sorted((name for name in store.names() if step_of(name) is not None), reverse=True)


def newest(store: Store, tell: Callable[[str], None]) -> Checkpoint:
    """Return the newest checkpoint that is valid; `tell` gets a sentence about each damaged one that is passed over."""
    names, damaged = all_names(store), []
    for name in names:
        try:
            checkpoint = Checkpoint(store, name)
            checkpoint.verify()
        except BadCheckpoint as error:
            damaged.append(error)
            continue
        for bad in damaged:
            tell(f"{bad} Continuing from the checkpoint before it, {name} (step {checkpoint.manifest.step}).")
        return checkpoint
    if damaged:
        raise damaged[0]
    raise ValueError(
        f"{store.describe()} has no checkpoint: give another run (rainband checkpoints RUN lists those of a run), or "
        "start one with --checkpoint-every."
    )
