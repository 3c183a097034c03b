"""Write the table of strategies in docs/guides/strategies.md: `python docs/strategy_table.py --write`."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "rainband" / "strategies"
PAGE = ROOT / "docs" / "guides" / "strategies.md"
BEGIN, END = "<!-- strategies: made by docs/strategy_table.py -->", "<!-- end of strategies -->"
HEAD = ["| strategy | what it does | use it | avoid it |", "|---|---|---|---|"]


def table(folder: Path = FOLDER) -> str:
    """Return one row per file, sorted by name; nothing is imported for it."""
    files = sorted(path for path in folder.rglob("*.py") if not path.stem.startswith("_"))
    return "\n".join([*HEAD, *(row(path) for path in files)])


def row(path: Path) -> str:
    paragraphs = _paragraphs(path)
    advice = next((text for text in paragraphs if text.startswith("Use ")), "")
    parts = re.split(r"\. (?:Not|Avoid(?: it)?) ", re.sub("^Use (it )?", "", advice), maxsplit=1)
    if len(parts) < 2:
        raise ValueError(f"{path}: its docstring should have a paragraph 'Use when ... . Avoid when ... .'")
    columns = [f"`{path.stem}`", paragraphs[0], *parts]
    return "| " + " | ".join(column.rstrip(".").replace("|", "\\|") for column in columns) + " |"


def _paragraphs(path: Path) -> list[str]:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def with_table(page: str, made: str) -> str:
    """Return the page with this table between the two marks."""
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    made = table()
    if "--write" not in sys.argv[1:]:
        print(made)
        return
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
