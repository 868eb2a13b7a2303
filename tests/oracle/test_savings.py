"""Savings of fixing causes: known runs give known credits, and all orders of fixing agree on the total."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bubblescope.model import Action, Kind, Lane, Run
from bubblescope.replay.attribution import attribute
from bubblescope.replay.savings import PLAYERS, mean_makespans, savings
from bubblescope.replay.scenario import Fix, replay
from tests.support.synthetic import Job, constant, make_run

F, B = 1000, 2000


def test_one_heavy_stage_alone_saves_the_same_in_every_order() -> None:
    a = attribute(make_run(Job(), constant(F, B, {3: 2})))
    assert a.bases is not None
    found = savings(a.programs, a.bases)
    # 57 → 41.25: the bottleneck's 30 units of bubble shrink with the stages made equal (§10).
    wanted = (57_000 - 1.25 * 33_000) * 1e-9
    stage = found["stage_imbalance"]
    assert [stage.first_in, stage.shapley, stage.order_min, stage.order_max] == pytest.approx([wanted] * 4)
    assert found["slow_worker"].first_in == found["slow_worker"].shapley == 0.0
    assert found["host_launch"].shapley is None


def test_credits_add_up_to_what_fixing_everything_saves() -> None:
    random = np.random.default_rng(3)

    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        base = F if action.kind == Kind.FORWARD else B
        slow = 1.5 if (replica, rank) == (1, 2) else 1.0
        return round(base * slow * (1 + 0.2 * (rank == 3)) * random.uniform(0.9, 1.3))

    a = attribute(make_run(Job(replicas=2, comm=80, host=300, optimizer=500, sync=100), duration))
    assert a.bases is not None
    found = savings(a.programs, a.bases)
    total = sum(saving.shapley or 0.0 for saving in found.values())
    outside = frozenset({Fix.DATA, Fix.HOST})
    ends = mean_makespans(a.programs, a.bases, [outside, outside | set(PLAYERS)])
    assert total == pytest.approx(ends[outside] - ends[outside | set(PLAYERS)])
    for saving in found.values():
        if saving.shapley is not None:
            assert saving.order_min <= saving.shapley <= saving.order_max


def test_makespans_computed_together_are_those_of_single_replays() -> None:
    a = attribute(make_run(Job(replicas=2, comm=80, host=300, data=100, sync=50), constant(F, B, {1: 1.7})))
    assert a.bases is not None
    wanted = [frozenset(), frozenset({Fix.P2P}), frozenset({Fix.HOST, Fix.STAGE}), frozenset(Fix)]
    together = mean_makespans(a.programs, a.bases, wanted)
    for fixes in wanted:
        one = np.mean([replay(p, a.bases, fixes).makespan.mean() for p in a.programs])
        assert together[fixes] == pytest.approx(float(one) * 1e-9)


def test_fixing_a_worker_does_not_remove_its_loss() -> None:
    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        return F if action.kind == Kind.FORWARD else B

    a = attribute(_with_loss(make_run(Job(steps=1), duration)))
    assert a.bases is not None
    assert (a.bases.kind == Kind.LOSS).any()
    before = replay(a.programs[0], a.bases)
    for fixes in ({Fix.WORKER}, {Fix.WORKER, Fix.HOST}, {Fix.SPREAD}):
        assert (replay(a.programs[0], a.bases, fixes).duration == before.duration).all()


def _with_loss(run: Run) -> Run:
    """The first half of each forward of the last stage becomes the loss."""
    s = run.spans
    last = (s.kind == Kind.FORWARD) & (s.stage == s.stage.max()) & (s.lane == Lane.COMPUTE)
    middle = (s.start_ns + s.end_ns) // 2
    first = s.with_columns(end_ns=np.where(last, middle, s.end_ns))
    second = s.take(last).with_columns(kind=np.full(int(last.sum()), int(Kind.LOSS)), start_ns=middle[last])
    return replace(run, spans=type(s).concat([first, second]))
