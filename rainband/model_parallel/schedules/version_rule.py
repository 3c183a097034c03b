"""The versions of a stage's parameters: a batch's version and update, and how long each is needed; no tensors."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from rainband.stage import StageVersions


@dataclass(frozen=True)
class VersionRule:
    """The rule of one stage. Batches, updates and versions count from 0 since the pipeline last ran empty."""

    how: StageVersions
    replicas: tuple[int, ...]  # workers of each stage
    stage: int

    @property
    def ahead(self) -> int:
        """Forwards before the first backward."""
        return (sum(self.replicas) - 1 - sum(self.replicas[: self.stage])) // self.replicas[self.stage]

    @property
    def batches(self) -> int:
        """Batches of an update: one per replica, or with 2BW `batches_per_update`."""
        if self.how.pipedream_2bw:
            return self.how.batches_per_update or len(self.replicas)
        return self.replicas[self.stage]

    def update(self, batch: int) -> int:
        return batch // self.batches

    def completes(self, batch: int) -> bool:
        """Return True if this batch is a worker's last one of an update. A replica computes one batch of each."""
        return not self.how.pipedream_2bw or batch % self.batches == self.batches - 1

    def version(self, batch: int, newest: int) -> int:
        """Return the newest version; with vertical sync that of S - 1 batches ago, with 2BW that of one update ago."""
        if self.how.pipedream_2bw:
            return max(0, self.update(batch) - 1)
        if self.how.vertical_sync:
            return max(0, batch - len(self.replicas) + 1)
        return newest


class LiveVersions:
    """The versions of one stage's parameters that are in memory, with a reference count each."""

    def __init__(self) -> None:
        self.newest = 0
        self.users: dict[int, int] = {0: 0}  # version -> batches that will go back through it
        self.peak = 1

    def hold(self, version: int) -> None:
        assert version in self.users, f"version {version} was released, there are {sorted(self.users)}"
        self.users[version] += 1

    def drop(self, version: int) -> None:
        self.users[version] -= 1

    def update(self, later: Container[int], stash: bool = True) -> bool:
        """Make the next version; return True if it overwrites the one before. `later`: versions of later forwards."""
        overwrites = not stash or (not self.users[self.newest] and self.newest not in later)
        if overwrites:
            del self.users[self.newest]
        self.newest += 1
        self.users[self.newest] = 0
        self.peak = max(self.peak, len(self.users))
        return overwrites

    def release(self, later: Container[int]) -> list[int]:
        """Forget the versions that nothing needs any more, and return them."""
        unused = [v for v, users in sorted(self.users.items()) if not users and v != self.newest and v not in later]
        for version in unused:
            del self.users[version]
        return unused

    def restart(self) -> None:
        """Count from 0 again; only the newest version is left, and it becomes version 0."""
        assert len(self.users) == 1
        self.newest, self.users = 0, {0: 0}


def check_stage_versions(how: StageVersions, replicas: Sequence[int]) -> None:
    """Raise ValueError if stages with these numbers of workers cannot keep their versions in this way."""
    if not how.pipedream_2bw:
        return
    if max(replicas) > 1:
        raise ValueError(
            f"pipedream_2bw requires one worker per stage, and the placement has {tuple(replicas)}: omit "
            "pipedream_2bw, or use --partitioner one_machine_per_stage."
        )
    if how.batches_per_update and how.batches_per_update < len(replicas):
        raise ValueError(
            f"batches_per_update={how.batches_per_update} is less than the {len(replicas)} stages, so the parameters "
            f"of one update ago would not be ready in time: type batches_per_update={len(replicas)} or more."
        )
