"""The files of checkpoints: they are read as they were written, survive crashes, and are refused if they are bad."""

from __future__ import annotations

import json
import pickle
import shutil
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rainband.checkpoints import commit, tree
from rainband.checkpoints.manifest import MANIFEST, Manifest, RunFacts, decode_manifest, encode_manifest
from rainband.checkpoints.read import Checkpoint, all_names, newest
from rainband.checkpoints.store import LocalStore, Store, open_store
from rainband.checkpoints.tensor_file import TensorFile, encoded
from rainband.checkpoints.write import write_file
from rainband.errors import BadCheckpoint
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import LayoutEntry, arrange
from rainband.protocol.saved_state import SavedBlock, SavedFile, name_of
from rainband.runtimes.checkpoints.background import BackgroundThread

PLAN = DataPlan(fingerprint="data", layout="digest", num_samples=8, batch_size=2, epochs=3, seed=0, portion_batches=2)
LAYOUT = arrange([LayoutEntry("weight", (2, 3))])
FACTS = RunFacts(run="run", task="quadratic", strategy="sync", num_workers=2, num_servers=0)
STATE = {"parameters": [torch.arange(6.0).reshape(2, 3)], "done": 4}


def manifest(step: int, files: Iterable[SavedFile]) -> Manifest:
    return Manifest(
        step=step, created_at="2026-01-01", facts=FACTS, plan=PLAN, layout=LAYOUT, num_replicas=2, files=tuple(files)
    )


def write(store: Store, step: int, keep: int = 3) -> None:
    working = commit.begin(store, name_of(step))
    files = [write_file(store, working, f"part-{i}.safetensors", {**STATE, "step": step}) for i in range(2)]
    commit.commit(store, working, manifest(step, files))
    commit.prune(store, keep)


def steps(store: Store) -> list[int]:
    return [Checkpoint(store, name).manifest.step for name in all_names(store)]


