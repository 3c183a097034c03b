"""TLS between machines: the certificate, the encrypted socket, and what strangers can do before they authenticate."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rainband.errors import HandshakeFailed
from rainband.protocol.messages import COORDINATOR, Address, Heartbeat, Message, Peer, encode
from rainband.transports import hub as hubs
from rainband.transports.auth import new_run_id, new_secret, role_keys
from rainband.transports.connect import connect, is_loopback, listen_tcp
from rainband.transports.connection import Connection
from rainband.transports.frames import pack
from rainband.transports.hub import Hub
from rainband.transports.tls.certificate import (
    Certificate,
    check_fingerprint,
    client_context,
    new_certificate,
    server_context,
)
from rainband.transports.tls.ed25519 import public_key, sign
from rainband.transports.tls.tls_socket import CHUNK_BYTES, MAX_UNKNOWN_BYTES, TlsSocket, unread, unsent

SECRET = new_secret()
KEYS, RUN_ID, WORKER = role_keys(SECRET), new_run_id(), Peer("worker", 0)
CERTIFICATE = new_certificate()


# ---- the certificate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed, public, message, signature",
    [  # RFC 8032, 7.1
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
            "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
        ),
        (
            "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
            "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
            "72",
            "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
            "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
            "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
        ),
    ],
)
def test_signatures_are_those_of_the_standard(seed: str, public: str, message: str, signature: str) -> None:
    assert public_key(bytes.fromhex(seed)).hex() == public
    assert sign(bytes.fromhex(seed), bytes.fromhex(message)).hex() == signature


@pytest.mark.skipif(shutil.which("openssl") is None, reason="requires the program openssl")
def test_openssl_accepts_the_signature_of_the_certificate(tmp_path: Path) -> None:
    path = tmp_path / "certificate"
    path.write_text(ssl.DER_cert_to_PEM_cert(CERTIFICATE.der))
    verified = subprocess.run(
        ["openssl", "verify", "-check_ss_sig", "-CAfile", str(path), str(path)], capture_output=True, text=True
    )
    assert verified.stdout == f"{path}: OK\n", verified.stderr


def test_openssl_refuses_a_key_that_is_not_that_of_the_certificate() -> None:
    with pytest.raises(ssl.SSLError, match="key values mismatch"):
        server_context(Certificate(CERTIFICATE.der, new_certificate().key))


def test_only_the_expected_certificate_is_accepted() -> None:
    check_fingerprint(CERTIFICATE.der, CERTIFICATE.fingerprint)
    for der in (new_certificate().der, None, b""):
        with pytest.raises(HandshakeFailed, match="not the one of the invitation"):
            check_fingerprint(der, CERTIFICATE.fingerprint)


# ---- the socket -----------------------------------------------------------------------------------------------------


def at_once(*functions: Callable[[], object]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture
def ends() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """The two ends of a connection with small buffers."""
    plain = socket.socketpair()
    for sock in plain:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = TlsSocket(plain[0], server_context(CERTIFICATE), server_side=True)
    client = TlsSocket(plain[1], client_context(), server_side=False)
    at_once(server.shake_hands, client.shake_hands)
    server.trusted()
    client.trusted()
    yield server, client
    server.close()
    client.close()


def test_both_ends_speak_tls_1_3_and_the_client_sees_the_certificate(ends: tuple[TlsSocket, TlsSocket]) -> None:
    server, client = ends
    assert client.peer_certificate() == CERTIFICATE.der and server.peer_certificate() is None
    for end in ends:
        assert end._tls.version() == "TLSv1.3"


def test_large_messages_cross_in_both_directions_at_once(ends: tuple[TlsSocket, TlsSocket]) -> None:
    sent = bytes(range(256)) * 4096  # 1 MiB, through buffers of some kB
    received = [bytearray(len(sent)), bytearray(len(sent))]
    at_once(
        lambda: ends[0].sendmsg([sent[:1000], sent[1000:]]),
        lambda: ends[1].sendall(sent),
        lambda: ends[0].recv_into(received[0], 0, socket.MSG_WAITALL),
        lambda: ends[1].recv_into(received[1], 0, socket.MSG_WAITALL),
    )
    assert received == [sent, sent]


def test_bytes_that_epoll_does_not_show_are_known(ends: tuple[TlsSocket, TlsSocket]) -> None:
    server, client = ends
    client.sendall(b"0123456789")
    assert not unread(server)
    assert server.recv(4) == b"0123" and unread(server)
    assert server.recv(100) == b"456789" and not unread(server)


def test_without_a_reader_a_sender_that_must_not_wait_stops_and_knows_that_bytes_are_left(
    ends: tuple[TlsSocket, TlsSocket],
) -> None:
    server, client = ends
    client.setblocking(False)
    sent = bytes(range(256)) * (2 * CHUNK_BYTES // 256)
    taken = client.send(sent)
    assert 0 < taken < len(sent) and unsent(client)
    with pytest.raises(BlockingIOError):
        client.send(sent[taken:])

    received = bytearray()
    server.setblocking(False)
    while unsent(client) or len(received) < taken:
        with suppress(BlockingIOError):  # a record has arrived in part
            received += server.recv(CHUNK_BYTES)
    assert received == sent[:taken]


def test_the_end_of_the_other_side_is_the_end(ends: tuple[TlsSocket, TlsSocket]) -> None:
    server, client = ends
    client.sendall(b"last")
    client.close()
    assert [server.recv(100), server.recv(100)] == [b"last", b""]


@pytest.mark.parametrize("flip", [1, 128])
def test_a_changed_byte_ends_the_connection(flip: int) -> None:
    for at in range(0, 64 + 22, 5):  # of a record: its head, its text and its checksum
        plain = socket.socketpair()
        with (
            TlsSocket(plain[0], server_context(CERTIFICATE), server_side=True) as server,
            TlsSocket(plain[1], client_context(), server_side=False) as client,
        ):
            at_once(server.shake_hands, client.shake_hands)
            client._tls.write(b"y" * 64)
            record = bytearray(client._leaving.read())
            record[at] ^= flip
            socket.socket.sendall(client, record)
            client.shutdown(socket.SHUT_WR)
            with pytest.raises((ssl.SSLError, AssertionError)):
                assert server.recv(64)


# ---- nodes ----------------------------------------------------------------------------------------------------------


class Node:
    """A node that other machines can reach, as a hub on a thread."""

    def __init__(self) -> None:
        self.received: list[tuple[Peer, Message, bytes]] = []
        self.hub = Hub(COORDINATOR, {"worker": KEYS["worker"]}, RUN_ID, self, 1 << 20)
        sock = listen_tcp("127.0.0.1")
        self.hub.listen(sock, CERTIFICATE)
        self.address = Address("127.0.0.1", sock.getsockname()[1], fingerprint=CERTIFICATE.fingerprint)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        while not self.over.is_set():
            self.hub.run_once(0.05)

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        self.received.append((connection.peer, message, bytes(body or b"")))
        self.hub.send(connection.peer, message, body)

    def lost(self, peer: Peer) -> None:
        pass

    def close(self) -> None:
        self.over.set()
        self.thread.join()
        self.hub.close()


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.close()


def test_a_node_answers_over_tls_messages_of_any_size(node: Node) -> None:
    sock, peer, key = connect(node.address, False, KEYS, RUN_ID, WORKER, 30.0)
    with sock:
        assert isinstance(sock, TlsSocket) and (peer.role, peer.index) == ("coordinator", 0)
        body = bytes(range(256)) * 2048
        for count in (0, 1, 1000, len(body)):
            head = pack(encode(Heartbeat(acked=count)), memoryview(body[:count]) if count else None, key)
            sock.sendmsg([head, body[:count]])
            answer = bytearray(len(head) + count)
            assert sock.recv_into(answer, 0, socket.MSG_WAITALL) == len(answer)
            assert answer == head + body[:count]
    assert [len(body) for _, _, body in node.received] == [0, 1, 1000, len(body)]


def test_another_certificate_is_refused_before_anything_is_sent(node: Node) -> None:
    address = Address("127.0.0.1", node.address.port, fingerprint=bytes(32))
    with pytest.raises(HandshakeFailed, match="the certificate is not the one of the invitation"):
        connect(address, False, KEYS, RUN_ID, WORKER, 30.0)


@pytest.mark.parametrize("role", ["server", "coordinator", "machine", "observer"])
def test_a_workers_key_opens_no_other_role(node: Node, role: str) -> None:
    with pytest.raises(HandshakeFailed, match="does not accept connections of our role"):
        connect(node.address, False, dict.fromkeys(KEYS, KEYS["worker"]), RUN_ID, Peer(role, 0), 30.0)


def test_another_secret_is_refused(node: Node) -> None:
    with pytest.raises(HandshakeFailed, match="secret mismatch"):
        connect(node.address, False, role_keys(new_secret()), RUN_ID, WORKER, 30.0)


@given(sent=st.binary(max_size=300), encrypted=st.booleans(), authenticated=st.booleans())
@settings(max_examples=60)
def test_any_bytes_end_at_most_their_own_connection(sent: bytes, encrypted: bool, authenticated: bool) -> None:
    node = shared_node()
    address = node.address
    if authenticated:
        sock, _, _ = connect(address, False, KEYS, RUN_ID, Peer("worker", 7), 30.0)
    else:
        sock = socket.create_connection((address.host, address.port))
        if encrypted:
            sock = TlsSocket(sock, client_context(), server_side=False)
            sock.shake_hands()
    with sock:
        sock.sendall(sent)
    good, _, _ = connect(address, False, KEYS, RUN_ID, WORKER, 30.0)
    good.close()
    assert node.thread.is_alive() and not [peer for peer, _, _ in node.received if peer.index == 7]


_shared: list[Node] = []


def shared_node() -> Node:
    if not _shared:
        _shared.append(Node())
    return _shared[0]


@pytest.fixture(scope="module", autouse=True)
def close_shared() -> Iterator[None]:
    yield
    while _shared:
        _shared.pop().close()


def test_a_stranger_can_send_little_before_it_authenticates() -> None:
    ours, theirs = socket.socketpair()
    with TlsSocket(ours, server_context(CERTIFICATE), server_side=True) as server, theirs:
        client = TlsSocket(theirs, client_context(), server_side=False)
        at_once(server.shake_hands, client.shake_hands)
        sender = threading.Thread(target=lambda: send_until_closed(client))
        sender.start()
        total = 0
        with pytest.raises(ConnectionError, match=f"sent {MAX_UNKNOWN_BYTES} bytes and has not authenticated"):
            while data := server.recv(1 << 16):
                total += len(data)
        assert total < MAX_UNKNOWN_BYTES
        server.close()
        sender.join()
        client.close()


def send_until_closed(sock: TlsSocket) -> None:
    with pytest.raises(OSError):
        while True:
            sock.sendall(bytes(4096))


def test_one_address_cannot_take_all_places_of_connections_that_do_not_say_who_they_are(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "MAX_UNKNOWN_PER_HOST", 4)
    strangers = [socket.create_connection((node.address.host, node.address.port)) for _ in range(12)]
    sock, _, _ = connect(node.address, False, KEYS, RUN_ID, WORKER, 30.0)
    assert len([c for c in node.hub.connections.values() if c.reader is None]) <= 4
    for stranger in [sock, *strangers]:
        stranger.close()


def test_a_node_that_others_can_reach_needs_a_certificate() -> None:
    hub = Hub(COORDINATOR, KEYS, RUN_ID, None, 1)  # type: ignore[arg-type]
    with listen_tcp("0.0.0.0") as sock:
        assert not is_loopback(sock)
        with pytest.raises(ValueError, match="needs a certificate"):
            hub.listen(sock)
    hub.close()
