"""Layer times are believed only where they say how long a stage would take with other layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bubblescope.replay.repartition import EXPLAINED, measured_layers, repartition
from tests.support import cases
from tests.support.predictions import model_of


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


def test_the_rest_of_the_first_and_the_last_stage_is_pinned_to_them() -> None:
    """An embedding and a loss head are no layers, and stay where they are."""
    layers = cases.layers(2, 4, 4, 4)
    found = measured_layers(model_of(cases.report()), layers)
    assert found is not None
    pinned = {layer.pinned: layer.forward_s for layer in found if layer.pinned}
    assert pinned == {"first": pytest.approx(0.005), "last": pytest.approx(0.010)}
