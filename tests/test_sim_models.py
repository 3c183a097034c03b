"""Virtual time: the clock, the network, computing, shared cores and the files that describe them."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rainband.runtimes.simulation.models.aggregated_servers import AggregatedServers, Times
from rainband.runtimes.simulation.models.clock import VirtualClock
from rainband.runtimes.simulation.models.cluster_model import (
    NETWORKS,
    ClusterModel,
    NodeModel,
    from_tables,
    load_model,
    to_toml,
)
from rainband.runtimes.simulation.models.compute import ComputeModel, ComputePace, exp, exponential, log, lognormal
from rainband.runtimes.simulation.models.cores import Cores, EveryNth, OwnCore
from rainband.runtimes.simulation.models.network import Flow, Machine, Network, NetworkModel, Parcel

MB = 1_000_000


class Noted(Parcel):
    """Notes when it is there."""

    def __init__(self, flow: Flow, num_bytes: int, name: str, arrivals: dict[str, float], clock: VirtualClock) -> None:
        super().__init__(flow, num_bytes)
        self.name, self.arrivals, self.clock = name, arrivals, clock

    def deliver(self) -> None:
        self.arrivals[self.name] = self.clock.now


class Wire:
    """A network whose messages are told by name."""

    def __init__(self, **settings: float) -> None:
        self.clock = VirtualClock()
        model = NetworkModel(**{"latency_s": 0.1, "bytes_per_s": 10 * MB, **settings})  # type: ignore[arg-type]
        self.network = Network(model, self.clock, seed=0)
        self.arrivals: dict[str, float] = {}

    def machine(self) -> Machine:
        return self.network.machine()

    def send(self, name: str, flow: Flow, num_bytes: int, at_s: float = 0.0) -> None:
        self.network.send(Noted(flow, num_bytes, name, self.arrivals, self.clock), at_s)

    def run(self) -> dict[str, float]:
        while self.clock.step():
            pass
        return {name: round(at_s, 6) for name, at_s in self.arrivals.items()}


# ---- the clock ----


def test_things_happen_in_the_order_of_their_time_and_then_of_their_planning() -> None:
    clock, done = VirtualClock(), []
    for name, at_s in (("b", 2.0), ("a", 1.0), ("c", 2.0)):
        clock.at(at_s, partial(done.append, name))
    while clock.step():
        pass
    assert (done, clock.now, clock.done) == (["a", "b", "c"], 2.0, 3)


def test_shuffled_ties_depend_on_the_seed_only() -> None:
    def order(seed: int) -> list[int]:
        clock, done = VirtualClock(Random(seed)), []
        for name in range(8):
            clock.at(1.0, partial(done.append, name))
        while clock.step():
            pass
        return done

    assert order(1) == order(1)
    assert order(1) != order(2)


@example([(2.0, 1.5), (3.25, 0.0)], 1.0)  # what is planned last comes after what has lain in its slot
@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2)), max_size=40), st.sampled_from([0.3, 1.0, 7.0, 1e3]))
def test_slots_of_time_change_no_order(plans: list[tuple[float, float]], slots_per_s: float) -> None:
    """Everything is planned at the beginning, and again when it happens."""

    def order(clock: VirtualClock) -> list[tuple[float, int]]:
        done: list[tuple[float, int]] = []

        def do(number: int, again_s: float | None) -> None:
            done.append((clock.now, number))
            if again_s is not None:
                clock.after(again_s, partial(do, number, None))

        for number, (at_s, again_s) in enumerate(plans):
            clock.at(at_s, partial(do, number, again_s))
        assert clock.num_planned == len(plans)
        while clock.step():
            pass
        assert (clock.num_planned, clock.done) == (0, 2 * len(plans))
        return done

    assert order(VirtualClock(slots_per_s=slots_per_s)) == order(VirtualClock())


# ---- the network ----


def test_a_block_takes_the_latency_and_its_bytes_once() -> None:
    wire = Wire()
    wire.send("block", Flow(wire.machine(), wire.machine()), 5 * MB)
    assert wire.run() == {"block": 0.6}  # 0.1 s + 5 MB at 10 MB/s: it is received while it is sent


def test_blocks_of_two_workers_queue_at_the_server() -> None:
    wire = Wire()
    server = wire.machine()
    for name in ("a", "b"):
        wire.send(name, Flow(wire.machine(), server), 5 * MB)
    assert wire.run() == {"a": 0.6, "b": 1.1}


def test_blocks_to_two_servers_queue_at_the_worker() -> None:
    wire = Wire()
    worker = wire.machine()
    for name in ("a", "b"):
        wire.send(name, Flow(worker, wire.machine()), 5 * MB)
    assert wire.run() == {"a": 0.6, "b": 1.1}


def test_both_directions_share_a_card_that_is_not_duplex() -> None:
    for duplex, second in ((True, 0.6), (False, 1.0)):
        wire = Wire(duplex=duplex)
        a, b = wire.machine(), wire.machine()
        wire.send("there", Flow(a, b), 5 * MB)
        wire.send("back", Flow(b, a), 5 * MB)
        assert max(wire.run().values()) == second


def test_a_packet_does_not_wait_for_the_blocks_of_others_but_for_its_own_connection() -> None:
    wire = Wire()
    worker, server = wire.machine(), wire.machine()
    own = Flow(worker, server)
    wire.send("block", own, 5 * MB)
    wire.send("own", own, 100)
    wire.send("other", Flow(wire.machine(), server), 100)
    arrivals = wire.run()
    assert arrivals["other"] == pytest.approx(0.1, abs=1e-4)
    assert arrivals["own"] == arrivals["block"] == 0.6


def test_racks_share_their_uplink() -> None:
    wire = Wire(rack_size=2, uplink_bytes_per_s=10 * MB, uplink_latency_s=0.05)
    a, b, c, d = (wire.machine() for _ in range(4))  # a and b in one rack, c and d in the other
    wire.send("inside", Flow(a, b), 5 * MB)
    assert wire.run() == {"inside": 0.6}
    wire = Wire(rack_size=2, uplink_bytes_per_s=10 * MB, uplink_latency_s=0.05)
    a, b, c, d = (wire.machine() for _ in range(4))
    wire.send("first", Flow(a, c), 5 * MB)
    wire.send("second", Flow(b, d), 5 * MB)
    assert wire.run() == {"first": 0.65, "second": 1.15}  # other cards, but one uplink


def test_a_cut_line_delivers_when_it_heals_in_the_order_sent() -> None:
    wire = Wire()
    flow = Flow(wire.machine(), wire.machine())
    flow.split_until = 7.0
    wire.send("a", flow, 100)
    wire.send("b", flow, 100, at_s=1.0)
    assert wire.run() == {"a": 7.0, "b": 7.0}
    assert list(wire.arrivals) == ["a", "b"]


@given(
    blocks=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3 * MB), st.floats(0, 2)), max_size=12),
    jitter=st.sampled_from([0.0, 0.3]),
)
def test_nothing_overtakes_on_a_connection_and_no_card_carries_more_than_it_can(
    blocks: list[tuple[int, int, float]], jitter: float
) -> None:
    wire = Wire(jitter_s=jitter)
    server = wire.machine()
    flows = [Flow(wire.machine(), server) for _ in range(4)]
    sent: dict[int, list[str]] = {}
    for number, (source, num_bytes, at_s) in enumerate(sorted(blocks, key=lambda block: block[2])):
        sent.setdefault(source, []).append(str(number))
        wire.send(str(number), flows[source], num_bytes, at_s)
    arrivals = wire.run()
    for names in sent.values():
        assert [name for name in wire.arrivals if name in names] == names
    total = sum(num_bytes for _, num_bytes, _ in blocks if num_bytes > 1500)
    if total:
        assert max(arrivals.values()) >= min(at_s for _, _, at_s in blocks) + 0.1 + total / (10 * MB) - 1e-6


# ---- many servers at once ----


def times_of(aggregated: AggregatedServers, times: Times) -> list[float]:
    return [aggregated.of(times, server) for server in range(len(aggregated.first_s))]


class EachByItself:
    """The same as a bank, with a clock for every card and processor of every server."""

    def __init__(self, model: ClusterModel, sizes: list[int]) -> None:
        self.sizes, self.network, self.nodes = sizes, model.network, model.nodes
        self.into, self.out, self.processor = ([0.0] * len(sizes) for _ in range(3))
        if not self.network.duplex:
            self.out = self.into

    def apply(self, left_at: float) -> list[float]:
        at = left_at + self.network.latency_s
        for i, size in enumerate(self.sizes):
            self.into[i] = max(at, self.into[i]) + size / self.network.bytes_per_s
            self.processor[i] = max(self.into[i], self.processor[i]) + size / self.nodes.apply_bytes_per_s
            at += size / self.network.bytes_per_s
        return list(self.processor)

    def ask(self, now: float) -> list[float]:
        for i, size in enumerate(self.sizes):
            self.processor[i] = max(now, self.processor[i]) + size / self.nodes.read_bytes_per_s
        return list(self.processor)

    def reply(self, ready: list[float], card_free_at: float) -> float:
        begin = [max(ready[i], self.out[i]) for i in range(len(self.sizes))]
        for i, size in sorted(enumerate(self.sizes), key=lambda share: begin[share[0]]):
            self.out[i] = begin[i] + size / self.network.bytes_per_s
            arrives = begin[i] + self.network.latency_s
            card_free_at = max(arrives, card_free_at) + size / self.network.bytes_per_s
        return card_free_at


@given(
    sizes=st.lists(st.sampled_from([2 * MB, 3 * MB, 7 * MB]), min_size=1, max_size=7),
    doings=st.lists(st.tuples(st.sampled_from(["push", "pull"]), st.floats(0, 0.5)), max_size=12),
    duplex=st.booleans(),
)
def test_two_numbers_stand_for_any_number_of_servers_with_equal_shares(
    sizes: list[int], doings: list[tuple[str, float]], duplex: bool
) -> None:
    model = ClusterModel(
        NetworkModel(latency_s=0.25, bytes_per_s=10 * MB, duplex=duplex),
        nodes=NodeModel(apply_bytes_per_s=16 * MB, read_bytes_per_s=32 * MB, message_s=0.0),
    )
    aggregated, each, worker, now = (
        AggregatedServers(model, sizes, [1] * len(sizes)),
        EachByItself(model, sizes),
        Machine(model.network),
        0.0,
    )
    for what, after_s in doings:
        now += after_s
        if what == "push":
            times, expected = aggregated.apply(now), each.apply(now)
        else:
            times, expected = aggregated.ask(now), each.ask(now)
        assert times_of(aggregated, times) == pytest.approx(expected)
        assert aggregated.at_the_last(times) == pytest.approx(max(expected))
        assert aggregated.in_the_middle(times) == pytest.approx(expected[len(sizes) // 2])
        if what == "pull":
            free_at = worker.into.free_at
            assert aggregated.reply(worker, times)[1] == pytest.approx(each.reply(expected, free_at))


def test_a_bank_of_servers_keeps_the_times_of_each() -> None:
    model = ClusterModel(
        NetworkModel(latency_s=0.1, bytes_per_s=10 * MB), nodes=NodeModel(apply_bytes_per_s=10 * MB, message_s=0.0)
    )
    aggregated = AggregatedServers(model, [5 * MB, 5 * MB], [1, 1])
    worker = Machine(model.network)
    assert aggregated.leave(worker, 0.0) == 0.0
    assert times_of(aggregated, aggregated.apply(0.0)) == pytest.approx([0.1 + 0.5 + 0.5, 0.1 + 1.0 + 0.5])
    # A second worker at the same time: its shares wait for the cards, then for the processors.
    assert times_of(aggregated, aggregated.apply(0.0)) == pytest.approx([0.1 + 1.0 + 0.6 - 0.1, 0.1 + 1.5 + 0.5])
    assert aggregated.leave(worker, 0.5) == 1.0  # its card is busy with both shares until then


def test_pushes_of_two_workers_queue_at_the_cards_of_a_bank() -> None:
    model = ClusterModel(
        NetworkModel(latency_s=0.1, bytes_per_s=10 * MB), nodes=NodeModel(apply_bytes_per_s=math.inf, message_s=0.0)
    )
    aggregated = AggregatedServers(model, [5 * MB, 5 * MB], [1, 1])
    assert times_of(aggregated, aggregated.apply(0.0)) == pytest.approx([0.6, 1.1])
    assert times_of(aggregated, aggregated.apply(0.0)) == pytest.approx([1.1, 1.6])


def test_replies_of_a_bank_share_the_workers_card() -> None:
    model = ClusterModel(
        NetworkModel(latency_s=0.1, bytes_per_s=10 * MB), nodes=NodeModel(read_bytes_per_s=1e18, message_s=0.0)
    )
    aggregated = AggregatedServers(model, [5 * MB, 5 * MB], [1, 1])
    leave, last = aggregated.reply(Machine(model.network), aggregated.ask(now=2.0))
    assert (round(leave, 6), round(last, 6)) == (2.0, 2.0 + 0.1 + 1.0)


# ---- cores ----


MS = 1e-3


def ends_of(num_cores: int, works: list[tuple[float, str, float]], **settings: float) -> dict[str, float]:
    """Return the end of each work in milliseconds; a work is (start, process, duration), in milliseconds too."""
    clock = VirtualClock()
    cores, ends = Cores(clock, num_cores, **settings), {}

    def begin(who: str, amount_s: float) -> None:
        cores.work(amount_s, lambda: ends.update({who: clock.now / MS}), who)

    for at_ms, who, amount_ms in works:
        clock.at(at_ms * MS, partial(begin, who, amount_ms * MS))
    while clock.step():
        pass
    return ends


def test_two_processes_on_a_core_have_it_in_turns() -> None:
    """Looked at with every tick of 4 ms: a has it from 0 to 4, b to 8, a its last 2 ms to 10, b to 12."""
    assert ends_of(1, [(0, "a", 6), (0, "b", 6)]) == pytest.approx({"a": 10, "b": 12})


def test_who_wakes_up_has_a_core_at_once_that_another_has_had_for_a_slice() -> None:
    assert ends_of(1, [(0, "a", 10), (2, "b", 0.5)]) == pytest.approx({"b": 2.5, "a": 10.5})


def test_and_waits_for_the_next_tick_where_that_has_just_begun() -> None:
    assert ends_of(1, [(0, "a", 10), (1, "b", 0.5)]) == pytest.approx({"b": 4.5, "a": 10.5})


def test_who_ends_leaves_the_core_at_once() -> None:
    assert ends_of(1, [(0, "a", 1), (0.5, "b", 0.5)]) == pytest.approx({"a": 1, "b": 1.5})


def test_who_wakes_up_goes_to_an_idle_core_where_the_machine_moves_it() -> None:
    """b was on the first core, where a has begun 1 ms ago. Otherwise it waits for the tick at 4 ms, and a for it."""
    works = [(0.0, "b", 1.0), (2.0, "a", 10.0), (3.0, "b", 1.0)]
    assert ends_of(2, works, moves=1.0) == pytest.approx({"b": 4, "a": 12})
    assert ends_of(2, works, moves=0.0) == pytest.approx({"b": 5, "a": 13})


def test_an_idle_core_needs_some_time_to_begin() -> None:
    """Only if it was idle: b comes while a has it."""
    assert ends_of(1, [(0, "a", 2), (1, "b", 1)], wake_s=0.5 * MS) == pytest.approx({"a": 2.5, "b": 3.5})


def test_shares_are_spread_evenly() -> None:
    yes = {part: EveryNth(part) for part in (2 / 3, 1 / 6, 1.0, 0.0)}
    answers = {part: [share() for _ in range(6)] for part, share in yes.items()}
    assert answers[2 / 3] == [False, True, True, False, True, True]
    assert answers[1 / 6] == [False] * 5 + [True]
    assert (answers[1.0], answers[0.0]) == ([True] * 6, [False] * 6)


def test_a_core_takes_over_who_waits_every_fourth_time_that_it_becomes_idle() -> None:
    """c waits behind a from 0.1 ms on; b goes to sleep on the other core at 0.6, 1.1, 1.3 and 1.5 ms."""
    works = [(0, "a", 30), (0, "b", 0.6), (0.1, "c", 30), (1.0, "b", 0.1), (1.2, "b", 0.1), (1.4, "b", 0.1)]
    assert ends_of(2, works, moves=0.0) == pytest.approx({"b": 1.5, "a": 30, "c": 31.5})


def test_two_who_have_a_core_in_turns_stay_there_for_some_ticks_beside_an_idle_one() -> None:
    """At 4 ms, a has just begun: c could be taken over, but only two of three times. Then they have turns, from tick to
    tick, and who waits has just run: at 28 ms, the sixth time, c is taken over, with 18 of its 30 ms left; a has 17."""
    works = [(3, "a", 30), (3, "b", 0.2), (3.1, "c", 30)]
    assert ends_of(2, works, moves=0.0) == pytest.approx({"b": 3.2, "a": 45, "c": 46})


def test_who_sleeps_comes_back_to_its_core_if_that_is_free() -> None:
    """b's core is the second; a is still on the first, and is not disturbed."""
    assert ends_of(2, [(0, "a", 9), (0, "b", 1), (3, "b", 2)]) == pytest.approx({"a": 9, "b": 5})


