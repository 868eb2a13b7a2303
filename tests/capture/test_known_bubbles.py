"""Real gloo pipelines whose stages sleep for set times: what is measured must be what is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bubblescope.report.build import Report, ReportOptions, build
from tests.support.predictions import quiet_reports
from tests.support.sleeping import SleepRun
from tests.support.synthetic import Job, constant, make_run

pytestmark = pytest.mark.real

FORWARD_S, BACKWARD_S = 0.020, 0.040
P, M = 4, 8
INTRINSIC = ("warmup", "cooldown", "schedule_steady")
LAST = {"1F1B": (3,), "GPipe": (3,), "Interleaved1F1B": (3, 7)}


SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B")


def slow(schedule: str) -> dict[int, float]:
    """The last GPU takes twice as long."""
    return dict.fromkeys(LAST[schedule], 2.0)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Reports of real runs, by schedule: with equal stages, and with a slow last GPU ("… slow")."""
    runs = {}
    for schedule in SCHEDULES:
        equal = SleepRun(schedule, P, M, FORWARD_S, BACKWARD_S, steps=5)
        runs |= {schedule: equal, f"{schedule} slow": replace(equal, scale=slow(schedule))}
    return quiet_reports(tmp_path_factory.mktemp("known"), runs)


def truth(schedule: str, scale: dict[int, float]) -> Report:
    """The same job without any noise: a replay written down."""
    job = Job(schedule, P, M, 2 if schedule.startswith("Inter") else None, steps=2, optimizer=1)
    return build(make_run(job, constant(round(FORWARD_S * 1e9), round(BACKWARD_S * 1e9), scale)), ReportOptions())


def seconds(report: Report, cause: str) -> float:
    return float(report.data["causes"][cause]["seconds"])


def sums_hold(data: dict[str, Any]) -> bool:
    return all(
        abs(sum(g["causes"].values()) - g["idle"]) < 1e-6
        and abs(g["busy"] + g["idle"] - g["window"]) < 1e-6
        and abs(sum(g["phases"].values()) - g["idle"]) < 1e-6
        for g in data["gpus"]
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_show_the_bubble_of_the_closed_form(schedule: str, measured: dict[str, Report]) -> None:
    found, wanted = measured[schedule], truth(schedule, {})
    bubble = found.data["bubble"]
    assert bubble["fraction"] == pytest.approx(wanted.data["bubble"]["fraction"], abs=0.02)
    assert bubble["theory"]["fraction"] == pytest.approx(wanted.data["bubble"]["fraction"], abs=1e-3)
    assert sums_hold(found.data)
    assert found.data["pipeline"]["schedule"] == schedule
    assert found.data["replay"]["trusted"]
    for seen, known in zip(found.data["gpus"], wanted.data["gpus"], strict=True):
        for phase in ("warmup", "cooldown"):
            assert seen["causes"][phase] == pytest.approx(known["causes"][phase], rel=0.10)


def test_1f1b_fraction_is_that_of_the_literature(measured: dict[str, Report]) -> None:
    found = measured["1F1B"]
    assert found.data["bubble"]["fraction"] == pytest.approx(0.2727, abs=0.02)
    for gpu in found.data["gpus"]:
        s = gpu["stage"]
        assert gpu["causes"]["warmup"] == pytest.approx(s * FORWARD_S + (P - 1 - s) * BACKWARD_S, rel=0.10)
        assert gpu["causes"]["cooldown"] == pytest.approx((P - 1 - s) * FORWARD_S + s * BACKWARD_S, rel=0.10)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_last_gpu_twice_as_slow_is_the_largest_cause_after_the_schedule(
    schedule: str, measured: dict[str, Report]
) -> None:
    found, wanted = measured[f"{schedule} slow"], truth(schedule, slow(schedule))
    causes = {name: row["seconds"] for name, row in found.data["causes"].items() if name not in INTRINSIC}
    assert max(causes, key=lambda name: causes[name]) == "stage_imbalance"
    step = float(np.mean(found.steps["seconds"]))
    share = wanted.data["causes"]["stage_imbalance"]["seconds"] / wanted.data["steps"]["seconds_median"]
    assert seconds(found, "stage_imbalance") / step == pytest.approx(share, rel=0.10)
    if schedule == "1F1B":
        assert share == pytest.approx(15.75 / 57, rel=1e-4)
    assert sums_hold(found.data)
    partition = next(a for a in found.data["advice"] if a["kind"] == "partition")
    assert partition["detail"]["slowest_stage"] in LAST[schedule]
