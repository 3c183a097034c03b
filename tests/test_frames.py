"""Frames: what lies on the wire, what is refused, and that pieces of any size give the same frames."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from rainband.transports.frames import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    STAGING_BYTES,
    BadFrame,
    Frame,
    FrameReader,
    Prefix,
    check_body,
    pack,
    unpack_prefix,
)

KEY = 7
HEADER = b"\x93\x01\x02\x03"  # msgpack for [1, 2, 3]
BODY = b"rainband"
GOLDEN = bytes.fromhex(
    "52424e44 01 00 0200 04000000 0800000000000000"  # RBND, version 1, kind 0, flags 2, lengths 4 and 8
    "4f89a0da 4cc6e8114b3c7d6f"  # the checksums of header and body
    "93010203 7261696e62616e64"
)


def whole(header: bytes, body: bytes = b"", key: int = KEY, flags: int = 0) -> bytes:
    return pack(header, memoryview(body) if body else None, key, flags) + body


def announcing(header_bytes: int, body_bytes: int) -> bytes:
    """A prefix with a right checksum, as a sender would make it that means what it says."""
    before, body_checksum = struct.pack("<4sBBHIQ", b"RBND", 1, 0, 0, header_bytes, body_bytes), bytes(8)
    return before + struct.pack("<I", zlib.crc32(before + body_checksum, KEY)) + body_checksum


def deliver(reader: FrameReader, stream: bytes, piece_bytes: Iterable[int] = ()) -> Iterator[list[Frame]]:
    """Play the socket: pieces of these sizes, then all there is space for; yield what each completes."""
    sizes, at = iter(piece_bytes), 0
    while at < len(stream):
        space = reader.space()
        count = min(next(sizes, len(space)), len(space), len(stream) - at)
        space[:count] = stream[at : at + count]
        at += count
        yield reader.received(count)


def contents(frames: list[Frame]) -> list[tuple[bytes, bytes | None, int]]:
    return [(bytes(f.header), None if f.body is None else bytes(f.body), f.flags) for f in frames]


def read(stream: bytes, key: int = KEY, max_body_bytes: int = 1 << 20) -> list[tuple[bytes, bytes | None, int]]:
    reader = FrameReader(max_body_bytes, key)
    return [frame for frames in deliver(reader, stream) for frame in contents(frames)]


def test_a_frame_is_these_bytes() -> None:
    assert whole(HEADER, BODY, flags=2) == GOLDEN


def test_these_bytes_are_a_frame() -> None:
    assert read(GOLDEN) == [(HEADER, BODY, 2)]


def test_the_checksums_are_those_of_zlib_and_xxhash() -> None:
    assert GOLDEN[20:24] == struct.pack("<I", zlib.crc32(GOLDEN[:20] + GOLDEN[24:36], KEY))
    assert GOLDEN[24:32] == struct.pack("<Q", xxhash.xxh3_64_intdigest(BODY))


def test_prefix_header_and_body_are_each_checked() -> None:
    prefix = unpack_prefix(GOLDEN[:PREFIX_BYTES], max_body_bytes=8)
    assert prefix == Prefix(1, 0, 2, 4, 8, prefix.header_checksum, prefix.body_checksum)
    check_body(prefix, memoryview(BODY))
    other_header = GOLDEN[:PREFIX_BYTES] + b"\x93\x01\x02\x04" + GOLDEN[PREFIX_BYTES + 4 :]
    other_flags = GOLDEN[:6] + b"\x03" + GOLDEN[7:]
    for damaged in (other_header, other_flags):
        reader = FrameReader(8, KEY)
        reader.space()[: len(damaged)] = damaged
        with pytest.raises(BadFrame, match="header checksum"):
            reader.received(len(damaged))
    with pytest.raises(BadFrame, match="body checksum"):
        check_body(prefix, b"rainbanD")
    with pytest.raises(BadFrame, match="has 7 bytes, its frame announces 8"):
        check_body(prefix, b"rainban")


def test_the_body_of_a_frame_is_counted_in_bytes() -> None:
    four_floats: Any = memoryview(bytearray(16)).cast("f")
    assert unpack_prefix(pack(HEADER, four_floats), max_body_bytes=16).body_bytes == 16


def test_an_empty_body_is_no_body() -> None:
    assert pack(HEADER, memoryview(b""), KEY) == pack(HEADER, None, KEY)
    assert read(whole(HEADER) + whole(b"")) == [(HEADER, None, 0), (b"", None, 0)]


@pytest.mark.parametrize("at", range(len(GOLDEN)))
def test_no_frame_comes_of_one_with_a_flipped_byte(at: int) -> None:
    for flip in range(1, 256):
        damaged = GOLDEN[:at] + bytes([GOLDEN[at] ^ flip]) + GOLDEN[at + 1 :]
        reader = FrameReader(max_body_bytes=1 << 20, key=KEY)
        try:
            assert list(deliver(reader, damaged)) == [[]]
        except BadFrame:
            continue
        # Only a longer header can make the reader wait: what it waits for is then refused.
        assert 8 <= at < 12
        assert not reader.between_frames
        with pytest.raises(BadFrame, match="header checksum"):
            list(deliver(reader, bytes(MAX_HEADER_BYTES)))


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary(max_size=50))
@example(0, 1, b"")
def test_a_frame_of_another_connection_is_refused(ours: int, theirs: int, header: bytes) -> None:
    if ours == theirs:
        assert read(whole(header, key=theirs), key=ours) == [(header, None, 0)]
        return
    with pytest.raises(BadFrame, match="another connection"):
        read(whole(header, key=theirs), key=ours)


@pytest.mark.parametrize(
    "header_bytes, body_bytes, message",
    [
        (2**32 - 1, 0, "a header of 4294967295 bytes; 1048576 are allowed"),
        (2**20 + 1, 0, "a header of 1048577 bytes; 1048576 are allowed"),
        (0, 2**63, "a body of 9223372036854775808 bytes; at most 1000 are allowed"),
        (0, 2**32 - 1, "a body of 4294967295 bytes; at most 1000 are allowed"),
        (0, 1001, "a body of 1001 bytes; at most 1000 are allowed"),
    ],
)
def test_lengths_over_the_limit_are_refused_before_anything_is_allocated(
    header_bytes: int, body_bytes: int, message: str
) -> None:
    asked: list[int] = []

    def memory(header: bytes, body_bytes: int) -> memoryview:
        asked.append(body_bytes)
        return memoryview(bytearray(body_bytes))

    reader = FrameReader(max_body_bytes=1000, key=KEY, body_memory=memory)
    prefix = announcing(header_bytes, body_bytes)
    tracemalloc.start()
    try:
        with pytest.raises(BadFrame, match=message):
            list(deliver(reader, prefix))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert asked == []
    assert peak_bytes < 100_000


def test_a_header_and_a_body_may_be_as_long_as_the_limits() -> None:
    header, body = bytes(MAX_HEADER_BYTES), bytes(range(250)) * 4
    assert read(whole(header, body), max_body_bytes=1000) == [(header, body, 0)]
    with pytest.raises(ValueError, match="a header of 1048577 bytes does not fit"):
        pack(header + b"\0", memoryview(body))


def test_a_header_that_is_too_long_is_sent_as_a_body_and_arrives_as_a_header() -> None:
    header = bytes(range(256)) * 4096 + b"\0"  # one byte more than the limit
    asked: list[int] = []

    def memory(header: bytes, body_bytes: int) -> memoryview:
        asked.append(body_bytes)
        return memoryview(bytearray(body_bytes))

    reader = FrameReader(len(header), KEY, memory)
    frames = [frame for some in deliver(reader, whole(header, flags=2) + whole(b"next", b"body")) for frame in some]
    assert contents(frames) == [(header, None, 2), (b"next", b"body", 0)]
    assert asked == [4]  # a node has no memory of its own for headers
    with pytest.raises(BadFrame, match="a body of 1048577 bytes; at most 1000 are allowed"):
        list(deliver(FrameReader(1000, KEY), whole(header)))


@pytest.mark.parametrize(
    "foreign",
    [
        b"GET / HTTP/1.1\r\nHost: rainband.example\r\n\r\n",
        bytes.fromhex("16030100fa010000f60303") + bytes(32),  # a TLS client hello
        b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n",
        bytes(64),
    ],
)
def test_another_protocol_is_refused_on_its_first_32_bytes(foreign: bytes) -> None:
    with pytest.raises(BadFrame, match="no Rainband frame"):
        read(foreign[:PREFIX_BYTES])


@given(st.binary(min_size=32, max_size=200).filter(lambda data: not data.startswith(b"RBND")))
def test_random_bytes_are_refused_on_their_first_32(data: bytes) -> None:
    with pytest.raises(BadFrame, match="no Rainband frame"):
        read(data[:PREFIX_BYTES])


@given(st.binary(min_size=27, max_size=100))
def test_random_bytes_after_the_magic_and_version_never_make_a_frame(data: bytes) -> None:
    reader = FrameReader(max_body_bytes=1000, key=KEY)
    try:
        assert not any(deliver(reader, b"RBND\x01" + data))
    except BadFrame:
        return
    assert not reader.between_frames


def test_a_frame_of_another_version_is_refused_with_both_versions() -> None:
    with pytest.raises(BadFrame, match="version 2, this process speaks 1: install the same"):
        read(b"RBND\x02" + GOLDEN[5:])


lengths = st.one_of(st.integers(0, 60), st.sampled_from([STAGING_BYTES - PREFIX_BYTES, STAGING_BYTES, 20_001]))
frame_lists = st.lists(st.tuples(lengths, lengths, st.integers(0, 2**16 - 1)), max_size=8)
pieces = st.lists(st.one_of(st.integers(1, 80), st.integers(1, 40_000)), max_size=60)


@given(frame_lists, pieces, st.booleans())
@example([(100, 0, 0)] * 3, [1] * 396, False)
@example([(10, 10, 1), (10, 20_001, 2), (20_001, 10, 3), (0, 0, 4)], [100], True)
def test_a_stream_cut_at_any_bytes_gives_the_same_frames(
    shapes: list[tuple[int, int, int]], piece_bytes: list[int], own_memory: bool
) -> None:
    sent = [
        (bytes([65 + i]) * header, bytes([97 + i]) * body if body else None, flags)
        for i, (header, body, flags) in enumerate(shapes)
    ]
    stream = b"".join(whole(header, body or b"", flags=flags) for header, body, flags in sent)
    memory = (lambda header, body_bytes: memoryview(bytearray(body_bytes))) if own_memory else None
    reader, got = FrameReader(1 << 20, KEY, memory), []
    for frames in deliver(reader, stream, piece_bytes):
        space = reader.space()
        space[:] = b"\xaa" * len(space)  # what is received next may not change what was returned before
        got += contents(frames)
    assert got == sent
    assert reader.between_frames


def test_a_stream_that_ends_within_a_frame_is_seen_to() -> None:
    for end in range(len(GOLDEN) + 1):
        reader = FrameReader(1000, KEY)
        list(deliver(reader, GOLDEN[:end]))
        assert reader.between_frames == (end in (0, len(GOLDEN)))


def test_all_bodies_completed_by_one_call_have_memory_of_their_own() -> None:
    (frames,) = deliver(FrameReader(1000, KEY), whole(b"1", b"one") + whole(b"2", b"two") + whole(b"3"))
    assert contents(frames) == [(b"1", b"one", 0), (b"2", b"two", 0), (b"3", None, 0)]


def test_only_what_was_staged_of_a_body_is_copied() -> None:
    given_memory, asked = bytearray(100_000), []

    def memory(header: bytes, body_bytes: int) -> memoryview:
        asked.append((header, body_bytes))
        return memoryview(given_memory)

    reader, body = FrameReader(100_000, KEY, memory), bytes(range(250)) * 400
    stream = whole(HEADER, body)
    list(deliver(reader, stream[:STAGING_BYTES]))
    staged = STAGING_BYTES - PREFIX_BYTES - len(HEADER)
    assert asked == [(HEADER, 100_000)]
    assert given_memory == body[:staged] + bytes(100_000 - staged)

    space = reader.space()
    assert space.obj is given_memory and len(space) == 100_000 - staged
    space[:] = body[staged:]
    (frame,) = reader.received(len(space))
    assert frame.body is not None and frame.body.obj is given_memory and frame.body == body


def test_memory_is_not_asked_for_a_body_whose_header_was_damaged() -> None:
    def memory(header: bytes, body_bytes: int) -> memoryview:
        raise AssertionError("the header is not to be believed")

    with pytest.raises(BadFrame, match="header checksum"):
        list(deliver(FrameReader(1000, KEY, memory), GOLDEN[:32] + b"\x93\x01\x02\x02" + BODY))


def test_memory_for_a_body_may_have_items_of_any_size() -> None:
    floats: Any = memoryview(bytearray(40_000)).cast("f")
    frames = list(deliver(FrameReader(40_000, KEY, lambda header, n: floats), whole(HEADER, b"\0\0\x80\x3f" * 10_000)))
    assert len(frames[-1]) == 1
    assert floats.tolist() == [1.0] * 10_000


def test_large_bodies_are_received_into_one_buffer_no_larger_than_the_limit() -> None:
    reader = FrameReader(50_000, KEY)
    stream = b"".join(whole(b"", bytes([i]) * 50_000) for i in range(3))
    bodies: list[Any] = [frame.body for frames in deliver(reader, stream) for frame in frames]
    assert [len(body) for body in bodies] == [50_000, 50_000, 50_000]
    assert [len(body.obj) for body in bodies] == [50_000, 50_000, 50_000]
    assert len({id(body.obj) for body in bodies}) == 1


def test_after_a_large_header_the_staging_buffer_is_small_again() -> None:
    reader = FrameReader(1000, KEY)
    received = [len(frames) for frames in deliver(reader, whole(bytes(100_000)))]
    assert received == [0, 1]
    assert len(reader.space()) == STAGING_BYTES


def test_a_reader_that_has_refused_a_frame_gives_no_more() -> None:
    for damaged in (GOLDEN[:33] + b"\xff" + GOLDEN[34:], GOLDEN[:-1] + b"\xff"):
        reader = FrameReader(1000, KEY)
        with pytest.raises(BadFrame):
            list(deliver(reader, GOLDEN + damaged))
        with pytest.raises(BadFrame):
            reader.received(0)
