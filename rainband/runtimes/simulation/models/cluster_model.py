"""The models of network, compute and nodes of a simulated cluster: by name, or from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rainband.runtimes.simulation.models.compute import ComputeModel
from rainband.runtimes.simulation.models.network import NetworkModel
from rainband.settings import as_dict, build


@dataclass(frozen=True)
class NodeModel:
    """The costs of nodes."""

    apply_bytes_per_s: float = 6e9  # a server checks and applies gradients
    gather_bytes_per_s: float = 0.0  # a server adds gradients that share one step; 0: as fast as applying
    read_bytes_per_s: float = 8e9  # a server copies parameters into a reply
    push_bytes_per_s: float = 6e9  # a worker copies gradients to where they are sent from
    pull_bytes_per_s: float = 8e9  # a worker copies parameters into its model
    message_s: float = 10e-6  # cost of a message and its answer for a server
    worker_message_s: float = 0.0  # cost of a message that a worker sends or receives
    shared_memory: bool = False  # all nodes on one machine: workers read parameters in place
    cores: int = 0  # of one machine, shared by all nodes; 0: each node has its own core
    crowding: float = 0.0  # slowdown by each further busy core, as a fraction
    wake_s: float = 0.0  # until an idle core runs a process that wakes up
    moves: float = 1.0  # probability of migrating on wake-up, if the own core is busy and another idle

    def __post_init__(self) -> None:
        for name in ("apply_bytes_per_s", "read_bytes_per_s", "push_bytes_per_s", "pull_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: choose a speed above 0.")
        for name in ("gather_bytes_per_s", "message_s", "worker_message_s", "crowding", "wake_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: choose 0 or more.")
        if not 0 <= self.moves <= 1:
            raise ValueError(f"moves={self.moves}: choose a probability from 0 to 1.")


@dataclass(frozen=True)
class ClusterModel:
    """The models of everything that takes time."""

    network: NetworkModel = field(default_factory=NetworkModel)
    compute: ComputeModel = field(default_factory=ComputeModel)
    nodes: NodeModel = field(default_factory=NodeModel)


NETWORKS = {
    "lan": NetworkModel(latency_s=50e-6, bytes_per_s=1.25e9),
    "1gbit": NetworkModel(latency_s=100e-6, bytes_per_s=125e6),
    "wan": NetworkModel(latency_s=30e-3, bytes_per_s=12.5e6, jitter_s=3e-3),
    "datacenter": NetworkModel(
        latency_s=15e-6, bytes_per_s=3.125e9, rack_size=20, uplink_bytes_per_s=12.5e9, uplink_latency_s=10e-6
    ),
}
PARTS = {"network": NetworkModel, "compute": ComputeModel, "nodes": NodeModel}


def load_model(name: str, compute: Mapping[str, Any] | None = None) -> ClusterModel:
    """Load a cluster by the name of its network or from a TOML file; `compute` overrides settings of [compute]."""
    model = _by_name(name)
    if not compute:
        return model
    return replace(model, compute=compute_model(as_dict(model.compute) | dict(compute)))


def compute_model(settings: Mapping[str, Any]) -> ComputeModel:
    """Build the model of computing times; errors name a setting as it is typed: compute.step_s."""
    try:
        return build(ComputeModel, settings, called="compute")
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith("compute ") else f"compute.{text}") from None


def _by_name(name: str) -> ClusterModel:
    if name in NETWORKS:
        return ClusterModel(NETWORKS[name])
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"no network named {name!r}: choose from {', '.join(NETWORKS)}, or give a TOML file "
            "(rainband calibrate writes one)."
        )
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name} is not a TOML file: {error}.") from None
    return from_tables(tables, name)


def from_tables(tables: dict[str, Any], source: str = "the model") -> ClusterModel:
    """Build a cluster from the tables [network], [compute] and [nodes]; their defaults are those of `lan`."""
    for name, table in tables.items():
        if name not in PARTS or not isinstance(table, dict):
            raise ValueError(f"{source} has a table {name!r}: choose from {', '.join(PARTS)}.")
    built: dict[str, Any] = {}
    for name, cls in PARTS.items():
        table = dict(tables.get(name, {}))
        base = as_dict(NETWORKS[table.pop("like")]) if table.get("like") in NETWORKS else {}
        try:
            built[name] = build(cls, base | table)
        except ValueError as error:
            raise ValueError(f"{source}, [{name}]: {error}") from None
    return ClusterModel(**built)


def to_toml(model: ClusterModel, comment: str = "") -> str:
    """Return the text of a TOML file from which `load_model` builds an equal model."""
    lines = [f"# {line}" for line in comment.splitlines()]
    for part in fields(model):
        lines += ["", f"[{part.name}]"]
        lines += [f"{name} = {_toml(value)}" for name, value in as_dict(getattr(model, part.name)).items()]
    return "\n".join(lines).lstrip("\n") + "\n"


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return repr(value)
