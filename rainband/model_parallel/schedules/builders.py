r"""Pipeline schedules, each a function that returns a table.

    name            update            backward uses            bubble                  activations kept  versions kept
    gpipe           per batch         the same parameters      (S-1) / (M+S-1)         M                 1
    one_f_one_b     per batch         the same                 (S-1) / (M+S-1)         min(M, S-s)       1
    interleaved     per batch         the same                 (P-1) / (VM+P-1)        more than 1F1B    1
    pipedream       per microbatch    those of its forward     none between updates    min(M, S-s)       min(M, S-s)
    pipedream_2bw   per batch         those of one batch ago   none between updates    min(M, S-s)       2

S stages, M microbatches of a batch (of the whole run where nothing is flushed), stage s counted from 0; P machines with
V stages each. Short runs need fewer versions. `check.py` plays a table and compares; `execute.py` trains with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rainband.model_parallel.schedules.table import Action, Table, need

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "pipedream", "pipedream_2bw")


def gpipe(stages: int, microbatches: int, batches: int = 1) -> Table:
    """All forwards, then all backwards, then an update (Huang et al. 2019)."""
    return _flushed("gpipe", stages, microbatches, batches, lambda stage: microbatches)


def one_f_one_b(stages: int, microbatches: int, batches: int = 1) -> Table:
    """Forwards until the first backward can come, then one of each in turn; an update after each batch.

    The bubble is GPipe's. What is saved is memory: a stage keeps the activations of S - s microbatches, not of M.
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
    homes = tuple((stage,) for stage in range(stages))
    return Table(name, tuple(rows), homes, microbatches * batches, (microbatches,) * stages)


def _in_turn(microbatches: Sequence[int], warm_up: int) -> list[tuple[Literal["F", "B"], int]]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(warm_up, len(microbatches))
    order: list[tuple[Literal["F", "B"], int]] = [("F", microbatch) for microbatch in microbatches[:ahead]]
    for place, microbatch in enumerate(microbatches[ahead:]):
        order += [("F", microbatch), ("B", microbatches[place])]
    return order + [("B", microbatch) for microbatch in microbatches[len(microbatches) - ahead :]]


def interleaved(machines: int, stages_per_worker: int, microbatches: int, batches: int = 1) -> Table:
    """1F1B where each machine has several stages: stage c * P + p is on machine p (Narayanan et al. 2021).

    The bubble shrinks by the number of stages of a machine, for as many times more messages.
    """
    _check_counts(machines, microbatches, batches)
    need(stages_per_worker >= 1, f"interleaved with {stages_per_worker} stages on each machine: give at least 1.")
    need(
        microbatches % machines == 0,
        f"interleaved deals microbatches in rounds of one per machine: {microbatches} are not a multiple of "
        f"{machines}. Choose {-(-microbatches // machines) * machines} (--microbatches).",
    )
    rows = []
    for machine in range(machines):
        row: list[Action] = []
        for batch in range(batches):
            row += _interleaved_row(machine, machines, stages_per_worker, microbatches, batch)
        rows.append(tuple(row))
    homes = tuple((stage % machines,) for stage in range(machines * stages_per_worker))
    return Table(
        "interleaved", tuple(rows), homes, microbatches * batches, (microbatches,) * (machines * stages_per_worker)
    )


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

    ahead = (
        total
        if microbatches == machines
        else min(total, 2 * (machines - machine - 1) + (stages_per_worker - 1) * machines)
    )
    turns = _in_turn(range(total), ahead)
    updates = [Action(chunk * machines + machine, "U", batch, batch + 1) for chunk in range(stages_per_worker)]
    return [action(kind, turn) for kind, turn in turns] + updates


