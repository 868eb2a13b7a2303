"""Hours and money are plain arithmetic, and money exists only where a price was given."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bubblescope.cost.prices import gpu_hours, loss, money
from bubblescope.errors import UsageError


def test_ten_milliseconds_in_ten_million_steps_are_27_78_hours_per_gpu() -> None:
    assert round(loss(0.010, steps=10_000_000).hours_per_gpu, 2) == 27.78


def test_gpu_hours_grow_with_the_gpus_but_the_hours_per_gpu_and_the_delay_do_not() -> None:
    one, many = loss(0.010, steps=10_000_000), loss(0.010, steps=10_000_000, gpus=1024)
    assert many.gpu_hours == pytest.approx(1024 * one.gpu_hours)
    assert many.hours_per_gpu == one.hours_per_gpu
    assert many.days == one.days == pytest.approx(one.hours_per_gpu / 24)


def test_money_is_hours_times_the_given_price() -> None:
    found = loss(0.5, steps=7200, gpus=4, price_per_gpu_hour=2.5)
    assert found.gpu_hours == 4.0
    assert found.money == 10.0


def test_without_a_price_there_is_no_money_rather_than_a_guess_or_zero() -> None:
    assert loss(0.5, steps=7200, gpus=4).money is None
    assert money(12.0, None) is None


def test_a_price_of_zero_is_a_price() -> None:
    assert loss(0.5, steps=7200, price_per_gpu_hour=0.0).money == 0.0


def test_a_cause_that_saves_time_costs_a_negative_amount() -> None:
    assert money(-2.0, 3.0) == -6.0


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("argument", ["seconds_per_step", "steps", "gpus", "price_per_gpu_hour"])
def test_a_negative_or_not_finite_input_is_refused_by_name(argument: str, bad: float) -> None:
    values = {"seconds_per_step": 0.01, "steps": 10.0, "gpus": 2.0, "price_per_gpu_hour": 1.0}
    with pytest.raises(UsageError, match=argument.split("_")[0]):
        loss(**(values | {argument: bad}))  # type: ignore[arg-type]


@given(
    st.floats(0, 1e3),
    st.integers(0, 10**9),
    st.integers(1, 10**5),
)
def test_gpu_hours_are_additive_over_steps_and_linear_in_gpus(seconds: float, steps: int, gpus: int) -> None:
    half = steps // 2
    parts = gpu_hours(seconds, steps=half, gpus=gpus) + gpu_hours(seconds, steps=steps - half, gpus=gpus)
    assert parts == pytest.approx(gpu_hours(seconds * gpus, steps=steps))