@pytest.fixture(params=["folder", "file://", "memory://"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    place = {"folder": str(tmp_path), "file://": f"file://{tmp_path}", "memory://": f"memory://{tmp_path.name}"}
    yield open_store(place[request.param])


# ---- what is read is what was written ----


@pytest.mark.parametrize(
    "value",
    [
        None,
        [1, -(2**70), 0.1, float("inf"), True, "text", (1, [2]), np.float64(0.3)],
        {"lr": 0.1, 3: {"nested": [None]}, (1, "a"): "tuple as key"},
    ],
    ids=["none", "numbers", "keys"],
)
def test_nested_state_is_read_as_it_was_split(value: object) -> None:
    text, tensors = tree.split(value)
    assert not tensors
    assert tree.joined(text, tensors.__getitem__) == value


@pytest.mark.parametrize(
    "value", [{"a": {"b": 1}, "a/b": 2}, {1: 1, "1": 2}, {"": 1, "value": 2}, {"a": [1], "a/0": 2}]
)
def test_tensors_whose_paths_read_alike_are_kept_apart(value: Any) -> None:
    def of_tensors(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: of_tensors(item) for key, item in value.items()}
        return [of_tensors(item) for item in value] if isinstance(value, list) else torch.tensor(value)

    text, tensors = tree.split(of_tensors(value))
    assert tree.joined(text, lambda name: tensors[name].item()) == value


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_are_read_as_they_were_written(store: Store, dtype: torch.dtype) -> None:
    given = {"a": torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype).T, "scalar": torch.tensor(1).to(dtype)}
    store.make_folder("f")
    file = write_file(store, "f", "x.safetensors", given)
    read = TensorFile("x", file.num_bytes, lambda first, number: store.read("f/x.safetensors", first, number))
    found = tree.joined(read.state, read.tensor)
    assert all(torch.equal(found[name], given[name]) and found[name].dtype == dtype for name in given)


def test_safetensors_reads_the_files_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_file(LocalStore(tmp_path), ".", "x.safetensors", {"weight": torch.arange(3.0), "none": torch.empty(0)})
    assert load_file(tmp_path / "x.safetensors")["weight"].tolist() == [0, 1, 2]


def test_a_checkpoint_is_found_complete_and_old_ones_are_removed(store: Store) -> None:
    for step in (4, 8, 12, 16):
        write(store, step, keep=2)
    assert steps(store) == [16, 12]
    checkpoint = newest(store, pytest.fail)
    assert checkpoint.manifest.plan == PLAN and checkpoint.manifest.layout == LAYOUT
    state = checkpoint.state("part-1.safetensors")
    assert state["step"] == 16 and torch.equal(state["parameters"][0], STATE["parameters"][0])  # type: ignore[index]


def test_an_unfinished_checkpoint_is_no_checkpoint_and_goes_with_the_next_one(store: Store) -> None:
    write(store, 4)
    write_file(store, commit.begin(store, name_of(8)), "part-0.safetensors", STATE)
    assert newest(store, lambda text: None).manifest.step == 4
    write(store, 12)
    assert steps(store) == [12, 4]
    assert sorted(store.names()) == [name_of(4), name_of(12)]


# ---- crash points ----


class Crash(Exception):
    """The machine stops."""


class CrashingDisk(LocalStore):
    """A disk that stops at its n-th operation. Then what was not synced is kept, or lost, as `keeps` says."""

    def __init__(self, root: Path, crash_at: int, keeps: bool) -> None:
        super().__init__(root)
        self.left = crash_at
        self.keeps = keeps
        self.unsynced: dict[str, Callable[[], None]] = {}  # path -> how to lose what was done there, newest last
        self.operations: list[str] = []

    def _step(self, what: str) -> None:
        self.operations.append(what)
        self.left -= 1
        if self.left < 0:
            if not self.keeps:
                for undo in reversed(list(self.unsynced.values())):
                    undo()
            raise Crash(what)

    def make_folder(self, path: str) -> None:
        self._step(f"make {path}")
        super().make_folder(path)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        chunks = list(chunks)
        self.unsynced[path] = lambda: (self.root / path).write_bytes(b"") and None  # type: ignore[func-returns-value]
        for number in range(len(chunks)):
            super().write(path, chunks[:number])
            self._step(f"write {path}, {number} of {len(chunks)} chunks")
        super().write(path, chunks)

    def sync(self, path: str) -> None:
        self._step(f"sync {path or '.'}")
        super().sync(path)
        self.unsynced.pop(path, None)
        for renamed in [known for known in self.unsynced if known.startswith("rename ") and not path]:
            del self.unsynced[renamed]

    def rename(self, old: str, new: str) -> None:
        self._step(f"rename {old}")
        super().rename(old, new)
        self.unsynced[f"rename {old}"] = lambda: super(CrashingDisk, self).rename(new, old)

    def remove(self, path: str) -> None:
        """Remove a folder's files one by one."""
        folder = self.root / path
        for item in sorted(folder.iterdir()) if folder.is_dir() else []:
            self._step(f"remove {path}/{item.name}")
            super().remove(f"{path}/{item.name}")
        self._step(f"remove {path}")
        super().remove(path)


def operations(tmp_path: Path) -> list[str]:
    disk = CrashingDisk(tmp_path / "all", 1000, keeps=True)
    write(LocalStore(disk.root), 4, keep=1)
    write(disk, 8, keep=1)
    return disk.operations


@pytest.mark.parametrize("keeps", [True, False], ids=["unsynced data kept", "unsynced data lost"])
def test_a_crash_at_any_point_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, keeps: bool) -> None:
    points = operations(tmp_path)
    assert len(points) > 15 and any("sync" in point for point in points)
    found = []
    for crash_at, point in enumerate(points):
        root = tmp_path / str(crash_at)
        write(LocalStore(root), 4, keep=1)
        with pytest.raises(Crash):
            write(CrashingDisk(root, crash_at, keeps), 8, keep=1)
        step = newest(LocalStore(root), lambda text: None).manifest.step
        found.append(step)
        write(LocalStore(root), 12, keep=1)  # and the next one cleans up
        assert LocalStore(root).names() == [name_of(12)], point
    assert found == sorted(found) and set(found) == {4, 8}  # never back to the old one


