"""Layer times are believed only where they say how long a stage would take with other layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bubblescope.replay.repartition import EXPLAINED, measured_layers, repartition
from bubblescope.report.advice import Wanted, explore
from bubblescope.report.build import build
from tests.support import cases
from tests.support.cases import MS
from tests.support.predictions import model_of
from tests.support.synthetic import Job, constant, make_run


def test_layers_that_make_up_their_stages_give_the_best_whole_cut() -> None:
    model = model_of(cases.report())
    found = measured_layers(model, cases.layers(4, 4, 4, 8))
    assert found is not None
    assert repartition(model, found).partition.layers == (5, 5, 5, 5)


@pytest.mark.parametrize(("share", "believed"), [(EXPLAINED + 0.01, True), (EXPLAINED - 0.01, False)])
def test_layers_that_are_a_small_part_of_a_middle_stage_are_not_believed(share: float, believed: bool) -> None:
    """As on a machine where stages are padded by sleeping: moving a layer would not move the padding."""
    layers = [
        replace(layer, forward_s=layer.forward_s * share, backward_s=layer.backward_s * share)
        for layer in cases.layers(4, 4, 4, 8)
    ]
    assert (measured_layers(model_of(cases.report()), layers) is not None) is believed


def test_two_stages_padded_by_sleeping_get_no_cut_and_are_told_how_little_their_layers_say() -> None:
    """Such a recording has no stage between to show that its layers are a small part of it."""
    run = make_run(Job(stages=2, microbatches=3, optimizer=MS), constant(10 * MS, 20 * MS, {0: 3}))
    seen = [replace(layer, forward_s=0.0001, backward_s=0.0002) for layer in cases.layers(10, 10)]
    made = build(replace(run, source=replace(run.source, details={"layer_times": seen})))
    (change,) = explore(made, Wanted(rebalance=True))["changes"]
    assert change["detail"]["bound"] == "continuous"
    assert any("take only 3% of stage 0's time" in a for a in change["assumptions"])


def test_the_share_of_the_end_stages_that_layers_take_is_said() -> None:
    run = make_run(Job(optimizer=MS), constant(10 * MS, 20 * MS, {3: 2}))
    made = build(replace(run, source=replace(run.source, details={"layer_times": cases.layers(3, 4, 4, 7)})))
    (change,) = explore(made, Wanted(rebalance=True))["changes"]
    assert change["detail"]["bound"] == "integer"
    assert any("75% of the first and 88% of the last stage's time" in a for a in change["assumptions"])


def test_the_rest_of_the_first_and_the_last_stage_is_pinned_to_them() -> None:
    """An embedding and a loss head are no layers, and stay where they are."""
    layers = cases.layers(2, 4, 4, 4)
    found = measured_layers(model_of(cases.report()), layers)
    assert found is not None
    pinned = {layer.pinned: layer.forward_s for layer in found if layer.pinned}
    assert pinned == {"first": pytest.approx(0.005), "last": pytest.approx(0.010)}
