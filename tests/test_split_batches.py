"""Habits of training loops whose workers share each batch: each has the result of plain PyTorch, with 1 to 3 workers.

Scripts compute in float64, so that only the order of additions differs; one worker must be equal bit for bit.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim import LBFGS, SGD, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from rainband.runtimes.training_loop.single_process import SingleProcessLoop
from rainband.runtimes.training_loop.split.orders import PassNumbers, ShuffledOrder
from tests.split_group import run_group

torch.manual_seed(0)
DATA = TensorDataset(torch.randn(26, 5).double(), torch.randint(0, 3, (26,)))  # batches of four, and one of two
Join = Callable[[Any, Any], Any]
Script = Callable[[Join], nn.Module]  # what a user writes
WORKERS = [1, 2, 3]
HABITS: dict[str, Script] = {}


class PlainBatches:
    """A DataLoader with the order of run.batches."""

    def __init__(self, run: Plain, dataset: Any, order: ShuffledOrder, arguments: dict[str, Any]) -> None:
        self.run, self.dataset, self.order, self.arguments = run, dataset, order, arguments

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        order = list(self.order.begin(self.run.passes.next(self.dataset)))
        return iter(DataLoader(self.dataset, batch_sampler=order, generator=torch.Generator(), **self.arguments))


class Plain:
    """Plain PyTorch: what a script does without rainband."""

    is_first = True
    stopped = None

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.passes = PassNumbers()
        self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *error: object) -> None: ...

    def batches(
        self, dataset: Any, batch_size: int, shuffle: bool = True, drop_last: bool = False, **arguments: Any
    ) -> Any:
        if not shuffle:
            return DataLoader(dataset, batch_size, drop_last=drop_last, **arguments)
        return PlainBatches(self, dataset, ShuffledOrder(len(dataset), batch_size, 0, drop_last), arguments)

    def loader(self, loader: Any, batches_ahead: int = 1) -> Any:
        return loader

    def part(self, batch: Any) -> Any:
        return batch

    def epochs(self, number: int) -> range:
        return range(number)

    def no_sync(self) -> Any:
        return nullcontext()

    def paused(self) -> Any:
        return nullcontext()

    def weight(self, weight: float) -> None: ...

    def register(self, *objects: object) -> None: ...

    def mean(self, value: Tensor) -> float:
        return float(value.detach())


def habit(script: Script) -> Script:
    HABITS[script.__name__] = script
    return script


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def backward(model: nn.Module, batch: Any) -> Tensor:
    inputs, labels = batch
    loss = cross_entropy(model(inputs), labels)
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: Optimizer, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = backward(model, batch)
    optimizer.step()
    return loss


# ---- the data ----


@habit
def three_lines(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
    return model


@habit
def loader_before_the_passes(join: Join) -> nn.Module:
    """The loader is made once, its length sets the schedule, and each iteration is another pass."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        loader = run.batches(DATA, batch_size=4)
        scheduler = CosineAnnealingLR(optimizer, 3 * len(loader))
        for _ in run.epochs(3):
            for batch in loader:
                train(model, optimizer, batch)
                scheduler.step()
    assert scheduler.last_epoch == 3 * 7
    return model


