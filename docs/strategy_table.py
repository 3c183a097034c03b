"""Make the table of strategies in README.md from the strategies' own files: `python docs/strategy_table.py --write`."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "rainband" / "strategies"
README = ROOT / "README.md"
BEGIN, END = "<!-- strategies: made by docs/strategy_table.py -->", "<!-- end of strategies -->"
HEAD = ["| strategy | what it does | use it | not |", "|---|---|---|---|"]


def table(folder: Path = FOLDER) -> str:
    """One row per file, by name; nothing is imported for it."""
    files = sorted(path for path in folder.glob("*.py") if not path.stem.startswith("_"))
    return "\n".join([*HEAD, *(row(path) for path in files)])


def row(path: Path) -> str:
    paragraphs = _paragraphs(path)
    advice = next((text for text in paragraphs if text.startswith("Use it ")), None)
    if advice is None or ". Not " not in advice:
        raise ValueError(f"{path}: its docstring should have a paragraph 'Use it when ... . Not when ... .'")
    use, avoid = advice.removeprefix("Use it ").split(". Not ", 1)
    work_items = [f"[`{path.stem}`](rainband/strategies/{path.name})", paragraphs[0], use, avoid]
    return "| " + " | ".join(work_item.rstrip(".").replace("|", "\\|") for work_item in work_items) + " |"


def _paragraphs(path: Path) -> list[str]:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]


def with_table(readme: str, made: str) -> str:
    """The README with this table between the two marks."""
    before, rest = readme.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{made}\n{END}{rest.split(END, 1)[1]}"


def main() -> None:
    made = table()
    if "--write" not in sys.argv[1:]:
        print(made)
        return
    README.write_text(with_table(README.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
