"""The tasks: numbers known beforehand, data as they lie in their files, and errors that say what to type."""

from __future__ import annotations

import gzip
import hashlib
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from rainband.tasks import fashion
from rainband.tasks.digits import Digits
from rainband.tasks.fashion import TEST, TRAIN, Fashion, Standardize, fetch, find_folder, read_idx
from rainband.tasks.linear import Linear
from rainband.tasks.load import load_task, task_names
from rainband.tasks.mlp import Mlp
from rainband.tasks.quadratic import Quadratic
from rainband.tasks.task import (
    Data,
    DatasetData,
    ModuleTask,
    Task,
    TensorData,
    accuracy_and_loss,
    evaluating,
    fingerprint,
    parameter_groups,
)

FEW_SECONDS = settings(max_examples=30, deadline=None)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradient(task: Task, model: nn.Module, batch: Any) -> Tensor:
    model.zero_grad()
    task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def train(task: Task, optimizer: torch.optim.Optimizer, model: nn.Module, epochs: int) -> None:
    data, shuffle = task.data(), np.random.default_rng(0)
    for _ in range(epochs):
        order = shuffle.permutation(len(data))
        for start in range(0, len(data), task.batch_size):
            optimizer.zero_grad()
            task.loss(model, data.batch(order[start : start + task.batch_size])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


# ---- every built-in task ----


def small(name: str, folder: Path) -> Task:
    match name:
        case "fashion":
            return load_task(name, {"folder": str(fashion_folder(folder))})
        case "mlp":
            return load_task(name, {"parameters": "0.1M", "samples": 100})
    return load_task(name, {})


@pytest.mark.parametrize("name", task_names())
def test_a_built_in_task_starts_alike_under_one_seed_and_has_gradients_and_measures(name: str, tmp_path: Path) -> None:
    task, again = small(name, tmp_path), small(name, tmp_path)
    torch.manual_seed(7)
    model = task.model()
    torch.manual_seed(7)
    other = again.model()

    for mine, yours in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, yours)
    assert fingerprint(task.data()) == fingerprint(again.data())
    loss = task.loss(model, task.data().batch(range(4)))
    assert loss.shape == () and bool(loss.isfinite())
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())
    measures = task.evaluate(model)
    assert "loss" in measures and all(type(value) is float for value in measures.values())


@pytest.mark.parametrize("name", task_names())
def test_a_loss_is_the_mean_over_the_batch(name: str, tmp_path: Path) -> None:
    task = small(name, tmp_path)
    torch.manual_seed(0)
    model, data = task.model(), task.data()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
        single = [float(task.loss(model, data.batch([i]))) for i in range(4)]
        together = float(task.loss(model, data.batch(range(4))))
    assert together == pytest.approx(sum(single) / 4, rel=1e-4)


# ---- quadratic ----


def test_the_gradient_of_a_round_quadratic_is_the_point_less_the_mean_of_the_batch() -> None:
    task = Quadratic(dimension=2, samples=4, condition=1.0)
    model = task.model()
    with torch.no_grad():
        model.w.copy_(torch.tensor([1.0, 10.0]))
    batch = (torch.tensor([[1.0, 2.0], [3.0, 4.0]]),)

    assert gradient(task, model, batch).tolist() == [1.0 - 2.0, 10.0 - 3.0]
    # offsets (0, 8) and (-2, 6): half their squares are 32 and 20
    assert task.loss(model, batch).item() == 26.0


def test_condition_100_makes_the_last_axis_a_hundred_times_flatter_than_the_first() -> None:
    task = Quadratic(dimension=3, condition=100.0)
    slope = gradient(task, task.model(), (-torch.ones(1, 3),))
    torch.testing.assert_close(slope, torch.tensor([1.0, 0.1, 0.01]))


def test_at_its_optimum_a_quadratic_is_flat_and_the_distance_is_0() -> None:
    task = Quadratic(dimension=5, samples=64)
    model = task.model()
    start = task.evaluate(model)
    with torch.no_grad():
        model.w.copy_(task.optimum())

    assert gradient(task, model, task.data().batch(range(64))).abs().max() < 1e-6
    end = task.evaluate(model)
    assert end["distance"] == 0.0
    assert end["loss"] < start["loss"]


