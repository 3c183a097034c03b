"""A worker's connection whose frames are received by a thread and handled by the thread that waits."""

from __future__ import annotations

import os
import socket
import threading

import msgspec

from rainband.errors import RainbandError
from rainband.transports.event_loop import EventLoop
from rainband.transports.frames import BadFrame, BodyMemory, Frame, FrameReader


class ThreadedLink:
    """Receives frames on its own thread, so that messages arrive while the worker computes.

    A subclass delivers frames (`frame_received`) and names the error that ends the link (`lost`).
    """

    def __init__(
        self,
        name: str,
        sock: socket.socket,
        key: int,
        event_loop: EventLoop,
        max_body_bytes: int,
        body_memory: BodyMemory | None = None,
    ) -> None:
        self.name = name
        self.sock = sock
        self.key = key
        self.event_loop = event_loop
        self.reader = FrameReader(max_body_bytes, key, body_memory)

    def start_receiving(self) -> None:
        threading.Thread(target=self._receive, name=f"receive {self.name}", daemon=True).start()

    def frame_received(self, frame: Frame) -> None:
        """Handle a frame, on the receiving thread."""
        raise NotImplementedError

    def lost(self, reason: str) -> RainbandError:
        """Return the error that the waiting thread gets when nothing more can be received."""
        raise NotImplementedError

    def wait_readable(self) -> None:
        """Return when there may be something to receive; the receiving thread may do other work first."""

    def _receive(self) -> None:
        try:
            while True:
                self.wait_readable()
                # The rest of a large body is received in one call.
                flags = socket.MSG_WAITALL if self.reader.in_body else 0
                count = self.sock.recv_into(self.reader.space(), 0, flags)
                if count == 0:
                    raise ConnectionError("the connection was closed")
                for frame in self.reader.received(count):
                    self.frame_received(frame)
        except (OSError, BadFrame, msgspec.DecodeError) as error:
            self.fail(self.lost(str(error)))
        except Exception as error:  # whatever it is: a thread that ends silently would leave the process waiting
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Raise an error in the thread that waits."""

        def fail() -> None:
            raise error

        self.event_loop.post(fail)


def close_in_children(sock: socket.socket) -> None:
    """Close a connection in forked processes: held open by a data loader, it would hide this process's death."""
    fd = sock.fileno()

    def close() -> None:
        if sock.fileno() == fd:
            os.close(sock.detach())

    os.register_at_fork(after_in_child=close)
