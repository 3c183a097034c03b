"""Ways to feed data to workers that share each batch: each has the result of plain PyTorch, or is an error."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.utils.data import (
    DataLoader,
    TensorDataset,
)

from tests.test_split_batches import DATA, WORKERS, Join, Script, compare, net, train

DATA_HABITS: dict[str, Script] = {}
OTHERS = TensorDataset(torch.randn(19, 5).double(), torch.randint(0, 3, (19,)))


def habit(script: Script) -> Script:
    DATA_HABITS[script.__name__] = script
    return script


def set_up() -> tuple[nn.Sequential, SGD]:
    model = net()
    torch.manual_seed(3)
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9)


def shuffled(data: Any = DATA, size: int = 4, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=size, shuffle=True, **arguments)


def train_both(model: nn.Module, optimizer: SGD, first: Any, second: Any) -> None:
    """Train with the loss of one batch plus a part of that of another one."""
    optimizer.zero_grad()
    loss = cross_entropy(model(first[0]), first[1]) + 0.5 * cross_entropy(model(second[0]), second[1])
    loss.backward()
    optimizer.step()


# ---- several loaders ----


@habit
def zip_of_two_loaders(join: Join) -> nn.Module:
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        for _ in range(2):
            for first, second in zip(run.loader(shuffled()), run.loader(shuffled(OTHERS, 3)), strict=False):
                train_both(model, optimizer, first, second)
    return model


@habit
def zip_of_two_datasets(join: Join) -> nn.Module:
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        for _ in range(2):
            for first, second in zip(run.batches(DATA, 4), run.batches(OTHERS, 8), strict=False):
                train_both(model, optimizer, first, second)
    return model


@habit
def zip_of_one_dataset_with_itself(join: Join) -> nn.Module:
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        loader = run.loader(shuffled())
        for _ in range(2):
            for first, second in zip(loader, loader, strict=True):
                train_both(model, optimizer, first, second)
    return model


@habit
def a_second_loader_that_begins_again(join: Join) -> nn.Module:
    """The labelled batches end a pass, and the unlabelled ones begin another pass when they are used up."""
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        others = run.loader(shuffled(OTHERS, 8))
        more = iter(others)
        for _ in range(2):
            for batch in run.loader(shuffled()):
                try:
                    other = next(more)
                except StopIteration:
                    more = iter(others)
                    other = next(more)
                train_both(model, optimizer, batch, other)
    return model


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


@habit
def two_infinite_iterators(join: Join) -> nn.Module:
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        first, second = forever(run.loader(shuffled())), forever(run.loader(shuffled(OTHERS, 4)))
        for _ in range(17):
            train_both(model, optimizer, next(first), next(second))
    return model


@habit
def loaders_in_turn(join: Join) -> nn.Module:
    """Several tasks take turns."""
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        tasks = [forever(run.loader(shuffled())), forever(run.loader(shuffled(OTHERS, 3)))]
        for step in range(17):
            train(model, optimizer, next(tasks[step % 2]))
    return model


@habit
def a_loader_picked_at_random(join: Join) -> nn.Module:
    """Each worker picks the same one, because the numbers have a seed of their own."""
    model, optimizer = set_up()
    numbers = random.Random(4)
    with join(model, optimizer) as run:
        tasks = [forever(run.loader(shuffled())), forever(run.loader(shuffled(OTHERS, 3)))]
        for _ in range(17):
            train(model, optimizer, next(numbers.choice(tasks)))
    return model


@habit
def several_batches_of_another_loader_per_batch(join: Join) -> nn.Module:
    """As the critic of a GAN, which is trained more often than its generator."""
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        more = forever(run.loader(shuffled(OTHERS, 4)))
        for batch in run.loader(shuffled()):
            for _ in range(3):
                train(model, optimizer, next(more))
            train(model, optimizer, batch)
    return model


@habit
def a_pass_inside_each_batch(join: Join) -> nn.Module:
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        for batch in run.loader(shuffled(size=13)):
            for other in run.loader(shuffled(OTHERS, 5)):
                train_both(model, optimizer, batch, other)
        for batch in run.loader(shuffled()):
            train(model, optimizer, batch)
    return model


@habit
def one_loader_after_the_other(join: Join) -> nn.Module:
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        for batch in chain(run.loader(shuffled()), run.loader(shuffled(OTHERS, 3))):
            train(model, optimizer, batch)
    return model


@habit
def noise_that_the_loop_draws_beside_a_loader(join: Join) -> nn.Module:
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        for _ in range(2):
            for inputs, labels in run.batches(DATA, 4):
                noise = run.part(torch.randn(4, 5, generator=run.generator).double())
                loss = cross_entropy(model(inputs), labels) + model(noise).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model


# ---- validation ----


def accuracy(model: nn.Module, batches: Any) -> Tensor:
    right = total = 0
    for inputs, labels in batches:
        right += int((model(inputs).argmax(1) == labels).sum())
        total += len(labels)
    return torch.tensor(right / total)


@habit
def validation_inside_a_pass(join: Join) -> nn.Module:
    model, optimizer = set_up()
    with join(model, optimizer) as run:
        for _ in range(2):
            for step, batch in enumerate(run.batches(DATA, 4)):
                train(model, optimizer, batch)
                if step % 3 == 0:
                    with torch.no_grad():
                        found = accuracy(model, run.batches(OTHERS, 4, shuffle=False))
    model.register_buffer("found", found)
    return model


@habit
def validation_in_evaluation_mode(join: Join) -> nn.Module:
    """The loader is read with gradients, and the forward pass is computed without."""
    model, optimizer = set_up()
    found = []
    with join(model, optimizer) as run:
        for _ in range(2):
            model.train()
            for batch in run.loader(shuffled()):
                train(model, optimizer, batch)
            model.eval()
            for inputs, labels in run.loader(DataLoader(OTHERS, 4)):
                with torch.no_grad():
                    found.append(cross_entropy(model(inputs), labels))
    model.register_buffer("found", torch.stack(found))
    return model


@habit
def training_in_evaluation_mode(join: Join) -> nn.Module:
    model, optimizer = set_up()
    model.eval()
    with join(model, optimizer) as run:
        for batch in run.loader(shuffled()):
            train(model, optimizer, batch)
    return model


# ---- the table ----


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", DATA_HABITS)
def test_a_way_to_feed_data_has_the_result_of_plain_pytorch(name: str, workers: int) -> None:
    compare(DATA_HABITS[name], workers)