def test_more_work_of_a_process_comes_after_what_it_has() -> None:
    assert ends_of(2, [(0, "a", 2), (1, "a", 2)]) == pytest.approx({"a": 4})


def test_what_a_process_does_by_itself_takes_its_turns_with_others() -> None:
    clock = VirtualClock()
    cores, ends = Cores(clock, 1), []
    cores.work(6 * MS, lambda: ends.append(clock.now), "a")
    assert cores.alongside(0.0, 1 * MS, "b") == pytest.approx(5 * MS)  # from the tick at 4 ms on
    assert cores.alongside(5 * MS, 1 * MS, "b") == pytest.approx(1 * MS)  # in the same turn
    while clock.step():
        pass
    assert ends == pytest.approx([8 * MS])
    assert OwnCore(clock).alongside(0.0, 1.0, "b") == 1.0


def test_busy_cores_slow_each_other_down_by_crowding() -> None:
    assert ends_of(2, [(0, "a", 2), (0, "b", 2)], crowding=0.5) == pytest.approx({"a": 3, "b": 3})


@given(
    works=st.lists(st.tuples(st.floats(0, 30), st.sampled_from("abcde"), st.floats(0.1, 12)), min_size=1, max_size=12),
    num_cores=st.integers(1, 3),
)
def test_no_work_is_lost_on_cores_and_none_is_done_twice(works: list[tuple[float, str, float]], num_cores: int) -> None:
    """Nobody is done before his own work could be, and all of it never takes longer than on one core."""
    ends = ends_of(num_cores, works)
    assert set(ends) == {who for _, who, _ in works}
    for who, end in ends.items():
        own = [(at, amount) for at, other, amount in works if other == who]
        assert end >= max(at + amount for at, amount in own) - 1e-6
        assert end >= min(at for at, _ in own) + sum(amount for _, amount in own) - 1e-6
    assert max(ends.values()) <= max(at for at, _, _ in works) + sum(amount for _, _, amount in works) + 1e-6


