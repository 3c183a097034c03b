"""Update rules: they decide, per block, when a gradient is applied and which reads must wait.

A rule does no I/O: it receives pushes and calls `block.apply`. Each block has its own rule object, which is saved,
copied and moved with the block.
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