def test_distance_is_measured_along_a_straight_line() -> None:
    task = Quadratic(dimension=2, noise=0.0)
    model = task.model()
    with torch.no_grad():
        model.w.copy_(task.optimum() + torch.tensor([3.0, -4.0]))
    assert task.evaluate(model)["distance"] == pytest.approx(5.0, rel=1e-6)


def test_without_noise_half_a_step_of_sgd_halves_the_distance() -> None:
    task = Quadratic(dimension=3, samples=8, condition=1.0, noise=0.0, batch_size=8)
    model = task.model()
    before = task.evaluate(model)["distance"]
    train(task, torch.optim.SGD(model.parameters(), lr=0.5), model, epochs=1)
    assert task.evaluate(model)["distance"] == pytest.approx(before / 2, rel=1e-5)


def test_the_samples_of_a_quadratic_depend_on_its_seed_only() -> None:
    assert fingerprint(Quadratic(seed=1).data()) == fingerprint(Quadratic(seed=1, epochs=3).data())
    assert fingerprint(Quadratic(seed=1).data()) != fingerprint(Quadratic(seed=2).data())


@pytest.mark.parametrize("wrong", [{"dimension": 0}, {"samples": 0}, {"condition": 0.5}, {"noise": -1.0}])
def test_a_quadratic_without_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
        Quadratic(**wrong)


# ---- linear ----


def test_the_gradient_of_linear_is_the_mean_of_its_batch_wherever_it_stands() -> None:
    task = Linear(dimension=2, samples=4)
    model = task.model()
    batch = (torch.tensor([[1.0, 2.0], [2.0, 8.0], [1.0, 4.0], [3.0, 1.0]]),)

    assert gradient(task, model, batch).tolist() == [7 / 4, 15 / 4]
    with torch.no_grad():
        model.weight.fill_(1e6)
    assert gradient(task, model, batch).tolist() == [7 / 4, 15 / 4]


@FEW_SECONDS
@given(
    order=st.permutations(range(8)),
    batch_size=st.sampled_from([1, 2, 4]),
    lr=st.sampled_from([2.0, 0.25, 2**-10]),
    epochs=st.integers(1, 3),
)
def test_whatever_the_order_linear_ends_on_the_same_bits(
    order: list[int], batch_size: int, lr: float, epochs: int
) -> None:
    task = Linear(dimension=3, samples=8 * batch_size, batch_size=batch_size, epochs=epochs)
    model, data = task.model(), task.data()
    for batch in order * epochs:
        samples = range(batch * batch_size, (batch + 1) * batch_size)
        slope = gradient(task, model, data.batch(samples)).view_as(model.weight)
        with torch.no_grad():
            model.weight -= lr * slope
    assert torch.equal(model.weight[0], task.after(lr))
    assert torch.equal(task.after(lr, epochs=2 * epochs), 2 * task.after(lr))


def test_the_samples_of_linear_are_whole_numbers_from_1_to_8() -> None:
    (x,) = Linear().data().batch(range(1024))
    assert sorted(set(x.flatten().tolist())) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"batch_size": 3}, "batch_size=3 would round gradients: choose a power of two"),
        ({"batch_size": 0}, "choose a power of two"),
        ({"samples": 6}, "samples=6 leaves a short last batch.*multiple of batch_size=4"),
        ({"samples": 2**20, "epochs": 3}, "choose at most 2097152 in total"),
    ],
)
def test_linear_refuses_what_would_be_rounded(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Linear(**wrong)


# ---- digits ----


def test_digits_are_1437_and_360_images_that_together_are_the_whole_file() -> None:
    task = Digits()
    images, labels = task.data().batch(range(1437))
    everything, all_labels = task._samples

    assert len(task.data()) == 1437 and len(all_labels) == 1797
    assert images.shape == (1437, 1, 8, 8) and images.dtype == torch.float32
    # how often each digit occurs in the file, as its description says
    assert torch.bincount(all_labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int(torch.bincount(labels).min()) > 100
    assert abs(float(everything.mean())) < 0.01 and abs(float(everything.std()) - 1) < 0.01


def test_the_first_digit_of_the_file_is_a_zero_and_looks_like_one() -> None:
    images, labels = Digits()._samples
    place = int(np.argmin(np.random.default_rng(0).permutation(1797)))  # where the split has put it
    pixels = (images[place, 0] * 6.02 + 4.88).round().int().tolist()
    assert labels[place] == 0
    assert pixels[0] == [0, 0, 5, 13, 9, 1, 0, 0] and pixels[7] == [0, 0, 6, 13, 10, 0, 0, 0]


def test_the_digits_net_has_38282_parameters() -> None:
    assert sum(parameter.numel() for parameter in Digits().model().parameters()) == 38_282


def test_four_epochs_of_plain_training_read_more_than_90_percent_of_the_digits() -> None:
    task = Digits()
    torch.manual_seed(0)
    model = task.model()
    assert task.evaluate(model)["accuracy"] < 0.5
    train(task, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), model, epochs=4)
    measures = task.evaluate(model)
    assert measures["accuracy"] > 0.9 and measures["loss"] < 0.5


def test_digits_without_scikit_learn_say_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'rainband\[data\]'"):
        Digits().data()


# ---- mlp ----


@pytest.mark.parametrize("name, exactly", [("0.1M", 101_770), ("0.7M", 669_706), ("5.8M", 5_824_522)])
def test_an_mlp_has_about_the_parameters_of_its_name(name: str, exactly: int) -> None:
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in Mlp(name).model().parameters()) == exactly
    assert round(exactly / 1e6, 1) == float(name.removesuffix("M"))


