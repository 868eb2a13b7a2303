"""What fixing a cause would buy: first-in, Shapley, and the range over all orders (ATTRIBUTION.md §7)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from bubblescope.algebra.maxplus import ends_at, weigh
from bubblescope.model.units import NS
from bubblescope.replay.bases import SCALED_KINDS, BaseTable
from bubblescope.replay.causes import cause_of
from bubblescope.replay.program import Edge, Program
from bubblescope.replay.scenario import Fix, delays, durations
from bubblescope.replay.shapley import coalitions, credits

PLAYERS = (Fix.P2P, Fix.COLLECTIVE, Fix.OPTIMIZER, Fix.SPREAD, Fix.WORKER, Fix.STAGE)
"""Host delay is removed first and the intrinsic bubble last; both stand outside the game."""

OUTSIDE = frozenset({Fix.AWAITED, Fix.DATA, Fix.HOST})
ON_EDGES = frozenset({Fix.AWAITED, Fix.DATA, Fix.HOST, Fix.P2P, Fix.COLLECTIVE})
"""The causes that `scenario.delays` looks at."""


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

    A player whose fix changes no number of any program (one replica: no slow worker) saves exactly nothing in
    every order, so it is left out of the game: half the replays for each.

    Worked example: one stage twice as slow, no transfers: only stage imbalance saves, so its Shapley value, its
    first-in and both ends of its range are the same.
    """
    idle = {fix for fix in Fix if not _changes_anything(fix, programs, bases)}
    players = [fix for fix in PLAYERS if fix not in idle]
    host = OUTSIDE - idle
    nothing = frozenset[Fix]()
    alone = {fix: frozenset({fix}) for fix in Fix if fix not in idle}
    makespan = mean_makespans(programs, bases, {nothing, *alone.values(), *(host | c for c in coalitions(players))})
    first_in = {fix: makespan[nothing] - makespan[alone[fix]] if fix in alone else 0.0 for fix in Fix}
    out = {cause_of(fix, bases): Saving(first_in[fix], None, None, None) for fix in Fix if fix is not Fix.AWAITED}
    # What a coalition gains is the makespan it takes away.
    found = credits(players, {c: -makespan[host | c] for c in coalitions(players)})
    for fix in PLAYERS:
        c = found.get(fix)
        shares = (0.0, 0.0, 0.0) if c is None else (c.shapley, c.low, c.high)
        out[cause_of(fix, bases)] = Saving(first_in[fix], *shares)
    return out


def mean_makespans(
    programs: Sequence[Program], bases: BaseTable, wanted: Collection[frozenset[Fix]]
) -> dict[frozenset[Fix], float]:
    """Seconds per step, mean over the steps of all programs, without each set of causes.

    Sets that change the edges alike are replayed together, and only closing nodes are looked at: for 1,024 GPUs
    moving the numbers about costs more than the replay itself.
    """
    alike: dict[frozenset[Fix], list[frozenset[Fix]]] = {}
    for fixes in wanted:
        alike.setdefault(fixes & ON_EDGES, []).append(fixes)
    total = dict.fromkeys(wanted, 0.0)
    for p in programs:
        for on_edges, sets in alike.items():
            weights = weigh(p.graph, p.duration.shape, delays(p, on_edges), p.release)
            for fixes in sets:
                total[fixes] += float(ends_at(weights, durations(p, bases, fixes), p.closing).max(axis=0).sum())
    steps = sum(len(p.steps) for p in programs)
    return {fixes: ns / steps * NS for fixes, ns in total.items()}


def _changes_anything(fix: Fix, programs: Sequence[Program], bases: BaseTable) -> bool:
    """False only where the replay with this fix is the replay without it, whatever else is fixed."""
    if fix is Fix.STAGE:
        return bool((bases.by_stage != bases.uniform).any())
    if fix is Fix.WORKER:
        return bool((bases.worker != bases.by_stage).any())
    if fix is Fix.AWAITED:
        return any(bool((p.edge == Edge.AWAIT).any()) for p in programs)
    if fix is Fix.COLLECTIVE:
        return any(bool((p.edge == Edge.LEAVE).any()) for p in programs)
    if fix is Fix.DATA:
        return any(bool(p.data.any()) for p in programs)
    if fix is Fix.P2P:
        return any(len(p.messages.wait) > 0 for p in programs)
    if fix is Fix.OPTIMIZER:
        return any(bool(((p.kind >= 0) & ~np.isin(p.kind, SCALED_KINDS)).any()) for p in programs)
    return True
