"""Fault scripts: one line per fault, so that a failing run can be written down, replayed and shortened.

0.250 kill worker 1                           its process ends; the others see the connection close
0.250 kill copy 0                             the same, of the copy of server 0, in a run with --copies 2
0.250 crash worker 1                          its machine ends; the others notice only after a long silence
0.900 start worker 1                          a lost node starts again, or a worker joins for the first time
0.400 pause server 0 for 2.500                as by SIGSTOP: it loses nothing and does nothing
0.300 skew coordinator by 60.000              its clock jumps ahead
0.000 disk worker 0 by 4.000                  saving takes 4 s longer
0.500 raise worker 1                          its next gradient raises, as an error in your code
0.700 stop coordinator                        as by Ctrl-C: the run ends after the current batches, and saves the model
0.100 netsplit worker 0 > coordinator for 3.000       one direction of a partition; messages arrive when it heals
0.100 slow worker 0 > server 1 for 1.000 by 0.200     each message takes 0.2 s longer
0.000 duplicate worker 0 > server 1 for 9.000         messages that may be duplicated arrive twice
0.000 reorder worker 0 > server 1 for 9.000 by 0.300  pushes overtake each other: each takes up to 0.3 s longer
0.200 reset worker 0 > server 1               the connection breaks: messages under way in both directions are lost
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from random import Random

ON_A_NODE = ("kill", "crash", "start", "pause", "skew", "disk", "stop", "raise")
ON_A_LINK = ("netsplit", "slow", "duplicate", "reorder", "reset")
LASTING = ("pause", "netsplit", "slow", "duplicate", "reorder")
WITH_AMOUNT = ("slow", "reorder", "skew", "disk")
LINE = re.compile(
    r"(?P<at_s>[\d.]+) (?P<what>\w+) (?P<node>\w+(?: \d+)?)(?: > (?P<to>\w+(?: \d+)?))?"
    r"(?: for (?P<for_s>[\d.]+))?(?: by (?P<by_s>[\d.]+))?"
)


@dataclass(frozen=True)
class Fault:
    """One fault: what happens, when, to which node or link."""

    at_s: float
    what: str
    node: str  # "worker 1", "server 0", "coordinator"
    to: str = ""  # the other end of a link
    for_s: float = 0.0
    by_s: float = 0.0

    def __post_init__(self) -> None:
        if self.what not in ON_A_NODE + ON_A_LINK:
            raise ValueError(f"no fault named {self.what!r}: choose from {', '.join(ON_A_NODE + ON_A_LINK)}.")
        if (self.what in ON_A_LINK) != bool(self.to):
            raise ValueError(f"{self}: write  {self.what} worker 0{' > server 0' * (self.what in ON_A_LINK)}.")
        if self.what == "stop" and self.node != "coordinator":
            raise ValueError(f"{self}: only the whole run can be stopped: write  stop coordinator.")
        if self.what == "raise" and not _is_worker(self.node):
            raise ValueError(f"{self}: only workers run your code: write  raise worker 0.")
        if (self.what in LASTING) != bool(self.for_s):
            raise ValueError(f"{self}: {_listed(LASTING)} require `for SECONDS`; the others do not take it.")
        if (self.what in WITH_AMOUNT) != bool(self.by_s):
            raise ValueError(f"{self}: {_listed(WITH_AMOUNT)} require `by SECONDS`; the others do not take it.")

    def __str__(self) -> str:
        to = f" > {self.to}" if self.to else ""
        lasting = f" for {self.for_s:.3f}" if self.for_s else ""
        by = f" by {self.by_s:.3f}" if self.by_s else ""
        return f"{self.at_s:.3f} {self.what} {self.node}{to}{lasting}{by}"


def _listed(words: tuple[str, ...]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


Script = tuple[Fault, ...]
FailsWith = Callable[[Script], bool]


def parse(text: str) -> Script:
    """Read a script; empty lines and comments after # are ignored."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return tuple(_fault(line) for line in lines if line)


