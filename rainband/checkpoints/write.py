"""Writes one file of a checkpoint. It does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rainband.checkpoints import tree
from rainband.checkpoints.manifest import hash_of
from rainband.checkpoints.store import Store
from rainband.checkpoints.tensor_file import encoded
from rainband.protocol.saved_state import SavedFile

if TYPE_CHECKING:
    from torch import Tensor


def write_file(store: Store, folder: str, name: str, state: object) -> SavedFile:
    """Write nested state, with its tensors, as one file of a checkpoint."""
    text, tensors = tree.split(state)
    return write_tensors(store, folder, name, tensors, text)


def write_tensors(
    store: Store, folder: str, name: str, tensors: Mapping[str, Tensor | bytes], text: str = ""
) -> SavedFile:
    """Write tensors, and bytes, as one file; `text` is stored with them."""
    header, bodies = encoded(tensors, text)
    path = f"{folder}/{name}"
    store.write(path, [header, *bodies])
    store.sync(path)
    return SavedFile(name, len(header) + sum(map(len, bodies)), hash_of(header))
