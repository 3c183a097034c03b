"""The simulated network: latency, bandwidth, and queues at NICs and uplinks.

    time of a message = latency + waiting for the sender's NIC + waiting for the receiver's NIC + bytes / bandwidth

A block occupies the sender's NIC while it leaves, and the receiver's NIC from the arrival of its first byte. So blocks
of many workers queue at a server. Messages of one packet do not wait for blocks, because real NICs interleave packets.
Messages of one connection do not overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from rainband.runtimes.simulation.models.clock import VirtualClock

PACKET_BYTES = 1500


@dataclass(frozen=True)
class NetworkModel:
    """The settings of a network."""

    latency_s: float = 50e-6  # from one machine to another, one way
    bytes_per_s: float = 1.25e9  # of a machine's NIC, in each direction
    duplex: bool = True  # false: both directions share the NIC
    jitter_s: float = 0.0  # mean of a random delay of each message, from 0 to twice as much
    rack_size: int = 0  # machines in a rack; 0: no racks
    uplink_bytes_per_s: float = 0.0  # of a rack, in each direction
    uplink_latency_s: float = 0.0  # between racks, on top

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.jitter_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(
                f"a network requires latency_s >= 0, jitter_s >= 0 and bytes_per_s > 0, not {self.latency_s}, "
                f"{self.jitter_s} and {self.bytes_per_s}."
            )
        if self.rack_size and self.uplink_bytes_per_s <= 0:
            raise ValueError("racks require the speed of their uplink: uplink_bytes_per_s=5e9.")


class Lane:
    """One direction of a NIC or an uplink, which transfers one block at a time."""

    __slots__ = ("bytes_per_s", "free_at")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0

    def occupy(self, from_s: float, num_bytes: float) -> tuple[float, float]:
        """Transfer a block from a moment on, or when the lane is free; returns when it begins and ends."""
        begin = from_s if from_s > self.free_at else self.free_at
        self.free_at = end = begin + num_bytes / self.bytes_per_s
        return begin, end


class Machine:
    """A machine's NIC."""

    def __init__(self, model: NetworkModel, rack: Rack | None = None) -> None:
        self.rack = rack
        self.out = Lane(model.bytes_per_s)
        self.into = Lane(model.bytes_per_s) if model.duplex else self.out


class Rack:
    """The uplink of some machines."""

    def __init__(self, model: NetworkModel) -> None:
        self.out = Lane(model.uplink_bytes_per_s)
        self.into = Lane(model.uplink_bytes_per_s) if model.duplex else self.out


class Parcel:
    """A message on its way; the message bus has the subclass with content."""

    __slots__ = ("arrived", "flow", "left_at", "num_bytes")
    idle = False  # see VirtualClock.at
    is_read_late = False  # `leave` is called when its first byte leaves
    may_overtake = False

    def __init__(self, flow: Flow, num_bytes: int) -> None:
        self.flow = flow
        self.num_bytes = num_bytes
        self.left_at = 0.0  # when its last byte leaves the sender
        self.arrived = False

    def leave(self) -> None:
        """Take the content, because the first byte leaves now."""

    def deliver(self) -> None:
        raise AssertionError("each kind of parcel delivers itself")


class Flow:
    """One direction of a connection: first in, first out."""

    __slots__ = (
        *("broken", "crosses_racks", "duplicate_until", "extra_s", "reorder_s", "reorder_until"),
        *("source", "split_until", "target", "under_way"),
    )

    def __init__(self, source: Machine, target: Machine) -> None:
        self.source = source
        self.target = target
        self.crosses_racks = source.rack is not target.rack
        self.under_way: list[Parcel] = []
        self.broken = False  # messages are dropped
        self.split_until = 0.0  # a partition: messages arrive then at the earliest
        self.extra_s = 0.0  # a slow link
        self.reorder_until = 0.0  # until then messages that may overtake do, and take up to `reorder_s` longer
        self.reorder_s = 0.0
        self.duplicate_until = 0.0  # until then messages that may be duplicated arrive twice


class Network:
    """Transfers messages in virtual time."""

    def __init__(self, model: NetworkModel, clock: VirtualClock, seed: int) -> None:
        self.model = model
        self.clock = clock
        self.random = Random(f"network {seed}")
        self.racks: list[Rack] = []
        self.num_machines = 0

    def machine(self) -> Machine:
        """Add a machine; racks are filled one after the other."""
        size = self.model.rack_size
        if size and self.num_machines % size == 0:
            self.racks.append(Rack(self.model))
        self.num_machines += 1
        return Machine(self.model, self.racks[-1] if size else None)

    def send(self, parcel: Parcel, at_s: float) -> None:
        """Send a message at a moment, now or later."""
        flow, num_bytes, model = parcel.flow, parcel.num_bytes, self.model
        flow.under_way.append(parcel)
        latency = model.latency_s + flow.extra_s
        if model.jitter_s:
            latency += 2 * model.jitter_s * self.random.random()
        if flow.crosses_racks:
            latency += model.uplink_latency_s
        if parcel.may_overtake and self.clock.now < flow.reorder_until:
            latency += flow.reorder_s * self.random.random()
        if num_bytes <= PACKET_BYTES:
            parcel.left_at = at_s + num_bytes / flow.source.out.bytes_per_s
            if parcel.is_read_late:
                self._at(at_s, parcel.leave)
            self.clock.at(parcel.left_at + latency, partial(self._arrive, parcel), parcel.idle)
            return
        begin, parcel.left_at = flow.source.out.occupy(at_s, num_bytes)
        if flow.crosses_racks:
            assert flow.source.rack is not None
            begin, through = flow.source.rack.out.occupy(begin, num_bytes)
            parcel.left_at = max(parcel.left_at, through)
        if parcel.is_read_late:
            self._at(begin, parcel.leave)
        self.clock.at(begin + latency, partial(self._receive, parcel, parcel.left_at + latency))

    def _receive(self, parcel: Parcel, last: float) -> None:
        """Occupy the receiver's NIC from the first byte on; the last byte arrives at `last` or later."""
        flow, begin = parcel.flow, self.clock.now
        if flow.crosses_racks:
            assert flow.target.rack is not None
            begin, through = flow.target.rack.into.occupy(begin, parcel.num_bytes)
            last = max(last, through)
        _, end = flow.target.into.occupy(begin, parcel.num_bytes)
        self.clock.at(max(last, end), partial(self._arrive, parcel), parcel.idle)

    def _arrive(self, parcel: Parcel) -> None:
        flow, now = parcel.flow, self.clock.now
        if now < flow.split_until:
            self.clock.at(flow.split_until, partial(self._arrive, parcel), parcel.idle)
            return
        if parcel.may_overtake and now < flow.reorder_until:
            flow.under_way.remove(parcel)
            parcel.deliver()
        parcel.arrived = True
        under_way = flow.under_way
        while under_way and under_way[0].arrived:
            under_way.pop(0).deliver()

    def _at(self, at_s: float, do: Callable[[], None]) -> None:
        if at_s <= self.clock.now:
            do()
        else:
            self.clock.at(at_s, do)
