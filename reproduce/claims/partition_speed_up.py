"""A fully connected model is fastest on a few machines; a locally connected one scales further (Dean et al. 2012).

The speech model 440 - 4 x 2560 - 8192 has 41.8 M weights. Each machine computes an equal part of the outputs of every
layer, and needs all of the layer below. The image model has windows of 10 x 10, 36 channels, 21,000 classes and 1.7 G
weights (100 x 100 pixels and three local layers are our choice). Each machine has a tile of the image, and only the
borders of tiles are sent. Layers are timed on one core of this machine, in the shapes of their parts, with their SGD
step; local layers per output pixel, because they do not fit in memory. A batch is then simulated over a network of
1 Gbit/s with shared network cards, times that vary by 10 %, and a cost of each message.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch
from torch import nn

from rainband.model.layers import LocallyConnected2d
from rainband.model_parallel.graph.tiles import Window, bounds, overlaps
from rainband.model_parallel.placement.profile import CutValue, Profile, Unit
from rainband.runtimes.simulation.models.cluster_model import ClusterModel, NodeModel, load_model
from rainband.runtimes.simulation.models.compute import ComputeModel
from reproduce.claim import Check, Claim, Method, Values
from reproduce.virtual_partition import batch_s

SPEECH = (440, 2560, 2560, 2560, 2560, 8192)
PIXELS, CHANNELS, WINDOW, LOCAL_LAYERS, CLASSES = 100, 36, 10, 3, 21_000
POOLED = CHANNELS * 7 * 7  # inputs of the layer of classes
BATCH, FLOAT_BYTES = 32, 4
MACHINES = (1, 2, 4, 8, 16, 32, 64)
GRIDS = ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (5, 5), (6, 6), (8, 8), (9, 9), (12, 12))
CORES = (1, 4)  # of a machine, each as fast as the one measured: threads work inside a part
MESSAGE_S = 37e-6  # of a machine's time, at either end: what `rainband calibrate` found on two cores
REPEATS = 10


# ---- measuring ----


@cache
def linear_s(inputs: int, outputs: int) -> tuple[float, float]:
    """Return the seconds of a forward pass, and of a backward pass with the SGD step."""
    return _time(nn.Linear(inputs, outputs), torch.randn(BATCH, inputs))


@cache
def pixel_s(channels: int) -> tuple[float, float]:
    """Return the same for one output pixel of a locally connected layer, measured on a tile of 10 x 10."""
    side = 10
    layer = LocallyConnected2d(channels, CHANNELS, WINDOW, side + WINDOW - 1)
    forward, backward = _time(layer, torch.randn(BATCH, channels, *layer.input_size))
    return forward / side**2, backward / side**2


def _time(layer: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Return the minimum of several measurements of this process's CPU time."""
    x.requires_grad_()
    parameters = list(layer.parameters())
    best = [math.inf, math.inf]
    for _ in range(1 + REPEATS):
        began = time.process_time()
        y = layer(x)
        forward = time.process_time()
        gradients = torch.autograd.grad(y, [x, *parameters], torch.ones_like(y))
        with torch.no_grad():
            for p, gradient in zip(parameters, gradients[1:], strict=True):
                p.add_(gradient, alpha=-1e-6)
        best = [min(best[0], forward - began), min(best[1], time.process_time() - forward)]
    return best[0], best[1]


# ---- the models in parts ----


