"""Results for experiment trackers: which numbers, and to whom they go."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bubblescope.capture.integrations import results, trackers
from bubblescope.capture.integrations.session import Session

FOUND = {"bubblescope/bubble/fraction": 0.25}


class Writer:
    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []

    def add_scalar(self, *row: Any) -> None:
        self.rows.append(row)

    def flush(self) -> None:
        self.rows.append(("flushed",))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """(wandb with a run at step 10, mlflow without an active run)"""
    wandb, mlflow = types.ModuleType("wandb"), types.ModuleType("mlflow")
    run = types.SimpleNamespace(summary={}, step=10, logged=[])
    run.log = lambda found, step: run.logged.append((found, step))
    wandb.run = run  # type: ignore[attr-defined]
    mlflow.active_run = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return wandb, mlflow


def test_only_active_runs_get_results(fakes: tuple[Any, Any]) -> None:
    assert trackers.log_metrics(FOUND, 12) == ["wandb"]
    assert fakes[0].run.summary == FOUND and fakes[0].run.logged == [(FOUND, 12)]
    fakes[0].run = None
    assert trackers.log_metrics(FOUND, 12) == []


def test_wandbs_steps_never_go_back(fakes: tuple[Any, Any]) -> None:
    trackers.log_metrics(FOUND, 3)
    assert fakes[0].run.logged == [] and fakes[0].run.summary == FOUND


def test_a_tracker_that_fails_is_a_warning(fakes: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    def down() -> None:
        raise ConnectionError("no route")

    fakes[1].active_run = down
    writer = Writer()
    assert trackers.log_metrics(FOUND, 1, writer) == ["wandb", "tensorboard"]
    assert writer.rows == [("bubblescope/bubble/fraction", 0.25, 1), ("flushed",)]
    assert "mlflow did not take the results" in caplog.text


def test_without_trackers_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert trackers.log_metrics(FOUND) == [] and not {"wandb", "mlflow"} & set(sys.modules)


def test_a_folder_without_a_recording_gives_no_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert results.metrics(tmp_path) == {}
    assert "no results to log: error: " in caplog.text


def test_what_is_unavailable_is_left_out() -> None:
    report = {
        "bubble": {"fraction": None, "gpu_idle_fraction": 0.5},
        "causes": {"warmup": {"seconds": None}, "optimizer": {"seconds": 1.5}},
        "steps": {},
        "cost": None,
    }
    assert results.flatten(report) == {
        "bubblescope/bubble/gpu_idle_fraction": 0.5,
        "bubblescope/causes/optimizer_seconds": 1.5,
    }


def test_training_without_a_pipeline_is_called_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("torch")
    session = Session(tmp_path)
    session.begin()
    assert session.end() == {}
    assert "no results to log: no pipeline was recorded" in caplog.text


def test_ending_a_session_that_never_began_does_nothing(tmp_path: Path) -> None:
    assert Session(tmp_path).end() == {} and list(tmp_path.iterdir()) == []
