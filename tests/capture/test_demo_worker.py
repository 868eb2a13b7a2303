"""The demo's training is a real one, and its options are checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bubblescope.cli.demo_worker import DemoOptions, _failure, launch, pace_note, pick_device
from bubblescope.errors import UsageError
from bubblescope.ingest import recording
from bubblescope.model import Kind


@pytest.mark.real
def test_the_demo_trains_and_its_slow_stage_is_slow(tmp_path: Path) -> None:
    options = DemoOptions(str(tmp_path), stages=2, microbatches=4, steps=5, imbalance={1: 2.0}, device="cpu")
    losses = launch(options)
    assert len(losses) == 5 and losses[-1] < 0.7 * losses[0]
    run = recording.read(tmp_path)
    assert run.notices == () and (run.layout.schedule, run.layout.microbatches) == ("1F1B", 4)
    typical = {
        stage: np.median(run.spans.duration_ns[run.spans.where(kind=Kind.BACKWARD, stage=stage)]) for stage in range(2)
    }
    assert 1.7 < typical[1] / typical[0] < 2.3


@pytest.mark.parametrize(
    "wrong",
    [{"stages": 0}, {"microbatches": 2}, {"imbalance": {9: 2.0}}, {"imbalance": {0: 0.0}}, {"steps": 0}],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        DemoOptions("x", **wrong)  # type: ignore[arg-type]


def test_the_padding_is_stated_openly() -> None:
    assert "padded by sleeping" in pace_note(DemoOptions("x"), "cpu")
    assert pace_note(DemoOptions("x"), "cuda") == ""


def test_gpus_that_are_not_there_are_asked_for_in_vain() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there are GPUs here")
    assert pick_device("auto", 4) == "cpu"
    with pytest.raises(UsageError):
        pick_device("cuda", 4)


def test_a_rank_that_fails_is_told_in_one_line_and_the_rest_is_for_debug() -> None:
    error = _failure(2, 1, "Traceback (most recent call last):\n  File x\nRuntimeError: no port\n\n")
    assert str(error) == "rank 2 of the demo ended with status 1: RuntimeError: no port"
    assert "Traceback" in error.__notes__[0]
