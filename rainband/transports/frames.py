"""Frames: one message on a byte stream, as a fixed prefix, a msgpack header and raw body bytes.

    offset  bytes  prefix, little-endian
    0       4      magic b"RBND"
    4       1      protocol version
    5       1      kind: 0, or 1 if the header was too long and is the body
    6       2      flags, for the sender and the receiver to agree on
    8       4      length of the header, at most 1 MiB
    12      8      length of the body, at most what the receiver allows; 0 is no body
    20      4      header checksum: crc32 of all of the prefix but this field, then of the header,
                   started from the connection's key
    24      8      body checksum: xxh3_64 of the body; 0 without a body

For a given frame, two different keys always give two different header checksums (crc32 is one-to-one in
what it is started from), so a frame recorded on one connection is refused on every connection with another
key. The checksums guard against accidents and mix-ups, not against an attacker who can write into the
connection: that takes TLS.

There is no I/O here: bytes go in and come out, and the owner of the socket moves them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

from xxhash import xxh3_64_intdigest

from rainband.errors import RainbandError

MAGIC = b"RBND"
PROTOCOL_VERSION = 1
PREFIX_BYTES = 32
MAX_HEADER_BYTES = 1 << 20
ORDINARY, HEADER_IS_BODY = 0, 1  # kinds of frames
STAGING_BYTES = 16 << 10  # holds a hundred small frames; of a large body at most this much is copied twice

_PREFIX = struct.Struct("<4sBBHIQIQ")
_LENGTHS_END, _BODY_CHECKSUM = 20, 24  # offsets: the header checksum lies between the two

BodyMemory = Callable[[bytes, int], memoryview]


class BadFrame(RainbandError):
    """The bytes are no frame of this connection; nothing after them can be trusted, so close it."""


class Prefix(NamedTuple):
    """The fields of a prefix after its magic, in the order in which they lie on the wire."""

    version: int
    kind: int
    flags: int
    header_bytes: int
    body_bytes: int
    header_checksum: int
    body_checksum: int


class Frame(NamedTuple):
    """A whole frame whose checksums were right."""

    header: bytes
    body: memoryview | None
    flags: int = 0


def pack(header: bytes, body: memoryview | None, key: int = 0, flags: int = 0) -> bytes:
    """Return prefix and header; the caller sends the body's own memory right after them, uncopied."""
    if len(header) > MAX_HEADER_BYTES:
        if body is not None:
            raise ValueError(
                f"a header of {len(header)} bytes does not fit a frame with a body: at most {MAX_HEADER_BYTES} do, "
                "so put bulk data into the body."
            )
        return _pack(HEADER_IS_BODY, b"", memoryview(header), key, flags) + header
    return _pack(ORDINARY, header, body, key, flags)


def _pack(kind: int, header: bytes, body: memoryview | None, key: int, flags: int) -> bytes:
    body_bytes = 0 if body is None else body.nbytes
    body_checksum = xxh3_64_intdigest(body) if body is not None and body_bytes else 0
    unsealed = _PREFIX.pack(MAGIC, PROTOCOL_VERSION, kind, flags, len(header), body_bytes, 0, body_checksum)
    before, after = unsealed[:_LENGTHS_END], unsealed[_BODY_CHECKSUM:] + header
    return before + _header_checksum(before, after, key).to_bytes(4, "little") + after


def unpack_prefix(data: bytes | memoryview, max_body_bytes: int) -> Prefix:
    """Return the fields of 32 bytes; what is no frame, or too large, is refused before any allocation."""
    magic, version, kind, flags, header_bytes, body_bytes, header_sum, body_sum = _PREFIX.unpack_from(data)
    prefix = Prefix(version, kind, flags, header_bytes, body_bytes, header_sum, body_sum)
    if magic != MAGIC or version != PROTOCOL_VERSION or header_bytes > MAX_HEADER_BYTES or body_bytes > max_body_bytes:
        raise BadFrame(_what_is_wrong(magic, prefix, max_body_bytes))
    return prefix


def check_body(prefix: Prefix, body: bytes | memoryview) -> None:
    """Refuse a body that is not as it was sent."""
    body_bytes = memoryview(body).nbytes
    if body_bytes != prefix.body_bytes:
        raise BadFrame(f"the body has {body_bytes} bytes, its frame announces {prefix.body_bytes}.")
    if body_bytes and xxh3_64_intdigest(body) != prefix.body_checksum:
        raise BadFrame(f"the body checksum is wrong: {body_bytes} bytes were damaged on the way.")


