"""Invitations: all that another machine needs to join a run. Each contains a secret."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

import msgspec

from rainband.protocol.messages import Address
from rainband.runtimes.machines.launchers import await_file, launched_by, shared_file

FILE_NAME = "invite.txt"
VARIABLE = "RAINBAND_INVITE"
MAX_BYTES = 1 << 16


class Invitation(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a run, the fingerprint of its certificate, and the key of the machines that join."""

    run: str  # the name of the run's directory
    run_id: bytes
    host: str
    port: int
    unix: str  # for processes of the run's own machine
    machine: str
    fingerprint: bytes  # none: on loopback, without TLS
    key: bytes

    @property
    def address(self) -> Address:
        return Address(self.host, self.port, self.unix, self.machine, self.fingerprint)

    def text(self) -> str:
        """Return it as one line of text."""
        return msgspec.json.encode(self).decode() + "\n"

    def write(self, path: Path) -> None:
        """Write a new file that only its owner may read, at once: another machine may wait for it."""
        beside = path.with_name(f".{path.name}.part")
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(self.text())
        beside.rename(path)


def read_invitation(
    word: str | None, environment: MutableMapping[str, str] = os.environ, say: Callable[[str], None] = lambda line: None
) -> Invitation:
    """Read an invitation: of a file, with "-" of standard input, without a word of RAINBAND_INVITE.

    The variable is removed: programs that are started here may store their environment.
    In a job of Slurm or torchrun it is read from the file that rank 0 shares.
    """
    typed = environment.pop(VARIABLE, None)
    if word == "-":
        return _parsed(sys.stdin.read(MAX_BYTES), "standard input")
    if word is not None:
        check_typed(word)
        return _parsed(_private_text(Path(word)), word)
    if typed is not None:
        return _parsed(typed, VARIABLE)
    launched = launched_by(environment)
    if launched is not None:
        path = shared_file(launched, environment)
        await_file(path, launched, say)
        return _parsed(_private_text(path), str(path))
    raise ValueError(
        f"an invitation is required: rainband join {FILE_NAME}, - for standard input, or the variable {VARIABLE}. "
        "On the machine of the run, rainband invite RUN prints one."
    )


def check_typed(word: str) -> None:
    """Raise ValueError, without the secret, if a word of the command line is an invitation."""
    if word.lstrip().startswith("{"):
        raise ValueError(
            "an invitation is secret, so it must not be typed as an argument, which others can see: put it into a file."
        )


def _private_text(path: Path) -> str:
    try:
        file = path.open("rb")
    except OSError as error:
        raise ValueError(
            f"cannot read the invitation {path}: {error.strerror}. rainband invite RUN prints one on the run's machine."
        ) from None
    with file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ValueError(
                f"the invitation {path} has mode {mode:04o}, so other users can read it: type chmod 600 {path}. If "
                "another user may have read it, start the run anew."
            )
        return file.read(MAX_BYTES).decode(errors="replace")


def _parsed(text: str, where: str) -> Invitation:
    try:
        return msgspec.json.decode(text, type=Invitation)
    except msgspec.DecodeError:
        raise ValueError(
            f"{where} is not an invitation: copy all of the file {FILE_NAME} from the directory of the run."
        ) from None
