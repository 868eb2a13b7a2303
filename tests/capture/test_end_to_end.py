"""From real processes to report.json, through the command line, when something went wrong on the way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.sleeping import SleepRun, run_pipeline

pytestmark = pytest.mark.real


def analyze(*paths: Path, out: Path) -> tuple[int, dict[str, Any], str]:
    """Exit status, report.json and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "bubblescope", "analyze", *map(str, paths), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    file = out / "report.json"
    return done.returncode, json.loads(file.read_text()) if file.exists() else {}, done.stderr


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rank 2 was killed in the middle of step 5."""
    folder: Path = tmp_path_factory.mktemp("killed")
    codes = [r.exitcode for r in run_pipeline(SleepRun("1F1B", 4, 8, 0.003, 0.006, steps=8, out=folder, kill=(2, 5)))]
    assert codes[2] == -9
    return folder


@pytest.fixture(scope="module")
def whole(killed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str]:
    """What `analyze` makes of it as it is."""
    return analyze(killed, out=tmp_path_factory.mktemp("whole"))


def test_killing_a_rank_costs_no_finished_step_of_any_rank(whole: tuple[int, dict[str, Any], str]) -> None:
    status, data, said = whole
    assert status == 0
    # Step 0 is warm-up; steps 1 to 4 were finished by all.
    assert [gpu["steps"] for gpu in data["gpus"]] == [4, 4, 4, 4]
    assert data["bubble"]["fraction"] is not None
    assert any(w["code"] == "rank-ended-early" and "rank 2" in w["message"] for w in data["source"]["warnings"])
    assert "rank 2" in said


def test_a_rank_with_fewer_steps_keeps_the_others_steps(killed: Path, tmp_path: Path) -> None:
    """One rank's file is cut in the middle of a line: its last step is gone, the others keep theirs."""
    cut = tmp_path / "cut"
    shutil.copytree(killed, cut)
    file = cut / "rank-00001.jsonl"
    lines = [line for line in file.read_bytes().splitlines(keepends=True) if b'"step":4,' not in line[:200]]
    steps = [i for i, line in enumerate(lines) if line.startswith(b'{"kind":"step"')]
    file.write_bytes(b"".join(lines[: steps[3]]) + lines[steps[3]][:100])
    status, data, _ = analyze(cut, out=tmp_path / "report")
    assert status == 0
    # Two steps are whole: they carry the causes and the advice. Every finished step of every rank is told as well.
    assert [gpu["steps"] for gpu in data["gpus"]] == [2, 2, 2, 2]
    assert [gpu["all_steps"]["steps"] for gpu in data["gpus"]] == [4, 2, 4, 4]
    assert data["steps"]["analysed"] == 2
    assert data["replay"]["trusted"]
    assert data["bubble"]["fraction"] is not None
    codes = {w["code"] for w in data["source"]["warnings"]}
    assert {"tail-cut", "windows-not-replayed"} <= codes
    for gpu in data["gpus"]:
        assert sum(gpu["causes"].values()) == pytest.approx(gpu["idle"], abs=1e-6)
        assert gpu["busy"] + gpu["idle"] == pytest.approx(gpu["window"], abs=1e-6)


def test_a_missing_rank_takes_the_causes_away_and_nothing_else(killed: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    shutil.copytree(killed, part)
    (part / "rank-00002.jsonl").unlink()
    status, data, _ = analyze(part, out=tmp_path / "report")
    assert status == 0
    assert data["source"]["missing_ranks"] == [2]
    assert data["bubble"]["fraction"] is None
    assert data["causes"]["stage_imbalance"]["seconds"] is None
    assert data["advice"] == []
    assert [gpu["rank"] for gpu in data["gpus"]] == [0, 1, 3]
    assert all(gpu["idle"] > 0 for gpu in data["gpus"])
    assert all(gpu["causes"]["stage_imbalance"] is None for gpu in data["gpus"])


def shifted(folder: Path, to: Path, change: dict[int, int]) -> Path:
    """A copy in which the first forward of step 3 of these ranks starts at that time (-1: an hour later)."""
    shutil.copytree(folder, to)
    for rank, start in change.items():
        file = to / f"rank-{rank:05d}.jsonl"
        lines = file.read_text().splitlines()
        for i, line in enumerate(lines):
            step = json.loads(line)
            if step.get("kind") == "step" and step["step"] == 3:
                columns = step["columns"]
                row = columns["kind"].index("F")
                hour = 3_600_000_000_000
                columns["start_ns"][row] = start if start >= 0 else columns["start_ns"][row] + hour
                columns["end_ns"][row] += hour if start < 0 else 0
                lines[i] = json.dumps(step)
        file.write_text("\n".join(lines) + "\n")
    return to


@pytest.mark.parametrize("change", [{1: 0}, {1: -1}, {0: -1, 1: -1, 2: -1, 3: -1}], ids=["ts 0", "an hour", "all"])
def test_a_broken_time_stamp_costs_its_step_and_nothing_else(
    change: dict[int, int], killed: Path, whole: tuple[int, dict[str, Any], str], tmp_path: Path
) -> None:
    status, data, _ = analyze(shifted(killed, tmp_path / "bad", change), out=tmp_path / "report")
    assert status == 0
    assert "impossible-times" in {w["code"] for w in data["source"]["warnings"]}
    assert data["steps"]["analysed"] == 3
    assert data["replay"]["trusted"]
    assert 0 < data["bubble"]["fraction"] < 1
    assert data["gpus"][0]["busy"] == pytest.approx(whole[1]["gpus"][0]["busy"], rel=0.3)


def test_what_is_no_recording_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").write_text("not json\n")
    status, _, said = analyze(tmp_path, out=tmp_path / "report")
    assert status == 3
    assert "error:" in said
    assert "hint:" in said
    assert "Traceback" not in said
