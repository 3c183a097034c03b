"""The programs on the pages about partitions and pipelines run, and print what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)

DOCS = Path(__file__).parent.parent / "docs" / "internals"


def programs() -> list[tuple[str, str]]:
    """(page and number, text) of every program."""
    found = []
    for page in ("graph_partitioning", "pipeline_schedules"):
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        found += [(f"{page} {number}", block) for number, block in enumerate(blocks)]
    return found


@pytest.mark.parametrize(("name", "program"), programs(), ids=[name for name, _ in programs()])
def test_the_program_on_the_page_runs(name: str, program: str, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(compile(program, name, "exec"), {"__name__": name})
    printed = capsys.readouterr().out
    for promised in re.findall(r"(?:^|  )# ([\[(].*[\])])$", program, re.MULTILINE):
        assert promised in printed
