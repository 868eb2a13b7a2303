"""`bubblescope diff` says what changed, keeps noise apart, and fails when asked to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cases import MS, noisy
from tests.support.cli_runner import Runner
from tests.support.small_recording import write_recording
from tests.support.synthetic import Job

JOB = Job(steps=6, optimizer=1 * MS)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """(even stages, last stage 1.5x), both with 2 % noise."""
    before = write_recording(tmp_path / "before", JOB, noisy({}, 1))
    after = write_recording(tmp_path / "after", JOB, noisy({3: 1.5}, 2))
    return str(before), str(after)


def test_the_cause_that_grew_is_named_with_its_interval(runs: tuple[str, str], bubblescope: Runner) -> None:
    done = bubblescope("diff", *runs)
    assert done.returncode == 0, done.stderr
    assert "longer" in done.stdout
    assert "stage imbalance" in done.stdout.splitlines()[0]
    assert "…" in done.stdout
    assert "idle, stage 3" in done.stdout


def test_json_has_every_cause_with_interval_and_is_the_same_each_time(
    runs: tuple[str, str], bubblescope: Runner
) -> None:
    first, second = (bubblescope("diff", *runs, "--json", "-") for _ in range(2))
    assert first.stdout == second.stdout
    data = json.loads(first.stdout)
    imbalance = data["causes"]["stage_imbalance"]
    assert imbalance["sure"] is True
    assert imbalance["low"] <= imbalance["difference"] <= imbalance["high"]
    assert imbalance["difference"] == pytest.approx(imbalance["after"] - imbalance["before"])
    total = sum(c["difference"] for c in data["causes"].values())
    assert total == pytest.approx(data["idle"]["difference"], abs=1e-6)
    assert [s["stage"] for s in data["stages"]] == [0, 1, 2, 3]
    assert data["worse_fraction"] > 0.2


@pytest.mark.parametrize(
    ("order", "option", "status"),
    [
        ((0, 1), (), 0),
        ((0, 1), ("--fail-if-worse",), 5),
        ((0, 1), ("--fail-if-worse", "0.1"), 5),
        ((0, 1), ("--fail-if-worse", "0.9"), 0),
        ((1, 0), ("--fail-if-worse",), 0),
        ((0, 0), ("--fail-if-worse",), 0),
        ((0, 1), ("--fail-if-worse", "-1"), 2),
    ],
)
def test_fail_if_worse_is_exit_5_and_only_beyond_the_noise(
    order: tuple[int, int], option: tuple[str, ...], status: int, runs: tuple[str, str], bubblescope: Runner
) -> None:
    done = bubblescope("diff", runs[order[0]], runs[order[1]], *option)
    assert done.returncode == status, done.stderr
    if status == 5:
        assert "longer than before" in done.stderr


def test_a_side_that_is_not_there_is_exit_3_with_its_name(runs: tuple[str, str], bubblescope: Runner) -> None:
    done = bubblescope("diff", runs[0], "nowhere")
    assert done.returncode == 3
    assert "nowhere" in done.stderr


@pytest.mark.parametrize("limit", ["nan", "inf", "-1"])
def test_a_limit_that_is_no_limit_is_refused(limit: str, bubblescope: Runner) -> None:
    examples = Path(__file__).parents[2] / "docs" / "examples"
    done = bubblescope("diff", str(examples / "before"), str(examples / "after"), "--fail-if-worse", limit)
    assert done.returncode == 2
