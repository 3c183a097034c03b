"""The manifest of a checkpoint: which run it is of, how far it was, and which files belong to it."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import xxhash

from rainband.errors import BadCheckpoint
from rainband.protocol.data_plan import DataPlan
from rainband.protocol.layout import Layout
from rainband.protocol.saved_state import SavedBlock, SavedCommands, SavedFile

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 32 << 20
MAX_SPREAD = 1 << 20  # portions that some blocks have and others lack
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


class RunFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run that a checkpoint is of. One that continues it must agree in what determines the training."""

    run: str  # the name of its directory
    task: str
    task_settings: dict[str, Any] = {}
    strategy: str
    strategy_settings: dict[str, Any] = {}
    num_workers: int
    num_servers: int
    script: str = ""
    seed: int = 0
    config: dict[str, Any] = {}  # all options of the run, as in its config.json


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of manifest.json."""

    format: int = FORMAT
    step: int  # batches that the parameters have
    created_at: str
    facts: RunFacts
    plan: DataPlan
    layout: Layout
    num_replicas: int  # for which the update rules were made
    files: tuple[SavedFile, ...]
    blocks: tuple[SavedBlock, ...] = ()  # of the servers; none: the workers have the optimizer
    commands: SavedCommands | None = None  # of a full-batch strategy
    metrics: dict[str, float] = {}
    hash: str = ""  # of everything above

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def hash_of(body: bytes | bytearray | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(body)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, with its hash."""
    plain = _in_json(msgspec.to_builtins(manifest, str_keys=True))
    del plain["hash"]
    plain["hash"] = hash_of(msgspec.json.encode(plain))
    return msgspec.json.format(msgspec.json.encode(plain), indent=1) + b"\n"


def _in_json(value: Any) -> Any:
    """Return the same with text in the place of NaN and infinity, such as a diverged model's loss: JSON has none."""
    if isinstance(value, dict):
        return {key: _in_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode_manifest(data: bytes, name: str) -> Manifest:
    """Return a manifest after all checks that need no other file; raise BadCheckpoint with the name of this one."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise BadCheckpoint(name, f"it has format {head.format}, and this version of Rainband reads {FORMAT}")
        manifest = msgspec.json.decode(data, type=Manifest, strict=False)  # numbers may be texts, see _in_json
        _ = manifest.plan.num_batches
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, ZeroDivisionError) as error:
        raise BadCheckpoint(name, f"it is not a manifest ({error})") from None
    if _hash_of_the_rest(data) != manifest.hash:
        raise BadCheckpoint(name, "it has changed since it was written: its hash differs")
    for file in manifest.files:
        if not PLAIN_NAME.fullmatch(file.name) or file.name == MANIFEST:
            raise BadCheckpoint(name, f"{file.name!r} is not the name of a file of a checkpoint")
    if wrong := _impossible(manifest):
        raise BadCheckpoint(name, wrong)
    return manifest


def _impossible(manifest: Manifest) -> str:
    """Return what cannot be true of the batches that a checkpoint has; "" if all can."""
    plan, step, blocks = manifest.plan, manifest.step, manifest.blocks
    if step < 0 or (blocks and not plan.coordinated and step > plan.num_batches):
        return f"it claims {step:,} batches, of {plan.num_batches:,}"
    first = min((block.first_open for block in blocks), default=0)
    last = max((max((*block.open, block.first_open)) for block in blocks), default=0)
    if first < 0 or last > plan.num_portions or last - first > MAX_SPREAD:
        return f"its blocks claim the batches of portions {first:,} to {last:,}, of {plan.num_portions:,}"
    return ""


def _hash_of_the_rest(data: bytes) -> str:
    """Return the hash of a manifest without its own one, however it is indented."""
    plain = msgspec.json.decode(data)
    plain.pop("hash", None)
    return hash_of(msgspec.json.encode(plain))


class _Head(msgspec.Struct):
    format: int