def test_an_mlp_ends_in_a_linear_layer_and_holds_back_1000_samples() -> None:
    task = Mlp("0.1M", samples=50)
    assert isinstance(task.model()[-1], nn.Linear)
    assert len(task.data()) == 50 and len(task._samples[0]) == 1050


def test_an_mlp_of_another_size_lists_the_sizes() -> None:
    with pytest.raises(ValueError, match="parameters=7M: choose from 0.1M, 0.7M, 5.8M, 20M"):
        Mlp("7M")


# ---- fashion ----


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def fashion_folder(folder: Path, labels: tuple[int, ...] = (0, 9, 3, 5)) -> Path:
    folder.mkdir(exist_ok=True)
    images = np.arange(len(labels) * 784).reshape(len(labels), 28, 28) % 256
    for pair in (TRAIN, TEST):
        (folder / pair.images).write_bytes(gzip.compress(idx(images)))
        (folder / pair.labels).write_bytes(gzip.compress(idx(np.array(labels))))
    return folder


def test_an_idx_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "f.gz").write_bytes(gzip.compress(idx(np.array([[[1, 2, 3]], [[4, 5, 255]]]))))
    assert read_idx(tmp_path / "f.gz", 3).tolist() == [[[1, 2, 3]], [[4, 5, 255]]]


@pytest.mark.parametrize(
    "content, message",
    [
        (gzip.compress(idx(np.zeros(5))[:-1]), "its header announces 5 bytes, but it has 4"),
        (gzip.compress(idx(np.zeros(5)) + b"!"), "its header announces 5 bytes, but it has 6"),
        (gzip.compress(idx(np.zeros(5)))[:-9], "truncated"),
        (gzip.compress(idx(np.zeros((5, 1)))), "not an idx file of bytes in 1 dimensions"),
        (gzip.compress(b"\0\0\x0d\1\0\0\0\1abcd"), "not an idx file of bytes"),  # 0x0d: floats
        (gzip.compress(b"\0\0\x08\1\0\0"), "not an idx file of bytes"),
        (gzip.compress(b""), "not an idx file of bytes"),
        (b"", "truncated"),
        (b"not packed", "damaged"),
    ],
    ids=["short", "long", "cut", "dimensions", "floats", "no_size", "no_head", "empty", "plain"],
)
def test_a_damaged_idx_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "f.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / "f.gz", 1)


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fashion, "MAX_BYTES", 1000)
    (tmp_path / "f.gz").write_bytes(gzip.compress(idx(np.zeros(2000))))
    with pytest.raises(ValueError, match="too large"):
        read_idx(tmp_path / "f.gz", 1)