def test_without_the_sync_of_a_file_a_crash_would_lose_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that forgets to sync is noticed by the test above."""
    root, disk = tmp_path / "a", CrashingDisk(tmp_path / "a", 1000, keeps=False)
    monkeypatch.setattr(CrashingDisk, "sync", lambda self, path: None)
    working = commit.begin(disk, name_of(8))
    file = write_file(disk, working, "part-0.safetensors", STATE)
    commit.commit(disk, working, manifest(8, [file]))
    disk.left = 0
    with pytest.raises(Crash):
        disk.make_folder("later")
    with pytest.raises((BadCheckpoint, ValueError)):
        newest(LocalStore(root), pytest.fail)


# ---- bad files ----


def damage_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_header(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"F32", b"I32", 1))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def edit_manifest(path: Path) -> None:
    text = path.read_text()
    path.write_text(text.replace('"step": 8', '"step": 9'))


PART, FOLDER = "part-0.safetensors", name_of(8)


@pytest.mark.parametrize(
    ("file", "damage", "why"),
    [
        (PART, damage_last_byte, "have changed since it was written"),
        (PART, damage_header, "header has changed"),
        (PART, truncate, "truncated"),
        (PART, Path.unlink, "is missing"),
        (MANIFEST, edit_manifest, "hash differs"),
        (MANIFEST, truncate, "not a manifest"),
    ],
    ids=["bit flip", "header", "truncated", "missing", "edited manifest", "truncated manifest"],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used_with_a_message(
    tmp_path: Path, file: str, damage: Callable[[Path], None], why: str
) -> None:
    store = LocalStore(tmp_path)
    write(store, 4)
    write(store, 8)
    damage(tmp_path / FOLDER / file)
    said: list[str] = []
    assert newest(store, said.append).manifest.step == 4
    [text] = said
    assert f"{FOLDER}/{file}" in text and why in text and f"{name_of(4)} (step 4)" in text
    shutil.rmtree(tmp_path / name_of(4))
    with pytest.raises(BadCheckpoint, match=why):
        newest(store, pytest.fail)


def header_only(header: object, length: int | None = None, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(first: int, last: int, shape: list[int], dtype: str = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


class Canary:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (Path.touch, (Path("canary"),))  # type: ignore[return-value]


MALICIOUS = {
    "pickle": pickle.dumps(Canary()),
    "header of 2^63 bytes": header_only({}, 2**63),
    "header longer than the file": header_only({}, 4096),
    "a million tensors": header_only({str(i): entry(0, 0, [0]) for i in range(150_000)}),
    "overlapping offsets": header_only({"a": entry(0, 4, [4]), "b": entry(2, 6, [4])}, body=bytes(6)),
    "offsets beyond the file": header_only({"a": entry(0, 2**62, [2**62])}, body=bytes(8)),
    "negative shape": header_only({"a": entry(0, 4, [-2, -2])}, body=bytes(4)),
    "huge shape of no bytes": header_only({"a": entry(0, 0, [2**62, 2**62, 0])}, body=bytes(4)),
    "unknown dtype": header_only({"a": entry(0, 4, [4], "OBJECT")}, body=bytes(4)),
    "deep nesting": (8 + 200_000).to_bytes(8, "little") + b"[" * 200_008,
    "nothing": b"",
}


@pytest.mark.parametrize("name", MALICIOUS)
def test_a_malicious_file_is_refused_without_running_or_allocating_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = MALICIOUS[name]
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint, match=r"x\.safetensors"):
            TensorFile("x.safetensors", len(data), lambda first, number: data[first : first + number])
        assert tracemalloc.get_traced_memory()[1] < 50 << 20
    finally:
        tracemalloc.stop()
    assert not Path("canary").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", "", MANIFEST])
def test_a_manifest_names_only_files_of_its_own_folder(name: str) -> None:
    data = encode_manifest(manifest(8, [SavedFile(name, 1, "")]))
    with pytest.raises(BadCheckpoint, match="is not the name of a file"):
        decode_manifest(data, MANIFEST)


@pytest.mark.parametrize(
    ("step", "blocks", "why"),
    [
        (-1, [], "claims -1 batches"),
        (10**15, [SavedBlock(version=0, first_open=0)], "claims 1,000,000,000,000,000 batches, of 12"),
        (8, [SavedBlock(version=0, first_open=10**15)], "portions 1,000,000,000,000,000 to"),
        (8, [SavedBlock(version=0, first_open=0, open={10**15: 1})], "portions 0 to 1,000,000,000,000,000"),
        (8, [SavedBlock(version=0, first_open=-1)], "portions -1 to -1"),
    ],
    ids=str,
)
def test_a_manifest_that_claims_impossible_batches_is_refused(step: int, blocks: list[SavedBlock], why: str) -> None:
    """They would be counted one by one, for years."""
    data = encode_manifest(msgspec.structs.replace(manifest(8, []), step=step, blocks=tuple(blocks)))
    with pytest.raises(BadCheckpoint, match=why):
        decode_manifest(data, MANIFEST)


def test_a_manifest_of_another_format_is_refused() -> None:
    data = encode_manifest(manifest(8, [])).replace(b'"format": 1', b'"format": 2')
    with pytest.raises(BadCheckpoint, match="format 2"):
        decode_manifest(data, MANIFEST)


@pytest.mark.parametrize("text", ['{"tensor": 1}', '{"other": 1}', "[", '{"dict": [1]}', "{}", '{"list": 3}'])
def test_state_with_another_structure_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="structure"):
        tree.joined(text, {}.__getitem__)


def test_a_file_with_a_dtype_that_safetensors_lacks_is_not_written() -> None:
    with pytest.raises(ValueError, match="complex128"):
        encoded({"a": torch.zeros(1, dtype=torch.complex128)})


def test_an_error_of_a_file_system_behind_a_url_is_one_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://somewhere")

    def refuse(*given: object, **named: object) -> None:
        raise RuntimeError("no credentials")

    for name in ("open", "ls", "size", "cat_file", "makedirs"):
        monkeypatch.setattr(type(store.files), name, refuse)  # type: ignore[attr-defined]
    uses: list[Callable[[], object]] = [
        lambda: store.write("x", [b""]),
        lambda: store.names(),
        lambda: store.size("x"),
        lambda: store.read("x", 0, 1),
        lambda: store.make_folder("x"),
    ]
    for use in uses:
        with pytest.raises(OSError, match="memory://somewhere.*RuntimeError: no credentials"):
            use()


def test_after_a_task_that_failed_the_others_are_settled() -> None:
    thread, done = BackgroundThread(), list[str]()

    def broken() -> Callable[[], None]:
        raise LookupError("slow down")

    for task in (broken, lambda: partial(done.append, "first"), broken, lambda: partial(done.append, "second")):
        thread.submit(task)
    errors = 0
    while thread.pending:
        try:
            thread.finish()
        except LookupError:
            errors += 1
    assert (errors, done) == (2, ["first", "second"])


def test_numbers_that_json_lacks_are_read_as_they_were() -> None:
    metrics = {"loss": float("nan"), "best": float("inf"), "worst": float("-inf"), "accuracy": 0.1}
    written = encode_manifest(msgspec.structs.replace(manifest(4, ()), metrics=metrics))
    read = decode_manifest(written, "manifest.json").metrics
    assert str(read) == str(metrics)
