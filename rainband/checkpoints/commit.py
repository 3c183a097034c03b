"""Writes a checkpoint so that the earlier ones stay valid at every instant.

    1  the nodes write their files into the folder step-0000000120.partial, and sync each
    2  the manifest, with the names, sizes and hashes of all files, is written there and synced; then the folder
    3  the folder is renamed to step-0000000120, and the folder above it is synced: the checkpoint exists
    4  the oldest checkpoints are renamed to .partial and removed, until `keep` are left

A folder behind a URL is not renamed: there a checkpoint exists when its manifest does, which is written last and in one
step. A crash before 3 leaves a partial folder, which no reader uses and the next commit removes.
"""

from __future__ import annotations

from rainband.checkpoints.manifest import MANIFEST, Manifest, encode_manifest
from rainband.checkpoints.store import Store
from rainband.protocol.saved_state import name_of, step_of

PARTIAL = ".partial"


def exists(store: Store, step: int) -> bool:
    """Return True if there is a checkpoint of this step: it is not written again."""
    return MANIFEST in store.names(name_of(step))


def begin(store: Store, name: str) -> str:
    """Make the folder for the files of a new checkpoint, unless another node has made it; return its name."""
    working = name + PARTIAL if store.renames else name
    store.make_folder(working)
    return working


def _is_there(store: Store, path: str, num_bytes: int) -> bool:
    try:
        return store.size(path) == num_bytes
    except OSError:
        return False


def commit(store: Store, working: str, manifest: Manifest) -> str:
    """Make a checkpoint of a folder whose files are complete; return its name."""
    path, final = f"{working}/{MANIFEST}", name_of(manifest.step) if store.renames else working
    assert final not in store.names() or not store.renames, "a checkpoint would be replaced"
    if store.renames:
        store.sync(working)  # the names of the files
    store.write(path, [encode_manifest(manifest)])
    store.sync(path)
    if store.renames:
        store.sync(working)
        store.rename(working, final)
        store.sync("")
    return final


def finish(store: Store, folder: str, manifest: Manifest) -> str:
    """Make a checkpoint of the files that nodes have written, unless there is one of this step; return its name."""
    working, final = begin(store, folder), name_of(manifest.step) if store.renames else folder
    if exists(store, manifest.step):
        return final
    for file in manifest.files:
        if not _is_there(store, f"{working}/{file.name}", file.num_bytes):
            raise OSError(
                f"{store.describe(working)} lacks {file.name}, which a node has written, or a part of it: if this is a "
                "URL, such as file://, all machines must reach the same files there"
            )
    return commit(store, working, manifest)


def discard(store: Store, folder: str) -> None:
    """Remove the files that nodes have written for a checkpoint that was not made."""
    working = folder + PARTIAL if store.renames else folder
    if store.renames or MANIFEST not in store.names(working):
        store.remove(working)


def prune(store: Store, keep: int, busy: str = "") -> list[str]:
    """Remove the oldest checkpoints until `keep` are left, and what crashes have left; return their names.

    `busy`: the folder of a checkpoint that nodes are writing now.
    """
    names = store.names()
    complete = [name for name in names if step_of(name) is not None and MANIFEST in store.names(name)]
    old = complete[: max(0, len(complete) - max(1, keep))]
    for name in old:
        remove(store, name)
    for name in names:
        is_left = name.endswith(PARTIAL) or step_of(name) is not None
        if name not in complete and is_left and name.removesuffix(PARTIAL) != busy:
            store.remove(name)
    return old


def remove(store: Store, name: str) -> None:
    """Remove a checkpoint; a crash leaves it whole, or as a folder that no reader uses."""
    if store.renames:
        store.remove(name + PARTIAL)
        store.rename(name, name + PARTIAL)
        store.sync("")
        store.remove(name + PARTIAL)
    else:
        store.remove(f"{name}/{MANIFEST}")
        store.remove(name)
