"""Gossip learns as fast per epoch as all-reduce, and faster where networks are slow; AdaComm beats fixed periods
(Lian et al. 2017; Wang et al. 2019).

Sixteen workers train digits; a step takes 10 ms, and the network is simulated. All-reduce is `averaging period=1`: for
plain SGD the same updates. Verdicts are 95 % intervals of the difference, seed by seed.
"""

from __future__ import annotations

from typing import Any

from reproduce.runs import Done, arguments, draw, interval, mean_and_spread, report, simulate

WORKERS, BATCH_SIZE, EPOCHS, LR = 16, 4, 6, 0.3
COMPUTE = {"kind": "lognormal", "step_s": 0.01, "spread": 0.2}
NETWORKS = {"fast": (50e-6, 1.25e9), "high latency": (5e-3, 1.25e9), "narrow": (50e-6, 10e6)}  # seconds, bytes/s
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "all-reduce": ("averaging", {"period": 1}),
    "gossip": ("gossip", {}),
    "period 4": ("averaging", {"period": 4}),
    "period 16": ("averaging", {"period": 16}),
    "AdaComm": ("adaptive_period", {"period": 16, "interval": 32}),
}


def run(method: str, network: str, seed: int) -> Done:
    strategy, settings = METHODS[method]
    latency_s, bytes_per_s = NETWORKS[network]
    return simulate(
        "digits", strategy, WORKERS, seed, batch_size=BATCH_SIZE, epochs=EPOCHS, lr=LR, compute=COMPUTE,
        network={"latency_s": latency_s, "bytes_per_s": bytes_per_s}, **settings,
    )  # fmt: skip


def main() -> None:
    asked = arguments("slow_networks", __doc__, seeds=8)
    losses: dict[str, list[float]] = {}
    seconds: dict[str, dict[str, list[float]]] = {}
    for method in METHODS:
        seconds[method] = {}
        for network in NETWORKS:
            done = [run(method, network, seed) for seed in range(asked.seeds)]
            losses[method] = [one.result.metrics["loss"] for one in done]  # the network changes no update
            seconds[method][network] = [one.result.training_s for one in done]
            mean = mean_and_spread(seconds[method][network])[0]
            loss = mean_and_spread(losses[method])
            print(f"{method:10} {network:13} {mean:6.2f} s  loss {loss[0]:.3f} ± {loss[1]:.3f}", flush=True)
    judge(losses, seconds)
    lines = {
        method: [(number, *mean_and_spread(values)) for number, values in enumerate(by_network.values())]
        for method, by_network in seconds.items()
    }
    draw(asked.figure, "16 workers on digits", "network: " + ", ".join(NETWORKS), "seconds of training", lines)


def judge(losses: dict[str, list[float]], seconds: dict[str, dict[str, list[float]]]) -> None:
    more, width = interval([g - a for g, a in zip(losses["gossip"], losses["all-reduce"], strict=True)])
    ratios = {
        network: interval(
            [a / g for a, g in zip(seconds["all-reduce"][network], seconds["gossip"][network], strict=True)]
        )
        for network in NETWORKS
    }
    report(
        "gossip ends with the loss of all-reduce after as many epochs",
        f"its loss is {more:.3f} ± {width:.3f} higher",
        more - width <= 0,
    )
    report(
        "gossip is faster as latency rises or bandwidth falls",
        ", ".join(
            f"{mean:.2f} ± {wide:.2f} times on the {network} network" for network, (mean, wide) in ratios.items()
        ),
        all(mean - wide > 1 for network, (mean, wide) in ratios.items() if network != "fast"),
    )
    fixed = min(("period 4", "period 16"), key=lambda method: mean_and_spread(losses[method])[0])
    lower, width = interval([f - a for f, a in zip(losses[fixed], losses["AdaComm"], strict=True)])
    times, wide = interval(
        [a / b for a, b in zip(seconds["all-reduce"]["narrow"], seconds["AdaComm"]["narrow"], strict=True)]
    )
    report(
        "AdaComm is at least as good as the best fixed period, and faster than all-reduce",
        f"its loss is {-lower:.3f} ± {width:.3f} above that of {fixed}; on the narrow network it is {times:.2f} ± "
        f"{wide:.2f} times as fast as all-reduce",
        lower + width >= 0 and times - wide > 1,
    )


if __name__ == "__main__":
    main()
