"""Tensors in a safetensors file, with a hash of each, so that any of them can be read and checked by itself.

Files are checked before anything is allocated: they may be truncated, edited, or not what their name says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from rainband.checkpoints.manifest import hash_of
from rainband.errors import BadCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {  # the name in the file -> that of torch, and bytes of an element
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}
NAMES = {f"torch.{of_torch}": name for name, (of_torch, _) in DTYPES.items()}
MAX_HEADER_BYTES = 8 << 20
MAX_TENSORS = 1 << 16
HASHES, STATE = "hashes", "state"  # keys of the header's metadata
ReadRange = Callable[[int, int], bytes | bytearray]  # (first byte, number of bytes)


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


def encoded(tensors: Mapping[str, Tensor | bytes], state: str = "") -> tuple[bytes, list[memoryview]]:
    """Return the header and the bodies of a file; `state` is a text that is stored with the tensors.

    Bytes are stored as a tensor of numbers from 0 to 255: they need no torch.
    """
    header: dict[str, Any] = {}
    hashes: dict[str, str] = {}
    bodies: list[memoryview] = []
    end = 0
    for name, tensor in tensors.items():
        if isinstance(tensor, bytes):
            dtype, shape, body = "U8", [len(tensor)], memoryview(tensor)
        elif str(tensor.dtype) not in NAMES:
            raise ValueError(
                f"{name} is a tensor of {tensor.dtype}, which no checkpoint can hold: use one of {', '.join(NAMES)}."
            )
        else:
            from rainband.model.containers import bytes_of  # which imports torch

            dtype, shape, body = NAMES[str(tensor.dtype)], list(tensor.shape), bytes_of(tensor)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(body)]}
        hashes[name] = hash_of(body)
        bodies.append(body)
        end += len(body)
    header["__metadata__"] = {HASHES: msgspec.json.encode(hashes).decode(), STATE: state}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES or len(tensors) > MAX_TENSORS:
        raise ValueError(f"a checkpoint file cannot have {len(tensors):,} tensors: write several files.")
    return len(text).to_bytes(8, "little") + text, bodies


class TensorFile:
    """The header of a safetensors file, which has been checked, and the way to read its tensors."""

    def __init__(self, name: str, num_bytes: int, read: ReadRange) -> None:
        """`name` is that of error messages."""
        self.name = name
        self._read = read
        if num_bytes < 8:
            raise self._bad(f"it has {num_bytes} bytes, which is too short for a safetensors file: it is truncated")
        length = int.from_bytes(read(0, 8), "little")
        if length > min(MAX_HEADER_BYTES, num_bytes - 8):
            raise self._bad(
                f"its header claims {length:,} bytes, of a file of {num_bytes:,}: it is truncated or of another kind"
            )
        self.header = bytes(read(0, 8 + length))
        self.entries, self.metadata = self._parsed(self.header[8:])
        self._check_offsets(num_bytes - 8 - length)
        self.hashes = self._hashes()

    @property
    def state(self) -> str:
        """The text that is stored with the tensors."""
        return self.metadata.get(STATE, "")

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, and check its hash if the file has one."""
        import torch

        entry, body = self._checked(name)
        dtype = getattr(torch, DTYPES[entry.dtype][0])
        if not body:
            return torch.empty(entry.shape, dtype=dtype)
        return torch.frombuffer(body, dtype=torch.uint8).view(dtype).reshape(entry.shape)

    def content(self, name: str) -> bytes:
        """Read the bytes of one tensor, and check their hash."""
        return bytes(self._checked(name)[1])

    def verify(self) -> None:
        """Read all tensors, and check their hashes."""
        for name in self.entries:
            self._checked(name)

    def _checked(self, name: str) -> tuple[TensorEntry, bytearray]:
        """Return the bytes of a tensor."""
        entry = self.entries.get(name)
        if entry is None:
            raise self._bad(f"it has no tensor {name!r}")
        first = len(self.header) + entry.data_offsets[0]
        found = self._read(first, entry.num_bytes) if entry.num_bytes else bytearray()
        body = found if isinstance(found, bytearray) else bytearray(found)  # a tensor needs memory it may write to
        if len(body) != entry.num_bytes:
            raise self._bad(f"tensor {name!r} has {len(body):,} bytes instead of {entry.num_bytes:,}: it is truncated")
        if name in self.hashes and hash_of(body) != self.hashes[name]:
            raise self._bad(f"the contents of tensor {name!r} have changed since it was written")
        return entry, body

    def _parsed(self, text: bytes) -> tuple[dict[str, TensorEntry], dict[str, str]]:
        try:
            raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            metadata = raw.pop("__metadata__", None)
            if len(raw) > MAX_TENSORS:
                raise self._bad(f"it claims {len(raw):,} tensors, more than {MAX_TENSORS:,}")
            entries = {name: msgspec.json.decode(of, type=TensorEntry) for name, of in raw.items()}
            known = {} if metadata is None else msgspec.json.decode(metadata, type=dict[str, str])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._bad(f"its header is not that of a safetensors file ({error})") from None
        return entries, known

    def _check_offsets(self, num_bytes: int) -> None:
        """Check that the tensors fill the file, one after the other."""
        end = 0
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].data_offsets):
            if entry.dtype not in DTYPES:
                raise self._bad(f"tensor {name!r} has the unknown dtype {entry.dtype!r}")
            first, last = entry.data_offsets
            wanted = prod(entry.shape) * DTYPES[entry.dtype][1]
            if first != end or min(entry.shape, default=0) < 0 or last - first != wanted:
                raise self._bad(f"tensor {name!r} of shape {list(entry.shape)} lies at bytes {first} to {last}")
            end = last
        if end != num_bytes:
            raise self._bad(f"its tensors have {end:,} bytes and the rest of the file {num_bytes:,}: it is truncated")

    def _hashes(self) -> dict[str, str]:
        try:
            hashes = msgspec.json.decode(self.metadata.get(HASHES, "{}"), type=dict[str, str])
        except msgspec.MsgspecError:
            raise self._bad("its list of hashes cannot be read") from None
        if HASHES in self.metadata and hashes.keys() != self.entries.keys():
            raise self._bad("its list of hashes is not that of its tensors")
        return hashes

    def _bad(self, why: str) -> BadCheckpoint:
        return BadCheckpoint(self.name, why)
