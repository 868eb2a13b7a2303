"""What fixing a cause would buy: first-in, Shapley, and the range over all orders (ATTRIBUTION.md §7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial

import numpy as np

from bubblescope.replay.bases import BaseTable
from bubblescope.replay.causes import cause_of
from bubblescope.replay.program import Program
from bubblescope.replay.scenario import Fix, replay

PLAYERS = (Fix.P2P, Fix.COLLECTIVE, Fix.OPTIMIZER, Fix.SPREAD, Fix.WORKER, Fix.STAGE)
"""Host delay is removed first and the intrinsic bubble last; both stand outside the game."""


@dataclass(frozen=True)
class Saving:
    """Seconds per step. first_in: T(measured) - T(fix only this). shapley, order_min, order_max: over the orders
    in which the players can be fixed, on top of a step without host delays; None for what is outside the game."""

    first_in: float
    shapley: float | None
    order_min: float | None
    order_max: float | None


def savings(programs: Sequence[Program], bases: BaseTable) -> dict[str, Saving]:
    """Mean over the steps of all programs, by the user-facing name of each cause.

    Worked example: one stage twice as slow, no transfers: only stage imbalance saves, so its Shapley value, its
    first-in and both ends of its range are the same.
    """
    steps = sum(len(p.steps) for p in programs)

    def mean_makespan(fixes: frozenset[Fix]) -> float:
        total = sum(float(replay(p, bases, fixes).makespan.sum()) for p in programs)
        return total / steps * 1e-9

    measured = mean_makespan(frozenset())
    out = {cause_of(fix, bases): Saving(measured - mean_makespan(frozenset({fix})), None, None, None) for fix in Fix}
    base = frozenset({Fix.DATA, Fix.HOST})
    value = {
        frozenset(c): mean_makespan(base | frozenset(c))
        for size in range(len(PLAYERS) + 1)
        for c in combinations(PLAYERS, size)
    }
    for player in PLAYERS:
        shapley, low, high = _marginals(player, value)
        name = cause_of(player, bases)
        out[name] = Saving(out[name].first_in, shapley, low, high)
    return out


def _marginals(player: Fix, value: dict[frozenset[Fix], float]) -> tuple[float, float, float]:
    """Shapley value, least and largest marginal saving of one player."""
    n = len(PLAYERS)
    gains, weights = [], []
    for coalition, seconds in value.items():
        if player not in coalition:
            gains.append(seconds - value[coalition | {player}])
            size = len(coalition)
            weights.append(factorial(size) * factorial(n - size - 1) / factorial(n))
    return float(np.dot(gains, weights)), min(gains), max(gains)