def test_fashion_pairs_images_with_labels_and_trains_on_the_training_half(tmp_path: Path) -> None:
    task = Fashion(folder=str(fashion_folder(tmp_path)))
    images, labels = task.data().batch([1, 3])
    assert labels.tolist() == [9, 5]
    assert images[0, 0, :3].tolist() == [784 % 256, 785 % 256, 786 % 256]

    (tmp_path / TEST.labels).write_bytes(gzip.compress(idx(np.array([7, 7, 7, 7]))))
    model = task.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.get_parameter("10.bias")[7] = 1.0  # always says 7: right on the held-out half, wrong on the other
    assert task.evaluate(model)["accuracy"] == 1.0


def test_fashion_pixels_0_and_255_become_minus_0_81_and_2_02() -> None:
    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1)
    standard = Standardize()(images)
    assert standard.shape == (2, 1, 1, 1)
    assert [round(x, 2) for x in standard.flatten().tolist()] == [-0.81, 2.02]


@pytest.mark.parametrize("labels", [(0, 10), (0, 1, 2)])
def test_a_folder_with_other_data_is_refused(labels: tuple[int, ...], tmp_path: Path) -> None:
    fashion_folder(tmp_path, (1, 2))
    (tmp_path / TRAIN.labels).write_bytes(gzip.compress(idx(np.array(labels))))
    with pytest.raises(ValueError, match=r"does not hold Fashion-MNIST.*\(2, 28, 28\)"):
        Fashion(folder=str(tmp_path)).data()


def test_fashion_is_looked_for_in_the_cache_folder_and_then_in_debians(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(fashion, "DEBIAN_FOLDER", tmp_path / "debian")
    with pytest.raises(ValueError, match=r"debian .*apt-get install dataset-fashion-mnist.*folder=PATH"):
        find_folder(None, download=False)

    fashion_folder(tmp_path / "debian")
    assert find_folder(None, download=False) == tmp_path / "debian"
    cache = tmp_path / ".cache" / "rainband" / "fashion"
    cache.parent.mkdir(parents=True)
    fashion_folder(cache)
    assert find_folder(None, download=False) == cache
    with pytest.raises(ValueError, match="is not in /nowhere "):
        find_folder("/nowhere", download=False)


def test_a_download_is_kept_only_when_its_content_is_the_known_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, there = fashion_folder(tmp_path / "home"), tmp_path / "there"
    with pytest.raises(ValueError, match="is not the known file"):
        fetch(there, home.as_uri())
    assert list(there.iterdir()) == []

    unpacked = {file.name: gzip.decompress(file.read_bytes()) for file in home.iterdir()}
    right = {name: hashlib.sha256(content).hexdigest() for name, content in unpacked.items()}
    monkeypatch.setattr(fashion, "SHA256", right)
    fetch(there, home.as_uri())
    assert {file.name: file.read_bytes() for file in there.iterdir()} == {
        file.name: file.read_bytes() for file in home.iterdir()
    }
    assert find_folder(str(there), download=False) == there


def test_a_download_that_fails_says_what_to_type_instead(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="could not download.*apt-get install dataset-fashion-mnist"):
        fetch(tmp_path, (tmp_path / "nothing").as_uri())


# ---- data of one's own ----


def test_tensor_data_gives_the_rows_asked_for_in_that_order() -> None:
    data = TensorData(torch.tensor([10, 11, 12]), torch.tensor([[1.0], [2.0], [3.0]]))
    first, second = data.batch([2, 0, 2])
    assert first.tolist() == [12, 10, 12] and second.tolist() == [[3.0], [1.0], [3.0]]
    assert len(data) == 3
    assert data.batch([])[0].tolist() == []


def test_tensor_data_takes_a_read_only_array_of_indices() -> None:
    indices = np.array([1], dtype=np.int32)
    indices.flags.writeable = False
    assert TensorData(torch.tensor([5, 6])).batch(indices)[0].tolist() == [6]


@pytest.mark.parametrize("lengths", [[], [2, 3]])
def test_tensor_data_of_unequal_lengths_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"equal length"):
        TensorData(*[torch.zeros(length) for length in lengths])


class SharedWords(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"word": "abc"[index], "place": index, "vector": torch.full((2,), float(index))}


def test_a_dataset_is_collated_as_a_data_loader_would() -> None:
    batch = DatasetData(SharedWords()).batch(np.array([2, 0]))
    assert batch["word"] == ["c", "a"]
    assert batch["place"].tolist() == [2, 0]
    assert batch["vector"].tolist() == [[2.0, 2.0], [0.0, 0.0]]


