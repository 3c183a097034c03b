"""Fashion-MNIST (Xiao et al. 2017): 70,000 images of clothes, 28 x 28 pixels, ten classes."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import urllib.request
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rainband.tasks.task import TensorData, accuracy_and_loss

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
PUBLIC_URL = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
MAX_BYTES = 64 * 2**20  # of one file, compressed or not; the largest has 47,040,016


class ImagePair(NamedTuple):
    """The two files of the training data or of the test data."""

    images: str
    labels: str


TRAIN = ImagePair("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
TEST = ImagePair("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
SHA256 = {  # of the uncompressed bytes, because compressors differ
    TRAIN.images: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    TRAIN.labels: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    TEST.images: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    TEST.labels: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


class Standardize(nn.Module):
    """Converts bytes to floats of mean 0 and variance 1; in the model, so that data takes a quarter of the memory."""

    def forward(self, images: Tensor) -> Tensor:
        return (images.unsqueeze(1).float() / 255 - 0.2860) / 0.3530


@dataclass(frozen=True)
class Fashion:
    folder: str | None = None  # with the four .gz files; None looks in the cache folder, then in Debian's
    download: bool = False  # download missing files
    batch_size: int = 64
    epochs: int = 3

    def model(self) -> nn.Sequential:
        """Build a convolutional model with 105,866 parameters."""
        return nn.Sequential(
            Standardize(),
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def data(self) -> TensorData:
        return TensorData(*_read_pair(self._found, TRAIN))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return accuracy_and_loss(model, *self._test)

    @cached_property
    def _found(self) -> Path:
        return find_folder(self.folder, self.download)

    @cached_property
    def _test(self) -> tuple[Tensor, Tensor]:
        return _read_pair(self._found, TEST)


def find_folder(folder: str | None, download: bool) -> Path:
    """Return the first folder that has all four files, downloading them if requested."""
    cache = Path.home() / ".cache" / "rainband" / "fashion"
    folders = [Path(folder).expanduser()] if folder else [cache, DEBIAN_FOLDER]
    for candidate in folders:
        if all((candidate / name).is_file() for name in SHA256):
            return candidate
    if download:
        fetch(folders[0])
        return folders[0]
    raise ValueError(
        f"Fashion-MNIST is not in {' or '.join(map(str, folders))} (files: {', '.join(SHA256)}). "
        "Type apt-get install dataset-fashion-mnist, or set task.folder=PATH of a copy, or task.download=true."
    )


def fetch(folder: Path, url: str = PUBLIC_URL) -> None:
    """Download the missing files; only files with the known hash are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, sha256 in SHA256.items():
        if not (folder / name).is_file():
            _write_whole(folder / name, _checked(f"{url}/{name}", sha256))


def _checked(address: str, sha256: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=30) as reply:
            compressed: bytes = reply.read(MAX_BYTES)
    except OSError as error:  # no internet, no such address, time-out
        raise ValueError(
            f"could not download {address}: {error}. "
            "Type apt-get install dataset-fashion-mnist, or set task.folder=PATH of a copy."
        ) from error
    found = hashlib.sha256(_unpack(compressed, address)).hexdigest()
    if found != sha256:
        raise ValueError(f"{address} is not the known file: sha256 {found} instead of {sha256}. Nothing was kept.")
    return compressed


def _write_whole(file: Path, content: bytes) -> None:
    """Write to a temporary file and rename it, so that other workers never see an incomplete file."""
    handle, unfinished = tempfile.mkstemp(dir=file.parent, prefix=file.name)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        os.replace(unfinished, file)
    except BaseException:
        os.unlink(unfinished)
        raise


def _read_pair(folder: Path, pair: ImagePair) -> tuple[Tensor, Tensor]:
    images, labels = read_idx(folder / pair.images, 3), read_idx(folder / pair.labels, 1)
    if images.shape != (len(labels), 28, 28) or np.any(labels > 9):
        raise ValueError(
            f"{folder} does not hold Fashion-MNIST: {pair.images} has shape {images.shape} and {pair.labels} "
            f"{len(labels)} labels up to {max(labels, default=0)}; it must have an image of 28 x 28 for each "
            "label, and labels of 0 to 9."
        )
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def read_idx(file: Path, dimensions: int) -> np.ndarray:
    """Read a compressed idx file: the magic bytes 0, 0, 8, dimensions; each size as 4 bytes; the values as bytes."""
    content, start = _unpack(file.read_bytes(), str(file)), 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < start:
        raise ValueError(
            f"{file} is not an idx file of bytes in {dimensions} dimensions: it begins with {content[:4]!r}."
        )
    shape = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{file} is damaged: its header announces {math.prod(shape)} bytes, but it has {len(content) - start}. "
            "Delete it and download it again."
        )
    # A writable copy, because torch warns about read-only memory.
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def _unpack(compressed: bytes, name: str) -> bytes:
    try:
        unpacker = zlib.decompressobj(wbits=31)  # 31: with a gzip header
        content = unpacker.decompress(compressed, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"{name} is damaged: {error}. Delete it and download it again.") from error
    if not unpacker.eof:
        raise ValueError(f"{name} is truncated or too large. Delete it and download it again.")
    return content
