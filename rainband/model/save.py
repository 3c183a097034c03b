"""Save a module as safetensors: a file that plain PyTorch loads in two lines."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn


def save_model(module: nn.Module, path: str) -> None:
    """Save to a temporary file and rename it: a crash leaves the old file or the new one."""
    if not path:
        return
    beside = Path(f"{path}.{os.getpid()}.part")
    safetensors.torch.save_model(module, str(beside))
    beside.rename(path)


def save_part(tensors: Mapping[str, Tensor], path: str, part: int) -> str:
    """Save one worker's submodel beside the final file; return its path."""
    if not path:
        return ""
    beside = f"{path}.{part}.part"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside)
    return beside


def join_parts(parts: Sequence[Path], path: str) -> None:
    """Merge the submodels into one file, in chunks of 1 MiB, and remove them."""
    if not path:
        return
    header: dict[str, dict[str, Any]] = {}
    bodies: list[tuple[Path, int, int]] = []  # file, offset and size of its tensors
    end = 0
    for part in parts:
        length, described = _header_of(part)
        size = part.stat().st_size - length
        for name, entry in described.items():
            first, last = entry["data_offsets"]
            header[name] = {**entry, "data_offsets": [first + end, last + end]}
        bodies.append((part, length, size))
        end += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at multiples of eight
    beside = Path(f"{path}.{os.getpid()}.part")
    with beside.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for part, length, _ in bodies:
            with part.open("rb") as source:
                source.seek(length)
                shutil.copyfileobj(source, out, 1 << 20)
    beside.rename(path)
    for part in parts:
        part.unlink()


def _header_of(part: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the offset of the tensors in a safetensors file, and its header."""
    with part.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        described = json.loads(file.read(length))
    described.pop("__metadata__", None)
    return 8 + length, described
