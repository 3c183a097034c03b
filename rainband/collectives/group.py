"""A group of workers that perform collective operations together; and what the groups of all transports share."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rainband.collectives.algorithm import load_algorithm
from rainband.collectives.cost import MEASURED_BYTES, MEASURED_NAMES, LinkCosts, choose, fitted
from rainband.collectives.operations import all_gather, broadcast, reduce, reduce_scatter
from rainband.collectives.table import MoveTable
from rainband.errors import PeerLost

WARM_UP = 2  # turns of a measurement that are not counted

OnLost = Literal["error", "continue"]

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)


class RankLost(PeerLost):
    """A rank of a group was lost during an operation. `rank` is its number."""

    def __init__(self, rank: int, doing: str) -> None:
        super().__init__(f"rank {rank}", doing)
        self.rank = rank

    def __reduce__(self) -> tuple[type[RankLost], tuple[int, str]]:
        return RankLost, (self.rank, self.doing)


class MembersChanged(Exception):
    """A member was lost: the attempt is void. Raised and caught inside of groups."""


class Call(NamedTuple):
    """One collective operation of all members; they must all make the same calls in the same order."""

    operation: str
    algorithm: str
    root: int = 0

    def __str__(self) -> str:
        name = self.operation.replace("_", "-")
        return f"{'an' if name[0] == 'a' else 'a'} {name}"


class Group(ABC):
    """A group of ranks. All members make the same calls, in the same order, with vectors of the same size and dtype.

    A vector is a contiguous tensor of any shape on the CPU. Operations work in place.

    With `on_lost="error"`, the loss of a member ends the operation with RankLost, which names it; members that had
    finished their part return normally, and the next call that needs the lost one raises RankLost. With "continue", an
    all-reduce starts again without the lost member, from the vectors as they were: all surviving members return the
    same sum of the same vectors. Other operations need all ranks, and raise RankLost.
    """

    def __init__(self, rank: int, num_ranks: int, on_lost: OnLost, costs: LinkCosts | None) -> None:
        if on_lost not in ("error", "continue"):
            raise ValueError(f"on_lost={on_lost!r}: it must be 'error' or 'continue'.")
        self.rank = rank
        self.num_ranks = num_ranks
        self.on_lost = on_lost
        self.costs = costs
        self._one = torch.zeros(1)
        self._backup = torch.empty(0, dtype=torch.uint8)

    @property
    @abstractmethod
    def lost(self) -> Sequence[int]:
        """Return the lost ranks, in the order in which they were noticed."""

    @property
    def members(self) -> tuple[int, ...]:
        """Return the ranks that are not lost; raise RankLost if the others have lost this one."""
        lost = self.lost
        self._check_self()
        return tuple(rank for rank in range(self.num_ranks) if rank not in lost)

    @abstractmethod
    def _begin(self) -> None:
        """Begin an operation: the next `_play` is its first attempt."""

    @abstractmethod
    def _play(self, call: Call, vector: Tensor, members: tuple[int, ...]) -> None:
        """Play the call's table, whose ranks are the positions of the members.

        Raises MembersChanged if a member was lost that had not done its part.
        """

    @abstractmethod
    def _commit(self) -> None:
        """Return when all members have done their parts; raise MembersChanged if one was lost before.

        Either it returns on all surviving members, or it raises on all.
        """

    @abstractmethod
    def close(self) -> None: ...

    def all_reduce(self, vector: Tensor, algorithm: str = "auto") -> tuple[int, ...]:
        """Replace the vector by the sum of the members' vectors; return the ranks that are in the sum."""
        if self.on_lost == "error":
            self._run(Call("all_reduce", algorithm), vector)
            return tuple(range(self.num_ranks))
        check_vector(vector)
        if algorithm == "auto" and self.costs is None:
            self.costs = self._measure_for(vector)
        keep = self._kept(vector)
        self._begin()
        while True:
            members = self.members
            try:
                self._play(self._chosen(Call("all_reduce", algorithm), vector, len(members)), vector, members)
                self._commit()
                return members
            except MembersChanged:
                vector.view(-1).view(torch.uint8).copy_(keep)

    def reduce_scatter(self, vector: Tensor, algorithm: str = "direct") -> range:
        """Sum the members' vectors; return the elements of the sum that this rank has. The rest has no meaning."""
        call = Call("reduce_scatter", algorithm)
        self._run(call, vector)
        table = table_of(self.num_ranks, call)
        parts = table.parts_of(self.rank)
        return elements_of(vector.numel(), table.num_parts, 1, parts.start, parts.stop, 0) if parts else range(0)

    def all_gather(self, vector: Tensor, algorithm: str = "direct") -> None:
        """Give each member the elements that the others have, as after a `reduce_scatter` by the same algorithm."""
        self._run(Call("all_gather", algorithm), vector)

    def broadcast(self, vector: Tensor, root: int = 0) -> None:
        """Replace the vector by that of rank `root`."""
        self._run(Call("broadcast", "", self._checked_root(root)), vector)

    def reduce(self, vector: Tensor, root: int = 0) -> None:
        """Sum the members' vectors at rank `root`; on the others, the vector then has no meaning."""
        self._run(Call("reduce", "", self._checked_root(root)), vector)

    def barrier(self) -> None:
        """Return when all members have called this."""
        self.all_reduce(self._one, "recursive_doubling")

    def measure_costs(self, vector: Tensor | None = None, rounds: int = 8) -> LinkCosts:
        """Measure alpha, beta and gamma together with all members; every member gets the same numbers.

        All algorithms and sizes take turns, so that interruptions by other processes are spread; the first turns are
        warm-up. With `vector`, which is overwritten, costs are those of vectors in the same memory; it has to have
        MEASURED_BYTES[-1] bytes.
        """
        trial = torch.zeros(MEASURED_BYTES[-1], dtype=torch.uint8) if vector is None else vector.view(-1)
        trial = trial.view(torch.uint8).view(torch.float32)
        work = {
            (name, size): (Call("all_reduce", name), trial[: size // trial.itemsize].zero_())
            for size in MEASURED_BYTES
            for name in MEASURED_NAMES
        }
        seconds: dict[tuple[str, int], list[float]] = {key: [] for key in work}
        for turn in range(WARM_UP + rounds):
            for key, (call, values) in work.items():
                self.barrier()
                took_s = _timed(call, values, self._run)
                if turn >= WARM_UP:
                    seconds[key].append(took_s)
        costs = fitted(self.num_ranks, {key: median(values) for key, values in seconds.items()})
        same = torch.tensor(costs, dtype=torch.float64)
        self.broadcast(same)
        alpha_s, beta_s, gamma_s, cores = same.tolist()
        return LinkCosts(alpha_s, beta_s, gamma_s, int(cores))

    def _measure_for(self, vector: Tensor) -> LinkCosts:
        """Return the costs of vectors in the memory of this one, which keeps its values."""
        first = vector.view(-1).view(torch.uint8)[: MEASURED_BYTES[-1]]
        if first.numel() < MEASURED_BYTES[-1]:
            return self.measure_costs()
        keep = first.clone()
        costs = self.measure_costs(first)
        first.copy_(keep)
        return costs

    def _run(self, call: Call, vector: Tensor) -> None:
        """Perform an operation that needs all ranks."""
        check_vector(vector)
        members = self._participants(call)
        if call.algorithm == "auto" and self.costs is None:
            self.costs = self._measure_for(vector)
        self._begin()
        try:
            self._play(self._chosen(call, vector, self.num_ranks), vector, members)
        except MembersChanged:
            self._whole_group(call)
            raise AssertionError("a changed group lacks a member") from None

    def _participants(self, call: Call) -> tuple[int, ...]:
        """Return the ranks of an operation that needs all of them; raise RankLost if it cannot be done."""
        return self._whole_group(call)

    def _whole_group(self, call: Call) -> tuple[int, ...]:
        """Return all ranks; raise RankLost if one is lost."""
        members = self.members
        if len(members) < self.num_ranks:
            raise RankLost(self.lost[0], f"doing {call}")
        return members

    def _check_self(self) -> None:
        if self.rank in self.lost:
            raise RankLost(self.rank, "the others went on without it: it was stopped, or too late")

    def _checked_root(self, root: int) -> int:
        if not 0 <= root < self.num_ranks:
            raise ValueError(f"root={root}: it must be a rank, from 0 to {self.num_ranks - 1}.")
        return root

    def _kept(self, vector: Tensor) -> Tensor:
        raw = vector.view(-1).view(torch.uint8)
        if self._backup.numel() < raw.numel():
            self._backup = torch.empty_like(raw)
        keep = self._backup[: raw.numel()]
        keep.copy_(raw)
        return keep

    def _chosen(self, call: Call, vector: Tensor, num_ranks: int) -> Call:
        if call.algorithm != "auto":
            return call
        assert self.costs is not None, "costs are measured before"
        return call._replace(algorithm=choose(num_ranks, vector.nbytes, self.costs))


def _timed(call: Call, values: Tensor, run: Callable[[Call, Tensor], object]) -> float:
    started = time.perf_counter()
    run(call, values)
    return time.perf_counter() - started


@lru_cache(maxsize=256)
def table_of(num_ranks: int, call: Call) -> MoveTable:
    """Return the table of a call; its ranks are positions."""
    match call.operation:
        case "broadcast":
            return broadcast(num_ranks, call.root)
        case "reduce":
            return reduce(num_ranks, call.root)
    algorithm = load_algorithm(call.algorithm)
    make: Callable[..., MoveTable] = {"reduce_scatter": reduce_scatter, "all_gather": all_gather}.get(
        call.operation, lambda algorithm, num_ranks: algorithm.table(num_ranks)
    )
    return make(algorithm, num_ranks)


def check_vector(vector: Tensor) -> None:
    """Raise ValueError for a tensor that cannot be reduced in place."""
    if vector.device.type != "cpu" or not vector.is_contiguous() or vector.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"a tensor of {vector.dtype} on {vector.device}, {'' if vector.is_contiguous() else 'not '}contiguous: "
            f"collective operations take contiguous CPU tensors of {names}."
        )


def view_of(vector: Tensor) -> Tensor:
    """Return a tensor of the same memory that does not keep it alive."""
    if not vector.nbytes:
        return torch.empty(0, dtype=vector.dtype)
    memory = (ctypes.c_uint8 * vector.nbytes).from_address(vector.data_ptr())
    return torch.frombuffer(memory, dtype=vector.dtype)


ALIGNED = 16  # elements: slices begin at multiples of it


def elements_of(size: int, parts: int, chunks: int, first: int, last: int, chunk: int) -> range:
    """Return the elements of a chunk of parts first to last - 1 of a vector."""

    def cut(at: int, of: int, length: int) -> int:
        return length if at == of else length * at // of // ALIGNED * ALIGNED

    start, end = cut(first, parts, size), cut(last, parts, size)
    return range(start + cut(chunk, chunks, end - start), start + cut(chunk + 1, chunks, end - start))
