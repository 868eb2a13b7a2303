"""Lightning and Hugging Face trainers with our callback; results in the experiment that is active."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.jobs import BIN, SCRIPTS, read_losses

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(300)]


def test_callbacks_record_and_log_to_the_active_run(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [str(BIN / "python"), str(SCRIPTS / "trainers.py"), "--losses", str(out)],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = read_losses(out)
    for trainer in ("lightning", "huggingface"):
        assert 0 < said[trainer]["bubblescope/bubble/gpu_idle_fraction"] < 1
        assert said[trainer]["bubblescope/step_seconds"] > 0
    assert said["mlflow"] == pytest.approx(said["lightning"]) and said["wandb"] == pytest.approx(said["lightning"])