def _fault(line: str) -> Fault:
    match = LINE.fullmatch(line)
    if match is None:
        raise ValueError(
            f"{line!r} is not a fault: write for example  0.250 kill worker 1  or  0.1 pause server 0 for 2."
        )
    words = match.groupdict()
    seconds = {name: float(words[name] or 0) for name in ("at_s", "for_s", "by_s")}
    return Fault(what=words["what"], node=words["node"], to=words["to"] or "", **seconds)


def check_nodes(script: Script, num_workers: int, num_servers: int, late_workers: str = "", copies: int = 1) -> None:
    """Raise ValueError if a fault names a node that the run does not have.

    `late_workers` says why no worker may join after the start; empty: any may.
    """
    nodes = {"coordinator", *_numbered("worker", num_workers), *_numbered("server", num_servers)}
    if copies > 1:
        nodes |= {*_numbered("copy", num_servers)}
    if not late_workers:
        nodes |= {fault.node for fault in script if fault.what == "start" and _is_worker(fault.node)}
    for fault in script:
        for node in filter(None, (fault.node, fault.to)):
            if node in nodes:
                continue
            if fault.what == "start" and _is_worker(node):
                advice = f"{late_workers}: start only workers that were lost, or omit this line."
            elif _is_worker(node) and not late_workers:
                advice = f"name another node, or add a line such as  0.1 start {node}  that lets it join."
            else:
                advice = "name another node, or omit this line."
            have = f"{_range('worker', num_workers)}, {_range('server', num_servers)} and the coordinator"
            raise ValueError(f"'{fault}': the run has no {node}, only {have}; {advice}")


def _is_worker(node: str) -> bool:
    return re.fullmatch(r"worker (0|[1-9]\d*)", node) is not None


def _numbered(role: str, number: int) -> list[str]:
    return [f"{role} {index}" for index in range(number)]


def _range(role: str, number: int) -> str:
    return f"no {role}s" if not number else f"{role} 0" if number == 1 else f"{role}s 0 to {number - 1}"


def text(script: Iterable[Fault]) -> str:
    return "\n".join(map(str, script))


@dataclass(frozen=True)
class Chances:
    """The limits of a random script."""

    length_s: float  # faults begin within this time, or soon after another fault
    timeout_s: float  # the failure timeout: pauses and partitions last 0.2 to 15 times as long
    most: int = 5  # the number of draws; one draw adds one or two faults
    servers_die: bool = False  # and the coordinator: then the run cannot finish
    coordinator_returns: bool = False  # the coordinator may die, and is started again
    shared_batches: bool = False  # workers exchange gradients with each other
    stops: bool = False  # the run is stopped, as by Ctrl-C
    raises: bool = False  # the code of a worker raises


# How long faults last, in failure timeouts.
DURATIONS = (0.2, 0.2, 0.9, 0.9, 1.5, 1.5, 4.0, 4.0, 15.0)


def random_script(random: Random, num_workers: int, num_servers: int, chances: Chances) -> Script:
    """Draw a script. Every fault but a death heals, and a dead node may be started again.

    Half of the faults follow another one closely, so that they strike while it lasts: many errors need that.
    """
    faults: list[Fault] = []
    for _ in range(random.randint(1, chances.most)):
        at_s = random.uniform(0, chances.length_s)
        if faults and random.random() < 0.5:
            before = random.choice(faults)
            at_s = before.at_s + random.uniform(0, max(before.for_s, chances.timeout_s))
        faults += _random_fault(random, at_s, num_workers, num_servers, chances)
    if chances.shared_batches and num_workers > 1 and random.random() < 0.5:
        faults.append(_between_workers(random, random.uniform(0, chances.length_s), num_workers, chances))
    if chances.stops:
        faults.append(Fault(random.uniform(0, chances.length_s), "stop", "coordinator"))
    if chances.raises:
        faults.append(Fault(random.uniform(0, chances.length_s), "raise", f"worker {random.randrange(num_workers)}"))
    return tuple(sorted(map(_rounded, faults), key=lambda fault: (fault.at_s, str(fault))))


