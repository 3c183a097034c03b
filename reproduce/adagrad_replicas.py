"""Adagrad lets more replicas train one model, and a warm start helps (Dean et al. 2012, figures 4 and 5).

Downpour on the digits with more and more workers. The fixed rate is the best of three for each number of workers, that
of Adagrad is always the same: its steps shrink where gradients are large, so one setting goes on working. A warm start
lets one worker do the first batches alone, and then releases the others.
"""

from __future__ import annotations

from typing import Any

from reproduce.runs import arguments, draw, over_seeds, report, simulate

WORKERS = (1, 4, 8, 16, 32)
EPOCHS, BATCH_SIZE, USABLE = 4, 16, 30.0  # with fewer errors than that, in percent, so many workers are of use
KINDS: dict[str, dict[str, Any]] = {
    "fixed rate": {"optimizer": "sgd", "lr": 0.2},
    "fixed rate, warm start": {"optimizer": "sgd", "lr": 0.2, "warm_batches": 90},
    "adagrad": {"optimizer": "adagrad", "lr": 0.02},
    "adagrad, warm start": {"optimizer": "adagrad", "lr": 0.02, "warm_batches": 90},
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
    usable = {name: max((w for w, mean, _ in points if mean < USABLE), default=0) for name, points in lines.items()}
    fixed, fixed_warm, adagrad, adagrad_warm = usable.values()
    unwarmed, warmed = lines["adagrad"], lines["adagrad, warm start"]
    report(
        "fixed-rate Downpour misses the target with many replicas, Adagrad goes further",
        f"below {USABLE:.0f} % errors: up to {fixed} workers with a fixed rate, up to {adagrad} with Adagrad",
        adagrad > fixed,
    )
    report(
        "a warm start helps",
        f"below {USABLE:.0f} % errors: up to {fixed_warm} workers with a fixed rate, {adagrad_warm} with Adagrad; "
        f"with Adagrad and {WORKERS[-2]} workers {unwarmed[-2][1]:.0f} % errors become {warmed[-2][1]:.0f} %",
        fixed_warm > fixed or adagrad_warm > adagrad,  # more replicas are of use, not only fewer errors
    )
    draw(asked.figure, "Downpour on the digits", "workers", "test error, %", lines, xscale="log")


if __name__ == "__main__":
    main()
