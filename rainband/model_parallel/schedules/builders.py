r"""Pipeline schedules, each a function that returns a table.

    name            update            backward uses            bubble                  activations kept  versions kept
    gpipe           per batch         the same parameters      (S-1) / (M+S-1)         M                 1
    one_f_one_b     per batch         the same                 (S-1) / (M+S-1)         min(M, S-s)       1
    interleaved     per batch         the same                 (P-1) / (VM+P-1)        more than 1F1B    1
    pipedream       per microbatch    those of its forward     none between updates    min(M, S-s)       min(M, S-s)
    pipedream_2bw   per batch         those of one batch ago   none between updates    min(M, S-s)       2

S stages, M microbatches of a batch (of the whole run where nothing is flushed), stage s counted from 0; P machines with
V stages each. Short runs need fewer versions. `check.py` plays a table and compares; `in_process.py` trains with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rainband.model_parallel.schedules.table import Action, Table, need
from rainband.model_parallel.schedules.version_rule import VersionRule
from rainband.stage import StageVersions

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "pipedream", "pipedream_2bw")


def gpipe(stages: int, microbatches: int, batches: int = 1) -> Table:
    """Return a table of all forwards, then all backwards, then an update (Huang et al. 2019)."""
    return _flushed("gpipe", stages, microbatches, batches, lambda stage: microbatches)


def one_f_one_b(stages: int, microbatches: int, batches: int = 1) -> Table:
    """Return a table of forwards until the first backward can start, then one of each in turn, then an update.

    The bubble is GPipe's. It saves memory: a stage keeps the activations of S - s microbatches, not of M.
    """
    return _flushed("one_f_one_b", stages, microbatches, batches, lambda stage: stages - stage - 1)


def _flushed(name: str, stages: int, microbatches: int, batches: int, warm_up: Callable[[int], int]) -> Table:
    _check_counts(stages, microbatches, batches)
    rows = []
    for stage in range(stages):
        row: list[Action] = []
        for batch in range(batches):
            first = batch * microbatches
            for kind, microbatch in _in_turn(range(first, first + microbatches), warm_up(stage)):
                row.append(Action(stage, kind, microbatch, batch))
            row.append(Action(stage, "U", batch, batch + 1))
        rows.append(tuple(row))
    machines = tuple((stage,) for stage in range(stages))
    return Table(name, tuple(rows), machines, microbatches * batches, (microbatches,) * stages)


def _in_turn(microbatches: Sequence[int], warm_up: int) -> list[tuple[Literal["F", "B"], int]]:
    """Return `warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(warm_up, len(microbatches))
    order: list[tuple[Literal["F", "B"], int]] = [("F", microbatch) for microbatch in microbatches[:ahead]]
    for number, microbatch in enumerate(microbatches[ahead:]):
        order += [("F", microbatch), ("B", microbatches[number])]
    return order + [("B", microbatch) for microbatch in microbatches[len(microbatches) - ahead :]]


def interleaved(machines: int, stages_per_worker: int, microbatches: int, batches: int = 1) -> Table:
    """Return a 1F1B table where each machine has several stages: stage c * P + p is on machine p.

    Narayanan et al. 2021. With V stages per machine the bubble is V times smaller, and messages are V times as many.
    """
    _check_counts(machines, microbatches, batches)
    need(stages_per_worker >= 1, f"interleaved with {stages_per_worker} stages per machine: at least 1 is required.")
    need(
        microbatches % machines == 0,
        f"interleaved deals microbatches in rounds of one per machine, and {microbatches} is not a multiple of "
        f"{machines}: use --microbatches {-(-microbatches // machines) * machines}.",
    )
    rows = []
    for machine in range(machines):
        row: list[Action] = []
        for batch in range(batches):
            row += _interleaved_row(machine, machines, stages_per_worker, microbatches, batch)
        rows.append(tuple(row))
    stages = machines * stages_per_worker
    machine_of = tuple((stage % machines,) for stage in range(stages))
    return Table("interleaved", tuple(rows), machine_of, microbatches * batches, (microbatches,) * stages)


def _interleaved_row(
    machine: int, machines: int, stages_per_worker: int, microbatches: int, batch: int
) -> list[Action]:
    total, first = stages_per_worker * microbatches, batch * microbatches

    def action(kind: Literal["F", "B"], turn: int) -> Action:
        round_number, within = divmod(turn, machines * stages_per_worker)
        chunk = within // machines
        if kind == "B":
            chunk = stages_per_worker - 1 - chunk
        microbatch = first + round_number * machines + within % machines
        return Action(chunk * machines + machine, kind, microbatch, batch)

    warm_up = 2 * (machines - machine - 1) + (stages_per_worker - 1) * machines
    ahead = total if microbatches == machines else min(total, warm_up)
    turns = _in_turn(range(total), ahead)
    updates = [Action(chunk * machines + machine, "U", batch, batch + 1) for chunk in range(stages_per_worker)]
    return [action(kind, turn) for kind, turn in turns] + updates


def pipedream(replicas: Sequence[int], microbatches: int, *, stash: bool = True, vertical_sync: bool = False) -> Table:
    """Return a table that never flushes: an update after every backward, which uses the parameters of its forward.

    PipeDream (Narayanan et al. 2019). `replicas` has the number of machines of each stage; microbatch m goes to
    replica m mod r, and the r gradients of a round make one update. With vertical sync a microbatch uses one version
    in all stages, that of its first; otherwise each stage uses its newest. Without stash a backward may use newer
    parameters than its forward: the result is not the gradient of any function, and serves comparison only.
    """
    _check_counts(len(replicas), microbatches, 1)
    need(min(replicas) >= 1, f"replicas={tuple(replicas)}: a stage requires at least one machine.")
    need(
        not vertical_sync or max(replicas) == 1,
        "vertical sync requires one count of updates for all stages: use it without replicas.",
    )
    need(stash or max(replicas) == 1, "without stash a stage has no replicas: give each stage one machine.")
    name = "pipedream" + ("" if stash else " without stash") + (" with vertical sync" if vertical_sync else "")
    return _never_flushed(name, StageVersions(stash=stash, vertical_sync=vertical_sync), replicas, microbatches)


def pipedream_2bw(stages: int, microbatches: int, batches: int) -> Table:
    """Return a table that never flushes and keeps two versions: batch t uses the parameters of batch t - 1.

    2BW (Narayanan et al. 2021): W(t+1) = W(t) - lr * gradient at W(t-1), in every stage.
    """
    _check_counts(stages, microbatches, batches)
    need(
        microbatches >= stages,
        f"pipedream_2bw requires at least as many microbatches as stages, not {microbatches} for {stages}: the version "
        "of one batch ago must be ready when a batch begins.",
    )
    how = StageVersions(pipedream_2bw=True, batches_per_update=microbatches)
    return _never_flushed("pipedream_2bw", how, (1,) * stages, microbatches * batches)


def _never_flushed(name: str, how: StageVersions, replicas: Sequence[int], microbatches: int) -> Table:
    rows: list[tuple[Action, ...]] = []
    machines: list[tuple[int, ...]] = []
    rules = [VersionRule(how, tuple(replicas), stage) for stage in range(len(replicas))]
    for stage, count in enumerate(replicas):
        machines.append(tuple(range(len(rows), len(rows) + count)))
        rows += [_row(rules[stage], range(replica, microbatches, count), microbatches) for replica in range(count)]
    return Table(name, tuple(rows), tuple(machines), microbatches, tuple(rule.batches for rule in rules), how.stash)


def _row(rule: VersionRule, own: Sequence[int], microbatches: int) -> tuple[Action, ...]:
    row: list[Action] = []
    newest, used, updates = 0, dict[int, int](), -(-microbatches // rule.batches)
    for kind, microbatch in _in_turn(own, rule.ahead):
        if kind == "F":
            used[microbatch] = rule.version(microbatch, newest)
        version = used[microbatch] if rule.how.stash or kind == "F" else newest
        row.append(Action(rule.stage, kind, microbatch, version))
        if kind == "B" and rule.completes(microbatch):
            newest = rule.update(microbatch) + 1
            row.append(Action(rule.stage, "U", newest - 1, newest))
    if newest < updates:  # the last round has no microbatch for this replica, but all replicas make its update
        row.append(Action(rule.stage, "U", updates - 1, updates))
    return tuple(row)


def _check_counts(stages: int, microbatches: int, batches: int) -> None:
    need(
        min(stages, microbatches, batches) >= 1,
        f"a schedule of {stages} stages, {microbatches} microbatches and {batches} batches: at least 1 of each is "
        "required.",
    )
