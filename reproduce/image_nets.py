"""VGG-16 and ResNet-50 in their real shapes, as chains of units, with computed profiles.

The modules are on torch's meta device, which knows shapes and operations and allocates nothing. The time of a unit is
the number of its operations, forward and backward, divided by a given rate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rainband.model_parallel.placement.profile import CutValue, Profile, Unit

IMAGE = (3, 224, 224)
FLOAT_BYTES = 4
VGG_16 = (64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool", 512, 512, 512, "pool", 512, 512, 512, "pool")
RESNET_50 = ((64, 3), (128, 4), (256, 6), (512, 3))  # channels inside a block, blocks


def vgg_16() -> dict[str, nn.Module]:
    """Return VGG-16 as a unit for each of 13 convolutions and 3 linear layers (Simonyan et al. 2015)."""
    units: dict[str, nn.Module] = {}
    channels, name = 3, ""
    for step in VGG_16:
        if isinstance(step, int):
            name = f"conv{len(units) + 1}"
            units[name] = nn.Sequential(nn.Conv2d(channels, step, 3, padding=1), nn.ReLU())
            channels = step
        else:
            units[name] = nn.Sequential(*units[name].children(), nn.MaxPool2d(2))
    units["fc1"] = nn.Sequential(nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU())
    units["fc2"] = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU())
    units["fc3"] = nn.Linear(4096, 1000)
    return units


class Bottleneck(nn.Module):
    """A residual block of 1 x 1, 3 x 3 and 1 x 1 convolutions; the skip is a convolution where the shape changes."""

    def __init__(self, channels: int, inside: int, stride: int) -> None:
        super().__init__()
        wide = 4 * inside
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, inside, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU()),
            *(nn.Conv2d(inside, inside, 3, stride, 1, bias=False), nn.BatchNorm2d(inside), nn.ReLU()),
            *(nn.Conv2d(inside, wide, 1, bias=False), nn.BatchNorm2d(wide)),
        )
        change = nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        self.skip = nn.Identity() if channels == wide and stride == 1 else change

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.layers(x) + self.skip(x)).relu()
        return y


def resnet_50() -> dict[str, nn.Module]:
    """Return ResNet-50 as a stem, 16 bottlenecks and a head (He et al. 2016)."""
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    units: dict[str, nn.Module] = {"stem": nn.Sequential(*stem)}
    channels = 64
    for group, (inside, blocks) in enumerate(RESNET_50):
        for block in range(blocks):
            stride = 2 if group and not block else 1
            units[f"block{group + 1}.{block + 1}"] = Bottleneck(channels, inside, stride)
            channels = 4 * inside
    units["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    return units


NETS = {"VGG-16": vgg_16, "ResNet-50": resnet_50}


def profile_of(net: str, batch_size: int, flops_per_s: float) -> Profile:
    """Return the profile of a model on a machine with this number of operations per second."""
    units, values = [], []
    with torch.device("meta"):
        modules = NETS[net]()
        x = torch.empty(batch_size, *IMAGE)
    names = list(modules)
    for index, (name, module) in enumerate(modules.items()):
        x = x.detach().requires_grad_(index > 0)  # images need no gradient
        with FlopCounterMode(display=False) as forward:
            y = module(x)
        with FlopCounterMode(display=False) as backward:
            y.sum().backward()
        units.append(
            Unit(
                name,
                forward.get_total_flops() / flops_per_s,
                backward.get_total_flops() / flops_per_s,
                sum(p.numel() for p in module.parameters()) * FLOAT_BYTES,
                y.numel() * FLOAT_BYTES,
                type(module).__name__,
            )
        )
        size = y.numel() * FLOAT_BYTES
        if index + 1 < len(names):
            values.append(CutValue(name, name, (names[index + 1],), size, size))
        x = y
    return Profile(net, batch_size, tuple(units), tuple(values))
