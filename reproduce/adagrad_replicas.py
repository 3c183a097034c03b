"""Adagrad lets more replicas train one model, and a warm start helps (Dean et al. 2012, figures 4 and 5).

Downpour on the digits with more and more workers. The fixed rate is the best one for few workers; with many the loss
runs away. Adagrad's steps shrink where gradients are large, so the same setting goes on working. A warm start lets one
worker do the first batches alone.
"""

from __future__ import annotations

from typing import Any

from reproduce.runs import arguments, draw, over_seeds, report, simulate

WORKERS = (1, 4, 16, 32)
EPOCHS, BATCH_SIZE = 4, 16
KINDS: dict[str, dict[str, Any]] = {
    "fixed rate": {"optimizer": "sgd", "lr": 0.2},
    "fixed rate, warm start": {"optimizer": "sgd", "lr": 0.2, "warm_batches": 90},
    "adagrad": {"optimizer": "adagrad", "lr": 0.02},
}


def error(workers: int, settings: dict[str, Any], seed: int) -> float:
    done = simulate(
        "digits",
        "downpour",
        workers,
        seed,
        epochs=EPOCHS,
        batch_size=BATCH_SIZE,
        guard=False,
        overlap=False,
        **settings,
    )
    return done.error


def main() -> None:
    asked = arguments("adagrad_replicas", __doc__)
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name, settings in KINDS.items():
        lines[name] = []
        for workers in WORKERS:
            mean, spread = over_seeds(range(asked.seeds), lambda s, w=workers, x=settings: error(w, x, s))  # type: ignore[misc]
            lines[name].append((workers, mean, spread))
            print(f"{workers:2} workers  {name:22} error {mean:5.1f} ± {spread:.1f} %")
    fixed, warm, adagrad = (points[-1][1] for points in lines.values())
    report(
        "fixed-rate Downpour misses the target with many replicas, Adagrad does not; a warm start helps",
        f"{WORKERS[-1]} workers: {fixed:.0f} % errors with a fixed rate, {warm:.0f} % after a warm start, "
        f"{adagrad:.0f} % with Adagrad",
        fixed > 2 * adagrad and warm <= fixed,
    )
    draw(asked.figure, "Downpour on the digits", "workers", "test error, %", lines, xscale="log")


if __name__ == "__main__":
    main()
