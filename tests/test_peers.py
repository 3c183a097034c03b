"""Workers that talk to each other: real sockets and shared memory, each end on its own event loop."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from hypothesis import given

from rainband.errors import HandshakeFailed, PeerLost
from rainband.protocol.messages import Address, GiveBack, Hello, LeaseRequest, Lend, Message, Peer, PeerValue, encode
from rainband.protocol.peer_inbox import Received
from rainband.transports import peers_shared, peers_tcp
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.connect import connect, this_machine
from rainband.transports.event_loop import EventLoop
from rainband.transports.frames import pack
from rainband.transports.peers import PeerLinks
from rainband.transports.pytrees import outgoing
from rainband.transports.shared_memory import PAGE, SharedSegment
from tests.processes import DEADLINE_S, wait_for
from tests.test_pytrees import pytrees, same

KEYS = role_keys(new_secret())

both_ways = pytest.mark.parametrize("transport", ["shm", "tcp"])


def links_of(
    number: int, transport: str, run_id: bytes, timeout_s: float = DEADLINE_S, lost: list[int] | None = None
) -> PeerLinks:
    told = None if lost is None else lost.append
    return PeerLinks(Peer("worker", number), KEYS, run_id, EventLoop(), transport, timeout_s, told)


@contextmanager
def linked(number: int, transport: str, lost: list[int] | None = None) -> Iterator[list[PeerLinks]]:
    """Link `number` workers to each other; a connecting worker needs one that answers, so each has a thread."""
    run_id = new_run_id()
    links = [links_of(index, transport, run_id, lost=lost) for index in range(number)]
    addresses = {index: link.listen() for index, link in enumerate(links)}
    at_once(*(lambda link=link: link.connect(addresses) for link in links))  # type: ignore[misc]
    try:
        yield links
    finally:
        for link in links:
            link.close()


def at_once(*works: Callable[[], object]) -> None:
    """Do these in threads, and raise what one of them raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "somebody waits for ever"
    if errors:
        raise errors[0]


def seen(link: PeerLinks, received: Received) -> Any:
    """Wait for a message as a runtime does."""
    until(link, received.ready)
    return received.result()


