"""What is predicted from one recorded real run comes true when the change is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.predictions import base_run, model_of, outcomes, predictions, run_all


@pytest.mark.real
def test_a_run_predicts_more_microbatches_moved_layers_and_other_schedules(tmp_path: Path) -> None:
    """The shorter version of scripts/validate_predictions."""
    reports = run_all(tmp_path, base_run(0.015, 0.030, steps=4))
    assert reports["base"].data["replay"]["trusted"]
    found = outcomes(reports)
    assert [o.key for o in found] == ["a", "b", "c", "d"]
    assert {o.change: round(o.error, 3) for o in found if not o.kept} == {}
    # Better is better: the order of the changes by step time comes true too.
    predicted = predictions(model_of(reports["base"]))
    by_prediction = sorted("bcd", key=lambda key: predicted[key])
    assert by_prediction[0] == "d"
