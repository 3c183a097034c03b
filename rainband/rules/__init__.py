"""When a block applies a gradient and who may read it: the servers' half of every algorithm.

A rule is pure: it is handed what has come and calls `block.apply`. Each block has a rule object of its own, which is
saved, copied and moved with the block.
"""

from __future__ import annotations

from rainband.rules.apply_every import ApplyEvery
from rainband.rules.apply_on_arrival import ApplyOnArrival
from rainband.rules.bounded import StalenessBound, TaskBound
from rainband.rules.clocks import Clocks
from rainband.rules.compensated import Compensated, compensated
from rainband.rules.rounds import FirstArrivalsOfRound, MeanOfRound
from rainband.rules.rule import Rule, RuleBlock
from rainband.rules.sum_gradients import SumGradients

__all__ = [
    "ApplyEvery",
    "ApplyOnArrival",
    "Clocks",
    "Compensated",
    "FirstArrivalsOfRound",
    "MeanOfRound",
    "Rule",
    "RuleBlock",
    "StalenessBound",
    "SumGradients",
    "TaskBound",
    "compensated",
]