def until(link: PeerLinks, happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < deadline, "it does not come"
        link.event_loop.wait(0.1)


def get(link: PeerLinks, source: int, *tag: int | str) -> Any:
    return seen(link, link.recv(source, tag))


# ---- what arrives ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["shm", "tcp"], scope="module")
def pair(request: pytest.FixtureRequest) -> Iterator[list[PeerLinks]]:
    with linked(2, request.param) as links:
        yield links


@given(pytree=pytrees)
def test_what_is_sent_arrives_to_the_last_bit(pair: list[PeerLinks], pytree: Any) -> None:
    pair[0].send(1, ("pytree",), pytree)
    assert same(pytree, get(pair[1], 0, "pytree"))


@both_ways
@pytest.mark.parametrize("numel", [0, 1, PAGE // 4, PAGE // 4 + 1, 300_001])
def test_values_of_any_size_arrive_and_may_be_overwritten_once_sent(transport: str, numel: int) -> None:
    with linked(2, transport) as (first, second):
        value = torch.ones(numel)
        for turn in range(3):
            first.send(1, ("value", turn), [value, turn])
            value.add_(1.0)
        for turn in range(3):
            tensor, number = get(second, 0, "value", turn)
            assert number == turn
            assert tensor.equal(torch.full((numel,), 1.0 + turn))


@both_ways
def test_messages_that_come_before_they_are_asked_for_are_kept(transport: str) -> None:
    with linked(2, transport) as (first, second):
        for word in ("a", "b", "a"):
            first.send(1, (word, 7), f"{word}{first.sent_messages}")
        assert get(second, 0, "b", 7) == "b1"
        assert [get(second, 0, "a", 7), get(second, 0, "a", 7)] == ["a0", "a2"]


def test_each_question_takes_one_message_in_the_order_of_asking() -> None:
    with linked(2, "shm") as (first, second):
        asked = [second.recv(0, ("x",)) for _ in range(3)]
        first.send(1, ("x",), 1)
        first.send(1, ("x",), 2)
        assert [seen(second, one) for one in asked[:2]] == [1, 2]
        assert not asked[2].ready()


@both_ways
def test_three_workers_talk_to_each_other(transport: str) -> None:
    with linked(3, transport) as links:
        for source in range(3):
            for to in {0, 1, 2} - {source}:
                links[source].send(to, ("from", source), 10 * source + to)
        for to in range(3):
            assert [get(links[to], s, "from", s) for s in range(3) if s != to] == [
                10 * s + to for s in range(3) if s != to
            ]


def test_a_question_can_be_awaited() -> None:
    async def ask(link: PeerLinks) -> Any:
        return await link.recv(0, ("x",))

    with linked(2, "shm") as (first, second):
        coroutine = ask(second)
        wanted = coroutine.send(None)
        assert isinstance(wanted, Received)
        first.send(1, ("x",), {"answer": 42})
        until(second, wanted.ready)
        with pytest.raises(StopIteration) as end:
            coroutine.send(None)
        assert end.value.value == {"answer": 42}


def test_messages_and_the_bytes_of_their_tensors_are_counted() -> None:
    with linked(2, "shm") as (first, _):
        first.send(1, ("x",), None)
        first.send(1, ("y",), [torch.zeros(16), torch.zeros(16)])
        assert (first.sent_messages, first.sent_bytes) == (2, 128)


# ---- room ------------------------------------------------------------------------------------------------------------


@both_ways
def test_two_who_send_to_each_other_never_wait_for_each_other(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both fill all the room there is before either asks for anything."""
    monkeypatch.setattr(peers_shared, "MAX_SEGMENTS", 2)
    monkeypatch.setattr(peers_tcp, "ROOM_BYTES", 1 << 16)
    value, number = torch.arange(100_000), 50

    def talk(me: PeerLinks, other: int) -> None:
        for turn in range(number):
            me.send(other, ("turn", turn), [value + turn])
        for turn in range(number):
            assert get(me, other, "turn", turn)[0][-1].item() == 99_999 + turn

    with linked(2, transport) as (first, second):
        at_once(lambda: talk(first, 1), lambda: talk(second, 0))


@both_ways
def test_who_waits_for_room_goes_on_when_there_is_some(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing comes from the other side that would wake the sender up by the way."""
    monkeypatch.setattr(peers_shared, "MAX_SEGMENTS", 2)
    monkeypatch.setattr(peers_tcp, "ROOM_BYTES", 1 << 16)
    value, number = torch.zeros(1 << 20), 20

    def send(me: PeerLinks) -> None:
        for turn in range(number):
            me.send(1, (turn,), value)

    with linked(2, transport) as (first, second):
        at_once(lambda: send(first), lambda: [get(second, 0, turn) for turn in range(number)])


def test_small_messages_in_both_directions_never_block_either() -> None:
    """So many that no socket's buffer holds them: 2,000 of 5 kB each way."""
    number, value = 2000, "x" * 5000

    def talk(me: PeerLinks, other: int) -> None:
        for turn in range(number):
            me.send(other, (turn,), value)
        assert get(me, other, number - 1) == value

    with linked(2, "shm") as (first, second):
        at_once(lambda: talk(first, 1), lambda: talk(second, 0))


def test_a_segment_is_used_again_only_when_it_was_given_back() -> None:
    with linked(2, "shm") as (first, second):
        assert first._shared is not None
        link = first._shared.links[1]
        first.send(1, ("a",), torch.full((10_000,), 1.0))
        first.send(1, ("b",), torch.full((10_000,), 2.0))
        assert sorted(link.lent) == [0, 1]
        assert link.free == []
        assert [get(second, 0, word)[0].item() for word in "ab"] == [1.0, 2.0]
        until(first, lambda: len(link.free) == 2)
        for turn in range(5):
            first.send(1, ("c", turn), torch.full((10_000,), 3.0))
            assert get(second, 0, "c", turn)[0].item() == 3.0
            until(first, lambda: len(link.free) == 2)
        assert sorted(link.lent) == [0, 1]


def test_segments_are_powers_of_two_and_grow_in_their_place() -> None:
    with linked(2, "shm") as (first, second):
        assert first._shared is not None
        link = first._shared.links[1]
        sizes = []
        for turn, numel in enumerate((2_000, 3_000, 2_000)):
            first.send(1, (turn,), torch.full((numel,), 1.0 + turn))
            assert get(second, 0, turn).equal(torch.full((numel,), 1.0 + turn))
            until(first, lambda: link.free == [0])
            sizes.append([len(segment.bytes) for segment in link.lent.values()])
        assert sizes == [[8192], [16384], [16384]]


def test_a_segment_keeps_one_file_open_at_each_end_until_the_links_close() -> None:
    with linked(2, "shm") as (first, second):
        before = num_open_segments()
        for turn in range(20):
            first.send(1, (turn,), torch.zeros(2000))
        assert get(second, 0, 19).equal(torch.zeros(2000))
        assert num_open_segments() == before + 40
        first.close()
        second.close()
        assert num_open_segments() == before


def num_open_segments() -> int:
    gc.collect()  # of other tests
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("rainband values" in name for name in names)


# ---- who may link up -------------------------------------------------------------------------------------------------


@both_ways
def test_a_worker_with_another_secret_is_refused(transport: str) -> None:
    run_id = new_run_id()
    first = links_of(0, transport, run_id)
    stranger = PeerLinks(Peer("worker", 1), role_keys(new_secret()), run_id, EventLoop(), transport, DEADLINE_S)
    addresses = {0: first.listen(), 1: stranger.listen()}
    going = True

    def serve() -> None:
        while going:
            first.event_loop.wait(0.01)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with pytest.raises(HandshakeFailed, match="worker 0: secret mismatch"):
            stranger.connect(addresses)
    finally:
        going = False
        thread.join()
        first.close()
        stranger.close()
    assert first.inbox.linked == set()


@both_ways
def test_workers_that_do_not_come_are_named(transport: str) -> None:
    first = links_of(0, transport, new_run_id())
    here = first.listen()
    with pytest.raises(
        PeerLost, match="lost worker 1, worker 2 while linking up with the other stages, for at most 0.1"
    ):
        first.connect({0: here, 1: here, 2: here}, timeout_s=0.1)
    first.close()


@both_ways
def test_a_worker_that_is_gone_cannot_be_called(transport: str) -> None:
    second = links_of(1, transport, new_run_id())
    here = second.listen()
    gone = Address("127.0.0.1", 1, "rainband-nobody", this_machine())
    with pytest.raises(PeerLost, match="lost worker 0 while linking up with it"):
        second.connect({0: gone, 1: here})
    second.close()


def test_another_worker_at_the_address_is_noticed() -> None:
    run_id = new_run_id()
    first, second = links_of(0, "tcp", run_id), links_of(2, "tcp", run_id)
    here, there = first.listen(), second.listen()
    with pytest.raises(HandshakeFailed, match="worker 0 answers where worker 1 should be"):
        second.connect({1: here, 2: there})
    first.close()
    second.close()


def test_shared_memory_with_another_machine_is_refused() -> None:
    second = links_of(1, "shm", new_run_id())
    second.listen()
    with pytest.raises(ValueError, match="worker 0 is not on this machine.*--transport tcp"):
        second.connect({0: Address("10.0.0.1", 1, "name", "another machine")})
    second.close()


def test_without_a_word_about_it_memory_is_shared_on_one_machine() -> None:
    with linked(2, "auto") as (first, second):
        assert first._shared is not None and list(first._shared.links) == [1]
        first.send(1, ("x",), torch.ones(5000))
        assert get(second, 0, "x").sum().item() == 5000.0


# ---- links that break ------------------------------------------------------------------------------------------------


@both_ways
def test_a_wait_for_a_worker_that_is_lost_ends_with_its_name(transport: str) -> None:
    lost: list[int] = []
    with linked(2, transport, lost) as (first, second):
        first.send(1, ("said",), "before")
        asked = second.recv(0, ("batch", 3, "value"))
        first.close()
        with pytest.raises(PeerLost, match="lost worker 0 while waiting for its message 'batch 3 value'"):
            seen(second, asked)
        assert lost == [0]
        assert list(second.lost) == [0]
        assert get(second, 0, "said") == "before"
        with pytest.raises(PeerLost, match="lost worker 0 while waiting for its message 'x'"):
            get(second, 0, "x")
        with pytest.raises(PeerLost, match="lost worker 0 while sending to it"):
            second.send(0, ("x",), 1)


def test_a_worker_to_which_there_was_never_a_link_is_reported() -> None:
    with linked(2, "shm") as (first, _):
        with pytest.raises(PeerLost, match="lost worker 5 while sending to it .there was never a link"):
            first.send(5, ("x",), 1)
        with pytest.raises(PeerLost, match="lost worker 5 while waiting"):
            get(first, 5, "x")


@both_ways
def test_a_wait_for_room_ends_with_an_error_when_the_other_is_lost(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_shared, "MAX_SEGMENTS", 1)
    monkeypatch.setattr(peers_tcp, "ROOM_BYTES", 1 << 16)
    with linked(2, transport) as (first, second):
        if second._tcp is not None:
            stop_reading(second)

        def send_for_ever() -> None:
            while True:
                first.send(1, ("x",), torch.zeros(1 << 20))

        def leave() -> None:
            wait_for(lambda: has_no_room(first), "a worker that waits for room")
            close_abruptly(second)

        with pytest.raises(PeerLost, match="lost worker 1 while sending to it"):
            at_once(send_for_ever, leave)


def has_no_room(link: PeerLinks) -> bool:
    if link._shared is not None:
        return [len(one.free) for one in link._shared.links.values()] == [0] and link.sent_messages > 0
    way = link._tcp
    return way is not None and way.wants_room and way.given_bytes - way.left_bytes > peers_tcp.ROOM_BYTES


def stop_reading(link: PeerLinks) -> None:
    """Its thread goes on, and deals with nothing that comes."""
    assert link._tcp is not None
    for connection in link._tcp.connections.values():
        link._tcp.hub.epoll.modify(connection.sock.fileno(), 0)


def close_abruptly(link: PeerLinks) -> None:
    for way in filter(None, (link._shared, link._tcp)):
        for connection in list(way.hub.connections.values()):
            connection.sock.shutdown(socket.SHUT_RDWR)


@both_ways
def test_what_was_sent_arrives_also_if_the_sender_leaves_at_once(transport: str) -> None:
    with linked(2, transport) as (first, second):
        first.send(1, ("x",), torch.ones(5_000_000))
        first.close()
        assert get(second, 0, "x").sum().item() == 5_000_000


@pytest.mark.processes
@both_ways
def test_a_forked_child_does_not_keep_a_dead_workers_links_open(transport: str) -> None:
    with linked(2, transport) as (first, second):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            first.close()
            with pytest.raises(PeerLost):
                get(second, 0, "x")
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# ---- garbage ---------------------------------------------------------------------------------------------------------

PAGES = torch.zeros(PAGE)


def forged(structure: bytes = b"\xc0", segment: int = -1) -> PeerValue:
    return PeerValue(("x",), structure, segment)


@contextmanager
def forger(transport: str, lost: list[int]) -> Iterator[tuple[PeerLinks, socket.socket, int]]:
    """A worker, and somebody who knows the secret but not the manners, with the key of its connection."""
    run_id = new_run_id()
    link = links_of(0, transport, run_id, lost=lost)
    address = link.listen()
    ends: list[tuple[socket.socket, Any, int]] = []
    me = Peer("worker", 1)

    def call() -> None:
        ends.append(connect(address, transport == "shm", KEYS, run_id, me, DEADLINE_S))

    at_once(call, lambda: until(link, lambda: ends))
    sock, _, key = ends[0]
    try:
        yield link, sock, key
    finally:
        sock.close()
        link.close()


def frame(message: Message, key: int, body: bytes = b"") -> bytes:
    return pack(encode(message), memoryview(body) if body else None, key) + body


BAD: Sequence[tuple[str, Any]] = [
    ("no frame at all", lambda key: b"GET / HTTP/1.1\r\n\r\n" + bytes(100)),
    ("another connection's frame", lambda key: frame(forged(), key ^ 1)),
    ("a word that is no text", lambda key: pack(encode(forged()).replace(b"x", b"\xff"), None, key)),
    ("a structure that is none", lambda key: frame(forged(b"\xc1"), key)),
    ("a tensor without its bytes", lambda key: frame(forged(outgoing(PAGES).structure), key)),
    ("a segment that was never lent", lambda key: frame(forged(outgoing(PAGES).structure, 3), key)),
    ("memory without its file", lambda key: frame(Lend(0, PAGE), key)),
    ("what only others may say", lambda key: frame(LeaseRequest(), key)),
    ("what was never lent is given back", lambda key: frame(GiveBack(0), key)),
]


@both_ways
@pytest.mark.parametrize("what, data", BAD, ids=[what for what, _ in BAD])
def test_who_does_not_keep_to_the_rules_is_cut_off(
    transport: str, what: str, data: Callable[[int], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[int] = []
    with forger(transport, lost) as (link, sock, key):
        sock.sendall(frame(Hello(), key))
        until(link, lambda: link.inbox.linked)
        sock.sendall(data(key))
        until(link, lambda: lost)
        assert lost == [1]
    assert "closed" in caplog.text


@both_ways
def test_nobody_is_a_peer_before_it_says_hello(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    with forger(transport, []) as (link, sock, key):
        sock.sendall(frame(forged(), key))
        is_cut_off(link, sock)
        assert not link.inbox.linked
    assert "says hello" in caplog.text


def is_cut_off(link: PeerLinks, sock: socket.socket) -> None:
    sock.setblocking(False)
    closed = False

    def look() -> bool:
        nonlocal closed
        with suppress(BlockingIOError):
            try:
                closed = closed or sock.recv(100) == b""
            except ConnectionResetError:
                closed = True
        return closed

    until(link, look)


def test_memory_that_is_not_what_was_announced_is_refused() -> None:
    lost: list[int] = []
    segment = SharedSegment.create("test", PAGE)
    with forger("shm", lost) as (link, sock, key):
        sock.sendall(frame(Hello(), key))
        socket.send_fds(sock, [frame(Lend(0, 2 * PAGE), key)], [segment.fd])
        until(link, lambda: lost)
    os.close(segment.fd)


def test_a_tensor_that_reaches_beyond_its_segment_is_refused() -> None:
    lost: list[int] = []
    segment = SharedSegment.create("test", PAGE)
    with forger("shm", lost) as (link, sock, key):
        sock.sendall(frame(Hello(), key))
        socket.send_fds(sock, [frame(Lend(0, PAGE), key)], [segment.fd])
        sock.sendall(frame(forged(outgoing(torch.zeros(PAGE // 4 + 1)).structure, 0), key))
        until(link, lambda: lost)
    os.close(segment.fd)


def test_links_that_nobody_uses_are_forgotten() -> None:
    """A fork remembers what to close; it must not keep alive what is gone."""
    link = links_of(0, "shm", new_run_id())
    link.listen()
    link.close()
    known = weakref.ref(link)
    del link
    gc.collect()
    assert known() is None
