"""`bubblescope demo` trains for real, and its report finds the stage that was made slow."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bubblescope as bs
from bubblescope.cli.demo import called_as, parse_imbalance
from bubblescope.errors import UsageError
from tests.support.cli_runner import Runner

INTRINSIC = ("warmup", "cooldown", "schedule_steady")
SLOW = 2
"""The stage that the demo slows down when nothing is said."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One run with defaults, shared by the tests below: what it printed, and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    done = subprocess.run(
        [sys.executable, "-m", "bubblescope", "demo"], cwd=folder, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done, folder / "demo-out"


@pytest.fixture(scope="module")
def data(demo: tuple[subprocess.CompletedProcess[str], Path]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((demo[1] / "report.json").read_text())
    return loaded


Demo = tuple[subprocess.CompletedProcess[str], Path]


@pytest.mark.real
def test_it_leaves_a_page_the_json_and_one_recording_per_stage(demo: Demo) -> None:
    done, out = demo
    assert (out / "report.html").stat().st_size > 10_000
    assert len(list((out / "recording").glob("rank-*.jsonl"))) == 4
    assert str(Path("demo-out") / "report.html") in done.stdout


@pytest.mark.real
def test_the_loss_of_the_training_falls_and_is_printed(demo: Demo) -> None:
    found = re.search(r"loss ([\d.]+) → ([\d.]+)", demo[0].stdout)
    assert found, demo[0].stdout
    assert float(found[2]) < 0.9 * float(found[1])


@pytest.mark.real
def test_the_job_is_described_as_it_was_started(data: dict[str, Any]) -> None:
    pipeline = data["pipeline"]
    assert (pipeline["stages"], pipeline["microbatches"], pipeline["schedule"]) == (4, 8, "1F1B")
    assert data["source"]["missing_ranks"] == []
    assert data["steps"]["analysed"] >= 5


@pytest.mark.real
def test_stage_imbalance_is_the_largest_cause_that_is_not_the_schedule_s_own(data: dict[str, Any]) -> None:
    avoidable = {name: c["seconds"] for name, c in data["causes"].items() if name not in INTRINSIC}
    assert max(avoidable, key=lambda name: avoidable[name] or 0.0) == "stage_imbalance"


@pytest.mark.real
def test_the_slow_stage_is_the_busiest_and_named_in_the_summary(demo: Demo, data: dict[str, Any]) -> None:
    busy = {gpu["stage"]: gpu["busy"] for gpu in data["gpus"]}
    assert max(busy, key=lambda stage: busy[stage]) == SLOW
    assert re.search(rf"stage {SLOW}\b", demo[0].stdout)


@pytest.mark.real
def test_busy_and_idle_make_the_window_and_causes_make_the_idle_time(data: dict[str, Any]) -> None:
    for gpu in data["gpus"]:
        assert gpu["busy"] + gpu["idle"] == pytest.approx(gpu["window"], abs=1e-6)
        assert sum(gpu["causes"].values()) == pytest.approx(gpu["idle"], abs=1e-6)


@pytest.mark.real
def test_analysing_its_recording_again_gives_the_same_figures(
    demo: Demo, data: dict[str, Any], bubblescope: Runner
) -> None:
    again = json.loads(bubblescope("analyze", str(demo[1] / "recording"), "--json", "-").stdout)
    for part in ("pipeline", "steps", "gpus", "bubble", "causes", "replay"):
        assert again[part] == data[part]


@pytest.mark.real
def test_python_and_the_command_line_agree(demo: Demo, data: dict[str, Any]) -> None:
    report = bs.analyze(bs.load(demo[1] / "recording"), price_per_gpu_hour=2.0)
    assert report.data["bubble"] == data["bubble"]
    assert report.data["cost"]["idle_money"] == pytest.approx(2 * data["cost"]["idle_gpu_hours"])
    assert data["cost"]["idle_money"] is None


@pytest.mark.real
def test_fail_above_exits_5_after_writing_everything(demo: Demo, bubblescope: Runner, tmp_path: Path) -> None:
    done = bubblescope("analyze", str(demo[1] / "recording"), "--fail-above", "0.01", "--out", "r")
    assert done.returncode == 5
    assert "error: bubble fraction" in done.stderr
    assert (tmp_path / "r" / "report.html").exists()


@pytest.mark.real
def test_a_recording_that_was_cut_in_one_rank_is_analysed_and_the_rank_is_named(
    demo: Demo, bubblescope: Runner, tmp_path: Path
) -> None:
    shutil.copytree(demo[1] / "recording", tmp_path / "cut")
    victim = next((tmp_path / "cut").glob("rank-00001*.jsonl"))
    lines = victim.read_bytes().splitlines(keepends=True)
    victim.write_bytes(b"".join(lines[:-3]) + lines[-3][: len(lines[-3]) // 2])  # as kill -9 in mid-write leaves it
    done = bubblescope("analyze", "cut", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert re.search(r"warning: .*rank 1\b|warning: .*rank-00001", done.stderr)
    assert json.loads(done.stdout)["steps"]["analysed"] >= 5


@pytest.mark.real
def test_how_to_go_on_can_be_typed_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "bin" / "bubblescope"
    script.parent.mkdir()
    script.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.argv", [str(script), "demo"])
    assert called_as() == "bin/bubblescope"
    monkeypatch.setattr("sys.argv", [str(tmp_path / "__main__.py"), "demo"])
    assert called_as() == f"{sys.executable} -m bubblescope"
    monkeypatch.setenv("PATH", str(script.parent))
    assert called_as() == "bubblescope"


def test_running_it_again_into_the_same_folder_does_not_mix_the_two_runs(demo: Demo) -> None:
    out = demo[1]
    done = subprocess.run(
        [sys.executable, "-m", "bubblescope", "demo", "--stages", "2", "--microbatches", "2", "--steps", "4"],
        cwd=out.parent, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(list((out / "recording").glob("rank-*.jsonl"))) == 2


def test_a_factor_per_stage_is_read_as_written() -> None:
    assert parse_imbalance(("2=1.5", "0=2"), stages=4) == {2: 1.5, 0: 2.0}
    assert parse_imbalance((), stages=4) == {}


@pytest.mark.parametrize("text", ["", "2", "2=", "=2", "a=2", "2=b", "4=2", "-1=2", "2=0", "2=-1", "2=nan", "2=inf"])
def test_any_other_imbalance_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_imbalance((text,), stages=4)


@pytest.mark.parametrize("name", ["2F2B", "ZB-H1", "custom"])
def test_a_schedule_that_torch_does_not_have_is_wrong_usage_before_anything_starts(
    name: str, bubblescope: Runner, tmp_path: Path
) -> None:
    done = bubblescope("demo", "--schedule", name)
    assert done.returncode == 2
    assert "1F1B" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_the_schedule_does_not_allow_are_wrong_usage_before_anything_starts(
    bubblescope: Runner, tmp_path: Path
) -> None:
    done = bubblescope("demo", "--schedule", "DualPipeV", "--stages", "2", "--microbatches", "2")
    assert done.returncode == 2
    assert "DualPipeV needs at least" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc here")
def test_a_place_that_cannot_be_written_is_named_before_the_training(bubblescope: Runner) -> None:
    done = bubblescope("demo", "--out", "/proc/x")
    assert done.returncode == 2
    assert re.match(r"error: cannot write: .*, in /proc/x", done.stderr)
    assert "padded" not in done.stderr  # the first thing that is said of a training


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_worker_that_was_killed_is_named_and_is_no_bug_of_ours(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "bubblescope", "demo", "--steps", "100"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert _wait_until(lambda: process.poll() is not None or len(_children(process.pid)) == 4)
        os.kill(_children(process.pid)[1], signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 6
    assert "of the demo was ended by signal 9 (Killed)" in said
    assert "ran out of memory" in said


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_demo_that_is_ended_leaves_no_worker_behind(how: int, status: int, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "bubblescope", "demo", "--steps", "100"],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert _wait_until(lambda: process.poll() is not None or len(_children(process.pid)) == 4)
        workers = _children(process.pid)
        process.send_signal(how)
        assert process.wait(60) == status
        assert _wait_until(lambda: not any(map(_runs, workers)))
    finally:
        process.kill()
        process.wait()