# ---- computing ----


@given(st.floats(-10, 10))
def test_the_exponential_is_that_of_the_library_nearly(x: float) -> None:
    assert exp(x) == pytest.approx(math.exp(x), rel=1e-9)


@given(st.floats(1e-9, 1e9))
def test_the_logarithm_is_that_of_the_library_nearly(x: float) -> None:
    assert log(x) == pytest.approx(math.log(x), rel=1e-13, abs=1e-14)


@pytest.mark.parametrize("draw", [exponential, lambda random: lognormal(random, 0.5)])
def test_random_times_have_mean_one(draw: object) -> None:
    random = Random(0)
    assert sum(draw(random) for _ in range(20_000)) / 20_000 == pytest.approx(1.0, abs=0.03)  # type: ignore[operator]


def test_a_slow_worker_takes_its_factor_longer() -> None:
    model = ComputeModel(kind="constant", step_s=2.0, slow_workers=(1,), slow_factor=3.0)
    assert [ComputePace(model, 0, worker).next_s() for worker in range(3)] == [2.0, 6.0, 2.0]


def test_every_worker_goes_through_a_measured_trace_from_its_own_place() -> None:
    model = ComputeModel(kind="trace", trace_s=(1.0, 2.0, 4.0))
    paces = [ComputePace(model, 0, worker) for worker in range(20)]
    steps = [tuple(pace.next_s() for _ in range(3)) for pace in paces]
    assert {sum(step) for step in steps} == {7.0}
    assert len(set(steps)) == 3


