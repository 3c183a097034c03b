"""Save a module as safetensors: a file that plain PyTorch loads in two lines."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from rainband.errors import NotSaved, RainbandError
from rainband.model.whole_tensors import WholeTensor, write_whole
from rainband.protocol.layout import BlockSpec, Layout


def save_model(module: nn.Module, path: str) -> None:
    """Save to a temporary file and rename it: a crash leaves the old file or the new one."""
    if not path:
        return
    with _replacing(path) as beside:
        safetensors.torch.save_model(module, str(beside))


def load_weights(module: nn.Module, path: str) -> None:
    """Copy the weights of a safetensors file into a module; ValueError if they are those of another model."""
    if not path:
        return
    try:
        safetensors.torch.load_model(module, path)
    except (RuntimeError, safetensors.SafetensorError) as error:
        raise ValueError(_of_another_model(path, error)) from None


def load_tensors(module: nn.Module, tensors: Mapping[str, Tensor], place: str) -> None:
    """Copy the parameters and buffers of a checkpoint into a module; ValueError if they are those of another model.

    Shared parameters need only one of their names, and buffers that a file of the model leaves out are left out.
    """
    own, others = module.state_dict(), {name for name, _ in module.named_buffers()}
    given = {name: tensor for name, tensor in tensors.items() if name in own or name not in others}
    shared = {own[name].data_ptr() for name in given if name in own}
    try:
        missing, unexpected = module.load_state_dict(given, strict=False)
    except RuntimeError as error:  # other shapes
        raise ValueError(_of_another_model(place, error)) from None
    missing = [name for name in missing if own[name].data_ptr() not in shared]
    if missing or unexpected:
        raise ValueError(_of_another_model(place, f"missing: {missing}, unexpected: {unexpected}"))


def _of_another_model(place: str, why: object) -> str:
    return f"the weights of {place} are not those of this model: {' '.join(str(why).split())}"


def save_part(tensors: Mapping[str, Tensor], path: str, part: int) -> str:
    """Save one worker's submodel beside the final file; return its path."""
    if not path:
        return ""
    beside = f"{path}.{part}.part"
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside)
    return beside


class _SavedTensor(NamedTuple):
    """A tensor in the file of a submodel."""

    file: Path
    begin: int  # in bytes
    size: int
    entry: dict[str, Any]  # of the file's header


def join_parts(parts: Sequence[Path], path: str, whole: Sequence[WholeTensor] = ()) -> None:
    """Merge the submodels into one file, in chunks of 1 MiB, and remove them.

    `whole`: tensors of which the submodels have shards.
    """
    if not path:
        return
    saved = {name: tensor for part in parts for name, tensor in _tensors_of(part)}
    shards = {shard.name for one in whole for shard in one.shards}
    copied = {name: tensor for name, tensor in saved.items() if name not in shards}
    header: dict[str, dict[str, Any]] = {}
    end = 0
    for name, tensor in copied.items():
        header[name] = {**tensor.entry, "data_offsets": [end, end + tensor.size]}
        end += tensor.size
    for one in whole:
        of_shards = [saved[shard.name] for shard in one.shards]
        begin, end = end, end + sum(shard.size for shard in of_shards)
        header[one.name] = {**of_shards[0].entry, "shape": list(one.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at multiples of eight
    with _replacing(path) as beside:
        with beside.open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            for tensor in copied.values():
                _copy_into(out, tensor)
            out.truncate(8 + len(encoded) + end)
        for one in whole:
            begin = 8 + len(encoded) + header[one.name]["data_offsets"][0]
            _write_shards(beside, begin, one, saved)
    for part in parts:
        part.unlink()


def _tensors_of(part: Path) -> Iterator[tuple[str, _SavedTensor]]:
    length, described = _header_of(part)
    for name, entry in described.items():
        first, last = entry["data_offsets"]
        yield name, _SavedTensor(part, length + first, last - first, entry)


def _copy_into(out: IO[bytes], tensor: _SavedTensor) -> None:
    with tensor.file.open("rb") as source:
        source.seek(tensor.begin)
        left = tensor.size
        while left:
            chunk = source.read(min(left, 1 << 20))
            out.write(chunk)
            left -= len(chunk)


def _write_shards(path: Path, begin: int, one: WholeTensor, saved: Mapping[str, _SavedTensor]) -> None:
    def shard(name: str) -> Tensor:
        with safetensors.safe_open(str(saved[name].file), framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    write_whole(path, begin, one, shard(one.shards[0].name).dtype, shard)


def save_blocks(layout: Layout, blocks: Sequence[BlockSpec], values: Mapping[int, bytes | Tensor], path: str) -> None:
    """Save parameters from the values of their blocks, under the names of the model."""
    vectors = [torch.empty(vector.numel, dtype=getattr(torch, vector.dtype)) for vector in layout.vectors]
    for block in blocks:
        given = values[block.index]
        tensor = torch.frombuffer(bytearray(given), dtype=torch.uint8) if isinstance(given, bytes) else given
        vectors[block.vector][block.start : block.stop] = tensor.view(vectors[block.vector].dtype)
    with _replacing(path) as beside:
        safetensors.torch.save_file(named_parameters(layout, vectors), beside)


def save_tensors(tensors: Mapping[str, Tensor], path: str, metadata: dict[str, str] | None = None) -> None:
    """Save tensors as they are named."""
    copies = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with _replacing(path) as beside:
        safetensors.torch.save_file(copies, beside, metadata)


def named_parameters(layout: Layout, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the parameters under the names of the model, cut out of the vectors of their layout."""
    tensors: dict[str, Tensor] = {}
    for spec in layout.parameters:
        in_memory = vectors[spec.vector][spec.start : spec.start + spec.numel]
        in_memory = in_memory.view([spec.shape[dimension] for dimension in spec.order])
        inverse = sorted(range(len(spec.order)), key=spec.order.__getitem__)
        tensors[spec.name.replace("_orig_mod.", "")] = in_memory.permute(inverse).contiguous()  # of torch.compile
    return tensors


def elsewhere_for(path: str) -> Path:
    """Return where a model is saved that cannot be saved as `path`, for example because the disk is full."""
    return Path(tempfile.gettempdir(), f"{Path(path).parent.name}.safetensors")


@contextmanager
def saving(path: str, module: nn.Module | None = None) -> Iterator[None]:
    """If there is a path, raise NotSaved for any error inside but one between nodes: then another worker saves.

    `module` is first saved elsewhere, if only workers have its parameters: those of all others may be lost then.
    """
    if not path:
        yield
        return
    try:
        yield
    except RainbandError:
        raise
    except Exception as error:
        why = f"the model could not be saved ({type(error).__name__}: {error})"
        if module is not None:
            elsewhere = elsewhere_for(path)
            with suppress(Exception):  # then the first error says more
                save_model(module, str(elsewhere))
                why += f"; it is in {elsewhere}"
        raise NotSaved(why) from error


@contextmanager
def _replacing(path: str) -> Iterator[Path]:
    """Yield the path of a temporary file, which in the end takes the place of `path` with the usual permissions."""
    beside = Path(f"{path}.{os.getpid()}.part")
    try:
        beside.touch()
        usual = stat.S_IMODE(beside.stat().st_mode)
        yield beside
        with suppress(OSError):  # some file systems have no permissions
            beside.chmod(usual)  # safetensors makes files that only their owner can read
        beside.rename(path)
    finally:
        beside.unlink(missing_ok=True)


def _header_of(part: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the offset of the tensors in a safetensors file, and its header."""
    with part.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        described = json.loads(file.read(length))
    described.pop("__metadata__", None)
    return 8 + length, described
