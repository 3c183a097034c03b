"""A Ray cluster: connecting to it, and reserving places for the workers and servers of a run."""

from __future__ import annotations

import atexit
import importlib
import logging
import math
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from rainband.options import OptionError, opt
from rainband.runtimes.configure import usable_cores

OLDEST = (2, 54)  # of Ray, because strangers could delete through the dashboard of earlier ones (CVE-2026-27482)
INSTALL = "pip install 'rainband[ray]'"
LOCAL = "local"
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
NICENESS = "RAY_worker_niceness"
TOKEN_FILE = Path.home() / ".ray" / "auth_token"
ANSWER_WITHIN_S = 0.5
SHUTDOWN_WITHIN_S = 10.0

Resources = Mapping[str, float]  # such as {"CPU": 1, "GPU": 0.5}


class RayConnection(NamedTuple):
    """The module `ray`, which is connected to a cluster, and whether that demands no token."""

    ray: Any
    is_open: bool


def import_ray() -> Any:
    """Return the module `ray`; raise OptionError if there is none, or if it is too old."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        missing = "is not installed" if error.name == "ray" else f"cannot be imported ({error})"
        raise OptionError(f"{opt('runtime', 'ray')} requires Ray, which {missing}: type {INSTALL}.") from None
    version = tuple(int(number) for number in re.findall(r"\d+", ray.__version__)[:2])
    if version < OLDEST:
        raise OptionError(
            f"{opt('runtime', 'ray')} requires Ray {'.'.join(map(str, OLDEST))} or later, and {ray.__version__} is "
            f"installed: type {INSTALL}."
        )
    return ray


@contextmanager
def connected(address: str, needed_cpus: float) -> Iterator[RayConnection]:
    """Connect to the cluster at `address`; without one, to that of RAY_ADDRESS, or start Ray on this machine.

    A connection of the user's own (`ray.init`) is used and left as it is. Ray on this machine gets at least
    `needed_cpus` processors, whatever there is: as in a run of processes, several may share one.
    """
    if address.startswith("ray://"):
        raise OptionError(
            f"{opt('address', address)}: a Ray client cannot be reached by the workers. Start the run on a node of the "
            f"cluster (ray job submit, or ray exec) with {opt('address', 'auto')}."
        )
    found = address or os.environ.get("RAY_ADDRESS") or LOCAL
    if "ray" not in sys.modules:  # Ray reads these variables once, when it is imported
        os.environ.update(_authentication(starts_here=found == LOCAL))
    ray = import_ray()
    if ray.is_initialized():
        if ray.util.client.ray.is_connected():
            raise OptionError(
                f"{opt('runtime', 'ray')}: this process is a Ray client, which the workers cannot reach. Start the run "
                "on a node of the cluster (ray job submit, or ray exec)."
            )
        yield RayConnection(ray, is_open=False)
        return
    _connect(ray, found, needed_cpus)
    try:
        yield RayConnection(ray, is_open=os.environ.get(MODE) != "token")
    finally:
        if not within(SHUTDOWN_WITHIN_S, ray.shutdown):
            atexit.unregister(ray.shutdown)  # it would wait once more


def within(seconds: float, call: Callable[[], object]) -> bool:
    """Make a call that may wait for a lost cluster; return False if it still waits, on a thread of its own."""
    thread = threading.Thread(target=call, name="end a part of Ray", daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _connect(ray: Any, address: str, needed_cpus: float) -> None:
    had_token = TOKEN_FILE.exists()
    if address == LOCAL:  # as processes of a run without Ray; by default Ray gives way to all other programs
        os.environ.setdefault(NICENESS, "0")
    of_local = {"num_cpus": max(usable_cores(), math.ceil(needed_cpus)), "include_dashboard": False}
    try:
        ray.init(
            address=address,
            log_to_driver=False,  # the output of the processes arrives with their heartbeats
            logging_level=logging.WARNING,
            **(of_local if address == LOCAL else {}),
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"{opt('address', address)}: cannot connect to a Ray cluster ({first_line(error)}). Start one on its first "
            f"node with ray start --head, or omit {opt('address')} to start Ray on this machine. If the cluster "
            f"demands a token, it must be in ~/.ray/auth_token or {TOKEN_PATH}."
        ) from None
    if not had_token and TOKEN_FILE.exists():  # Ray has written one, which all users of this machine can read
        TOKEN_FILE.chmod(0o600)


def first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


def _authentication(starts_here: bool) -> dict[str, str]:
    """Return the variables with which Ray demands a token of everyone, or shows the one that it finds.

    Without a token, everyone who reaches the ports of a cluster can run programs on it. A new token is in no file.
    """
    if MODE in os.environ:
        return {}
    if TOKEN in os.environ or Path(os.environ.get(TOKEN_PATH) or TOKEN_FILE).is_file():
        return {MODE: "token"}
    return {MODE: "token", TOKEN: secrets.token_hex(32)} if starts_here else {}


def actor_options(resources: Resources) -> dict[str, Any]:
    """Return what an actor is made with, so that Ray reserves these resources for it."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {"num_cpus": 0}
    options |= {names[name]: amount for name, amount in resources.items() if name in names}
    own = {name: amount for name, amount in resources.items() if name not in names}
    return {**options, "resources": own} if own else options


def groups_of_workers(number: int, need: Resources, nodes: Sequence[Resources], servers: int) -> list[int]:
    """Return how many workers to place together on one node: as many as fit on the largest beside its servers.

    The bundles of a placement group are spread over the nodes; a bundle of several workers keeps these together.
    """
    beside = -(-servers // max(1, len(nodes)))  # servers on each node; each takes one place of a worker
    fits = max((_fits(node, need) for node in nodes), default=0) - beside
    size = max(1, min(number, fits))
    return [min(size, number - first) for first in range(0, number, size)]


def _fits(node: Resources, need: Resources) -> int:
    amounts = [int(node.get(name, 0.0) / amount + 1e-9) for name, amount in need.items() if amount > 0]
    return min(amounts, default=1)


def times(number: int, need: Resources) -> dict[str, float]:
    return {name: number * amount for name, amount in need.items()}


def answers(node: Mapping[str, Any]) -> bool:
    """Return True if the process that manages a node accepts connections: Ray itself notices its end much later."""
    with suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_WITHIN_S).close()
        return True
    return False
