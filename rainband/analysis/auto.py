"""The strategy `auto`: analyze the task for the run that was asked for, and take the strategy that is recommended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from rainband.analysis.analysis import FILE, HERE, Analysis, analyze, cluster
from rainband.analysis.predict import CANDIDATES, AnalyzedCluster
from rainband.analysis.recommend import CHOSEN
from rainband.options import OptionError, RunOptions, num_threads, opt
from rainband.plugins import load_strategy
from rainband.runtimes.configure import SERVERS, WORKERS, given_options
from rainband.runtimes.simulation.models.cluster_model import load_model
from rainband.settings import parse_pairs
from rainband.tasks.task import Task
from rainband.views.forecast import RateForecast

AUTO = "auto"
# Runs that are not predicted: of a model in stages, on several machines, with encoded gradients, of an earlier run.
UNPREDICTED = (
    *("stages", "split", "placement", "listen", "codec", "pull_codec", "resume", "config", "faults", "address"),
    *("max_workers", "record", "transport"),
)


def analyze_for(task: Task, name: str, options: RunOptions, runs: Path, say: Callable[[str], None]) -> Analysis:
    """Analyze a task for a run with these options, here or in a simulation."""
    given = given_options(options)
    for option in UNPREDICTED:
        if given.get(option):
            raise OptionError(
                f"{opt(option, given[option])}: {AUTO} cannot predict such runs. Name a strategy, or omit it."  # type: ignore[literal-required]
            )
    runtime = given.get("runtime") or "processes"
    if runtime == "ray":
        raise OptionError(f"{opt('runtime', runtime)}: {AUTO} cannot predict such runs. Name a strategy.")
    simulated = runtime == "sim"
    compute = given.get("compute")
    if simulated:
        network = str(given.get("network") or "lan")
        model = load_model(network, compute)
    else:
        network = HERE
        model = cluster(HERE, runs / FILE, say)
    workers, servers = given.get("workers") or WORKERS, given.get("servers") or SERVERS
    setting = AnalyzedCluster(
        workers=workers,
        servers=servers,
        model=model,
        batch_size=given.get("batch_size"),
        threads=num_threads("threads", cast(str, given.get("threads") or 1), workers),
        network=network,
        drawn_times=simulated,
    )
    return analyze(task, name, setting, [one for one in CANDIDATES if one.kind in CHOSEN])


def options_for(words: str, options: RunOptions) -> RunOptions:
    """Return the options without numbers of nodes that the chosen strategy does not have."""
    name, *pairs = words.split()
    requires = load_strategy(name, parse_pairs(pairs)).requires
    mine: RunOptions = {**options}
    if not requires.servers:
        mine.pop("servers", None)
    if requires.max_replicas == 1:
        mine.pop("workers", None)
    return mine


def forecast_of(analysis: Analysis) -> RateForecast:
    """Return what the run's directory keeps of the prediction."""
    chosen = analysis.recommendation.chosen
    return RateForecast(
        chosen.words, chosen.samples_per_s, chosen.slowest, chosen.fastest, analysis.recommendation.reasons
    )
