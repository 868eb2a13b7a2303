"""Whatever is given to the Python API: a result, or an error of ours that names the argument, never another one."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bubblescope as bs
from bubblescope.errors import InputError, UsageError
from bubblescope.report.build import Report
from tests.support.kineto_gen import Shape, simulate, traces, write

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "before"
NO_NUMBER = [math.nan, math.inf, "x", "8", [], {}, b"8", None.__class__]


@pytest.fixture(scope="module")
def run() -> bs.Run:
    return bs.load(EXAMPLE)


@pytest.fixture(scope="module")
def report(run: bs.Run) -> Report:
    return bs.analyze(run)


@pytest.mark.parametrize("name", ["gpus", "total_steps", "microbatches", "stages"])
@pytest.mark.parametrize("value", [0, -1, 1.5, 8.0, True, 10**400, *NO_NUMBER])
def test_a_count_is_a_whole_number_from_1(run: bs.Run, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{name} is .*whole number from 1"):
        bs.analyze(run, **{name: value})


@pytest.mark.parametrize("value", [-1, -0.001, True, 10**400, 1e300, *NO_NUMBER])
def test_a_price_is_a_number_from_0(run: bs.Run, value: Any) -> None:
    with pytest.raises(UsageError, match=r"^price_per_gpu_hour is .*number from 0"):
        bs.analyze(run, price_per_gpu_hour=value)


def test_numbers_of_numpy_are_numbers_and_the_largest_give_finite_costs(run: bs.Run) -> None:
    huge = 10**15
    found = bs.analyze(run, gpus=np.int64(8), total_steps=np.int32(100), price_per_gpu_hour=np.float32(2.5)).data
    assert (found["cost"]["gpus"], type(found["cost"]["gpus"])) == (8, int)
    assert found["cost"]["price_per_gpu_hour"] == 2.5
    most = bs.analyze(run, gpus=huge, total_steps=huge, price_per_gpu_hour=huge, microbatches=huge, stages=huge).data
    assert math.isfinite(most["cost"]["idle_money"])


@pytest.mark.parametrize("value", [None, 5, [], b"EUR"])
def test_a_currency_is_a_text(run: bs.Run, value: Any) -> None:
    with pytest.raises(UsageError, match=r"^currency is "):
        bs.analyze(run, currency=value)


@pytest.mark.parametrize("value", ["", "nope", 5, [], b"1F1B"])
def test_a_schedule_is_a_known_name(run: bs.Run, value: Any) -> None:
    with pytest.raises(UsageError, match="is not a schedule"):
        bs.analyze(run, schedule=value)


@pytest.mark.parametrize("value", [None, str(EXAMPLE), EXAMPLE, 5, []])
def test_only_a_run_can_be_analysed_and_the_hint_says_how_to_get_one(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^run is .* must be a Run$") as caught:
        bs.analyze(value)
    assert "bubblescope.load(path)" in caught.value.hint


@pytest.mark.parametrize("value", [None, "", 5, 1.5, b"x", [None], [""], [b"x"], [5]])
def test_what_is_no_path_is_named(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^path is .* must be a path$"):
        bs.load(value)


@pytest.mark.parametrize("value", [[], (), {}])
def test_no_path_at_all_is_wrong_usage(value: Any) -> None:
    with pytest.raises(UsageError, match="no path"):
        bs.load(value)


@pytest.mark.parametrize("value", ["nowhere", "~no-such-user-here/x", "a\0b", "no/*.json", "foo://x", "://"])
def test_a_path_to_nothing_is_an_input_error(value: str) -> None:
    with pytest.raises(InputError):
        bs.load(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("executor", 5), ("executor", "x"), ("format", None), ("format", ""), ("format", 5), ("format", "x"),
     ("names", 5), ("names", ""), ("names", "."), ("names", "nowhere.toml"), ("max_events", 0), ("max_bytes", "1")],
)  # fmt: skip
def test_other_arguments_of_load_are_checked_too(name: str, value: Any) -> None:
    with pytest.raises(UsageError):
        bs.load(EXAMPLE, **{name: value})


@pytest.mark.parametrize("limit", ["max_events", "max_bytes"])
def test_the_limits_of_a_file_are_arguments_of_load(limit: str, tmp_path: Path) -> None:
    file = write(tmp_path, traces(simulate(Shape())))[0]
    with pytest.raises(InputError, match="more than 9 ") as caught:
        bs.load(file, **{limit: 9})
    assert limit in caught.value.hint


def test_paths_may_come_from_a_generator() -> None:
    assert len(bs.load(EXAMPLE.glob("rank-*.jsonl")).layout.ranks) == 4


@pytest.mark.parametrize("step", [-1, 999, 1.5, "x", [], math.nan])
def test_a_figure_of_a_step_that_was_not_analysed_says_which_were(report: Report, step: Any) -> None:
    with pytest.raises(UsageError, match="was not analysed; these were: 1, 2, "):
        report.timeline_figure(step=step)


def test_wrong_usage_is_a_value_error_and_crosses_processes() -> None:
    with pytest.raises(ValueError, match="no path") as caught:
        bs.load([])
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301
    assert isinstance(again, UsageError) and str(again) == str(caught.value)


@pytest.mark.parametrize("name", ["every", "warmup", "max_steps"])
@pytest.mark.parametrize("value", [-1, 1.5, True, math.nan, math.inf, "x", []])
def test_a_recording_s_counts_are_whole_numbers(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"^{name} is .*whole number from"):
        bs.record(tmp_path, **{name: value})


@pytest.mark.parametrize("value", [None, "", 5, b"x", []])
def test_a_recording_needs_a_folder(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^folder is .* must be a path$"):
        bs.record(value)


@pytest.mark.parametrize("kind", [None, 5, "", "zz", [], math.nan])
def test_a_span_is_of_a_known_kind(kind: Any) -> None:
    with pytest.raises(UsageError, match="is not a kind of work"), bs.span(kind):
        pass


@pytest.mark.parametrize("name", ["stage", "microbatch"])
@pytest.mark.parametrize("value", [None, -2, 1.5, True, "x", math.nan])
def test_a_span_s_stage_and_micro_batch_are_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{name} is .*whole number from -1"), bs.span("F", **{name: value}):
        pass


def test_a_span_takes_numbers_of_numpy() -> None:
    with bs.span("F", stage=np.int64(1), microbatch=np.int32(2)):
        pass
