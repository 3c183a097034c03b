"""The repository keeps its promises: its commands exist, it speaks only of itself, its versions agree."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Written in two halves, so that this file does not mention them either.
FORBIDDEN = ["../" + "shared", "/work/" + "shared", "TORCH" + ".md", "PROTOCOL" + ".md", "helper" + " agent"]
NOT_OURS = {
    ".git",
    ".venv",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".cache",
    "site",
    "runs",
}


def files() -> Iterator[Path]:
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in NOT_OURS]
        yield from (Path(folder, name) for name in names)


@pytest.mark.parametrize(
    "target", ["help", "setup", "train", "test", "test-all", "check", "format", "docs", "bench", "clean"]
)
def test_make_has_the_target_and_help_lists_it(target: str) -> None:
    assert re.search(rf"^{target}:.*  ## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_continuous_integration_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("words", FORBIDDEN)
def test_the_repository_speaks_only_of_itself(words: str) -> None:
    mentioning = [str(path.relative_to(ROOT)) for path in files() if words.encode() in path.read_bytes()]
    assert mentioning == []


def test_the_package_and_the_project_have_one_version() -> None:
    import rainband

    assert getattr(rainband, "__version__", PROJECT["version"]) == PROJECT["version"]


def test_every_pin_is_exact_and_fits_any_index() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


@pytest.mark.parametrize("extra", ["core", "data", "plots", "dev", "lightning", "hf", "tensorboard", "docs"])
def test_whatever_set_up_installs_is_pinned(extra: str) -> None:
    pinned = {normal(line.split("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    wanted = PROJECT["dependencies"] if extra == "core" else PROJECT["optional-dependencies"][extra]
    names = {normal(re.split(r"[<>=!~\[; ]", requirement)[0]) for requirement in wanted}
    assert names <= pinned


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
