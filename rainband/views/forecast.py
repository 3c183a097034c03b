"""The rate that was predicted for a run with `auto`: forecast.json in its directory, shown next to the measured one."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rainband.views.formatting import short

FILE = "forecast.json"


class RateForecast(msgspec.Struct, frozen=True):
    """The strategy that was chosen, and its predicted rate."""

    chosen: str
    samples_per_s: float
    slowest: float
    fastest: float
    reasons: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{short(self.samples_per_s)} samples/s ({short(self.slowest)} to {short(self.fastest)})"

    def save(self, directory: Path) -> None:
        data = msgspec.json.format(msgspec.json.encode(self), indent=2)
        (directory / FILE).write_bytes(data + b"\n")


def forecast_line(directory: Path, measured: float) -> str:
    """Return the predicted rate next to the measured one; empty if none was predicted."""
    try:
        forecast = msgspec.json.decode((directory / FILE).read_bytes(), type=RateForecast)
    except (OSError, msgspec.DecodeError):
        return ""
    if not measured:
        return f"predicted {forecast.text}"
    off = forecast.samples_per_s / measured - 1
    return f"predicted {forecast.text}, measured {short(measured)}: the prediction was off by {off:+.0%}"
