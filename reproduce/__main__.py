"""Reproduce claims of papers: python -m reproduce NAME ... | all | --list.

Finished points are kept in reproduce/results/NAME.jsonl. With --resume they are used, and more seeds or an interrupted
series go on from there; without it the claim is measured anew.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from reproduce import page
from reproduce.points import Store, measure, seconds_of


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduce", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="claims, or: all")
    parser.add_argument("--seeds", type=int, default=8, help="runs of each kind that decide (default 8)")
    parser.add_argument("--resume", action="store_true", help="use the points that are finished")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--list", action="store_true", help="list the claims, their verdicts, and how long they took")
    parser.add_argument("--page", action="store_true", help="only draw the figures and write the page again")
    parser.add_argument(
        "--results",
        type=Path,
        default=page.RESULTS,
        help="where finished points are; if it is elsewhere, the page in docs/ stays as it is",
    )
    asked = parser.parse_args(words)
    if asked.list:
        print(page.listed())
        return 0
    names = page.names() if asked.names == ["all"] or (asked.page and not asked.names) else asked.names
    if unknown := sorted(set(names) - set(page.names())):
        parser.error(f"{', '.join(unknown)}: no such claim. Choose from {', '.join(page.names())}, or all.")
    if not names or asked.seeds < 2 or asked.jobs < 1:
        parser.error("type the name of a claim, or all; at least 2 seeds and 1 job. --list lists the claims.")
    if len(names) > 1 and not asked.page:
        known = sum(seconds_of(page.load(name), Store(page.RESULTS / f"{name}.jsonl")) for name in names)
        print(f"{len(names)} claims: all points took {page.duration(known)} one after the other, for the page in docs/")
    for name in names:
        claim, store = page.load(name), Store(asked.results / f"{name}.jsonl", asked.resume or asked.page)
        if not asked.page:
            command = f"python -m reproduce {name} --seeds {asked.seeds}"
            with Progress(TextColumn(name), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
                task = bar.add_task("", total=None)
                try:
                    for done, total in measure(claim, store, asked.seeds, asked.jobs, command):
                        bar.update(task, completed=done, total=total)
                except KeyboardInterrupt:
                    print(
                        f"{len(store.values)} points are kept: {command} --resume goes on from there", file=sys.stderr
                    )
                    return 130
        it = page.found(claim, store)
        if it.seeds:
            print(page.in_words(claim, it) + "\n")
            page.draw(
                name, claim, it, (page.FIGURES if asked.results == page.RESULTS else asked.results) / f"{name}.png"
            )
    if asked.results == page.RESULTS:
        page.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
