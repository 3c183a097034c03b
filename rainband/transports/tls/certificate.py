"""The certificate of a machine in a run: made for the run, kept in memory, known to others by its fingerprint.

No authority signs it. A node that connects compares its fingerprint with the one of the invitation, or with the one
that the coordinator has sent.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import ssl

import msgspec

from rainband.errors import HandshakeFailed
from rainband.transports.tls.ed25519 import KEY_BYTES, public_key, sign

# Types of DER, the binary form of certificates, and the parts of ours that never change.
_INTEGER, _BITS, _OCTETS, _OBJECT, _TEXT, _SEQUENCE, _SET, _DATE = 0x02, 0x03, 0x04, 0x06, 0x0C, 0x30, 0x31, 0x18
_ED25519 = bytes.fromhex("300506032b6570")  # the algorithm
_COMMON_NAME = bytes.fromhex("550403")
_FROM, _UNTIL = b"20000101000000Z", b"99991231235959Z"  # no clock is compared: the run's end ends its use


class Certificate(msgspec.Struct, frozen=True):
    """A certificate and its private key, as DER. It is never written to a disk."""

    der: bytes
    key: bytes

    @property
    def fingerprint(self) -> bytes:
        return fingerprint(self.der)


def new_certificate(name: str = "rainband") -> Certificate:
    """Return a fresh certificate that is signed with its own key."""
    seed = secrets.token_bytes(KEY_BYTES)
    names = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _der(_OBJECT, _COMMON_NAME), _der(_TEXT, name.encode()))))
    signed = _der(
        _SEQUENCE,
        _der(0xA0, _der(_INTEGER, b"\x02")),  # version 3
        _der(_INTEGER, b"\x01" + secrets.token_bytes(15)),  # serial number; positive, because it begins with 1
        _ED25519,
        names,  # the issuer
        _der(_SEQUENCE, _der(_DATE, _FROM), _der(_DATE, _UNTIL)),
        names,  # the subject
        _der(_SEQUENCE, _ED25519, _bits(public_key(seed))),
    )
    der = _der(_SEQUENCE, signed, _ED25519, _bits(sign(seed, signed)))
    key = _der(_SEQUENCE, _der(_INTEGER, b"\x00"), _ED25519, _der(_OCTETS, _der(_OCTETS, seed)))
    return Certificate(der, key)


def fingerprint(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()


def server_context(certificate: Certificate) -> ssl.SSLContext:
    """Return the settings with which a node that has this certificate accepts connections."""
    context = _tls_1_3(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # no connection is resumed
    fd = os.memfd_create("rainband certificate", os.MFD_CLOEXEC)  # OpenSSL reads files; this one is in memory
    try:
        os.write(fd, _pem("CERTIFICATE", certificate.der) + _pem("PRIVATE KEY", certificate.key))
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def client_context() -> ssl.SSLContext:
    """Return the settings with which a node connects; it must call `check_fingerprint` before it sends anything."""
    context = _tls_1_3(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # there is no authority; the fingerprint says whose certificate it must be
    return context


def check_fingerprint(der: bytes | None, expected: bytes) -> None:
    """Raise unless a certificate is the one that was expected."""
    if not hmac.compare_digest(fingerprint(der or b""), expected):
        raise HandshakeFailed(
            "the certificate is not the one of the invitation: the address belongs to another run, or an attacker "
            "intercepts the connection. Use the invitation of the run that is there now (rainband invite)."
        )


def _tls_1_3(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _der(kind: int, *contents: bytes) -> bytes:
    content = b"".join(contents)
    length = len(content)
    if length < 0x80:
        return bytes([kind, length]) + content
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes([kind, 0x80 | len(size)]) + size + content


def _bits(data: bytes) -> bytes:
    return _der(_BITS, b"\x00", data)


def _pem(kind: str, der: bytes) -> bytes:
    return f"-----BEGIN {kind}-----\n{base64.encodebytes(der).decode()}-----END {kind}-----\n".encode()
