"""Batch size times workers, kept constant, keeps the error (Gupta et al. 2016, Rudra).

Soft synchronisation with n = 1 on the digits: an update is over about mu * lambda samples, mu per worker. Along
mu * lambda = 128 the error stays about the same, however many workers share it; with four times that it rises, because
the same epochs make fewer updates.
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
        "along mu * lambda = constant the error stays; it rises where the product does",
        f"128: {min(errors):.1f} to {max(errors):.1f} %;  512: {min(p[1] for p in large):.1f} % and more",
        max(errors) - min(errors) < 5 and min(p[1] for p in large) > min(errors),
    )
    draw(asked.figure, "soft synchronisation on the digits", "workers", "test error, %", lines, xscale="log")


if __name__ == "__main__":
    main()