class FrameReader:
    """Incremental parser: returns where the next bytes must go, and yields whole frames.

    Prefixes and headers arrive in a small staging buffer, and with them small bodies and the beginning of
    large ones; the rest of a body arrives where it stays. How long what `received` returns is valid:

    - a header: for ever, it is a copy;
    - a body in memory given by `body_memory`: as long as its owner says. That memory is written to
      before the body's checksum is known, so it may not be used until its frame is returned;
    - a body without `body_memory`: until the next call of `received`. Bodies that come in several pieces
      share one buffer, but never two of one call: such a body is the only frame of the call that completes
      it.

    After `BadFrame` the reader is of no more use; frames that came in the same piece, before the bad one,
    are dropped with it, as if the connection had been lost a moment earlier.
    """

    def __init__(self, max_body_bytes: int, key: int = 0, body_memory: BodyMemory | None = None) -> None:
        self._max_body_bytes = max_body_bytes
        self._key = key
        self._body_memory = body_memory
        self._pool = bytearray()  # the shared buffer of large bodies
        self._small = memoryview(bytearray(STAGING_BYTES))
        self._staging = self._small  # or a larger one while a large header arrives
        self._staged = 0  # bytes at the front of the staging buffer, not yet parsed
        self._wanted = PREFIX_BYTES  # with fewer bytes staged, parsing would get no further
        self._arriving: _Arriving | None = None  # the frame whose body is being received

    @property
    def between_frames(self) -> bool:
        """Return True if the stream may end here without truncating a frame."""
        return self._staged == 0 and self._arriving is None

    @property
    def in_body(self) -> bool:
        """True while a body is received: then `space` ends where the body does."""
        return self._arriving is not None

    def space(self) -> memoryview:
        """Return the memory into which the next bytes must be received, as many as come."""
        if self._arriving is not None:
            return self._arriving.memory[self._arriving.filled :]
        return self._staging[self._staged :]

    def received(self, count: int) -> list[Frame]:
        """Take note that `count` bytes were written to `space()`, and return the frames they complete."""
        if self._arriving is not None:
            return self._body_received(self._arriving, count)
        self._staged += count
        assert self._staged <= len(self._staging), "more bytes received than there was space for"
        if self._staged < self._wanted:
            return []
        return self._parse(bytes(self._staging[: self._staged]))

    def _body_received(self, arriving: _Arriving, count: int) -> list[Frame]:
        arriving.filled += count
        assert arriving.filled <= arriving.prefix.body_bytes, "more bytes received than there was space for"
        if arriving.filled < arriving.prefix.body_bytes:
            return []
        return [self._finish(arriving)]

    def _parse(self, data: bytes) -> list[Frame]:
        frames: list[Frame] = []
        at, end, wanted = 0, len(data), PREFIX_BYTES
        while end - at >= PREFIX_BYTES:
            start = at + PREFIX_BYTES
            prefix = unpack_prefix(data[at:start], self._max_body_bytes)
            header_end = start + prefix.header_bytes
            if header_end > end:
                wanted = PREFIX_BYTES + prefix.header_bytes
                break
            _check_sealed(data[at : at + _LENGTHS_END], data[at + _BODY_CHECKSUM : header_end], prefix, self._key)
            header = data[start:header_end]
            at = header_end
            if not prefix.body_bytes:
                frames.append(Frame(header, None, prefix.flags))
                continue
            arriving = self._begin(prefix, header, data[at : at + prefix.body_bytes])
            at += arriving.filled
            if arriving.filled < prefix.body_bytes:
                break
            frames.append(self._finish(arriving))
        self._stage(data[at:], wanted)
        return frames

    def _begin(self, prefix: Prefix, header: bytes, first: bytes) -> _Arriving:
        """Give the body its memory, and put there the part of it that has come already."""
        if prefix.kind == HEADER_IS_BODY:
            memory = memoryview(bytearray(prefix.body_bytes))
        else:
            memory = self._memory(header, prefix.body_bytes, whole=len(first) == prefix.body_bytes)
        memory[: len(first)] = first
        self._arriving = _Arriving(prefix, header, memory, len(first))
        return self._arriving

    def _memory(self, header: bytes, body_bytes: int, whole: bool) -> memoryview:
        if self._body_memory is not None:
            memory = self._body_memory(header, body_bytes).cast("B")
            assert len(memory) == body_bytes, f"body_memory gave {len(memory)} bytes for a body of {body_bytes}"
            return memory
        if whole:  # other frames may be complete in the same call: the pool would be shared
            return memoryview(bytearray(body_bytes))
        if len(self._pool) < body_bytes:
            power_of_two = 1 << (body_bytes - 1).bit_length()  # so that slowly growing bodies do not allocate each time
            self._pool = bytearray(min(power_of_two, self._max_body_bytes))
        return memoryview(self._pool)[:body_bytes]

    def _finish(self, arriving: _Arriving) -> Frame:
        check_body(arriving.prefix, arriving.memory)
        self._arriving = None
        if arriving.prefix.kind == HEADER_IS_BODY:
            return Frame(bytes(arriving.memory), None, arriving.prefix.flags)
        return Frame(arriving.header, arriving.memory, arriving.prefix.flags)

    def _stage(self, leftover: bytes, wanted: int) -> None:
        """Keep the beginning of a frame at the front of a staging buffer that can hold its whole header."""
        self._staging = self._small if wanted <= STAGING_BYTES else memoryview(bytearray(wanted))
        self._staging[: len(leftover)] = leftover
        self._staged, self._wanted = len(leftover), wanted


@dataclass(slots=True)
class _Arriving:
    """A frame whose header was right and whose body is being received."""

    prefix: Prefix
    header: bytes
    memory: memoryview
    filled: int


def _header_checksum(before: bytes, after: bytes, key: int) -> int:
    """Return the checksum of what lies before its own field and what lies after it, the header included."""
    return crc32(after, crc32(before, key))


def _check_sealed(before: bytes, after: bytes, prefix: Prefix, key: int) -> None:
    if _header_checksum(before, after, key) != prefix.header_checksum:
        raise BadFrame("the header checksum is wrong: the frame was damaged, or belongs to another connection.")


def _what_is_wrong(magic: bytes, prefix: Prefix, max_body_bytes: int) -> str:
    if magic != MAGIC:
        return f"this is no Rainband frame: it begins with {magic!r} instead of {MAGIC!r}."
    if prefix.version != PROTOCOL_VERSION:
        return (
            f"the frame is of protocol version {prefix.version}, this process speaks {PROTOCOL_VERSION}: "
            "install the same version of rainband on all machines."
        )
    if prefix.header_bytes > MAX_HEADER_BYTES:
        return f"the frame announces a header of {prefix.header_bytes} bytes; {MAX_HEADER_BYTES} are allowed."
    return f"the frame announces a body of {prefix.body_bytes} bytes; at most {max_body_bytes} are allowed here."
