"""Memory shared between processes of one machine: published parameters and mailboxes.

Both are sealed memory files, handed over a Unix socket. They have no names, so nothing is left behind whatever is
killed, and the small /dev/shm of a container is no limit.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from rainband.protocol.layout import BlockSpec
from rainband.protocol.parameter_buffers import ParameterBuffer

PAGE = 4096
WORD_BYTES = 64  # one cache line per version word, against false sharing
MAX_VIEWS = 4096  # cached tensors of a mailbox
READ_TRIES = 8  # then a torn read is accepted at its lower version, and counted
CHUNK_BYTES = 1 << 26  # made in one call, which begins again after a signal


def mapped(fd: int, num_bytes: int, offset: int = 0, writable: bool = True) -> tuple[mmap.mmap, Tensor]:
    """Map a memory file with its pages: page faults later would cost eight times as much.

    MAP_POPULATE would do it in one call, during which no other thread of the process runs: with some GB, it would send
    no heartbeat for seconds.
    """
    if writable:
        for first in range(offset, offset + num_bytes, CHUNK_BYTES):
            os.posix_fallocate(fd, first, min(CHUNK_BYTES, offset + num_bytes - first))
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=protection, offset=offset)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only memory
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
    memory[::PAGE].sum()  # reads each page
    return mapping, memory


class SharedSegment:
    """A memory file that is mapped into this process."""

    def __init__(self, fd: int, num_bytes: int, writable: bool) -> None:
        self.fd = fd
        self.mapping, self.bytes = mapped(fd, num_bytes, writable=writable)

    @classmethod
    def create(cls, name: str, num_bytes: int) -> SharedSegment:
        return cls.settle(cls.reserve(name), num_bytes)

    @staticmethod
    def reserve(name: str) -> int:
        """Return a memory file of unknown size, to be inherited by child processes."""
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    @classmethod
    def settle(cls, fd: int, num_bytes: int) -> SharedSegment:
        """Give a reserved file its final size."""
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return cls(fd, num_bytes, writable=True)

    @classmethod
    def open(cls, fd: int, num_bytes: int, writable: bool) -> SharedSegment:
        """Map the file of another process, and close `fd`; refuse one that could still be truncated."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & fcntl.F_SEAL_SHRINK and os.fstat(fd).st_size == num_bytes:
                return cls(fd, num_bytes, writable)
        except OSError:
            pass  # not a memory file
        finally:
            os.close(fd)  # the mapping has its own
        raise ValueError(f"shared memory of {num_bytes} bytes was announced, something else was handed over.")

    def seal_against_writers(self) -> None:
        """Prevent other processes from mapping it writable; existing mappings stay writable."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, 0x10)  # F_SEAL_FUTURE_WRITE, which Python 3.11 does not define


def buffer_offsets(specs: Sequence[BlockSpec], buffers: int) -> tuple[list[list[int]], int]:
    """Return the offsets of each block's buffers in a server's published memory, and its length."""
    at = -(-len(specs) * WORD_BYTES // PAGE) * PAGE
    offsets: list[list[int]] = []
    for spec in specs:
        size = -(-spec.num_bytes // 64) * 64
        offsets.append([at + i * size for i in range(buffers)])
        at += buffers * size
    return offsets, max(PAGE, -(-at // PAGE) * PAGE)


class Published:
    """A server's parameters in shared memory, readable by every process of the machine."""

    def __init__(self, segment: SharedSegment, specs: Sequence[BlockSpec], buffers: int) -> None:
        self.segment = segment
        self.buffers = buffers
        offsets, _ = buffer_offsets(specs, buffers)
        self.words = memoryview(segment.mapping)[: max(1, len(specs)) * WORD_BYTES].cast("q")
        self.stride = WORD_BYTES // 8
        self.at = {spec.index: i * self.stride for i, spec in enumerate(specs)}
        self.values = {
            spec.index: [
                segment.bytes[offset : offset + spec.num_bytes].view(getattr(torch, spec.dtype)) for offset in of_block
            ]
            for spec, of_block in zip(specs, offsets, strict=True)
        }

    @classmethod
    def create(cls, specs: Sequence[BlockSpec], buffers: int) -> Published:
        _, num_bytes = buffer_offsets(specs, buffers)
        return cls(SharedSegment.create("rainband parameters", num_bytes), specs, buffers)

    @classmethod
    def open(cls, fd: int, specs: Sequence[BlockSpec], buffers: int) -> Published:
        _, num_bytes = buffer_offsets(specs, buffers)
        return cls(SharedSegment.open(fd, num_bytes, writable=False), specs, buffers)

    def buffer(self, spec: BlockSpec) -> ParameterBuffer:
        return ParameterBuffer(self.words, self.at[spec.index], self.values[spec.index])

    def read(self, block: int, out: Tensor) -> tuple[int, int]:
        """Copy a block's newest parameters; return their version and the number of torn tries."""
        at, buffers = self.at[block], self.values[block]
        for torn in range(READ_TRIES):
            before = self.words[at]
            out.copy_(buffers[(before >> 1) % len(buffers)])
            if before & 1 == 0 and self.words[at] == before:
                return before >> 1, torn
            os.sched_yield()  # the writer may be waiting for this core
        return before >> 1, READ_TRIES

    def read_round(self, block: int, version: int, out: Tensor) -> bool:
        """Copy exactly this version of a block; return False if it is, or became, overwritten."""
        at = self.at[block]
        buffers = self.values[block]
        last = version + len(buffers) - 1  # two buffers hold a version and the next one
        if not version <= self.words[at] >> 1 <= last:
            return False
        out.copy_(buffers[version % len(buffers)])
        return self.words[at] <= 2 * last  # otherwise its buffer is being overwritten


class Mailbox:
    """Slots in which one worker leaves payloads for one server."""

    def __init__(self, segment: SharedSegment, slots: int, slot_bytes: int) -> None:
        self.segment = segment
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._tensors: dict[tuple[int, str, int], Tensor] = {}

    @classmethod
    def create(cls, slots: int, slot_bytes: int) -> Mailbox:
        return cls(SharedSegment.create("rainband mailbox", slots * slot_bytes), slots, slot_bytes)

    @classmethod
    def open(cls, fd: int, slots: int, slot_bytes: int, max_bytes: int) -> Mailbox:
        if slots < 1 or slot_bytes < 1 or slot_bytes % 64 or slots * slot_bytes > max_bytes:
            os.close(fd)
            raise ValueError(
                f"a mailbox of {slots} x {slot_bytes} bytes: slots have multiples of 64, all together {max_bytes}."
            )
        return cls(SharedSegment.open(fd, slots * slot_bytes, writable=False), slots, slot_bytes)

    def tensor(self, slot: int, dtype: str, numel: int) -> Tensor:
        """Return the payload in a slot; tensors are cached, because the same few are requested repeatedly."""
        key = slot, dtype, numel
        tensor = self._tensors.get(key)
        if tensor is None:
            if not 0 <= slot < self.slots or not 0 <= numel * _item_bytes(dtype) <= self.slot_bytes:
                raise ValueError(f"no {numel} x {dtype} in slot {slot} of {self.slots} x {self.slot_bytes} bytes.")
            start = slot * self.slot_bytes
            if len(self._tensors) == MAX_VIEWS:  # gradients whose absent parameters change have many lengths
                self._tensors.clear()
            raw = self.segment.bytes[start : start + numel * _item_bytes(dtype)]
            tensor = self._tensors[key] = raw.view(getattr(torch, dtype))
        return tensor


def _item_bytes(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype named {dtype!r}.")
    return found.itemsize
