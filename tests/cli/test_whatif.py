"""`bubblescope whatif` ranks what was asked for, says what it assumes, and promises nothing it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bubblescope.cli.whatif import size
from bubblescope.errors import UsageError
from tests.support.cases import MS
from tests.support.cli_runner import Runner
from tests.support.small_recording import write_recording
from tests.support.synthetic import Job, constant

JOB = Job(steps=3, optimizer=1 * MS)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """1F1B p=4 m=8, F = 10 ms, B = 20 ms, last stage twice as slow: 571 ms a step."""
    return write_recording(tmp_path / "rec", JOB, constant(10 * MS, 20 * MS, {3: 2.0}))


def layer_file(folder: Path) -> Path:
    rows = ["name,forward_s,backward_s,bytes"] + [f"layers.{i},0.0025,0.005,{2**30}" for i in range(20)]
    path = folder / "layers.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_json_alone_on_stdout_with_what_was_asked_best_first(recording: Path, bubblescope: Runner) -> None:
    done = bubblescope("whatif", str(recording), "--microbatches", "16", "--microbatches", "32", "--schedule", "zb_h1",
                       "--price-per-gpu-hour", "2", "--gpus", "8", "--total-steps", "3600", "--json", "-")  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["step_seconds"] == pytest.approx(0.571, abs=1e-6)
    assert data["replay"]["trusted"] is True
    saved = [c["saved_seconds"] for c in data["changes"]]
    assert saved == sorted(saved, reverse=True)
    assert {c["kind"] for c in data["changes"]} == {"microbatches", "schedule"}
    change = next(c for c in data["changes"] if c["detail"].get("microbatches") == 16)
    assert change["step_seconds"] == pytest.approx(1.051, abs=1e-6)
    assert change["saved_gpu_hours"] == pytest.approx(8 * change["saved_seconds"])
    assert change["saved_money"] == pytest.approx(2 * change["saved_gpu_hours"])
    assert change["saved_fraction"] == pytest.approx(change["saved_seconds"] / 0.571, rel=1e-6)
    assert change["assumptions"]
    assert data["cost"] == {"gpus": 8, "total_steps": 3600, "price_per_gpu_hour": 2.0, "currency": "USD"}


def test_without_options_all_that_is_worth_it_is_shown_with_assumptions(recording: Path, bubblescope: Runner) -> None:
    done = bubblescope("whatif", str(recording))
    assert done.returncode == 0, done.stderr
    assert "saves" in done.stdout.splitlines()[0]
    assert "1. " in done.stdout
    assert "assuming" in done.stdout
    assert "memory: peak activations" in done.stdout
    assert "the replay of the run itself is off by 0.0 % of the step: trusted" in done.stdout


def test_the_best_whole_cut_comes_from_a_layer_file(recording: Path, tmp_path: Path, bubblescope: Runner) -> None:
    layers = layer_file(tmp_path)
    done = bubblescope("whatif", str(recording), "--rebalance", "--layer-times", str(layers), "--memory-limit", "6GiB",
                       "--json", "-")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (change,) = json.loads(done.stdout)["changes"]
    assert change["detail"]["layers"] == [5, 5, 5, 5]
    assert change["step_seconds"] == pytest.approx(11 * 0.0375 + 0.001, abs=1e-6)
    tight = bubblescope("whatif", str(recording), "--rebalance", "--layer-times", str(layers), "--memory-limit", "4GiB")
    assert tight.returncode == 0
    assert "not predicted: Move layers between stages, because no cut" in tight.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--schedule", "nonsense"), 2, "is not a schedule"),
        (("--microbatches", "0"), 2, "0"),
        (("--memory-limit", "lots"), 2, "60GiB"),
        (("--memory-limit", "1GiB", "--rebalance"), 2, "--layer-times"),
        (("--layer-times", "nowhere.csv"), 3, "nowhere.csv"),
    ],
)
def test_wrong_wishes_are_refused_in_words(
    arguments: tuple[str, ...], status: int, said: str, recording: Path, bubblescope: Runner
) -> None:
    done = bubblescope("whatif", str(recording), *arguments)
    assert done.returncode == status, done.stderr
    assert done.stderr.startswith("error: ")
    assert said in done.stderr
    assert done.stdout == ""


def test_what_nobody_can_tell_from_the_run_is_said(recording: Path, bubblescope: Runner) -> None:
    done = bubblescope("whatif", str(recording), "--replace-node", "--fix-input")
    assert done.returncode == 0
    assert "not predicted: Replace a slow node, because a slow GPU can only be told" in " ".join(done.stdout.split())


def test_the_number_of_the_run_is_no_change_and_fewer_micro_batches_are_not_more(
    recording: Path, bubblescope: Runner
) -> None:
    done = bubblescope("whatif", str(recording), "--microbatches", "8", "--microbatches", "1", "--json", "-")
    data = json.loads(done.stdout)
    assert [c["detail"]["microbatches"] for c in data["changes"]] == [1]
    assert data["refused"] == [{"action": "Run 8 micro-batches per step", "why": "that is the number of this run"}]
    assert data["changes"][0]["action"].startswith("Run 1 micro-batch per step instead of 8")
    assert "shrinks from 8 to 1 micro-batch;" in data["changes"][0]["assumptions"][0]


def test_a_run_without_a_bubble_gets_a_plain_sentence(tmp_path: Path, bubblescope: Runner) -> None:
    job = Job("1F1B", stages=2, microbatches=2048, steps=1, optimizer=1)
    folder = write_recording(tmp_path / "busy", job, constant(10, 20))
    done = bubblescope("whatif", str(folder))
    assert done.returncode == 0, done.stderr
    assert "the bubble is not what holds this run back" in " ".join(done.stdout.split())


def test_help_documents_the_json_and_the_file_of_layers(bubblescope: Runner) -> None:
    text = bubblescope("whatif", "--help").stdout
    for word in ("--json", "saved_fraction", "name,forward_s,backward_s,bytes,pinned", "Examples"):
        assert word in text


def test_sizes_are_read_as_people_write_them() -> None:
    assert [size(t) for t in ("1GiB", "2 gb", "80e9", "512")] == [2**30, 2e9, 80e9, 512]
    for wrong in ("", "0", "-1", "GiB", "inf", "nan"):
        with pytest.raises(UsageError):
            size(wrong)


@pytest.mark.parametrize("many", ["1000000", "1" + 30 * "0"])
def test_more_micro_batches_than_a_replay_takes_are_refused_and_not_tried(
    many: str, recording: Path, bubblescope: Runner
) -> None:
    done = bubblescope("whatif", str(recording), "--microbatches", many, "--json", "-")
    assert done.returncode == 0, done.stderr
    (refused,) = json.loads(done.stdout)["refused"]
    assert "a replay takes up to 5,000,000" in refused["why"]