def speech(machines: int) -> Profile:
    """Put part p of each layer on machine p; all parts of a layer go to all machines, as do the sums of the softmax."""
    units: list[Unit] = []
    values: list[CutValue] = []
    below: list[str] = []
    for layer, (inputs, outputs) in enumerate(pairwise(SPEECH)):
        names = [f"{layer}.{part}" for part in range(machines)]
        times = linear_s(inputs, outputs // machines)
        units += [Unit(name, *times, inputs * outputs // machines * FLOAT_BYTES) for name in names]
        values += [CutValue(name, name, tuple(names), *_both_ways(SPEECH[layer] / machines)) for name in below]
        below = names
    tops = [f"softmax.{part}" for part in range(machines)]
    units += [Unit(name) for name in tops]
    values += [CutValue(name, name, tuple(tops), BATCH * FLOAT_BYTES, 0) for name in below]
    return Profile("speech", BATCH, tuple(units), tuple(values))


def images(rows: int, columns: int) -> Profile:
    """Put tile t of each layer on machine t; borders go to neighbors, pooled outputs to all machines."""
    units: list[Unit] = []
    values: list[CutValue] = []
    tiles, side, channels = rows * columns, PIXELS, 3
    for layer in range(LOCAL_LAYERS):
        here = (bounds(side, rows), bounds(side, columns))
        side, forward_backward = side - WINDOW + 1, pixel_s(channels)
        there = (bounds(side, rows), bounds(side, columns))
        for tile in range(tiles):
            (top, bottom), (left, right) = _tile(there, tile, columns)
            pixels = (bottom - top) * (right - left)
            forward, backward = (seconds * pixels for seconds in forward_backward)
            units.append(Unit(f"{layer}.{tile}", forward, backward, pixels * _weights(channels) * FLOAT_BYTES))
            if layer:  # every machine can read the pixels
                values += _borders(f"{layer - 1}.", f"{layer}.{tile}", here, ((top, bottom), (left, right)), channels)
        channels = CHANNELS
    tops = [f"classes.{tile}" for tile in range(tiles)]
    units += [Unit(name, *linear_s(POOLED, -(-CLASSES // tiles)), POOLED * CLASSES // tiles * 4) for name in tops]
    last = [f"{LOCAL_LAYERS - 1}.{tile}" for tile in range(tiles)]
    values += [CutValue(f"{name} pooled", name, tuple(tops), *_both_ways(POOLED / tiles)) for name in last]
    return Profile("images", BATCH, tuple(units), tuple(values))


def _borders(
    below: str, reader: str, edges: tuple[list[int], list[int]], tile: tuple[tuple[int, int], ...], channels: int
) -> list[CutValue]:
    """Return the values that a tile needs from every tile of the layer below, its own included."""
    window = Window(kernel=WINDOW)
    needed = [window.sees(begin, end, edge[-1]) for (begin, end), edge in zip(tile, edges, strict=True)]
    parts = []
    for down in overlaps(edges[0], needed[0].begin, needed[0].end):
        for across in overlaps(edges[1], needed[1].begin, needed[1].end):
            source = down.tile * (len(edges[1]) - 1) + across.tile
            numbers = (down.end - down.begin) * (across.end - across.begin) * channels
            parts.append(CutValue(f"{below}{source} to {reader}", f"{below}{source}", (reader,), *_both_ways(numbers)))
    return parts


def _tile(edges: tuple[list[int], list[int]], tile: int, columns: int) -> tuple[tuple[int, int], tuple[int, int]]:
    row, column = divmod(tile, columns)
    return (edges[0][row], edges[0][row + 1]), (edges[1][column], edges[1][column + 1])


def _weights(channels: int) -> int:
    return WINDOW * WINDOW * channels * CHANNELS


def _both_ways(numbers_per_sample: float) -> tuple[int, int]:
    size = math.ceil(numbers_per_sample * BATCH * FLOAT_BYTES)
    return size, size


# ---- the machines ----


def cluster() -> ClusterModel:
    compute = ComputeModel(kind="lognormal", step_s=1.0, spread=0.1)
    return replace(load_model("1gbit"), compute=compute, nodes=NodeModel(message_s=MESSAGE_S))


def seconds(profile: Profile, cores: int, seed: int) -> float:
    """Return the seconds of one batch on machines with this number of cores."""
    units = [Unit(u.name, u.forward_s / cores, u.backward_s / cores, u.parameter_bytes) for u in profile.units]
    quick = Profile(profile.model, profile.batch_size, tuple(units), profile.values)
    where = {unit.name: int(unit.name.rpartition(".")[2]) for unit in units}
    return batch_s(quick, where, cluster(), seed)


def point(seed: int, x: float, net: str, cores: int) -> Values:
    """Return how many times as fast x machines are as one."""
    torch.set_num_threads(1)
    return {"times": seconds(profile(net, 1), cores, seed) / seconds(profile(net, int(x)), cores, seed)}


@cache
def profile(net: str, machines: int) -> Profile:
    grids = {rows * columns: (rows, columns) for rows, columns in GRIDS}
    return speech(machines) if net == FULL else images(*grids[machines])


FULL, LOCAL = "fully connected, 42 M", "locally connected, 1.7 G"
CLAIM = Claim(
    paper="Dean et al. 2012, figure 3",
    text="a fully connected model is fastest on 8 machines, and slower on more; a local one is 12 times as fast on 81",
    part="Model parallelism",
    methods=tuple(
        Method(f"{net}, {cores} {'core' if cores == 1 else 'cores'}", {"net": net, "cores": cores}, x=at)
        for net, at in ((FULL, MACHINES), (LOCAL, tuple(rows * columns for rows, columns in GRIDS)))
        for cores in CORES
    ),
    tasks={"": {}},
    point=point,
    x=MACHINES,
    x_label="machines on 1 Gbit/s",
    log_x=True,
    shown={"times": "times as fast as one machine"},
    checks=(
        *(
            Check(
                f"{FULL}, {cores}: slower on 64 machines than on {inner}",
                lambda r, name=f"{FULL}, {cores}", inner=inner: r(name, "times", inner) / r(name, "times", 64),
                above=1.0,
                unit="times",
            )
            for cores, inner in (("1 core", 32), ("4 cores", 16))
        ),
        Check(
            f"{FULL}, 4 cores: faster on 8 machines than on 32",
            lambda r: r(f"{FULL}, 4 cores", "times", 8) / r(f"{FULL}, 4 cores", "times", 32),
            above=1.0,
            unit="times",
        ),
        Check(
            f"{LOCAL}, 4 cores: on 81 machines",
            lambda r: r(f"{LOCAL}, 4 cores", "times", 81),
            above=12.0,
            unit="times as fast as one",
        ),
        Check(
            f"{LOCAL}, 4 cores: faster on 81 machines than on 36",
            lambda r: r(f"{LOCAL}, 4 cores", "times", 81) / r(f"{LOCAL}, 4 cores", "times", 36),
            above=1.0,
            unit="times",
            control=True,
        ),
    ),
)
