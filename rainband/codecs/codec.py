"""The contract of a codec: what its author writes. Read this file first.

A codec turns a vector of numbers into fewer bytes, and back. It is a frozen dataclass, whose fields are its settings:

    encode(values, key, memory)   on the sender: the bytes of these values
    decode(body, numel, key)      on the receiver: the values, or ValueError if these bytes cannot be any

Both ends know `key`, a number that is another one for each message; random choices depend on nothing else, so runs that
are simulated from a seed can be repeated. `properties` declares all that a run must know about a codec.
This file does not import torch, so that `rainband --help` stays fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self

import xxhash

from rainband.settings import check_arguments

if TYPE_CHECKING:
    from torch import Tensor


class Piece(NamedTuple):
    """A stretch of a vector that belongs to one parameter; with more than one column, it is (part of) a matrix."""

    start: int
    stop: int
    columns: int = 1


@dataclass
class Memory:
    """The memory of one sender of one vector between messages, besides what it has not sent."""

    pieces: Sequence[Piece] = ()
    tensors: dict[int, Tensor] = field(default_factory=dict)
    messages: int = 0


@dataclass(frozen=True)
class Properties:
    """The facts that a run must know about a codec before it starts. Options are checked against it."""

    # The sum of what several senders have encoded with the same key is the encoding of their sum.
    linear: bool = False
    unbiased: bool = False  # the mean of what is decoded, over all keys, is what was encoded
    of_values: bool = False  # what is decoded is near each value: parameters can be sent, not only changes
    keeps: str = ""  # what a sender keeps between messages; empty: nothing
    scope: Literal["element", "bucket", "block", "matrix"] = "element"  # what is encoded as one unit


class Codec(ABC):
    """The base class of every codec. Subclasses are frozen dataclasses whose fields are their settings."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Check the names and types of the settings."""
        if settings:
            check_arguments(cls, settings)
        return super().__new__(cls)

    @property
    @abstractmethod
    def properties(self) -> Properties:
        """Declare what a run must know."""

    @abstractmethod
    def encode(self, values: Tensor, key: int, memory: Memory) -> Tensor:
        """Return the bytes (uint8, 1-D) of a vector of finite float32 values, which stays as it is."""

    @abstractmethod
    def decode(self, body: Tensor, numel: int, key: int) -> Tensor:
        """Return the float32 values of these bytes; raise ValueError if they are not what `encode` makes."""

    @abstractmethod
    def num_bytes(self, numel: int) -> int:
        """Return how many bytes `numel` values become, or about how many if that depends on the values."""

    def sender(self, pieces: Sequence[Piece] = ()) -> Sender:
        """Return one sender's side for one vector, which has these pieces."""
        return EachForItself(self, pieces)


@dataclass(frozen=True)
class BiasedCodec(Codec):
    """A codec that leaves out a part of what it encodes: with `feedback`, a sender adds that to its next message."""

    def sender(self, pieces: Sequence[Piece] = ()) -> Sender:
        return ErrorFeedback(self, pieces) if self.has_feedback else EachForItself(self, pieces)

    @property
    @abstractmethod
    def has_feedback(self) -> bool:
        """Return the setting `feedback`."""

    @property
    def kept(self) -> str:
        return "what it has not sent (error feedback)" if self.has_feedback else ""


# ---- senders --------------------------------------------------------------------------------------------------------


class Sender(Protocol):
    """One sender's side for one vector, which it sends again and again with other values."""

    def encode(self, values: Tensor, key: int) -> Tensor:
        """Return bytes (uint8), or float32 values that are to be sent as they are, if bytes would be no fewer.

        `values` are finite, and stay as they are.
        """

    @property
    def unsent(self) -> Tensor | None:
        """Return what it has kept to be sent later; None: nothing."""

    def take_unsent(self) -> Tensor | None:
        """Return what it has kept, which will now be sent as it is."""

    def keep(self, more: Tensor) -> None:
        """Keep these values, too: they were sent before, and not taken."""


class EachForItself:
    """A sender that encodes each message for itself."""

    unsent = None

    def __init__(self, codec: Codec, pieces: Sequence[Piece] = ()) -> None:
        self.codec = codec
        self.memory = Memory(pieces)

    def encode(self, values: Tensor, key: int) -> Tensor:
        plain = values.detach().float()
        body = self.codec.encode(plain, key, self.memory)
        self.memory.messages += 1
        return body if len(body) < values.nbytes else plain

    def take_unsent(self) -> None:
        return None

    def keep(self, more: Tensor) -> None:
        """Keep nothing."""


class ErrorFeedback:
    """A sender that adds to each message what the ones before have left out (Seide et al. 2014).

        total    = values + residual
        residual = total - decoded(encoded(total))

    So all that was sent and the residual are together all that was to be sent.
    """

    def __init__(self, codec: Codec, pieces: Sequence[Piece] = ()) -> None:
        self.codec = codec
        self.memory = Memory(pieces)
        self.residual: Tensor | None = None

    def encode(self, values: Tensor, key: int) -> Tensor:
        plain = values.detach().float()
        total = plain.clone() if self.residual is None else self.residual.add_(plain)
        body = self.codec.encode(total, key, self.memory)
        self.memory.messages += 1
        if len(body) >= values.nbytes:
            self.residual = None
            return total
        try:
            self.residual = total.sub_(self.codec.decode(body, len(total), key))
        except ValueError:  # values so large that their sums are not finite
            self.residual = None
            return total
        return body

    @property
    def unsent(self) -> Tensor | None:
        return self.residual

    def take_unsent(self) -> Tensor | None:
        residual, self.residual = self.residual, None
        return residual

    def keep(self, more: Tensor) -> None:
        self.residual = more if self.residual is None else self.residual.add_(more)


def key_of(*numbers: int) -> int:
    """Return the key of a message from numbers that both ends know."""
    return xxhash.xxh3_64_intdigest(" ".join(map(str, numbers)).encode()) >> 1


def fraction_error(name: str, value: float) -> str:
    """Return what is wrong with a setting that must be a fraction; empty: nothing."""
    return "" if 0.0 < value <= 1.0 else f"{name}={value}: must be more than 0 and at most 1, such as {name}=0.01."
