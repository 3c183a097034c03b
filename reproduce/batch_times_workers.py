"""A constant product of batch size and number of workers keeps the test error (Gupta et al. 2016, Rudra).

Soft synchronization with n = 1 on digits: an update averages about mu * lambda samples, mu for each of lambda workers.
With mu * lambda = 128 the error is about the same for any number of workers; with 512 it is larger, because the same
epochs have fewer updates.
"""

from __future__ import annotations

from reproduce.runs import arguments, draw, over_seeds, report, simulate

WORKERS = (1, 4, 16, 32)
PRODUCTS = (128, 512)
EPOCHS, LR = 12, 0.3


def error(workers: int, batch_size: int, seed: int) -> float:
    done = simulate(
        "digits",
        "soft_sync",
        workers,
        seed,
        epochs=EPOCHS,
        batch_size=batch_size,
        n=1,
        lr=LR,
        scaling="none",
        guard=False,
    )
    return done.error


def main() -> None:
    asked = arguments("batch_times_workers", __doc__)
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for product in PRODUCTS:
        name = f"mu * lambda = {product}"
        lines[name] = []
        for workers in WORKERS:
            size = product // workers
            mean, spread = over_seeds(range(asked.seeds), lambda s, w=workers, b=size: error(w, b, s))  # type: ignore[misc]
            lines[name].append((workers, mean, spread))
            print(f"{workers:2} workers, batches of {size:3}: error {mean:5.1f} ± {spread:.1f} %")
    small, large = lines.values()
    errors = [point[1] for point in small]
    report(
        "the error is constant for a constant mu * lambda, and rises with the product",
        f"128: {min(errors):.1f} to {max(errors):.1f} %;  512: {min(p[1] for p in large):.1f} % and more",
        max(errors) - min(errors) < 5 and min(p[1] for p in large) > min(errors),
    )
    draw(asked.figure, "soft synchronization on digits", "workers", "test error, %", lines, xscale="log")


if __name__ == "__main__":
    main()