def test_a_dataset_may_have_its_own_collate() -> None:
    data = DatasetData(SharedWords(), collate=lambda samples: "".join(sample["word"] for sample in samples))
    assert data.batch([1, 1, 2]) == "bbc"


def test_a_subset_keeps_its_own_numbering() -> None:
    data = DatasetData(Subset(TensorDataset(torch.arange(10)), [7, 8, 9]))
    assert len(data) == 3 and data.batch([0, 2])[0].tolist() == [7, 9]


def test_a_dataset_without_length_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([])

    with pytest.raises(ValueError, match="Stream has no length.*map-style"):
        DatasetData(Stream())  # type: ignore[arg-type]


def test_a_module_a_dataset_and_a_loss_make_a_task() -> None:
    pairs = TensorDataset(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
    task = ModuleTask(lambda: nn.Linear(1, 1), pairs, functional.mse_loss)
    model = task.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    # (9 + 25) / 2, with slopes -(3*1 + 5*2) and -(3 + 5)
    assert task.loss(model, task.data().batch([0, 1])).item() == 17.0
    assert gradient(task, model, task.data().batch([0, 1])).tolist() == [-13.0, -8.0]
    assert task.evaluate(model) == {}


def test_a_module_task_evaluates_in_evaluation_mode_and_leaves_the_model_as_it_was() -> None:
    def measure(model: nn.Module) -> dict[str, float]:
        return {"training": float(model.training), "gradients": float(torch.is_grad_enabled())}

    task = ModuleTask(lambda: nn.Linear(1, 1), TensorDataset(torch.zeros(1)), functional.mse_loss, measure)
    model = task.model()
    assert task.evaluate(model) == {"training": 0.0, "gradients": 0.0}
    assert model.training and torch.is_grad_enabled()


def test_a_submodule_that_was_frozen_stays_frozen_after_evaluating() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1).eval())
    with pytest.raises(RuntimeError), evaluating(model):
        assert not model[0].training
        raise RuntimeError
    assert model[0].training and not model[1].training


def test_accuracy_and_loss_count_over_all_chunks() -> None:
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([1.0, 0.0]))  # always says class 0
    labels = torch.tensor([0] * 1500 + [1] * 500)
    measures = accuracy_and_loss(model, torch.zeros(2000, 1), labels)
    assert measures["accuracy"] == 0.75
    # -log softmax is log(1 + 1/e) for class 0 and 1 more for class 1
    assert measures["loss"] == pytest.approx(np.log1p(np.exp(-1)) + 0.25, rel=1e-5)


def test_parameter_groups_are_the_tasks_own_or_one_of_all() -> None:
    class Grouped(Quadratic):
        def groups(self, model: nn.Module) -> list[dict[str, Any]]:
            return [{"params": list(model.parameters()), "lr": 0.5}]

    model = Quadratic().model()
    assert parameter_groups(Quadratic(), model) == [{"params": [model.w]}]
    assert parameter_groups(Grouped(), model) == [{"params": [model.w], "lr": 0.5}]


# ---- fingerprints ----


@dataclass
class Listed:
    """Data whose batch of one is the listed sample itself."""

    samples: list[Any]

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Any) -> Any:
        return [self.samples[i] for i in indices]


def of_one(sample: Any) -> str:
    return fingerprint(Listed([sample]))


def test_a_fingerprint_is_short_stable_text() -> None:
    # fixed for ever: checkpoints keep it
    assert fingerprint(TensorData(torch.tensor([1, 2, 3]))) == "aea7b462c42d737d"


def pytrees() -> st.SearchStrategy[Any]:
    plain = st.none() | st.booleans() | st.integers(-3, 3) | st.text("ab", max_size=2) | st.binary(max_size=2)
    arrays = st.lists(st.integers(0, 2), max_size=3).map(lambda x: np.array(x, dtype=np.int16))
    tensors = st.lists(st.integers(0, 2), max_size=3).map(lambda x: torch.tensor(x, dtype=torch.bfloat16))
    return st.recursive(
        plain | arrays | tensors,
        lambda inner: (
            st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text("xy", max_size=1), inner, max_size=2)
        ),
        max_leaves=4,
    )


