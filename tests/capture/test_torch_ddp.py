"""The hook that autograd itself calls: what goes wrong in it must not reach the job's backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bubblescope.capture.hooks.torch_ddp import _Wait
from bubblescope.capture.recorder import Recorder


def test_an_error_of_ours_inside_a_backward_costs_a_warning_and_no_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path)
    wait = _Wait(recorder, torch.nn.Linear)
    output = torch.ones(1, requires_grad=True) * 2
    output.register_hook(wait._queue)
    with monkeypatch.context() as broken:
        broken.setattr(recorder, "mark", lambda: 1 / 0)
        output.sum().backward()
    assert wait.ready == [] and len(recorder.patches.warnings) == 1
    assert "ZeroDivisionError" in recorder.patches.warnings[0]
    wait._queue(output)  # outside of a backward autograd refuses the callback
    assert recorder.patches.faults == 2
