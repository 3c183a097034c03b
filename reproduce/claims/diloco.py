"""DiLoCo with 50 inner steps reaches the loss of synchronous training, with 50 times fewer bytes (Douillard et al.
2023).

Four workers with batches of 16 train a small language model with AdamW. Synchronous training is `all_reduce` with
batches of 64: as many steps, each with as many samples.
"""

from __future__ import annotations

from rainband.tasks.load import load_task
from reproduce.claim import Check, Claim, Method
from reproduce.runs import train

WORKERS, BATCH, EPOCHS, PERIOD = 4, 16, 8, 50
TASK = "reproduce.tiny_lm:TinyLm"
RATES = [{"lr": rate} for rate in (0.004, 0.008, 0.016)]
LOCAL = {"period": PERIOD, "batch_size": BATCH}


def point(seed: int, x: float, task: str, strategy: str, batch_size: int, **settings: object) -> dict[str, float]:
    found = train(task, strategy, WORKERS, seed, batch_size=batch_size, optimizer="adamw", **settings)  # type: ignore[arg-type]
    built = load_task(task, {})
    model_mb = sum(p.numel() for p in built.model().parameters()) * 4e-6
    steps = EPOCHS * (len(built.data()) // (WORKERS * BATCH))  # of each worker
    found["per_step"] = found["sent_mb"] / (WORKERS * steps * model_mb)
    return found


CLAIM = Claim(
    paper="Douillard et al. 2023",
    text="DiLoCo with 50 inner steps has the loss of synchronous training, with 50 times fewer bytes",
    part="Model averaging",
    how="processes",
    methods=(
        Method("synchronous", {"strategy": "all_reduce", "batch_size": WORKERS * BATCH}, RATES),
        Method("DiLoCo", {"strategy": "diloco", **LOCAL}, RATES),
        Method("one mean at the end", {"strategy": "one_shot", "batch_size": BATCH}, RATES),
    ),
    settings={"epochs": EPOCHS},
    tasks={TASK: {}},
    point=point,
    why=(
        "A run of 712 steps has 14 exchanges, in which the outer step cannot catch up with 712 common ones. The paper "
        "begins with a model of 24,000 common steps, and makes many times as many exchanges. After a first run of each "
        "method, epochs (12 to 8) and rates (4 to 3) were cut, for time."
    ),
    tuned_by="loss",
    shown={"loss": "test loss, nats per letter", "per_step": "models sent by a worker, per step"},
    checks=(
        Check(
            "a loss at most 2 % larger",
            lambda r: 100 * (r("DiLoCo", "loss") / r("synchronous", "loss") - 1),
            below=2.0,
            unit="%",
        ),
        Check(
            "over 45 times fewer bytes than a model in each step",
            lambda r: 1 / r("DiLoCo", "per_step"),
            above=45.0,
            unit="times",
        ),
        Check(
            "without exchanges, a loss over 2 % larger: they matter",
            lambda r: 100 * (r("one mean at the end", "loss") / r("synchronous", "loss") - 1),
            above=2.0,
            unit="%",
            control=True,
        ),
    ),
)