def test_a_pace_is_fixed_by_seed_and_worker() -> None:
    def steps(seed: int, worker: int) -> list[float]:
        pace = ComputePace(ComputeModel(kind="lognormal", straggler_chance=0.1), seed, worker)
        return [pace.next_s() for _ in range(5)]

    assert steps(1, 2) == steps(1, 2) != steps(1, 3)
    assert steps(1, 2) != steps(2, 2)


def test_times_are_the_same_bits_on_every_machine() -> None:
    steps = {}
    for kind in ("lognormal", "exponential"):
        pace = ComputePace(ComputeModel(kind=kind, step_s=1.0, spread=0.5), seed=0, worker=0)  # type: ignore[arg-type]
        steps[kind] = [pace.next_s() for _ in range(2)]
    assert steps["lognormal"] == [1.3840818145354832, 0.3387618556874504]
    assert steps["exponential"] == [2.769741773691625, 1.2581488075142642]


# ---- files ----


def test_a_model_written_as_toml_is_read_back_equal(tmp_path: Path) -> None:
    model = ClusterModel(
        NETWORKS["datacenter"],
        ComputeModel(kind="trace", trace_s=(0.1, 0.2), slow_workers=(3,)),
        NodeModel(shared_memory=True, cores=2),
    )
    file = tmp_path / "cluster.toml"
    file.write_text(to_toml(model, "measured\nhere"))
    assert file.read_text().startswith("# measured\n# here\n")
    assert load_model(str(file)) == model


