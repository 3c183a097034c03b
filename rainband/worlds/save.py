"""Save a module as safetensors: a file that plain PyTorch loads in two lines."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors.torch
from torch import nn


def save_model(module: nn.Module, path: str) -> None:
    """Write beside, then rename: a crash leaves the old file or the new one, whole."""
    if not path:
        return
    beside = Path(f"{path}.{os.getpid()}.part")
    safetensors.torch.save_model(module, str(beside))
    beside.rename(path)
