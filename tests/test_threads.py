"""The torch threads of workers: a number, or a share of their machine's cores."""

from __future__ import annotations

import pytest

from rainband.cli.options.words import configured
from rainband.options import OptionError, RunOptions, num_threads


@pytest.mark.parametrize(
    "cores, workers, servers, threads",
    [(16, 4, 0, 4), (16, 4, 2, 3), (16, 3, 0, 5), (2, 1, 2, 1), (8, 1, 2, 6), (8, 2, 8, 2), (2, 4, 2, 1), (1, 1, 0, 1)],
)
def test_auto_divides_the_cores(cores: int, workers: int, servers: int, threads: int) -> None:
    """Servers have a core each, of at most half of them, and no worker has none."""
    assert num_threads("threads", "auto", workers, servers, cores) == threads
    assert threads * workers + min(servers, cores // 2) <= max(cores, workers + min(servers, cores // 2))


def test_a_run_has_the_share_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rainband.runtimes.configure.usable_cores", lambda: 16)

    def threads(strategy: str, **options: object) -> int:
        return configured(["digits", strategy], RunOptions(**options)).threads  # type: ignore[typeddict-item]

    assert threads("downpour", threads="auto", workers=4, servers=2) == 3
    assert threads("sync", threads="auto", workers=4) == 4
    assert threads("single", threads="auto") == 16
    assert threads("single", threads="auto", runtime="sim") == 1
    assert threads("single", threads="3") == threads("single", threads=3) == 3
    assert threads("single") == 1


@pytest.mark.parametrize("typed", [0, "0", "all", "-1", 1.5, True])
def test_other_words_are_refused(typed: object) -> None:
    with pytest.raises(OptionError, match="threads"):
        configured(["digits", "single"], {"threads": typed})  # type: ignore[typeddict-item]


def test_ray_reserves_a_number() -> None:
    with pytest.raises(OptionError, match="give a number"):
        configured(["digits", "downpour"], {"threads": "auto", "runtime": "ray"})
