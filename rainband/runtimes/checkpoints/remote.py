"""Checkpoints of nodes on other machines: the run's own machine writes and reads the files for them.

A node opens one more connection to the coordinator's process, with the role `files`, and asks for one thing at a time.
It may write only files of the checkpoint that is being written now, and read only the one from which the run continues.
"""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rainband.checkpoints import commit
from rainband.checkpoints.manifest import MANIFEST, PLAIN_NAME
from rainband.checkpoints.read import Checkpoint
from rainband.checkpoints.store import LocalStore, Store, is_url
from rainband.errors import PeerLost, RainbandError
from rainband.protocol.messages import Address, FileAnswer, FileRead, FileWrite, Message, Peer
from rainband.runtimes.checkpoints.background import Background
from rainband.runtimes.checkpoints.place import opened, store_of
from rainband.transports.connect import connect, is_here
from rainband.transports.connection import Connection
from rainband.transports.hub import Hub

if TYPE_CHECKING:
    from rainband.runtimes.config import Job

ROLE = "files"
PART_BYTES = 4 << 20  # in one message
PATIENCE_S = 300.0  # for one answer: the disk may be slow
OF_A_NODE = re.compile(r"(worker|server)[0-9-]*\.safetensors")


class NodeFiles:
    """The files of checkpoints, as one node reaches them: on its own disk, behind a URL, or on the run's machine."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.remote: RemoteStore | None = None

    def store(self) -> Store:
        config = self.job.config
        return self._remote("") if self.job.remote and not is_url(config.checkpoints) else store_of(config)

    def source(self) -> Checkpoint:
        """Return the checkpoint from which the run continues."""
        place = self.job.config.resume_from
        if not self.job.remote or is_url(place):
            return opened(place)
        return Checkpoint(self._remote(place.rpartition("/")[0]), place.rpartition("/")[2])

    def _remote(self, described: str) -> RemoteStore:
        if self.remote is None:
            self.remote = RemoteStore(self.job.coordinator, self.job.keys, self.job.run_id, described)
        return self.remote


class RemoteStore:
    """The files of a checkpoint on the run's machine. Several threads may use it."""

    renames = False  # the run's machine does that

    def __init__(self, run: Address, keys: Mapping[str, bytes], run_id: bytes, described: str) -> None:
        """`run`: the address of the coordinator."""
        self.run = run
        self.keys = keys
        self.run_id = run_id
        self.described = described
        self.lock = threading.Lock()
        self.hub: Hub | None = None
        self.answer: tuple[FileAnswer, bytes] | None = None

    def make_folder(self, path: str) -> None:
        """Do nothing: the run's machine makes it."""

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        folder, _, name = path.rpartition("/")
        offset = 0
        for chunk in chunks:
            view = memoryview(chunk)
            for first in range(0, len(view), PART_BYTES):
                part = view[first : first + PART_BYTES]
                self._ask(FileWrite(folder, name, offset), part)
                offset += len(part)

    def sync(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        self._ask(FileWrite(folder, name, sync=True))

    def rename(self, old: str, new: str) -> None:
        raise NotImplementedError("the run's machine renames folders")

    def remove(self, path: str) -> None:
        raise NotImplementedError("the run's machine removes files")

    def names(self, path: str = "") -> list[str]:
        raise NotImplementedError("the run's machine has found the checkpoint")

    def size(self, path: str) -> int:
        return self._read(path, 0, 0)[0].num_bytes

    def read(self, path: str, first: int, number: int) -> bytearray:
        memory = bytearray(number)
        for at in range(0, number, PART_BYTES):
            _, body = self._read(path, first + at, min(PART_BYTES, number - at))
            memory[at : at + len(body)] = body
            if len(body) < min(PART_BYTES, number - at):
                return memory[: at + len(body)]
        return memory

    def describe(self, path: str = "") -> str:
        return f"{self.described}/{path}" if path else self.described

    def _read(self, path: str, first: int, number: int) -> tuple[FileAnswer, bytes]:
        folder, _, name = path.rpartition("/")
        return self._ask(FileRead(folder, name, first, number))

    def _ask(self, request: Message, body: memoryview | None = None) -> tuple[FileAnswer, bytes]:
        """Return the answer of the run's machine; raise OSError if it has none."""
        with self.lock:
            try:
                answer, content = self._asked(request, body)
            except RainbandError as error:
                self._close()
                raise OSError(f"the run's machine does not take it ({error})") from None
        if answer.error:
            raise OSError(answer.error)
        return answer, content

    def _asked(self, request: Message, body: memoryview | None) -> tuple[FileAnswer, bytes]:
        if self.hub is None:
            me = Peer(ROLE, secrets.randbelow(1 << 32))
            sock, self.peer, key = connect(self.run, is_here(self.run), self.keys, self.run_id, me, 30.0)
            self.hub = Hub(me, {}, self.run_id, self, 2 * PART_BYTES)
            self.connection = self.hub.adopt(sock, self.peer, key)
        self.answer = None
        self.hub.send(self.connection.peer, request, body)
        until = time.monotonic() + PATIENCE_S
        while self.answer is None:
            if time.monotonic() > until:
                raise PeerLost("the run's machine", f"waiting for its answer for {PATIENCE_S:g} s")
            self.hub.run_once(1.0)
        return self.answer

    def receive(self, connection: Connection, message: Message, body: memoryview | None) -> None:
        if isinstance(message, FileAnswer):
            self.answer = message, bytes(body or b"")

    def lost(self, peer: Peer) -> None:
        raise PeerLost("the run's machine", "using its files (the connection was closed)")

    def _close(self) -> None:
        if self.hub is not None:
            self.hub.close()
            self.hub = None


class FileHost:
    """The run's side: answers the requests of nodes, beside the thread that serves messages."""

    def __init__(
        self,
        store: Store,
        source: str,
        under_way: Callable[[], str],
        last: Callable[[], str],
        background: Background,
        send: Callable[[Peer, Message, bytes | None], None],
    ) -> None:
        """`under_way` and `last` return the folders of the checkpoint that is being written, and of the last one.

        `source`: the one from which the run continues. It and the last one may be read.
        """
        self.store = store
        self.source = source
        self.under_way, self.last = under_way, last
        self.background = background
        self.send = send

    def receive(self, sender: Peer, message: Message, body: memoryview | None) -> None:
        content = bytes(body or b"")  # a connection reuses its memory
        folder = self.under_way()

        def work() -> Callable[[], None]:
            try:
                answer, found = self._answer(message, content, folder)
            except (OSError, ValueError) as error:
                answer, found = FileAnswer(error=str(error)), None
            return lambda: self.send(sender, answer, found or None)  # a frame has no empty body

        self.background.submit(work)

    def _answer(self, message: Message, content: bytes, folder: str) -> tuple[FileAnswer, bytes | None]:
        if isinstance(message, FileWrite):
            return self._write(message, content, folder), None
        if isinstance(message, FileRead):
            return self._read(message)
        raise ValueError("it is no request for a file")

    def _write(self, message: FileWrite, content: bytes, folder: str) -> FileAnswer:
        if not isinstance(self.store, LocalStore):
            raise ValueError("the run writes its checkpoints behind a URL: each node writes there itself")
        if not folder or message.folder != folder or not OF_A_NODE.fullmatch(message.name):
            raise ValueError(f"{message.folder}/{message.name} is not of the checkpoint that is written now")
        path = f"{commit.begin(self.store, folder)}/{message.name}"
        if message.sync:
            self.store.sync(path)
            return FileAnswer()
        with (self.store.root / path).open("r+b" if message.offset else "wb", buffering=0) as file:
            file.seek(message.offset)
            left = memoryview(content)
            while left:
                left = left[file.write(left) :]
        return FileAnswer()

    def _read(self, message: FileRead) -> tuple[FileAnswer, bytes]:
        last = self.last()
        is_last = message.folder == last != "" and isinstance(self.store, LocalStore)
        source = self.store.root / last if is_last and isinstance(self.store, LocalStore) else Path(self.source)
        known = message.name == MANIFEST or PLAIN_NAME.fullmatch(message.name)
        if not (is_last or self.source) or message.folder != source.name or not known:
            raise ValueError(f"{message.folder}/{message.name} is not of the checkpoint from which the run continues")
        with (source / message.name).open("rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            found = os.pread(file.fileno(), min(message.num_bytes, PART_BYTES), message.offset)
        return FileAnswer(num_bytes=num_bytes), found
