"""A TCP socket that encrypts with TLS 1.3, with the calls of a plain socket that the transports use.

An SSLSocket has no sendmsg and no MSG_WAITALL, and may not be used by two threads at once. Here OpenSSL works on two
buffers in memory, under a lock: one thread may wait for bytes while another sends. The lock is held while bytes are
encrypted or decrypted, never while the network is waited for.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any

CHUNK_BYTES = 1 << 18  # encrypted or received at a time
MAX_UNKNOWN_BYTES = 1 << 16  # received from a peer that has not authenticated
UNKNOWN_CHUNK_BYTES = 1 << 12


class TlsSocket(socket.socket):
    """A connected socket behind TLS. `trusted` is to be called when the peer has authenticated."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_side: bool, received: bytes = b"") -> None:
        """Take over a connected socket, whose own object is detached; `received`: what was read from it already."""
        timeout = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.settimeout(timeout)
        self._lock = threading.Lock()  # of OpenSSL's state
        self._sending = threading.Lock()  # of what leaves: encrypted bytes must leave in order
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._arrived.write(received)
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side)
        self._unsent = memoryview(b"")
        self._is_open = False
        self._ended = False
        self._chunk = memoryview(bytearray(UNKNOWN_CHUNK_BYTES))
        self._may_receive = MAX_UNKNOWN_BYTES  # before `trusted` is called

    def trusted(self) -> None:
        """Receive any amount from now on."""
        self._chunk = memoryview(bytearray(CHUNK_BYTES))
        self._may_receive = -1

    def unwrap(self) -> tuple[socket.socket, bytes]:
        """Return the socket without TLS, and what has arrived behind the last encrypted message that was read."""
        timeout = self.gettimeout()
        plain = socket.socket(self.family, self.type, self.proto, fileno=self.detach())
        plain.settimeout(timeout)
        return plain, self._arrived.read()

    def shake_hands(self) -> None:
        """Do TLS's handshake; with a non-blocking socket, raise BlockingIOError where it must wait."""
        while not self._is_open:
            with self._lock:
                try:
                    self._tls.do_handshake()
                    self._is_open = True
                except ssl.SSLWantReadError:
                    if self._ended:
                        raise ConnectionError("the peer closed the connection during the TLS handshake") from None
                except ssl.SSLError:
                    self._is_open = False
                    raise
            self._flush()
            if not self._is_open:
                self._fetch()

    def peer_certificate(self) -> bytes | None:
        """Return the certificate that the peer has shown, as DER; its private key was proved."""
        return self._tls.getpeercert(binary_form=True)

    def pending(self) -> bool:
        """Return True if bytes have been received that were not read yet: the kernel does not know of them."""
        return bool(self._arrived.pending or (self._is_open and self._tls.pending()))

    def push_out(self) -> bool:
        """Send encrypted bytes that are left; return True if the network has not taken all of them."""
        try:
            self._flush()
        except BlockingIOError:
            return True
        return False

    # ---- the calls of a plain socket --------------------------------------------------------------------------------

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        self.shake_hands()
        view = memoryview(buffer).cast("B")
        view = view[:nbytes] if nbytes else view
        filled = 0
        while True:
            filled += self._decrypt_into(view[filled:])
            wanted = len(view) if flags & socket.MSG_WAITALL else 1
            if filled >= wanted or self._ended:
                return filled
            self._fetch()

    def _decrypt_into(self, view: memoryview) -> int:
        """Decrypt what has arrived; note the end."""
        filled = 0
        with self._lock:
            try:
                while filled < len(view):
                    count = int(self._tls.read(len(view) - filled, view[filled:]))
                    if not count:
                        self._ended = True
                        break
                    filled += count
            except ssl.SSLWantReadError:
                self._ended = self._ended or self._arrived.eof
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                self._ended = True
        return filled

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        space = bytearray(bufsize)
        return bytes(memoryview(space)[: self.recv_into(space, 0, flags)])

    def sendmsg(self, buffers: Iterable[Any], *others: Any) -> int:
        """Encrypt and send; non-blocking: as much as the network takes, and at most one chunk more."""
        self.shake_hands()
        self._flush()  # BlockingIOError: the bytes of an earlier call have not left
        taken = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            for start in range(0, len(view), CHUNK_BYTES):
                piece = view[start : start + CHUNK_BYTES]
                with self._lock:
                    self._tls.write(piece)
                taken += len(piece)
                try:
                    self._flush()
                except BlockingIOError:
                    return taken
        return taken

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg([data])

    def sendall(self, data: Any, flags: int = 0) -> None:
        self.sendmsg([data])  # blocking: all of it leaves

    # ---- encrypted bytes --------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        """Receive encrypted bytes; raise BlockingIOError if there are none yet."""
        space = self._chunk if self._may_receive < 0 else self._chunk[: self._may_receive]
        if not space:
            raise ConnectionError(f"the peer sent {MAX_UNKNOWN_BYTES} bytes and has not authenticated")
        count = super().recv_into(space)
        if self._may_receive > 0:
            self._may_receive -= count
        with self._lock:
            if count:
                self._arrived.write(space[:count])
            else:
                self._arrived.write_eof()
                self._ended = not self._is_open

    def _flush(self) -> None:
        with self._sending:
            while True:
                if not self._unsent:
                    with self._lock:
                        self._unsent = memoryview(self._leaving.read() if self._leaving.pending else b"")
                if not self._unsent:
                    return
                self._unsent = self._unsent[super().send(self._unsent) :]


def unread(sock: socket.socket) -> bool:
    """Return True if a socket has received bytes that epoll does not show."""
    return isinstance(sock, TlsSocket) and sock.pending()


def unsent(sock: socket.socket) -> bool:
    """Send what a socket has encrypted; return True if some of it has not left."""
    return isinstance(sock, TlsSocket) and sock.push_out()
