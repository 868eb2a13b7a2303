"""Lightning and Hugging Face trainers with our callback; results in the experiment that is active."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.frameworks.jobs import BIN, ROOT, SCRIPTS, read_losses

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


GIVEN = """
import sys, types, torch, transformers
sys.path.insert(0, {scripts!r})
import trainers
import bubblescope as bs

model = {model}
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(32, 8)), batch_size=4)
rows = [dict(x=torch.ones(8)) for _ in range(48)]
arguments = transformers.TrainingArguments(
    output_dir="hf", max_steps=6, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
)
writer = types.SimpleNamespace(add_scalar=lambda *row: None, flush=lambda: None)

def train():
    for _ in range(4):
        with bs.span("F", 0, 0):
            torch.ones(64, 64).sum()
        with bs.span("B", 0, 0):
            torch.ones(64, 64).sum()
        bs.step()
"""
MODELS = {"lightning": "trainers.lightning_model()", "huggingface": "trainers.huggingface_model()", "loop": "None"}


@pytest.mark.parametrize("which", MODELS)
def test_the_code_of_the_documentation_runs(which: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "howto" / "trainers.md").read_text(encoding="utf-8")
    (code,) = [c for c in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if f"runs/{which}" in c]
    given = GIVEN.format(scripts=str(SCRIPTS), model=MODELS[which])
    done = subprocess.run(
        [str(BIN / "python"), "-c", given + code], cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1].replace("'", '"'))
    assert said["bubblescope/step_seconds"] > 0