def described(pytree: Any) -> str:
    """Say what a pytree is, so that two are equal when their descriptions are."""
    match pytree:
        case tuple():
            return f"({', '.join(map(described, pytree))})"
        case dict():
            return f"{{{', '.join(f'{key!r}: {described(pytree[key])}' for key in sorted(pytree))}}}"
        case torch.Tensor() | np.ndarray():
            return f"{type(pytree).__name__} {pytree.tolist()}"
    return repr(pytree)


@FEW_SECONDS
@given(one=pytrees(), other=pytrees())
def test_fingerprints_are_equal_exactly_when_samples_are(one: Any, other: Any) -> None:
    assert of_one(one) == of_one(one)
    assert (of_one(one) == of_one(other)) == (described(one) == described(other))


@pytest.mark.parametrize(
    "one, other",
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 1), torch.zeros(1, 2)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.float32)),
        (("ab", "c"), ("a", "bc")),
        (((1,), 2), ((1, 2),)),
        (1, True),
        (1, 1.0),
        ("1", 1),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
    ],
)
def test_samples_that_only_look_alike_have_different_fingerprints(one: Any, other: Any) -> None:
    assert of_one(one) != of_one(other)


def test_the_order_of_a_dicts_keys_and_the_layout_of_a_tensor_do_not_matter() -> None:
    assert of_one({"a": 1, "b": 2}) == of_one({"b": 2, "a": 1})
    square = torch.arange(4).reshape(2, 2)
    assert of_one(square.t()) == of_one(square.t().contiguous())


@pytest.mark.parametrize("changed", [0, 1, 2, 49, 50, 51, 97, 98, 99])
def test_a_change_at_the_beginning_middle_or_end_is_noticed(changed: int) -> None:
    x = torch.zeros(100)
    before = fingerprint(TensorData(x))
    x[changed] = 1
    assert fingerprint(TensorData(x)) != before


def test_the_number_of_samples_is_part_of_the_fingerprint() -> None:
    prints = {fingerprint(TensorData(torch.zeros(length))) for length in range(12)}
    assert len(prints) == 12


def test_random_transforms_do_not_change_a_fingerprint_nor_it_the_random_numbers() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 4

        def batch(self, indices: Any) -> Any:
            return torch.rand(2), np.random.rand(2), random.random()

    def next_numbers() -> tuple[float, float, float]:
        return float(torch.rand(1)), float(np.random.rand()), random.random()

    def seed() -> None:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)

    noisy: Data = Noisy()
    seed()
    expected = next_numbers()
    seed()
    first = fingerprint(noisy)
    assert next_numbers() == expected
    assert fingerprint(noisy) == first


def test_of_samples_with_a_generator_of_their_own_only_the_number_is_compared() -> None:
    class Augmented:
        def __init__(self, length: int, seed: int) -> None:
            self.length = length
            self.generator = np.random.default_rng(seed)

        def __len__(self) -> int:
            return self.length

        def batch(self, indices: Any) -> Any:
            return torch.ones(2) if self.generator.random() < 0.5 else torch.zeros(2)

    assert len({fingerprint(Augmented(100, seed)) for seed in range(4)}) == 1
    assert fingerprint(Augmented(100, 0)) != fingerprint(Augmented(101, 0))


@pytest.mark.parametrize("sample", [object(), np.array([object()])])
def test_a_batch_that_cannot_be_hashed_says_what_can(sample: Any) -> None:
    with pytest.raises(ValueError, match="contains a value of type .*tensors, arrays, numbers and strings"):
        of_one(sample)


# ---- finding a task by its name ----

MODULE = """
from dataclasses import dataclass
from rainband.tasks.linear import Linear
from rainband.tasks.task import ModuleTask
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset
import torch

@dataclass(frozen=True)
class Needs:
    size: int
    batch_size: int = 4
    epochs: int = 1
    def model(self): return nn.Linear(self.size, 1)
    def data(self): ...
    def loss(self, model, batch): ...
    def evaluate(self, model): ...

class Plain:
    batch_size, epochs = 2, 3
    model = data = loss = evaluate = lambda self: None

class Sizeless:
    model = data = loss = evaluate = lambda self: None

ready = Linear(dimension=5)
number = 3
Net = nn.Linear

def mine():
    pairs = TensorDataset(torch.zeros(6, 1), torch.zeros(6, 1))
    return ModuleTask(lambda: nn.Linear(1, 1), pairs, functional.mse_loss, batch_size=2)
"""


