"""Nodes of other machines write and read checkpoints through the run's machine, and nothing else there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rainband.checkpoints import commit
from rainband.checkpoints.manifest import MANIFEST, Manifest
from rainband.checkpoints.read import Checkpoint
from rainband.checkpoints.store import LocalStore
from rainband.checkpoints.write import write_file
from rainband.protocol.messages import Address, FileAnswer, FileRead, FileWrite, Message, Peer
from rainband.runtimes.checkpoints.background import AtOnce
from rainband.runtimes.checkpoints.remote import PART_BYTES, FileHost, RemoteStore
from tests.test_checkpoint_files import FACTS, LAYOUT, PLAN

NODE = Peer("files", 1)
LARGE = torch.arange(PART_BYTES // 4 + 1000, dtype=torch.float32)  # more than one message


class Near(RemoteStore):
    """A store whose requests arrive without a connection."""

    def __init__(self, folder: Path, under_way: str = "", source: str = "", last: str = "") -> None:
        super().__init__(Address("", 0), {}, b"", str(folder))
        self.host = FileHost(LocalStore(folder), source, lambda: under_way, lambda: last, AtOnce(), self._answered)

    def _answered(self, to: Peer, answer: Message, body: bytes | None) -> None:
        assert isinstance(answer, FileAnswer) and to == NODE
        self.answer = answer, body or b""

    def _asked(self, request: Message, body: memoryview | None) -> tuple[FileAnswer, bytes]:
        self.host.receive(NODE, request, body)
        assert self.answer is not None
        return self.answer


def test_a_checkpoint_is_written_and_read_from_another_machine(tmp_path: Path) -> None:
    name, local = "step-0000000004", LocalStore(tmp_path)
    there = Near(tmp_path, under_way=name)
    file = write_file(there, commit.begin(there, name), "worker.safetensors", {"large": LARGE})
    manifest = Manifest(step=4, created_at="", facts=FACTS, plan=PLAN, layout=LAYOUT, num_replicas=2, files=(file,))
    assert commit.finish(local, name, manifest) == name
    found = Checkpoint(Near(tmp_path, source=str(tmp_path / name)), name)
    found.verify()
    assert torch.equal(found.state("worker.safetensors")["large"], LARGE)
    assert found.place == str(tmp_path / name)


@pytest.mark.parametrize(
    "request_",
    [
        FileWrite("step-0000000004", "../worker.safetensors"),
        FileWrite("step-0000000004", "manifest.json"),
        FileWrite("step-0000000004", "coordinator.safetensors"),
        FileWrite("step-0000000009", "worker.safetensors"),
        FileWrite("", "worker.safetensors"),
        FileRead("step-0000000004", "../../secret", 0, 10),
        FileRead("..", MANIFEST, 0, 10),
        FileRead("step-0000000009", MANIFEST, 0, 10),
    ],
    ids=str,
)
def test_other_files_are_neither_written_nor_read(tmp_path: Path, request_: Any) -> None:
    (tmp_path / "secret").write_text("it is not told")
    folder = tmp_path / "run" / "step-0000000004"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    there = Near(folder.parent, under_way="step-0000000004", source=str(folder))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="is not of the checkpoint"):
        there._ask(request_, memoryview(b"bad"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_there_is_an_error_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Any, name: str) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "begin", full)
    with pytest.raises(OSError, match="No space left"):
        Near(tmp_path, "step-0000000004").write("step-0000000004/worker.safetensors", [b"1"])
