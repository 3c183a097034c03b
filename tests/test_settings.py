"""Settings: words become fields, mistakes become advice."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rainband.plugins import load_strategy
from rainband.protocol.optimizer_spec import OptimizerSpec
from rainband.settings import Setting, as_dict, build, fields_of, parse_pairs
from rainband.strategy import Strategy, Worker


@dataclass(frozen=True)
class Downpour:
    """Stands for any strategy."""

    lr: float = 0.1  # step size; the server's
    n_fetch: int = 1
    """Steps between two pulls.

    And a second paragraph nobody prints."""
    # Steps between
    # two pushes.
    n_push: int = 1
    warm: bool = False


@dataclass(frozen=True)
class Everything:
    whole: int = 1
    real: float = 0.5
    flag: bool = True
    text: str = "αβγδ=αβγδ"  # Greek − and more
    limit: int | None = None
    old_style: Optional[float] = None  # noqa: UP045 - this spelling must work, too
    label: str | None = None
    how: Literal["mean", "sum"] = "mean"
    bits: Literal[1, 8] = 8
    betas: tuple[float, float] = (0.9, 0.999)
    many: tuple[float, ...] = ()
    delay: int | Literal["auto"] = "auto"
    computed: int = field(default=0, init=False)


@dataclass(frozen=True)
class Base:
    lr: float = 0.1  # of the base
    seed: int = 0  # of the base, too


@dataclass(frozen=True)
class Derived(Base):
    lr: float = 0.2  # of the derived


@dataclass(frozen=True)
class Needy:
    bound: int


@dataclass(frozen=True)
class Wrapping:
    inner: Downpour = field(default_factory=Downpour)


@dataclass(frozen=True)
class Bare:
    pass


def test_words_become_fields_of_the_annotated_types() -> None:
    words = {"lr": "0.5", "n_push": "4", "warm": "yes"}
    assert build(Downpour, words) == Downpour(lr=0.5, n_push=4, warm=True)


def test_no_words_give_the_defaults() -> None:
    assert build(Downpour, {}) == Downpour()
    assert build(Bare, {}) == Bare()


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("whole", "-3", -3),
        ("whole", 4.0, 4),
        ("real", "1e-3", 0.001),
        ("real", "inf", float("inf")),
        ("real", 2, 2.0),
        ("flag", "No", False),
        ("flag", "0", False),
        ("flag", 1, True),
        ("flag", "TRUE", True),
        ("text", "4", "4"),
        ("text", "none", "none"),
        ("limit", "7", 7),
        ("limit", "none", None),
        ("limit", None, None),
        ("old_style", "0.5", 0.5),
        ("label", "None", None),
        ("label", "7", "7"),
        ("how", "sum", "sum"),
        ("bits", "1", 1),
        ("betas", "0.5, 0.75", (0.5, 0.75)),
        ("betas", [0.5, 1], (0.5, 1.0)),
        ("many", "", ()),
        ("many", "1", (1.0,)),
        ("many", "1,2,3", (1.0, 2.0, 3.0)),
        ("delay", "auto", "auto"),
        ("delay", "3", 3),
    ],
)
def test_a_word_is_read_by_the_type_of_its_field(name: str, word: object, value: object) -> None:
    read = getattr(build(Everything, {name: word}), name)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "word", "advice"),
    [
        ("whole", "abc", "whole=abc: expected a whole number, such as whole=4"),
        ("whole", "4.5", "whole=4.5: expected a whole number, such as whole=4"),
        ("whole", 4.5, "whole=4.5: expected a whole number, such as whole=4"),
        ("whole", True, "whole=True: expected a whole number, such as whole=4"),
        ("whole", float("inf"), "whole=inf: expected a whole number, such as whole=4"),
        ("real", "fast", "real=fast: expected a number, such as real=0.1"),
        ("real", "nan", "real=nan: expected a number, such as real=0.1"),
        ("real", False, "real=False: expected a number, such as real=0.1"),
        ("real", None, "real=None: expected a number, such as real=0.1"),
        ("flag", "maybe", "flag=maybe: expected true or false, such as flag=true"),
        ("flag", 2, "flag=2: expected true or false, such as flag=true"),
        ("text", 4, "text=4: expected text, such as text=name"),
        ("limit", "few", "limit=few: expected a whole number or none, such as limit=4"),
        ("how", "max", "how=max: expected one of mean, sum, such as how=mean"),
        ("bits", "2", "bits=2: expected one of 1, 8, such as bits=1"),
        ("many", "1,x", "many=1,x: expected values separated by commas, each a number, such as many=0.1,0.1"),
        ("many", 1.0, "many=1.0: expected values separated by commas, each a number, such as many=0.1,0.1"),
        (
            "betas",
            "1",
            "betas=1: expected 2 values separated by commas: a number, a number, such as betas=0.1,0.1",
        ),
        ("delay", "long", "delay=long: expected a whole number or one of auto, such as delay=4"),
    ],
)
def test_a_wrong_word_is_answered_with_what_would_be_right(name: str, word: object, advice: str) -> None:
    with pytest.raises(ValueError) as error:
        build(Everything, {name: word})
    assert str(error.value) == advice


def test_a_number_too_large_for_a_float_is_a_wrong_value_too() -> None:
    with pytest.raises(ValueError, match="expected a number, such as real=0.1"):
        build(Everything, {"real": 10**400})


def test_an_unknown_name_is_answered_with_the_nearest_and_with_all() -> None:
    with pytest.raises(ValueError) as error:
        build(Downpour, {"npush": "4"})
    assert str(error.value) == (
        "Downpour has no setting 'npush' (did you mean n_push?): it has lr, n_fetch, n_push, warm."
    )


def test_a_name_near_to_nothing_gets_no_guess() -> None:
    with pytest.raises(ValueError, match=r"^Downpour has no setting 'zzz': it has lr, n_fetch, n_push, warm\.$"):
        build(Downpour, {"zzz": "4"})


def test_a_class_without_settings_says_so() -> None:
    with pytest.raises(ValueError, match=r"^Bare has no setting 'lr': it has none\.$"):
        build(Bare, {"lr": "4"})


def test_a_field_the_class_computes_itself_is_no_setting() -> None:
    with pytest.raises(ValueError, match="Everything has no setting 'computed'"):
        build(Everything, {"computed": "1"})
    assert "computed" not in as_dict(Everything())


def test_a_field_without_default_must_be_given() -> None:
    assert build(Needy, {"bound": "2"}) == Needy(2)
    with pytest.raises(ValueError, match=r"^Needy requires bound=4: it is a whole number\.$"):
        build(Needy, {})


def test_a_field_that_cannot_be_typed_takes_values_but_not_text() -> None:
    assert build(Wrapping, {"inner": Downpour(lr=1.0)}) == Wrapping(Downpour(lr=1.0))
    with pytest.raises(ValueError, match="^inner=fast: expected a value made in Python, not text$"):
        build(Wrapping, {"inner": "fast"})


def test_pairs_are_split_at_the_first_equals_sign() -> None:
    assert parse_pairs(["n_push=4", "label=a=b", " lr = 0.1 ", "empty="]) == {
        "n_push": "4",
        "label": "a=b",
        "lr": "0.1",
        "empty": "",
    }
    assert parse_pairs([]) == {}


@pytest.mark.parametrize(
    ("pairs", "advice"),
    [
        (["n_push"], "'n_push' is not a setting: write name=value, such as n_push=4."),
        (["=4"], "'=4' is not a setting: write name=value, such as n_push=4."),
        ([""], "'' is not a setting: write name=value, such as n_push=4."),
        (["lr=1", "lr=2"], "lr is set twice, to 1 and to 2: keep one of them."),
    ],
)
def test_a_pair_that_is_none_is_answered_with_how_to_write_one(pairs: list[str], advice: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_pairs(pairs)
    assert str(error.value) == advice


def test_fields_are_described_with_the_words_beside_them() -> None:
    assert fields_of(Downpour) == [
        Setting("lr", "a number", 0.1, "step size; the server's"),
        Setting("n_fetch", "a whole number", 1, "Steps between two pulls."),
        Setting("n_push", "a whole number", 1, "Steps between two pushes."),
        Setting("warm", "true or false", False, ""),
    ]


def test_a_comment_after_letters_beyond_ascii_is_found() -> None:
    assert next(setting.doc for setting in fields_of(Everything) if setting.name == "text") == "Greek − and more"


def test_a_field_declared_again_takes_the_later_words() -> None:
    assert [(setting.default, setting.doc) for setting in fields_of(Derived)] == [
        (0.2, "of the derived"),
        (0, "of the base, too"),
    ]


def test_a_field_that_must_be_given_has_no_default() -> None:
    assert fields_of(Needy) == [Setting("bound", "a whole number", MISSING, "")]


def test_a_class_typed_at_a_prompt_is_described_without_words() -> None:
    made_up: type = dataclass(frozen=True)(type("MadeUp", (), {"__annotations__": {"lr": float}, "lr": 0.1}))
    assert fields_of(made_up) == [Setting("lr", "a number", 0.1, "")]


numbers = st.floats(allow_nan=False)
everythings = st.builds(
    Everything,
    whole=st.integers(),
    real=numbers,
    flag=st.booleans(),
    text=st.text(),
    limit=st.none() | st.integers(),
    old_style=st.none() | numbers,
    label=st.none() | st.text().filter(lambda text: text.lower() != "none"),
    how=st.sampled_from(["mean", "sum"]),
    bits=st.sampled_from([1, 8]),
    betas=st.tuples(numbers, numbers),
    many=st.lists(numbers).map(tuple),
    delay=st.integers() | st.just("auto"),
)


@given(everythings)
def test_what_as_dict_gives_build_takes(everything: Everything) -> None:
    assert build(Everything, as_dict(everything)) == everything


@given(everythings)
def test_values_written_as_words_are_read_back_exactly(everything: Everything) -> None:
    def word(value: object) -> str:
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)

    words = {name: word(value) for name, value in as_dict(everything).items()}
    assert build(Everything, words) == everything


# ---- strategies in a custom training loop ----


@dataclass(frozen=True)
class WithRate(Strategy):
    """A strategy that takes nothing from the package but the base class."""

    lr: float = 0.5
    other: int = 3

    async def run(self, worker: Worker) -> None:
        raise NotImplementedError


def test_the_rate_of_a_custom_loop_replaces_that_of_any_strategy_that_declares_one() -> None:
    spec = OptimizerSpec("adam", {"lr": 0.01})

    assert WithRate(other=4).with_optimizer(spec) == WithRate(lr=0.01, other=4)
    assert load_strategy("downpour", {}).with_optimizer(spec) == load_strategy(
        "downpour", {"optimizer": "adam", "lr": 0.01}
    )
