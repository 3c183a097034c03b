"""The table and the figure of docs/guides/slow_networks.md, from the rows of `rainband bench slow_network --json`.

python docs/slow_network_page.py ROWS ... --write   (JSON files; without one, docs/results/slow_network.json is used)
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
PAGE, KEPT = HERE / "guides" / "slow_networks.md", HERE / "results" / "slow_network.json"
PICTURE = HERE / "pictures" / "slow_networks.png"
BEGIN, END = "<!-- table: python docs/slow_network_page.py --write -->", "<!-- end of the table -->"
OMITTED = re.compile(r" (local_)?lr=[\d.]+| optimizer=sgd| algorithm=ring")
LIMIT_S = 75.0
Times = dict[str, dict[int, list[float]]]  # method -> Mbit -> seconds of each run


def times(rows: list[dict[str, object]]) -> Times:
    found: Times = {}
    for row in rows:
        match = re.fullmatch(r"(.*), (\d+) Mbit, .*", str(row["name"]))
        if match and row["unit"] == "s":
            name = OMITTED.sub("", match[1])
            found.setdefault(name, {}).setdefault(int(match[2]), []).append(float(str(row["value"])))
    return found


def table(found: Times) -> str:
    measured = _mbits(found)
    lines = [f"| | {' | '.join(map(_bandwidth, measured))} |", "|---" * (1 + len(measured)) + "|"]
    for name, by_mbit in found.items():
        both = [_seconds(by_mbit.get(mbit, [])) for mbit in measured]
        lines.append(f"| {name if name.startswith('DDP') else _code(name)} | {' | '.join(both)} |")
    return "\n".join(lines)


def _mbits(found: Times) -> list[int]:
    return sorted({mbit for by_mbit in found.values() for mbit in by_mbit})


def _bandwidth(mbit: int) -> str:
    return f"{mbit / 1000:g} Gbit" if mbit >= 1000 else f"{mbit} Mbit"


def _code(name: str) -> str:
    return ", ".join(f"`{part}`" for part in name.split(", "))


def _seconds(seconds: list[float]) -> str:
    if not seconds:
        return ""
    low, high = min(seconds), max(seconds)
    if math.isinf(high):
        return f"not in {LIMIT_S:g} s"
    return f"{low:.2g} s" if f"{low:.2g}" == f"{high:.2g}" else f"{low:.2g}-{high:.2g} s"


def draw(found: Times) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mbits, names = _mbits(found), list(found)[::-1]
    size = (3 + 4 * len(mbits), 4.5)
    figure, all_axes = pyplot.subplots(1, len(mbits), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axes, mbit in zip(all_axes[0], mbits, strict=True):
        seconds = [min(found[name].get(mbit, [math.nan])) for name in names]
        shown = [LIMIT_S if math.isinf(each) else each for each in seconds]
        colors = ["lightgray" if math.isinf(each) else "tab:blue" for each in seconds]
        axes.barh(names, shown, color=colors)
        axes.set(xscale="log", xlim=(1, LIMIT_S), xlabel="seconds (gray: not reached)", title=_bandwidth(mbit))
        axes.grid(alpha=0.3, axis="x")
    figure.savefig(PICTURE, dpi=80)
    pyplot.close(figure)


def written() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def rows(files: list[Path]) -> list[dict[str, object]]:
    return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]


def main() -> None:
    files = [Path(word) for word in sys.argv[1:] if word != "--write"]
    if files:
        KEPT.write_text(json.dumps(rows(files), indent=1) + "\n", encoding="utf-8")
    found = times(rows([KEPT]))
    if "--write" not in sys.argv[1:]:
        print(table(found))
        return
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{begin}\n\n{table(found)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    draw(found)


if __name__ == "__main__":
    main()