@pytest.mark.parametrize("name", list(NETWORKS))
def test_every_network_has_a_name(name: str) -> None:
    assert load_model(name) == ClusterModel(NETWORKS[name])


def test_a_file_may_begin_from_a_named_network() -> None:
    model = from_tables({"network": {"like": "1gbit", "latency_s": 0.5}})
    assert (model.network.latency_s, model.network.bytes_per_s) == (0.5, 125e6)


@pytest.mark.parametrize(
    "tables, told",
    [
        ({"network": {"latency": 1}}, r"\[network\].*no setting 'latency' \(did you mean latency_s\?\)"),
        ({"net": {}}, "choose from network, compute, nodes"),
        ({"compute": {"kind": "slow"}}, "one of constant, lognormal, exponential, trace"),
        ({"network": {"bytes_per_s": 0}}, "bytes_per_s > 0"),
        ({"compute": {"kind": "trace"}}, "requires measured steps"),
        ({"nodes": {"apply_bytes_per_s": 0}}, "apply_bytes_per_s=0.*choose a speed above 0"),
        ({"nodes": {"wake_s": -1e-6}}, "wake_s=-1e-06: choose 0 or more"),
        ({"nodes": {"gather_bytes_per_s": -1}}, "gather_bytes_per_s=-1.*choose 0 or more"),
        ({"nodes": {"moves": 1.5}}, "moves=1.5: choose a probability from 0 to 1"),
    ],
)
def test_a_wrong_model_says_what_would_be_right(tables: dict[str, dict[str, object]], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        from_tables(tables)


def test_an_unknown_network_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="choose from lan, 1gbit, wan, datacenter, or give a TOML file"):
        load_model("token_ring")
