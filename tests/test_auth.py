"""Handshake: who gets in, who does not, and what those who do not get in can learn."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import struct
import traceback
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.errors import HandshakeFailed
from rainband.transports.auth import (
    ROLES,
    ClientHandshake,
    Handshake,
    Identity,
    ServerHandshake,
    new_run_id,
    new_secret,
    role_keys,
)

SECRET = bytes(range(100, 132))
OTHER_SECRET = bytes(range(101, 133))
RUN, OTHER_RUN = b"the-run-of-today", b"run-of-yesterday"
WORKER, SERVER = Identity("worker", 3, 1), Identity("server", 0, 2)


def client(secret: bytes = SECRET, run_id: bytes = RUN, me: Identity = WORKER) -> ClientHandshake:
    return ClientHandshake(secret, run_id, me)


def server(secret: bytes = SECRET, run_id: bytes = RUN, me: Identity = SERVER) -> ServerHandshake:
    return ServerHandshake(dict.fromkeys(ROLES, secret), run_id, me)


def mac(label: bytes, transcript: bytes, secret: bytes = SECRET) -> bytes:
    return hmac.digest(secret, label + transcript, "sha256")


def deliver(message: bytes, to: Handshake, piece_bytes: int = 1000) -> bytes:
    """Feed a message as the receiver asks for it, and return all that it sends meanwhile."""
    said = b""
    while message:
        count = min(to.need, piece_bytes, len(message))
        to.feed(message[:count])
        said, message = said + to.outgoing, message[count:]
    return said


def converse(one: Handshake, other: Handshake, piece_bytes: int = 1000) -> list[bytes]:
    """Carry messages between the two until both are silent, and return them."""
    messages, said = [], one.outgoing
    while said:
        messages.append(said)
        said = deliver(said, other, piece_bytes)
        one, other = other, one
    return messages


def test_the_right_secret_lets_each_side_know_the_other() -> None:
    ours, theirs = client(), server()
    assert [len(message) for message in converse(ours, theirs)] == [62, 75, 32, 33]
    assert ours.done and ours.peer == SERVER
    assert theirs.done and theirs.peer == WORKER
    assert ours.key == theirs.key


@pytest.mark.parametrize("role", ["worker", "server", "coordinator", "observer"])
def test_every_role_can_be_on_either_side(role: str) -> None:
    me = Identity(role, 2**32 - 1, 0)
    ours, theirs = client(me=me), server(me=me)
    converse(ours, theirs)
    assert ours.peer == theirs.peer == me


@given(st.integers(1, 80))
def test_messages_may_arrive_in_parts(piece_bytes: int) -> None:
    ours, theirs = client(), server()
    converse(ours, theirs, piece_bytes)
    assert ours.done and theirs.done


def test_the_messages_are_these_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    letters = iter([b"c", b"s"])  # of the client's nonce and of the server's
    monkeypatch.setattr(secrets, "token_bytes", lambda count: next(letters) * count)
    ours, theirs = client(), server()
    messages = converse(ours, theirs)
    hello = b"RBHI\x01" + b"\x01" + struct.pack("<II", 3, 1) + RUN + b"c" * 32
    answer = b"\x01\x01" + b"\x02" + struct.pack("<II", 0, 2) + b"s" * 32
    assert messages == [
        hello,
        answer + mac(b"server", hello + answer),
        mac(b"client", hello + answer),
        b"\x01" + mac(b"verdict", hello + answer + b"\x01"),
    ]
    assert struct.pack("<I", ours.key) == mac(b"key", hello + answer)[:4]
    assert ours.key == theirs.key == 828351811
    assert hashlib.sha256(b"".join(messages)).hexdigest() == (
        "4144683b8079ff35a3a5522f23dc863057bea3e9226d60add5549bb598527bf2"
    )


def test_every_connection_has_nonces_and_a_key_of_its_own() -> None:
    talks = [(client(), server()) for _ in range(3)]
    hellos, answers, *_ = zip(*(converse(*talk) for talk in talks), strict=True)
    assert len({hello[-32:] for hello in hellos}) == 3
    assert len({answer[11:43] for answer in answers}) == 3
    assert len({ours.key for ours, _ in talks}) == 3


def test_a_server_reads_94_bytes_before_it_knows_its_peer() -> None:
    theirs = server()
    ours = client()
    read_bytes = theirs.need
    assert deliver(ours.outgoing[:5], theirs) == b""
    read_bytes += theirs.need
    answer = deliver(ours.outgoing[5:], theirs)
    read_bytes += theirs.need
    assert not theirs.done
    deliver(deliver(answer, ours), theirs)
    assert theirs.done and read_bytes == 94


def test_a_finished_handshake_needs_no_more_bytes() -> None:
    ours, theirs = client(), server()
    converse(ours, theirs)
    assert ours.need == theirs.need == 0
    with pytest.raises(AssertionError):
        theirs.feed(b"x")


def test_macs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, compare = [], hmac.compare_digest

    def spy(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    converse(client(), server())
    assert compared == [32, 32, 32]


# Those who are refused. Each function below returns the error and the handshake of one who was, so that one
# test can look at what all of them say.


def failed(handshake: Handshake, message: bytes) -> HandshakeFailed:
    with pytest.raises(HandshakeFailed) as caught:
        deliver(message, handshake)
    assert not handshake.done
    return caught.value


def a_client_with_another_secret() -> tuple[HandshakeFailed, Handshake]:
    ours = client(OTHER_SECRET)
    return failed(ours, deliver(ours.outgoing, server())), ours


def a_peer_that_invents_its_proof() -> tuple[HandshakeFailed, Handshake]:
    theirs = server()
    deliver(client().outgoing, theirs)
    return failed(theirs, b"p" * 32), theirs


def a_proof_made_with_another_secret() -> tuple[HandshakeFailed, Handshake]:
    theirs, hello = server(), client(OTHER_SECRET).outgoing
    transcript = hello + deliver(hello, theirs)[:43]
    return failed(theirs, mac(b"client", transcript, OTHER_SECRET)), theirs


def a_proof_that_ends_early() -> tuple[HandshakeFailed, Handshake]:
    ours, theirs = client(), server()
    proof = deliver(deliver(ours.outgoing, theirs), ours)
    deliver(proof[:31], theirs)
    assert theirs.need == 1 and not theirs.done
    with pytest.raises(HandshakeFailed) as caught:
        theirs.feed(b"")
    return caught.value, theirs


def a_replayed_client() -> tuple[HandshakeFailed, Handshake]:
    hello, _, proof, _ = converse(client(), server())
    theirs = server()
    deliver(hello, theirs)
    return failed(theirs, proof), theirs


def a_replayed_server() -> tuple[HandshakeFailed, Handshake]:
    _, answer, _, _ = converse(client(), server())
    ours = client()
    return failed(ours, answer), ours


def a_server_that_reflects_the_hello() -> tuple[HandshakeFailed, Handshake]:
    ours = client()
    return failed(ours, ours.outgoing[:2]), ours


def a_client_that_reflects_the_servers_proof() -> tuple[HandshakeFailed, Handshake]:
    theirs = server()
    answer = deliver(client().outgoing, theirs)
    return failed(theirs, answer[-32:]), theirs


def a_server_that_reflects_the_clients_proof() -> tuple[HandshakeFailed, Handshake]:
    ours = client()
    proof = deliver(deliver(ours.outgoing, server()), ours)
    return failed(ours, b"\x01" + proof), ours


def a_client_of_another_run() -> tuple[HandshakeFailed, Handshake]:
    ours, theirs = client(run_id=OTHER_RUN), server()
    return failed(theirs, deliver(deliver(ours.outgoing, theirs), ours)), theirs


def a_server_of_another_run() -> tuple[HandshakeFailed, Handshake]:
    ours, theirs = client(run_id=OTHER_RUN), server()
    failed(theirs, deliver(deliver(ours.outgoing, theirs), ours))
    return failed(ours, theirs.outgoing), ours


def a_client_of_another_version() -> tuple[HandshakeFailed, Handshake]:
    theirs = server()
    return failed(theirs, b"RBHI\x02"), theirs


def a_server_of_another_version() -> tuple[HandshakeFailed, Handshake]:
    ours = client()
    return failed(ours, b"\x02\x09"), ours


def a_client_of_unknown_role() -> tuple[HandshakeFailed, Handshake]:
    theirs = server()
    return failed(theirs, b"RBHI\x01" + b"\x09" + bytes(8) + RUN + bytes(32)), theirs


def a_client_whose_role_may_not_connect() -> tuple[HandshakeFailed, Handshake]:
    theirs = ServerHandshake({"worker": SECRET}, RUN, SERVER)
    return failed(theirs, client(me=Identity("coordinator", 0, 0)).outgoing), theirs


def a_server_that_does_not_accept_our_role() -> tuple[HandshakeFailed, Handshake]:
    ours = client()
    return failed(ours, b"\x04\x01"), ours


def a_worker_that_says_it_is_a_server() -> tuple[HandshakeFailed, Handshake]:
    keys = role_keys(SECRET)
    theirs = ServerHandshake(keys, RUN, SERVER)
    ours = ClientHandshake(keys["worker"], RUN, Identity("server", 0, 0))
    failed(ours, deliver(ours.outgoing, theirs))  # the server's proof is made with another key
    return failed(theirs, bytes(32)), theirs


def a_server_of_unknown_role() -> tuple[HandshakeFailed, Handshake]:
    ours = client()
    answer = b"\x01\x01" + b"\x09" + bytes(8) + bytes(32)
    transcript = ours.outgoing + answer
    deliver(answer + mac(b"server", transcript), ours)
    return failed(ours, b"\x01" + mac(b"verdict", transcript + b"\x01")), ours


def a_server_that_answers_with_an_unknown_status() -> tuple[HandshakeFailed, Handshake]:
    ours = client()
    answer = b"\x01\x01" + b"\x02" + bytes(8) + bytes(32)
    transcript = ours.outgoing + answer
    deliver(answer + mac(b"server", transcript), ours)
    return failed(ours, b"\x07" + mac(b"verdict", transcript + b"\x07")), ours


def a_browser() -> tuple[HandshakeFailed, Handshake]:
    theirs = server()
    return failed(theirs, b"GET / HTTP/1.1\r\nHost: rainband.example\r\n\r\n"[:5]), theirs


def a_tls_client() -> tuple[HandshakeFailed, Handshake]:
    theirs = server()
    return failed(theirs, bytes.fromhex("16030100fa")), theirs


def an_ssh_server() -> tuple[HandshakeFailed, Handshake]:
    ours = client()
    return failed(ours, b"SS"), ours


def a_peer_that_hangs_up() -> tuple[HandshakeFailed, Handshake]:
    ours = client()
    with pytest.raises(HandshakeFailed) as caught:
        ours.feed(b"")
    return caught.value, ours


SECRET_MISMATCH = "secret mismatch.*rainband doctor"
NO_NODE = "the peer is no Rainband node"
UNKNOWN_ROLE = "unknown role 9: install the same version"
REFUSED: dict[Callable[[], tuple[HandshakeFailed, Handshake]], tuple[str, bytes | None]] = {
    # who is refused: what our log says, and what the peer is told (None: something signed)
    a_client_with_another_secret: (SECRET_MISMATCH, b""),
    a_peer_that_invents_its_proof: (SECRET_MISMATCH, b""),
    a_proof_made_with_another_secret: (SECRET_MISMATCH, b""),
    a_proof_that_ends_early: ("closed the connection", b""),
    a_replayed_client: (SECRET_MISMATCH, b""),
    a_replayed_server: (SECRET_MISMATCH, b""),
    a_server_that_reflects_the_hello: (NO_NODE, b""),
    a_client_that_reflects_the_servers_proof: (SECRET_MISMATCH, b""),
    a_server_that_reflects_the_clients_proof: (SECRET_MISMATCH, b""),
    a_client_of_another_run: ("role='worker', index=3, .* belongs to another run", None),
    a_server_of_another_run: ("belongs to another run: check its address", b""),
    a_client_of_another_version: ("speaks protocol version 2, we speak 1: install the same", b"\x02\x01"),
    a_server_of_another_version: ("speaks protocol version 9, we speak 1: install the same", b""),
    a_client_of_unknown_role: (UNKNOWN_ROLE, b"\x04\x01"),
    a_client_whose_role_may_not_connect: ("the role coordinator, which may not connect here", b"\x04\x01"),
    a_server_that_does_not_accept_our_role: ("does not accept connections of our role", b""),
    a_worker_that_says_it_is_a_server: (SECRET_MISMATCH, b""),
    a_server_of_unknown_role: (UNKNOWN_ROLE, b""),
    a_server_that_answers_with_an_unknown_status: ("unknown status 7: install the same version", b""),
    a_browser: (NO_NODE, b""),
    a_tls_client: (NO_NODE, b""),
    an_ssh_server: (NO_NODE, b""),
    a_peer_that_hangs_up: ("closed the connection", b""),
}


@pytest.mark.parametrize("refused", REFUSED, ids=lambda function: function.__name__)
def test_refused_with_the_right_words_is(refused: Callable[[], tuple[HandshakeFailed, Handshake]]) -> None:
    error, handshake = refused()
    reason, told = REFUSED[refused]
    assert re.search(reason, str(error))
    if told is not None:
        assert handshake.outgoing == told
    assert not handshake.done and handshake.key == 0


@pytest.mark.parametrize("refused", REFUSED, ids=lambda function: function.__name__)
def test_the_secret_is_in_no_error_and_no_handshake_of(
    refused: Callable[[], tuple[HandshakeFailed, Handshake]],
) -> None:
    error, handshake = refused()
    shown = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(handshake))
    for secret in (SECRET, OTHER_SECRET):
        for form in (secret.hex(), secret.decode("latin1"), repr(secret)[2:-1], str(list(secret))[1:-1]):
            assert form not in shown


def test_a_refused_handshake_stays_refused() -> None:
    for refused in REFUSED:
        _, handshake = refused()
        with pytest.raises((HandshakeFailed, AssertionError)):
            handshake.feed(b"")
        assert not handshake.done


def test_a_client_without_the_secret_does_not_learn_that_the_run_is_wrong() -> None:
    theirs, hello = server(), client(OTHER_SECRET, OTHER_RUN).outgoing
    assert len(deliver(hello, theirs)) == 75
    error = failed(theirs, b"p" * 32)
    assert "run" not in str(error).replace("rainband", "") and theirs.outgoing == b""


@pytest.mark.parametrize("number, length", [(0, 62), (1, 75), (2, 32), (3, 33)])
def test_a_byte_flipped_in_any_message_keeps_its_receiver_from_finishing(number: int, length: int) -> None:
    for at in range(length):
        ours, theirs = client(), server()
        message = ours.outgoing
        receiver: Handshake = theirs
        sender: Handshake = ours
        for _ in range(number):
            message = deliver(message, receiver)
            receiver, sender = sender, receiver
        damaged = message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]
        with pytest.raises(HandshakeFailed):  # of a damaged hello the client learns, by the server's answer to it
            deliver(deliver(damaged, receiver), sender)
        assert not (ours.done and theirs.done)
        assert not theirs.done or number == 3


def test_a_relay_cannot_change_who_the_client_is() -> None:
    ours, theirs = client(), server()
    as_coordinator = ours.outgoing[:5] + b"\x03" + ours.outgoing[6:]
    failed(ours, deliver(as_coordinator, theirs))
    assert ours.outgoing == b""


@pytest.mark.parametrize(
    "secret, run_id, me, message",
    [
        (SECRET[:31], RUN, WORKER, "a secret of 31 bytes is too short: new_secret"),
        (b"", RUN, WORKER, "a secret of 0 bytes is too short"),
        (SECRET, RUN[:15], WORKER, "a run id of 15 bytes: it has 16"),
        (SECRET, RUN, Identity("king", 0, 0), "no role named 'king': choose from worker, server"),
        (SECRET, RUN, Identity("worker", 2**32, 0), "between 0 and 4294967295"),
        (SECRET, RUN, Identity("worker", 0, -1), "between 0 and 4294967295"),
    ],
)
def test_wrong_settings_are_refused_at_once(secret: bytes, run_id: bytes, me: Identity, message: str) -> None:
    for side in (client, server):
        with pytest.raises(ValueError, match=message):
            side(secret, run_id, me)


def test_each_role_has_a_key_of_its_own_that_does_not_show_the_secret() -> None:
    keys = role_keys(SECRET)
    assert set(keys) == set(ROLES) and len({SECRET, *keys.values()}) == len(ROLES) + 1
    assert role_keys(SECRET, "worker") == {"worker": keys["worker"]}
    with pytest.raises(ValueError, match="a secret of 31 bytes is too short"):
        role_keys(SECRET[:31])


def test_secrets_and_run_ids_are_long_and_new_each_time() -> None:
    assert len(new_secret()) == 32 and new_secret() != new_secret()
    assert len(new_run_id()) == 16 and new_run_id() != new_run_id()