@pytest.fixture
def mylab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mylab_for_tasks.py").write_text(MODULE)
    (tmp_path / "broken_for_tasks.py").write_text("import not_there_at_all")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield
    sys.modules.pop("mylab_for_tasks", None)


def test_tasks_are_the_files_of_their_folder() -> None:
    assert {"digits", "fashion", "linear", "mlp", "quadratic"} <= set(task_names())
    assert not {"__init__", "load", "task"} & set(task_names())


def test_names_of_tasks_are_known_before_torch_is_imported() -> None:
    code = (
        "import sys, rainband.tasks as tasks; tasks.task_names(); "
        "sys.exit(not {'torch', 'numpy'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1]).returncode == 0


def test_a_built_in_task_takes_settings_as_text_or_as_values() -> None:
    task = load_task("quadratic", {"dimension": "3", "noise": "0.5", "epochs": 7})
    assert task == Quadratic(dimension=3, noise=0.5, epochs=7)
    assert load_task("fashion", {"folder": "none", "download": "false"}) == Fashion()


@pytest.mark.usefixtures("mylab")
def test_a_task_of_ones_own_is_a_class_an_instance_or_a_function_in_the_current_folder() -> None:
    needs = load_task("mylab_for_tasks:Needs", {"size": "3"})
    assert needs.model().in_features == 3
    assert load_task("mylab_for_tasks:Plain", {}).epochs == 3
    assert load_task("mylab_for_tasks:ready", {}) == Linear(dimension=5)
    assert load_task("mylab_for_tasks:ready", {"samples": "8"}) == Linear(dimension=5, samples=8)
    assert load_task("mylab_for_tasks:mine", {}).batch_size == 2
    changed = load_task("mylab_for_tasks:mine", {"batch_size": "3"})
    assert changed.batch_size == 3 and len(changed.data()) == 6


@pytest.mark.usefixtures("mylab")
@pytest.mark.parametrize(
    "spec, given_settings, message",
    [
        (
            "digit",
            {},
            r"no task named 'digit' \(did you mean digits\?\): choose from clicks, digits, fashion.*module:name",
        ),
        ("zzz", {}, "no task named 'zzz': choose from"),
        ("task", {}, "no task named 'task'"),
        ("digits", {"batch": "8"}, r"Digits has no setting 'batch' \(did you mean batch_size\?\)"),
        ("digits", {"epochs": "x"}, "epochs=x: expected a whole number"),
        ("digits", {"epochs": "0"}, "epochs=0: epochs must be at least 1"),
        ("nowhere_at_all:mine", {}, "no module named 'nowhere_at_all', neither installed nor in /"),
        ("mylab_for_tasks.py:mine", {}, "Omit the ending: mylab_for_tasks"),
        ("./mylab:mine", {}, "type module:name, such as mylab:mine"),
        (":mine", {}, "type module:name"),
        ("mylab_for_tasks:mime", {}, r"has no 'mime' \(did you mean mine\?\)"),
        ("mylab_for_tasks:Needs", {}, "Needs requires size"),
        ("mylab_for_tasks:Plain", {"epochs": "1"}, "no settings, so omit epochs, or make Plain a dataclass"),
        ("mylab_for_tasks:Sizeless", {}, "batch_size, epochs must be whole numbers"),
        ("mylab_for_tasks:number", {}, "is not a task: it has no model, data, loss, evaluate"),
        ("mylab_for_tasks:Net", {}, "is not a task: it has no model, data, loss, evaluate"),
    ],
)
def test_a_wrong_name_or_setting_says_what_would_be_right(
    spec: str, given_settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_task(spec, given_settings)


@pytest.mark.usefixtures("mylab")
def test_a_module_that_misses_another_shows_that_one() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load_task("broken_for_tasks:mine", {})


def test_a_model_in_place_of_its_class_is_refused() -> None:
    with pytest.raises(ValueError, match="this Linear is a model: pass its class, or lambda: Net"):
        ModuleTask(nn.Linear(1, 1), [], nn.functional.mse_loss)