def _random_fault(random: Random, at_s: float, num_workers: int, num_servers: int, chances: Chances) -> list[Fault]:
    lasts_s = chances.timeout_s * random.choice(DURATIONS)
    worker, server = f"worker {random.randrange(num_workers)}", f"server {random.randrange(num_servers)}"
    kinds = ["kill", "kill", "crash", "pause", "netsplit", "slow", "duplicate"]
    kinds += ["join", "stall", "reset", "skew", "disk", "reorder", "tear"]
    match random.choice(kinds + ["end"] * 2 * chances.servers_die + ["replace"] * 3 * chances.coordinator_returns):
        case "kill" | "crash" as what:
            back = [Fault(at_s + lasts_s, "start", worker)] if random.random() < 0.7 else []
            return [Fault(at_s, what, worker), *back]
        case "pause":
            return [Fault(at_s, "pause", worker, for_s=lasts_s)]
        case "stall":
            return [Fault(at_s, "pause", random.choice((server, "coordinator")), for_s=lasts_s)]
        case "join":
            return [Fault(at_s, "start", f"worker {num_workers + random.randrange(2)}")]
        case "end":
            ended = random.choice((server, server, "coordinator"))
            back = [Fault(at_s + lasts_s, "start", ended)] if ended == server and random.random() < 0.5 else []
            return [Fault(at_s, random.choice(("kill", "crash")), ended), *back]
        case "replace":
            what = random.choice(("kill", "crash"))
            return [Fault(at_s, what, "coordinator"), Fault(at_s + lasts_s, "start", "coordinator")]
        case "skew":
            whose = random.choice((worker, server, "coordinator", "coordinator"))
            return [Fault(at_s, "skew", whose, by_s=lasts_s * random.choice((1, 10, 1000)))]
        case "disk":
            return [Fault(at_s, "disk", worker, by_s=lasts_s)]
        case "tear":  # the worker dies while its push has reached some blocks only
            by_s = chances.timeout_s * random.random()
            dies_s = at_s + by_s * random.random()
            return [Fault(at_s, "slow", worker, server, lasts_s, by_s), Fault(dies_s, "kill", worker)]
        case "reorder":
            ends = random.sample((worker, server), 2)
            return [Fault(at_s, "reorder", ends[0], ends[1], lasts_s, chances.timeout_s * random.random())]
        case "reset":
            others = (server, "coordinator") if chances.servers_die else (server,)
            return [Fault(at_s, "reset", worker, random.choice(others))]
        case what:
            ends = random.sample(random.choice(((worker, server), (worker, "coordinator"), (server, "coordinator"))), 2)
            by_s = chances.timeout_s * random.random() if what == "slow" else 0.0
            return [Fault(at_s, what, ends[0], ends[1], lasts_s, by_s)]


def _between_workers(random: Random, at_s: float, num_workers: int, chances: Chances) -> Fault:
    one, other = random.sample(range(num_workers), 2)
    lasts_s = chances.timeout_s * random.choice(DURATIONS)
    return Fault(at_s, "netsplit", f"worker {one}", f"worker {other}", lasts_s)


def _rounded(fault: Fault) -> Fault:
    """Round to the precision of the text, so that a script that is read back is the same script."""
    by_s = max(0.001, round(fault.by_s, 3)) if fault.by_s else 0.0
    return replace(fault, at_s=round(fault.at_s, 3), for_s=round(fault.for_s, 3), by_s=by_s)


def shrink(script: Script, fails: FailsWith) -> Script:
    """Return a short script that still fails: leave faults out, then shorten those that last."""
    script = _leave_out(script, fails)
    for i, fault in enumerate(script):
        for part in (0.125, 0.25, 0.5):
            shorter = _rounded(replace(fault, for_s=fault.for_s * part))
            candidate = (*script[:i], shorter, *script[i + 1 :])
            if fault.for_s and shorter.for_s and fails(candidate):
                script = candidate
                break
    return script


def _leave_out(script: Script, fails: FailsWith) -> Script:
    """Leave out halves, then quarters, down to single faults, as long as the script still fails."""
    size = max(1, len(script) // 2)
    while True:
        shorter = next((rest for rest in _without_each(script, size) if fails(rest)), None)
        if shorter is not None:
            script = shorter
        elif size == 1:
            return script
        else:
            size //= 2


def _without_each(script: Script, size: int) -> Iterable[Script]:
    return ((*script[:at], *script[at + size :]) for at in range(0, len(script), size))
