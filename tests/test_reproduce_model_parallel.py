"""The claims about model parallelism: small forms of their claims, with numbers that are easy to check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rainband.model_parallel.placement.predict import partition_s
from rainband.model_parallel.placement.profile import CutValue, LinkSpeed, Profile, Unit
from rainband.model_parallel.schedules.builders import gpipe, one_f_one_b
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel
from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from reproduce.claims import partition_speed_up, same_bubble
from reproduce.claims.pipedream_plans import compare
from reproduce.claims.sent_once import count
from reproduce.claims.weight_stashing import apart
from reproduce.image_nets import profile_of
from reproduce.virtual_partition import batch_s
from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)


@pytest.mark.parametrize("kind", ["local", "fully connected"])
def test_a_value_is_sent_once_to_each_machine_that_needs_it(kind: str) -> None:
    counted = count(kind, machines=3, seed=0)
    assert counted.sent == counted.came_back == counted.distinct < counted.edges
    assert counted.largest_error < 1e-12


# ---- virtual time ----

STEADY = ClusterModel(
    NetworkModel(latency_s=0.5, bytes_per_s=1000.0),
    ComputeModel(kind="constant", step_s=1.0),
    NodeModel(message_s=0.0),
)
CHAIN = Profile("", 1, (Unit("a", 1.0, 2.0), Unit("b", 1.0, 2.0)), (CutValue("a", "a", ("b",), 1000, 1000),))


def test_a_chain_on_two_machines_takes_its_work_and_two_messages() -> None:
    """1 + 1 s forward, 2 + 2 s backward, and 0.5 s + 1 s each way."""
    assert batch_s(CHAIN, {"a": 0, "b": 1}, STEADY) == 9.0
    assert batch_s(CHAIN, {"a": 0, "b": 0}, STEADY) == 6.0


def test_a_message_costs_both_ends_time() -> None:
    dear = replace(STEADY, nodes=NodeModel(message_s=0.25))
    assert batch_s(CHAIN, {"a": 0, "b": 1}, dear) == 9.0 + 4 * 0.25


def test_messages_queue_at_a_card() -> None:
    """One value of 2000 bytes to two machines: the second copy leaves when the first is gone, 2 s later."""
    units = (Unit("a"), Unit("b"), Unit("c"))
    profile = Profile("", 1, units, (CutValue("a", "a", ("b", "c"), 2000, 0),))
    assert batch_s(profile, {"a": 0, "b": 1, "c": 1}, STEADY) == 0.5 + 2.0
    assert batch_s(profile, {"a": 0, "b": 1, "c": 2}, STEADY) == 0.5 + 4.0


def test_a_gradient_goes_back_once_when_the_last_reader_of_a_machine_is_done() -> None:
    """There in 1.5 s, two backwards of 2 and 3 s, back in 1.5 s, and the maker's own second."""
    units = (Unit("a", 0.0, 1.0), Unit("b", 0.0, 2.0), Unit("c", 0.0, 3.0))
    profile = Profile("", 1, units, (CutValue("a", "a", ("b", "c"), 1000, 1000),))
    assert batch_s(profile, {"a": 0, "b": 1, "c": 1}, STEADY) == 1.5 + 2 + 3 + 1.5 + 1


@pytest.fixture
def layers_at_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that run at 100 Gflop/s: measuring them here would take longer, and differ."""

    def at_a_rate(inputs: int, outputs: int) -> tuple[float, float]:
        forward_s = 2 * inputs * outputs * partition_speed_up.BATCH / 100e9
        return forward_s, 2 * forward_s

    weights = partition_speed_up.WINDOW**2 * partition_speed_up.CHANNELS
    monkeypatch.setattr(partition_speed_up, "linear_s", at_a_rate)
    monkeypatch.setattr(partition_speed_up, "pixel_s", lambda channels: at_a_rate(weights, channels))


@pytest.mark.slow
@pytest.mark.usefixtures("layers_at_a_rate")
def test_full_nets_slow_beyond_a_few_machines_and_local_ones_do_not() -> None:
    speech, images = partition_speed_up.speech, partition_speed_up.images
    assert sum(u.parameter_bytes for u in speech(1).units) == 4 * 41_758_720
    assert sum(u.parameter_bytes for u in images(1, 1).units) / 4 == pytest.approx(1.69e9, rel=0.01)
    full = [partition_speed_up.seconds(speech(machines), 1, seed=0) for machines in (1, 8, 64)]
    local = [partition_speed_up.seconds(images(side, side), 1, seed=0) for side in (1, 4, 9)]
    assert full[1] < full[2] < full[0]
    assert local[2] < local[1] / 2 < local[0] / 10


@pytest.mark.usefixtures("layers_at_a_rate")
@pytest.mark.parametrize("net", ["speech", "images"])
def test_a_partition_takes_in_virtual_time_what_a_plan_predicts(net: str) -> None:
    """Two programs that know nothing of each other, for eight and nine machines on 1 Gbit/s."""
    profile = partition_speed_up.speech(8) if net == "speech" else partition_speed_up.images(3, 3)
    where = {unit.name: int(unit.name.rpartition(".")[2]) for unit in profile.units}
    gbit = NetworkModel(latency_s=100e-6, bytes_per_s=125e6)
    predicted_s = partition_s(profile, where, LinkSpeed(latency_s=100e-6, bytes_per_s=125e6))
    assert batch_s(profile, where, replace(STEADY, network=gbit)) == pytest.approx(predicted_s, rel=0.05)


# ---- plans ----


def test_the_nets_have_as_many_parameters_as_is_known_of_them() -> None:
    known = {"VGG-16": 138_357_544, "ResNet-50": 25_557_032}
    for net, parameters in known.items():
        assert sum(unit.parameter_bytes for unit in profile_of(net, 2, 1e12).units) == 4 * parameters


def test_vgg_is_planned_as_fifteen_and_one_and_resnet_as_data_parallel() -> None:
    vgg, resnet = (compare(net, teraflops=14, gbit=10) for net in ("VGG-16", "ResNet-50"))
    assert (vgg.shape, resnet.shape) == ("15-1", "16")
    assert vgg.gain > 1.4 and vgg.saved > 0.85
    assert resnet.gain == pytest.approx(1.0)


# ---- schedules ----


def test_with_stashing_a_pipeline_is_delayed_sgd_to_the_bit_and_without_it_is_not() -> None:
    assert apart("stashing", seed=0, microbatches=8)[0] == 0.0
    assert apart("vertical sync", seed=0, microbatches=8)[0] == 0.0
    assert apart("no stashing", seed=0, microbatches=8)[0] > 1e-6


def test_1f1b_idles_as_gpipe_does_and_saves_fewer_bytes() -> None:
    assert max(same_bubble.largest_error()) < 1e-9
    (one,) = same_bubble.peak_bytes(gpipe, 1, 1)
    assert one == 2 * 4 * same_bubble.SAMPLES * same_bubble.WIDTH  # the inputs of linear, the outputs of tanh
    assert same_bubble.peak_bytes(gpipe, 3, 4) == [4 * one] * 3
    assert same_bubble.peak_bytes(one_f_one_b, 3, 4) == [3 * one, 2 * one, one]
