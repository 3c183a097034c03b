"""Update rules: the server part of every algorithm. A rule decides, per block, when gradients are applied and read."""

from __future__ import annotations

from rainband.rules.apply_every import ApplyEvery
from rainband.rules.apply_on_arrival import ApplyOnArrival
from rainband.rules.bounded import StalenessBound, TaskBound
from rainband.rules.clocks import Clocks
from rainband.rules.compensated import Compensated, compensated
from rainband.rules.rounds import FirstArrivalsOfRound, MeanOfRound
from rainband.rules.rule import Rule, RuleBlock
from rainband.rules.sum_gradients import SumGradients
from rainband.rules.sums import MeanOfArrivals, MeanOfRoundSums

__all__ = [
    "ApplyEvery",
    "ApplyOnArrival",
    "Clocks",
    "Compensated",
    "FirstArrivalsOfRound",
    "MeanOfArrivals",
    "MeanOfRound",
    "MeanOfRoundSums",
    "Rule",
    "RuleBlock",
    "StalenessBound",
    "SumGradients",
    "TaskBound",
    "compensated",
]
