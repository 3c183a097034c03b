"""`rainband fuzz`: simulate runs with random faults, each repeatable from its seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rainband.cli.report_errors import FAILED, report_errors
from rainband.options import FAULTS_HINT, reading

if TYPE_CHECKING:
    from rainband.runtimes.simulation.oracle.check import OracleVerdict
    from rainband.runtimes.simulation.oracle.scenarios import Case


def command(
    seeds: Annotated[
        str, typer.Argument(metavar="SEED", help="One seed, such as 17; or several, such as 0-1000.")
    ] = "0-100",
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="downpour, downpour2 (n_push=2), corrected (with compensation), ragged (pushes of 1 to 4 batches), "
            "sync, averaging, gossip, per_worker (sync batch_per_worker=true), backup (with a backup worker), "
            "stale_sync, adaptive_bound, bounded_delay, soft_sync, sandblaster, conjugate_gradient, tree "
            "(variant=adv_star) or tree_rounds (tree synchronous=true).",
            show_default="the seed's choice",
        ),
    ] = None,
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File of faults to inject.", show_default="drawn from the seed")
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Show every message.")] = False,
    shrink: Annotated[bool, typer.Option("--shrink", help="Reduce the faults of a failing run to a few.")] = False,
) -> None:
    """Simulate runs with random faults, and check that each is correct.

    A small task whose gradients are whole numbers is trained while workers, servers, the coordinator and their
    connections fail, according to a script that is drawn from the seed. Each run is checked: every batch is applied
    exactly once, the parameters are correct (to the last bit where gradients are only added, within limits for
    averaging and gossip, otherwise up to rounding), all blocks agree on every round, no read is staler than the bound,
    and there is no deadlock. Full-batch strategies must reach the fault-free result. A failing seed is shown with the
    command that repeats it.

    \b
    rainband fuzz 0-1000
    rainband fuzz 17 --trace
    rainband fuzz 17 --faults script.txt --shrink
    """
    from rainband.runtimes.simulation.oracle.check import check, shortest

    failed = 0
    with report_errors():
        for case in _cases(seeds, strategy, faults):
            verdict = check(case, keep_trace=trace)
            if verdict.violations and shrink:
                verdict = check(shortest(case), keep_trace=trace)
            failed += bool(verdict.violations)
            if verdict.violations or trace or "-" not in seeds:
                _show(verdict, shrink or faults is not None)
    typer.echo(f"{failed} failed" if failed else "all correct")
    raise typer.Exit(FAILED if failed else 0)


def _cases(seeds: str, strategy: str | None, faults: Path | None) -> Iterator[Case]:
    from dataclasses import replace

    from rainband.runtimes.simulation.models.faults import check_nodes, parse
    from rainband.runtimes.simulation.oracle.scenarios import KINDS, random_case

    if strategy is not None and strategy not in KINDS:
        raise ValueError(f"no strategy {strategy!r} to fuzz: choose from {', '.join(KINDS)}.")
    script = None
    if faults is not None:
        with reading("faults", faults, FAULTS_HINT):
            script = parse(faults.read_text(encoding="utf-8"))
    for seed in _numbers(seeds):
        case = random_case(seed, strategy)
        if script is not None:
            check_nodes(script, case.num_workers, case.num_servers)
            case = replace(case, script=script)
        yield case


def _numbers(seeds: str) -> range:
    first, dash, last = seeds.partition("-")
    try:
        numbers = range(int(first), int(last) if dash else int(first) + 1)
    except ValueError:
        raise ValueError(f"{seeds!r} is not a seed: write a number, such as 17, or two, such as 0-1000.") from None
    if not numbers:
        raise ValueError(f"{seeds!r} has no seeds: the second number must be the larger one, such as 0-1000.")
    return numbers


def _show(verdict: OracleVerdict, shortened: bool) -> None:
    from rainband.runtimes.simulation.models.faults import text
    from rainband.runtimes.simulation.models.trace import table

    case = verdict.case
    typer.echo(
        f"seed {case.seed}: {case.strategy}, {case.num_workers} workers, {case.num_servers} servers: "
        f"{verdict.outcome} after {verdict.seconds:.3f} s, trace {verdict.trace.digest()}"
    )
    typer.echo(text(case.script))
    if verdict.trace.lines:
        typer.echo(table(verdict.trace.lines))
    for violation in verdict.violations:
        typer.echo(f"VIOLATED: {violation}")
    if verdict.violations and shortened:
        typer.echo("To repeat it, write the lines of the script to a file, and type")
        typer.echo(f"  {verdict.command} --faults FILE --trace")
    elif verdict.violations:
        typer.echo(f"To repeat it:  {verdict.command} --trace")
