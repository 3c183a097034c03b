"""The programs on the pages about partitions and pipelines run, and print what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.pipeline_models import one_thread  # noqa: F401 (a fixture for all)

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["partitions", "pipelines"])
def test_the_program_on_the_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    exec(compile(program, page, "exec"), {"__name__": page})
    printed = capsys.readouterr().out
    for promised in re.findall(r"(?:^|  )# ([\[(].*[\])])$", program, re.MULTILINE):
        assert promised in printed
