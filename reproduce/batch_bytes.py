"""A full-batch method sends far fewer bytes for a pass over the data than an asynchronous one (Dean et al. 2012).

Downpour pushes a gradient and pulls the model for every minibatch; Sandblaster pulls it once per evaluation and pushes
the sum of many minibatches. The script counts the bytes to and from the servers for one pass over digits.
"""

from __future__ import annotations

from rainband.coordinator.coordinator import RunSettings
from rainband.model.flat_parameters import Flat
from rainband.plugins import load_strategy
from rainband.protocol.events import AnyEvent, IterationDone
from rainband.protocol.messages import Dataset
from rainband.runtimes.simulation.cluster import Notes, SimulatedCluster
from rainband.runtimes.simulation.models.cluster_model import load_model
from rainband.runtimes.simulation.run import scenario_of
from rainband.strategy import Strategy
from rainband.tasks.digits import Digits
from reproduce.runs import arguments, draw, over_seeds, report

WORKERS, BATCH_SIZE = 2, 16
N_PUSH = (1, 4, 16, 45)  # of the 90 minibatches in a pass; with 45 each worker pushes once


def bytes_per_pass(strategy: Strategy, seed: int) -> float:
    task, passes = Digits(), [1]
    flat, data = Flat(task.model()), task.data()
    scenario = scenario_of(strategy, task, flat, data, WORKERS, Dataset("", len(data), BATCH_SIZE, 1))

    def show(event: AnyEvent) -> None:
        if isinstance(event, IterationDone):
            passes[0] = event.evaluations

    settings = RunSettings(num_workers=WORKERS, num_servers=1, seed=seed)
    runtime = SimulatedCluster(scenario, settings, load_model("lan", {"step_s": 0.01}), Notes(show=show), seed=seed)
    runtime.start()
    runtime.run()
    stats = [worker.stats for worker in runtime.workers.values()]
    saved = sum(4 * parameter.numel() for parameter in flat.parameters)  # the model is pulled once more at the end
    return (sum(s.pushed_bytes + s.pulled_bytes for s in stats) - saved) / passes[0]


def main() -> None:
    asked = arguments("batch_bytes", __doc__)
    seeds = range(asked.seeds)
    downpour, _ = over_seeds(seeds, lambda seed: bytes_per_pass(load_strategy("downpour", {}), seed))
    points, exact = [], []
    for n_push in N_PUSH:
        ours = load_strategy("sandblaster", {"iterations": 3, "n_push": n_push, "loss_tolerance": 0.0})
        mean, spread = over_seeds(seeds, lambda seed, strategy=ours: downpour / bytes_per_pass(strategy, seed))  # type: ignore[misc]
        points.append((n_push, mean, spread))
        exact.append((n_push, 2 * 90 / (-(-90 // n_push) + WORKERS), 0.0))
        print(f"{n_push:3} minibatches per push:  {mean:5.1f} times as many bytes, {exact[-1][1]:.1f} expected")
    report(
        "the ratio of bytes is about the number of minibatches per push",
        f"with 45 minibatches per push, Downpour sends {points[-1][1]:.0f} times as many bytes as Sandblaster",
        points[-1][1] > 0.7 * N_PUSH[-1],
    )
    lines = {"measured": points, "expected": exact}
    draw(asked.figure, "Bytes for a pass over the digits", "minibatches per push", "Downpour / Sandblaster", lines)


if __name__ == "__main__":
    main()