@habit
def drop_last(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.batches(DATA, batch_size=4, drop_last=True):
                train(model, optimizer, batch)
    return model


@habit
def no_shuffling(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.batches(DATA, batch_size=4, shuffle=False):
                train(model, optimizer, batch)
    return model


@habit
def fewer_samples_than_workers(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for size in (1, 2, 25):
            for batch in run.batches(DATA, batch_size=size):
                train(model, optimizer, batch)
    return model


@habit
def own_data_loader(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    loader: DataLoader[Any] = DataLoader(DATA, batch_size=4, shuffle=True)
    torch.manual_seed(3)
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.loader(loader):
                train(model, optimizer, batch)
    return model


@habit
def own_collate_function_and_generator(join: Join) -> nn.Module:
    def collate(samples: Sequence[Any]) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in samples]) * 2, "y": torch.stack([y for _, y in samples])}

    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    loader: DataLoader[Any] = DataLoader(
        DATA, batch_size=8, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(5)
    )
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.loader(loader):
                train(model, optimizer, (batch["x"], batch["y"]))
    return model


@habit
def weighted_sampler(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    sampler = WeightedRandomSampler(list(range(1, 27)), 20)
    loader: DataLoader[Any] = DataLoader(DATA, batch_size=6, sampler=sampler)
    torch.manual_seed(3)
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.loader(loader):
                train(model, optimizer, batch)
    return model


class Shuffles:
    """A batch sampler that uses the global random numbers for each batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(5):
            yield torch.randperm(26)[:6].tolist()

    def __len__(self) -> int:
        return 5


@habit
def own_batch_sampler(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    loader: DataLoader[Any] = DataLoader(DATA, batch_sampler=Shuffles())  # type: ignore[arg-type]
    torch.manual_seed(3)
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.loader(loader):
                train(model, optimizer, batch)
    return model


class Stream(IterableDataset[Any]):
    """Samples without numbers, in an order drawn from the global random numbers."""

    def __iter__(self) -> Iterator[Any]:
        for k in torch.randperm(26).tolist():
            yield DATA[k]


@habit
def iterable_dataset(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    loader: DataLoader[Any] = DataLoader(Stream(), batch_size=4)
    torch.manual_seed(3)
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.loader(loader):
                train(model, optimizer, batch)
    return model


@habit
def batches_drawn_by_the_loop(join: Join) -> nn.Module:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    inputs, labels = DATA.tensors
    with join(model, optimizer) as run:
        for _ in range(10):
            rows = torch.randint(26, (8,), generator=run.generator)
            batch = run.part((inputs[rows], labels[rows]))
            train(model, optimizer, batch)
            with torch.no_grad():
                assert len(run.part(inputs)) == 26
    return model


# ---- schedules ----


@habit
def schedule_per_step(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=15)
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
                scheduler.step()
    assert scheduler.last_epoch == 14
    return model


@habit
def schedule_per_epoch(join: Join) -> nn.Module:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.1)
    schedulers: list[LRScheduler] = [CosineAnnealingLR(optimizer, 3), MultiStepLR(optimizer, [1, 2], gamma=0.5)]
    with join(model, optimizer) as run:
        run.register(*schedulers)
        for _ in run.epochs(3):
            for batch in run.batches(DATA, batch_size=8):
                train(model, optimizer, batch)
            for scheduler in schedulers:
                scheduler.step()
    return model


@habit
def schedule_by_the_mean_loss(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=1.5, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, patience=0)
    with join(model, optimizer) as run:
        for _ in range(2):
            for batch in run.batches(DATA, batch_size=4):
                scheduler.step(run.mean(train(model, optimizer, batch)))
    assert optimizer.param_groups[0]["lr"] < 1.5
    return model


# ---- gradients ----


@habit
def clipping(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            optimizer.zero_grad()
            backward(model, batch)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    return model


@habit
def clipping_into_new_gradients(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            optimizer.zero_grad()
            backward(model, batch)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clamp(-0.01, 0.01)
            optimizer.step()
    return model


@habit
def gradient_scaler(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    with join(model, optimizer) as run:
        run.register(scaler)
        for number, (inputs, labels) in enumerate(run.batches(DATA, batch_size=4)):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels) * (math.inf if number == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    return model


@habit
def accumulation(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for _ in range(2):
            for number, batch in enumerate(run.batches(DATA, batch_size=4), 1):
                backward(model, batch)
                if number % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.step()  # the rest
            optimizer.zero_grad()
    return model


@habit
def accumulation_over_batches_drawn_ahead(join: Join) -> nn.Module:
    """Three batches are drawn, then computed, as some libraries do; the last ones are fewer and smaller."""
    model = net()
    optimizer = Adam(model.parameters(), lr=0.05)
    with join(model, optimizer) as run:
        for _ in range(2):
            batches = iter(run.loader(DataLoader(DATA, batch_size=4, shuffle=True), batches_ahead=3))
            while drawn := list(islice(batches, 3)):
                for inputs, labels in drawn:
                    (cross_entropy(model(inputs), labels) / len(drawn)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return model


@habit
def accumulation_without_exchanges(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for _ in range(2):
            batches = run.batches(DATA, batch_size=5)  # 6 batches, the last one has one sample
            for number, batch in enumerate(batches, 1):
                with nullcontext() if number % 3 == 0 else run.no_sync():
                    backward(model, batch)
                if number % 3 == 0:
                    optimizer.step()
                    optimizer.zero_grad()
    return model


@habit
def several_backward_passes_per_batch(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for inputs, labels in run.batches(DATA, batch_size=4):
            optimizer.zero_grad()
            outputs = model(inputs)
            cross_entropy(outputs, labels).backward(retain_graph=True)
            outputs.square().mean().backward()
            optimizer.step()
    return model


@habit
def backward_before_and_after_the_passes(join: Join) -> nn.Module:
    """A trial of the gradients before, and another step on the last batch afterwards."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        backward(model, DATA[:4])
        optimizer.zero_grad()
        for _ in range(2):
            for batch in run.batches(DATA, batch_size=13):
                train(model, optimizer, batch)
            train(model, optimizer, batch)
    return model


@habit
def zeros_where_there_is_no_gradient(join: Join) -> nn.Module:
    model = Routed()
    optimizer = Adam(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            optimizer.zero_grad()
            backward(model, batch)
            for parameter in model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
    return model


@habit
def zeroing_in_place(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            backward(model, batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return model


@habit
def losses_over_tokens(join: Join) -> nn.Module:
    """A mean over the tokens that are not padding: `run.weight` tells how many this worker has."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for inputs, labels in run.batches(DATA, batch_size=8):
            optimizer.zero_grad()
            labels = labels.masked_fill(inputs[:, 0] > 0.2, -100)
            tokens = int((labels >= 0).sum())
            run.weight(tokens)
            loss = cross_entropy(model(inputs), labels, ignore_index=-100, reduction="sum") / max(1, tokens)
            loss.backward()
            optimizer.step()
    return model


@habit
def class_weights(join: Join) -> nn.Module:
    """The mean of cross_entropy(weight=...) is over the weights of the labels."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    weight = torch.tensor([1.0, 4.0, 0.5]).double()
    with join(model, optimizer) as run:
        for inputs, labels in run.batches(DATA, batch_size=8):
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels, weight=weight).backward()
            optimizer.step()
    return model


@habit
def ignored_targets(join: Join) -> nn.Module:
    """Some parts have no target that counts; the penalty is the same on all workers."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for _ in range(2):
            for inputs, labels in run.loader(DataLoader(DATA, batch_size=8)):
                labels = labels.masked_fill(inputs[:, 0] > -0.2, -100)
                loss = 2 * cross_entropy(model(inputs), labels) + 0.01 * sum(
                    p.square().sum() for p in model.parameters()
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return model


@habit
def ignored_pixels(join: Join) -> nn.Module:
    """Each sample has several targets, and gradients are accumulated over two batches."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for step, (inputs, labels) in enumerate(run.batches(DATA, batch_size=6)):
            images = model(inputs).unsqueeze(2) * torch.tensor([1.0, -0.5]).double()
            targets = torch.stack([labels, labels.masked_fill(inputs[:, 1] > 0, -1)], 1)
            cross_entropy(images, targets, ignore_index=-1, label_smoothing=0.1).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    return model


@habit
def sharpness_aware_minimization(join: Join) -> nn.Module:
    """SAM: a step up by hand, another backward pass, a step back, and the step of the optimizer."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            optimizer.zero_grad()
            backward(model, batch)
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.add_(gradient, alpha=0.05)
            optimizer.zero_grad()
            backward(model, batch)
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.05)
            optimizer.step()
    return model


@habit
def checkpointing_inside_the_backward_pass(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for inputs, labels in run.batches(DATA, batch_size=4):
            optimizer.zero_grad()
            hidden = checkpoint(model[:2], inputs.requires_grad_(), use_reentrant=True)
            cross_entropy(model[2](hidden), labels).backward()
            optimizer.step()
    return model


@habit
def gradient_penalty(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for inputs, labels in run.batches(DATA, batch_size=4):
            optimizer.zero_grad()
            inputs = inputs.requires_grad_()
            outputs = model(inputs)
            (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            (cross_entropy(outputs, labels) + slopes.square().mean()).backward()
            optimizer.step()
    return model


# ---- parameters ----


@habit
def parameter_groups(join: Join) -> nn.Module:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05, "weight_decay": 0.1}]
    optimizer = AdamW(groups, lr=0.01)
    with join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            train(model, optimizer, batch)
    return model


@habit
def frozen_then_trained(join: Join) -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    optimizer = SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for epoch in range(3):
            if epoch == 1:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})
            if epoch == 2:
                model[2].requires_grad_(False)
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
    return model


class Routed(nn.Module):
    """Each sample goes through one of three heads, and a fourth is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads = nn.ModuleList(nn.Linear(5, 3).double() for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        kind = (inputs[:, 0] > 1.0).long() + (inputs[:, 0] > 1.5).long()
        outputs = inputs.new_zeros(len(inputs), 3)
        for k in range(3):
            rows = (kind == k).nonzero()[:, 0]
            if len(rows):
                outputs = outputs.index_add(0, rows, self.heads[k](inputs[rows]))
        return outputs


@habit
def unused_parameters(join: Join) -> nn.Module:
    model = Routed()
    optimizer = Adam(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for _ in range(3):
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
    assert model.heads[3].weight.grad is None
    return model


@habit
def unused_parameters_with_accumulation(join: Join) -> nn.Module:
    model = Routed()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for number, batch in enumerate(run.batches(DATA, batch_size=4), 1):
            backward(model, batch)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


@habit
def tied_weights(join: Join) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)).double()
    model[2].weight = model[0].weight
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            train(model, optimizer, batch)
    return model


@habit
def moving_average(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with join(model, optimizer) as run:
        run.register(average)
        for batch in run.batches(DATA, batch_size=4):
            train(model, optimizer, batch)
            average.update_parameters(model)
    return average


@habit
def changes_by_the_loop(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    with join(model, optimizer) as run:
        for number, batch in enumerate(run.batches(DATA, batch_size=4)):
            train(model, optimizer, batch)
            model[0].weight.data.clamp_(-0.3, 0.3)
            if number == 3:
                nn.init.ones_(model[2].weight)
                optimizer.state.pop(model[2].weight)
    return model


@habit
def compiled_model(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")
    with join(compiled, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            train(compiled, optimizer, batch)
    return model


# ---- optimizers ----


@habit
def two_models_and_optimizers(join: Join) -> nn.Module:
    """A GAN: each loss has its own backward pass, and the generator's goes through the discriminator."""
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    discriminator = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    first = Adam(generator.parameters(), lr=0.02)
    second = SGD(discriminator.parameters(), lr=0.1, momentum=0.5)
    with join([generator, discriminator], [first, second]) as run:
        for _ in range(2):
            for real, _ in run.batches(DATA, batch_size=8):
                one, zero = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)
                second.zero_grad()
                binary_cross_entropy_with_logits(discriminator(real), one).backward()
                fake = generator(real.flip(1))
                binary_cross_entropy_with_logits(discriminator(fake.detach()), zero).backward()
                second.step()
                first.zero_grad()
                binary_cross_entropy_with_logits(discriminator(fake), one).backward()
                first.step()
    return nn.ModuleList([generator, discriminator])


@habit
def lbfgs(join: Join) -> nn.Module:
    model = net()
    optimizer = LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    with join(model, optimizer) as run:
        for inputs, labels in run.batches(DATA, batch_size=13):

            def closure(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model(inputs), labels)
                loss.backward()
                return loss

            optimizer.step(closure)
    return model


@habit
def closure_of_an_ordinary_optimizer(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):

            def closure(batch: Any = batch) -> float:
                optimizer.zero_grad()
                return float(backward(model, batch).detach())

            losses.append(optimizer.step(closure))
    model.register_buffer("losses", torch.tensor(losses).double())
    return model


@habit
def whole_matrix_optimizer(join: Join) -> nn.Module:
    model = net()
    muon = Muon([p for p in model.parameters() if p.ndim == 2], lr=0.05)
    adam = AdamW([p for p in model.parameters() if p.ndim < 2], lr=0.05)
    with join(model, [muon, adam]) as run:
        for inputs, labels in run.batches(DATA, batch_size=4):
            for optimizer in (muon, adam):
                optimizer.zero_grad()
            backward(model, (inputs, labels))
            for optimizer in (muon, adam):
                optimizer.step()
    return model


@habit
def saving_and_loading_the_optimizer(join: Join) -> nn.Module:
    model = net()
    optimizer = Adam(model.parameters(), lr=0.05)
    with join(model, optimizer) as run:
        for _ in range(2):
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                train(model, optimizer, batch)
                if number == 2:
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    return model


# ---- the flow of the loop ----


@habit
def continue_on_nan(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for number, (inputs, labels) in enumerate(run.batches(DATA, batch_size=4)):
            loss = cross_entropy(model(inputs), labels) * (math.nan if number in (0, 4) else 1.0)
            if torch.isnan(loss):
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@habit
def break_and_begin_again(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for _ in range(3):
            for number, batch in enumerate(run.batches(DATA, batch_size=4)):
                if number == 2:
                    break
                train(model, optimizer, batch)
    return model


@habit
def return_from_the_block(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with join(model, optimizer) as run:
        for number, batch in enumerate(run.batches(DATA, batch_size=4)):
            if number == 4:
                return model
            train(model, optimizer, batch)
    raise AssertionError("the loop returns before")


@habit
def evaluation_on_one_worker(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with join(model, optimizer) as run:
        for _ in range(3):
            for batch in run.batches(DATA, batch_size=4):
                train(model, optimizer, batch)
            if run.is_first:
                model.eval()
                with torch.no_grad():
                    cross_entropy(model(DATA.tensors[0]), DATA.tensors[1])
                model.train()
    return model


@habit
def evaluation_within_a_pass(join: Join) -> nn.Module:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    losses = []
    with join(model, optimizer) as run:
        for batch in run.batches(DATA, batch_size=4):
            train(model, optimizer, batch)
            with torch.no_grad():
                losses.append(run.mean(cross_entropy(model(batch[0]), batch[1])))
    model.register_buffer("losses", torch.tensor(losses).double())
    return model


# ---- the table ----


def compare(script: Script, workers: int) -> None:
    """Fail unless all workers have the model of plain PyTorch; one worker alone has it bit for bit."""
    plain = script(Plain).state_dict()
    models = run_group(script, workers)
    assert len(models) == workers
    for model in models:
        for key, value in model.state_dict().items():
            if workers == 1:
                assert torch.equal(value, plain[key]), key
            else:
                torch.testing.assert_close(value, plain[key], rtol=1e-12, atol=1e-12)
    for model in models[1:]:
        for key, value in model.state_dict().items():
            assert torch.equal(value, models[0].state_dict()[key]), f"{key} differs between workers"


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_has_the_result_of_plain_pytorch(name: str, workers: int) -> None:
    compare(HABITS[name], workers)


@pytest.mark.parametrize("name", HABITS)
def test_a_script_started_by_python_has_the_result_of_plain_pytorch(name: str) -> None:
    plain = HABITS[name](Plain).state_dict()
    alone = HABITS[name](lambda model, optimizer: SingleProcessLoop()).state_dict()
    assert all(torch.equal(value, plain[key]) for key, value in alone.items())


def test_the_guide_lists_every_habit() -> None:
    guide = (Path(__file__).parent.parent / "docs" / "guides" / "training_loop.md").read_text(encoding="utf-8")
    table = guide.split("| in your loop | test |")[1].split("\n\n")[0]
    assert re.findall(r"\| `(\w+)` \|$", table, re.MULTILINE) == list(HABITS)
