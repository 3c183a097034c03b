"""Codecs: exact bytes, exact values, bounds of their errors, and what arrives broken is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rainband.codecs.codec import Codec, Memory, Piece, key_of
from rainband.codecs.find import codec_names, load_codec, text_of
from rainband.codecs.packing import pack, unpack
from rainband.codecs.qsgd import Qsgd
from rainband.codecs.topk import TopK

VARIANTS = [
    *("fp16", "bf16", "sign", "qsgd:8", "qsgd:4", "qsgd:2", "qsgd:bits=4,bucket=7", "ternary", "ternary:0", "topk:0.1"),
    *("randk:0.1", "randk:0.1,feedback=no", "significant", "powersgd:2", "deep_gradient:0.1"),
]


def through(codec: Codec, values: Tensor, key: int = 1, memory: Memory | None = None) -> Tensor:
    body = codec.encode(values, key, memory or Memory([Piece(0, len(values), max(1, int(len(values) ** 0.5)))]))
    return codec.decode(body, len(values), key)


def encoded(name: str, values: list[float]) -> list[float]:
    return through(load_codec(name), torch.tensor(values)).tolist()


# ---- exact values and bytes ----


def test_sign_sends_the_mean_of_the_positive_and_of_the_negative_values() -> None:
    assert encoded("sign", [1.0, 3.0, -1.0, -5.0, 0.0, -3.0]) == pytest.approx([4 / 3, 4 / 3, -3, -3, 4 / 3, -3])


def test_each_parameter_has_two_scales_of_its_own() -> None:
    values = torch.cat((torch.full((64,), 1.0), torch.full((64,), -100.0)))
    memory = Memory([Piece(0, 64), Piece(64, 128)])
    assert through(load_codec("sign"), values, memory=memory).tolist() == values.tolist()


def test_topk_sends_the_largest_values_as_they_are() -> None:
    assert encoded("topk:0.34", [1.0, -7.0, 2.0, 3.0, -1.0, 5.0]) == [0, -7, 0, 0, 0, 5]


def test_the_significant_values_are_those_above_twice_the_root_mean_square() -> None:
    # the squares of seven 1 and one 5 have the mean 4, and 5 is at least 2 * 2
    assert encoded("significant:2", [1.0] * 7 + [-5.0]) == [0] * 7 + [-5]


def test_qsgd_is_exact_at_its_levels() -> None:
    assert encoded("qsgd:bits=4", [7.0, -7.0, 3.0, 0.0, 1.0]) == [7, -7, 3, 0, 1]
    assert encoded("qsgd:bits=2", [4.0, -4.0, 0.0]) == [4, -4, 0]


def test_ternary_without_clipping_is_exact_at_its_levels() -> None:
    assert encoded("ternary:0", [2.0, -2.0, 0.0, 2.0, 0.0]) == [2, -2, 0, 2, 0]


def test_casts_are_those_of_torch() -> None:
    values = torch.randn(99)
    assert torch.equal(through(load_codec("fp16"), values), values.half().float())
    assert torch.equal(through(load_codec("bf16"), values), values.bfloat16().float())


def test_a_value_beyond_float16_is_scaled_and_not_made_infinite() -> None:
    assert encoded("fp16", [2.0**20, 2.0**10]) == [2.0**20, 2.0**10]


def test_powersgd_is_exact_for_a_matrix_of_its_rank_and_sends_the_rest_as_it_is() -> None:
    matrix = torch.outer(torch.arange(1.0, 21), torch.arange(1.0, 31)) + torch.outer(torch.ones(20), torch.ones(30))
    values = torch.cat((matrix.view(-1), torch.tensor([5.0, 6.0])))
    codec, memory = load_codec("powersgd:2"), Memory([Piece(0, 600, 30), Piece(600, 602)])
    body = codec.encode(values, 1, memory)
    assert len(body) == 4 + 12 + 4 * 2 * (20 + 30) + 4 * 2
    assert torch.allclose(codec.decode(body, 602, 1), values, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("fp16", 2 * 1000 + 4),
        ("bf16", 2 * 1000),
        ("sign", 4 + 4 + 8 + 125),
        ("qsgd:8", 1000 + 4 * 2),
        ("qsgd:4", 500 + 4 * 2),
        ("qsgd:2", 250 + 4 * 2),
        ("ternary", 250 + 4),
        ("topk:0.01", 4 + 4 + 6 * 10),
        ("randk:0.01", 4 * 10),
    ],
)
def test_a_thousand_values_take_these_bytes(name: str, num_bytes: int) -> None:
    codec = load_codec(name)
    assert len(codec.encode(torch.randn(1000), 1, Memory())) == num_bytes == codec.num_bytes(1000)


def test_a_sampled_threshold_finds_about_as_many_and_the_largest() -> None:
    values = torch.randn(200_000)
    sent = through(TopK(fraction=0.01), values)
    assert 1600 <= int((sent != 0).sum()) <= 2600
    assert values[sent != 0].abs().min() >= values[sent == 0].abs().max()


def test_equal_values_are_not_all_sent() -> None:
    assert int((through(TopK(fraction=0.01), torch.ones(100_000)) != 0).sum()) == 1000


# ---- laws of every codec ----


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("numel", [1, 2, 15, 513, 20_000, 70_001])
def test_what_is_decoded_has_the_length_and_is_finite(name: str, numel: int) -> None:
    for values in (torch.randn(numel), torch.zeros(numel), torch.full((numel,), 1e-40), torch.full((numel,), 1e30)):
        before = values.clone()
        decoded = through(load_codec(name), values)
        assert decoded.shape == values.shape and decoded.dtype == torch.float32
        assert bool(decoded.isfinite().all())
        assert torch.equal(values, before)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_key_gives_the_same_bytes(name: str) -> None:
    values, codec = torch.randn(3000), load_codec(name)
    assert torch.equal(codec.encode(values, 5, Memory()), codec.encode(values, 5, Memory()))


@pytest.mark.parametrize("name", [name for name in VARIANTS if load_codec(name).properties.unbiased])
def test_the_mean_of_an_unbiased_codec_is_what_was_encoded(name: str) -> None:
    values, codec, number = torch.linspace(-1.0, 2.0, 60), load_codec(name), 1500
    many = torch.stack([through(codec, values, key_of(3, n)) for n in range(number)])
    error_of_mean = many.std(0) / number**0.5
    assert bool(((many.mean(0) - values).abs() <= 4.5 * error_of_mean + 1e-6).all())


def test_the_codecs_that_are_said_to_be_unbiased_are_these() -> None:
    unbiased = [name for name in VARIANTS if load_codec(name).properties.unbiased]
    assert unbiased == ["qsgd:8", "qsgd:4", "qsgd:2", "qsgd:bits=4,bucket=7", "ternary:0", "randk:0.1,feedback=no"]


@given(st.integers(1, 1 << 30), st.sampled_from([2, 4, 8]))
@settings(max_examples=30, deadline=None)
def test_a_rounded_value_is_within_one_level(key: int, bits: int) -> None:
    values = torch.randn(700, generator=torch.Generator().manual_seed(key))
    codec = Qsgd(bits=bits, bucket=700)  # type: ignore[arg-type]
    step = float(values.abs().max()) / codec.levels
    assert float((through(codec, values, key) - values).abs().max()) <= step * 1.0001


@pytest.mark.parametrize("name", [n for n in VARIANTS if load_codec(n).properties.linear and n not in ("fp16", "bf16")])
def test_a_linear_codec_encodes_the_sum_as_the_sum_of_what_it_encodes(name: str) -> None:
    a, b, codec = torch.randint(-9, 9, (999,)).float(), torch.randint(-9, 9, (999,)).float(), load_codec(name)
    summed = codec.encode(a, 7, Memory()).view(torch.float32) + codec.encode(b, 7, Memory()).view(torch.float32)
    assert torch.equal(codec.decode(summed.view(torch.uint8), 999, 7), through(codec, a + b, 7))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_numbers_are_unpacked(bits: int) -> None:
    for numel in (1, 3, 64, 1001):
        numbers = torch.randint(0, 2**bits, (numel,), dtype=torch.uint8)
        assert torch.equal(unpack(pack(numbers, bits), bits, numel), numbers)


# ---- what is sent, and what is kept ----


@pytest.mark.parametrize("name", ["topk:0.1", "randk:0.1", "significant:1", "deep_gradient:0.1,momentum=0,warmup=0"])
def test_all_that_was_sent_and_the_residual_are_all_gradients_exactly(name: str) -> None:
    codec = load_codec(name)
    sender, given_, sent = codec.sender(), torch.zeros(500), torch.zeros(500)
    for key in range(40):
        gradient = torch.randint(-50, 50, (500,)).float()
        given_ += gradient
        sent += codec.decode(sender.encode(gradient, key), 500, key)
    unsent = sender.unsent
    assert unsent is not None and bool(unsent.any())
    assert torch.equal(sent + unsent, given_)
    assert torch.equal(sender.take_unsent(), given_ - sent)  # type: ignore[arg-type]
    assert sender.unsent is None


@pytest.mark.parametrize("name", ["sign", "powersgd:1"])
def test_residuals_of_rounded_codecs_make_up_for_what_was_lost(name: str) -> None:
    codec = load_codec(name)
    sender, given_, sent = codec.sender([Piece(0, 900, 30)]), torch.zeros(900), torch.zeros(900)
    for key in range(30):
        gradient = torch.randn(900)
        given_ += gradient
        sent += codec.decode(sender.encode(gradient, key), 900, key)
    assert sender.unsent is not None
    assert torch.allclose(sent + sender.unsent, given_, atol=1e-4)


def test_without_feedback_nothing_is_kept() -> None:
    sender = load_codec("topk:0.1,feedback=no").sender()
    sender.encode(torch.randn(100), 1)
    assert sender.unsent is None and sender.take_unsent() is None


def test_a_vector_that_would_not_become_smaller_is_sent_as_it_is_with_the_residual() -> None:
    sender = load_codec("topk:0.9").sender()
    assert sender.encode(torch.tensor([1.0, 2.0]), 1).tolist() == [1.0, 2.0]
    sender = load_codec("significant:100").sender()
    sender.encode(torch.tensor([2.0] + [1.0] * 49), 1)
    assert sender.unsent is not None and sender.unsent.tolist() == [0.0] + [1.0] * 49
    assert sender.encode(torch.tensor([1.0] + [0.0] * 49), 2).tolist() == [1.0] * 50  # all are the largest
    assert sender.unsent is None


def test_deep_gradient_corrects_momentum_and_masks_what_was_sent() -> None:
    codec = load_codec("deep_gradient:0.1,momentum=0.5,warmup=0")
    sender = codec.sender()
    first = codec.decode(sender.encode(torch.tensor([8.0] + [1.0] * 9), 1), 10, 1)
    assert first.tolist() == [8.0] + [0.0] * 9
    # u = 0.5 * 1 + 1 = 1.5 and v = 1 + 1.5 for what was not sent; u began anew where it was
    assert sender.encode(torch.zeros(10), 2) is not None
    assert sender.unsent is not None
    assert sorted(sender.unsent.tolist()) == [0.0, 0.0] + [1.5] * 8


def test_deep_gradient_warms_up() -> None:
    codec = load_codec("deep_gradient:0.001,warmup=2")
    sender = codec.sender()
    numbers = [int((codec.decode(sender.encode(torch.randn(1000), n), 1000, n) != 0).sum()) for n in range(9)]
    assert numbers == [250, 250, 62, 62, 16, 16, 4, 4, 1]


# ---- what arrives ----


@pytest.mark.parametrize("name", VARIANTS)
def test_a_body_of_another_length_is_refused(name: str) -> None:
    codec = load_codec(name)
    body = codec.encode(torch.randn(2000), 1, Memory([Piece(0, 2000, 40)]))
    for wrong in (body[:-1], body[:3], body[:0], torch.cat((body, body[:1]))):
        with pytest.raises(ValueError):
            codec.decode(wrong, 2000, 1)


@pytest.mark.parametrize("name", VARIANTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_bytes_are_decoded_to_finite_values_or_refused(name: str, data: st.DataObject) -> None:
    codec, numel = load_codec(name), 300
    values = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    good = codec.encode(values, 1, Memory([Piece(0, numel, 20)]))
    length = data.draw(st.one_of(st.just(len(good)), st.integers(0, 2000)))
    body = torch.zeros(length, dtype=torch.uint8)
    body[: len(good)] = good[:length]
    for _ in range(data.draw(st.integers(0, 8))):
        if length:
            body[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = codec.decode(body, numel, 1)
    except ValueError:
        return
    assert decoded.shape == (numel,) and bool(decoded.isfinite().all())


@pytest.mark.parametrize(("name", "places"), [("topk:0.5", [3, 3]), ("topk:0.5", [3, 9]), ("topk:0.5", [3, 2])])
def test_places_that_repeat_or_are_not_in_the_vector_are_refused(name: str, places: list[int]) -> None:
    codec = load_codec(name)
    body = codec.encode(torch.tensor([1.0, 2.0, 0.0, 0.0]), 1, Memory())
    body[-4:] = torch.tensor(places, dtype=torch.int16).view(torch.uint8)
    with pytest.raises(ValueError, match="order"):
        codec.decode(body, 4, 1)


@pytest.mark.parametrize("name", ["bf16", "topk:0.5", "randk:0.5", "powersgd"])
def test_values_that_are_not_finite_are_refused(name: str) -> None:
    codec = load_codec(name)
    with pytest.raises(ValueError, match="finite"):
        codec.decode(codec.encode(torch.tensor([1.0, float("nan"), 2.0, float("inf")]), 1, Memory()), 4, 1)


def test_halves_that_are_not_finite_and_factors_that_are_none_are_refused() -> None:
    codec = load_codec("fp16")
    body = codec.encode(torch.ones(2), 1, Memory())
    body[:2] = torch.tensor([torch.nan]).half().view(torch.uint8)
    with pytest.raises(ValueError, match="finite"):
        codec.decode(body, 2, 1)
    body[:2], body[4:] = 0, torch.tensor([0.5]).view(torch.uint8)
    with pytest.raises(ValueError, match="no factor"):
        codec.decode(body, 2, 1)


# ---- names and settings ----


def test_the_first_setting_needs_no_name() -> None:
    assert load_codec("topk:0.02") == TopK(fraction=0.02)
    assert load_codec("topk:0.02,feedback=no") == TopK(fraction=0.02, feedback=False)
    assert load_codec("qsgd") == Qsgd()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_codec_is_written_as_it_can_be_typed(name: str) -> None:
    assert load_codec(text_of(load_codec(name))) == load_codec(name)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("topq", "did you mean topk"),
        ("topk:2", "at most 1"),
        ("topk:many", "expected a number"),
        ("topk:0.1,k=3", "no setting 'k'"),
        ("fp16:3", "has no settings"),
        ("qsgd:3", "expected one of 2, 4, 8"),
        ("powersgd:0", "from 1 to 256"),
        ("nowhere:Codec", "no module named 'nowhere'"),
    ],
)
def test_a_mistake_says_what_is_allowed(typed: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_codec(typed)


def test_there_are_these_codecs() -> None:
    assert codec_names() == sorted(
        ["bf16", "deep_gradient", "fp16", "powersgd", "qsgd", "randk", "sign", "significant", "ternary", "topk"]
    )


@pytest.mark.parametrize("numel", [1, 3, 15])
def test_the_largest_of_few_or_equal_values_is_significant(numel: int) -> None:
    sender = load_codec("significant:4").sender()
    sent = sender.encode(torch.ones(numel), 1)
    values = sent if sent.dtype == torch.float32 else load_codec("significant:4").decode(sent, numel, 1)
    assert values.sum() == numel


@pytest.mark.parametrize("name", ["topk:0.1", "sign", "randk:0.5", "powersgd:1", "significant:2"])
def test_values_whose_sums_are_infinite_are_sent_as_they_are(name: str) -> None:
    codec = load_codec(name)
    sender = codec.sender([Piece(0, 100, 10)])
    values = torch.cat((torch.full((50,), 3e38), torch.full((50,), -1e38)))
    for key in range(4):
        sent = sender.encode(values, key)
        if sent.dtype == torch.uint8:
            assert codec.decode(sent, 100, key).isfinite().all()
        assert sender.unsent is None or sender.unsent.isfinite().all()


def test_powersgd_takes_matrices_whose_square_is_beyond_float32() -> None:
    codec = load_codec("powersgd:1")
    sender = codec.sender([Piece(0, 100, 10)])
    values = torch.arange(1.0, 11.0).outer(torch.arange(1.0, 11.0)).view(-1) * 1e25
    for key in range(3):
        sent = sender.encode(values, key)
        assert sent.dtype == torch.uint8
        torch.testing.assert_close(codec.decode(sent, 100, key), values, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", codec_names())
def test_a_parameter_without_values_is_nothing(name: str) -> None:
    codec = load_codec(name)
    body = codec.encode(torch.empty(0), 1, Memory())
    assert len(codec.decode(body, 0, 1)) == 0