def pipedream(replicas: Sequence[int], microbatches: int, *, stash: bool = True, vertical_sync: bool = False) -> Table:
    """Never flush: update after every backward, which uses the parameters of its forward (Narayanan et al. 2019).

    `replicas` has the number of machines of each stage; microbatch m goes to replica m mod r, and the r gradients of a
    round make one update. With vertical sync a microbatch uses one version in all stages, that of its first; without,
    each stage takes its newest. Without stash the backward meets newer parameters than its forward did: no gradient of
    anything, here to be compared with.
    """
    _check_counts(len(replicas), microbatches, 1)
    need(min(replicas) >= 1, f"a stage needs at least one machine, not replicas={tuple(replicas)}.")
    need(
        not vertical_sync or max(replicas) == 1,
        "vertical sync needs one count of updates for all stages: use it without replicas.",
    )
    need(stash or max(replicas) == 1, "without stash there are no replicas: give each stage one machine.")
    rows: list[tuple[Action, ...]] = []
    for stage, count in enumerate(replicas):
        ahead = (sum(replicas) - 1 - sum(replicas[:stage])) // count
        for replica in range(count):
            mine = range(replica, microbatches, count)
            rows.append(_stashing_row(stage, count, mine, ahead, -(-microbatches // count), stash))
    homes, machine = [], 0
    for count in replicas:
        homes.append(tuple(range(machine, machine + count)))
        machine += count
    if vertical_sync:
        rows = _with_the_versions_of_the_first_stage(rows)
    name = "pipedream" + ("" if stash else " without stash") + (" with vertical sync" if vertical_sync else "")
    return Table(name, tuple(rows), tuple(homes), microbatches, tuple(replicas), stash)


def _stashing_row(
    stage: int, replicas: int, mine: Sequence[int], ahead: int, updates: int, stash: bool
) -> tuple[Action, ...]:
    row: list[Action] = []
    version, seen = 0, {}
    for kind, microbatch in _in_turn(mine, ahead):
        if kind == "F":
            seen[microbatch] = version
        row.append(Action(stage, kind, microbatch, seen[microbatch] if stash or kind == "F" else version))
        if kind == "B":
            row.append(Action(stage, "U", microbatch // replicas, microbatch // replicas + 1))
            version = microbatch // replicas + 1
    if version < updates:  # the last round has no microbatch for this replica, but its update is everybody's
        row.append(Action(stage, "U", updates - 1, updates))
    return tuple(row)


def _with_the_versions_of_the_first_stage(rows: list[tuple[Action, ...]]) -> list[tuple[Action, ...]]:
    version = {action.microbatch: action.version for action in rows[0] if action.kind == "F"}
    return [
        tuple(a if a.kind == "U" else a._replace(version=version[a.microbatch]) for a in row)  # an update has its own
        for row in rows
    ]


def pipedream_2bw(stages: int, microbatches: int, batches: int) -> Table:
    """Never flush, keep two versions: batch t uses the parameters of batch t - 1 (2BW, Narayanan et al. 2021).

    W(t+1) = W(t) - lr * gradient at W(t-1), in every stage. A batch needs as many microbatches as there are stages.
    """
    _check_counts(stages, microbatches, batches)
    need(
        microbatches >= stages,
        f"pipedream_2bw needs at least as many microbatches as stages, not {microbatches} for {stages}: the version of "
        "one batch ago must be ready when a batch begins (--microbatches).",
    )
    rows = []
    for stage in range(stages):
        row: list[Action] = []
        for kind, microbatch in _in_turn(range(microbatches * batches), stages - stage - 1):
            batch = microbatch // microbatches
            row.append(Action(stage, kind, microbatch, max(0, batch - 1)))
            if kind == "B" and microbatch % microbatches == microbatches - 1:
                row.append(Action(stage, "U", batch, batch + 1))
        rows.append(tuple(row))
    homes = tuple((stage,) for stage in range(stages))
    return Table("pipedream_2bw", tuple(rows), homes, microbatches * batches, (microbatches,) * stages)


def _check_counts(stages: int, microbatches: int, batches: int) -> None:
    need(
        min(stages, microbatches, batches) >= 1,
        f"a schedule of {stages} stages, {microbatches} microbatches and {batches} batches: give at least 1 of each.",
    )
