"""`bubblescope cost` says what the arithmetic says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli_runner import Runner

TEN_MS = ("cost", "--bubble-ms", "10", "--steps", "10000000")


def test_ten_milliseconds_in_ten_million_steps_are_said_to_be_27_78_hours_per_gpu(bubblescope: Runner) -> None:
    done = bubblescope(*TEN_MS)
    assert done.returncode == 0
    assert "27.78 hours per GPU" in done.stdout


@pytest.mark.parametrize(
    ("bubble_ms", "hours", "gpu_hours"), [("0.001", "1.00 µs", "0.00000800 GPU-seconds"), ("0", "0 s", "0 GPU-hours")]
)
def test_what_is_too_short_for_hours_is_told_in_smaller_units(
    bubblescope: Runner, bubble_ms: str, hours: str, gpu_hours: str
) -> None:
    said = ("cost", "--bubble-ms", bubble_ms, "--steps", "1", "--gpus", "8", "--price-per-gpu-hour", "2.5")
    money = "under 0.01 USD" if bubble_ms != "0" else "0.00 USD"
    assert bubblescope(*said).stdout == f"{hours} per GPU\n{gpu_hours} on 8 GPUs\n{money}\n"


def test_without_a_price_the_json_has_hours_and_no_money(bubblescope: Runner) -> None:
    data = json.loads(bubblescope(*TEN_MS, "--gpus", "8", "--json", "-").stdout)
    assert data.keys() == {"gpu_hours", "hours_per_gpu", "money", "days"}
    assert data["hours_per_gpu"] == pytest.approx(27.7778, abs=1e-4)
    assert data["gpu_hours"] == pytest.approx(8 * data["hours_per_gpu"])
    assert data["days"] == pytest.approx(27.7778 / 24, abs=1e-4)
    assert data["money"] is None


def test_with_a_price_both_outputs_have_the_money(bubblescope: Runner, tmp_path: Path) -> None:
    done = bubblescope(*TEN_MS, "--gpus", "8", "--price-per-gpu-hour", "2.5", "--currency", "EUR", "--json", "c.json")
    assert "555.56 EUR" in done.stdout
    assert json.loads((tmp_path / "c.json").read_text())["money"] == pytest.approx(555.5556, abs=1e-3)


@pytest.mark.parametrize(
    "bad",
    [
        ("--gpus", "-1"),
        ("--gpus", "0"),
        ("--steps", "0"),
        ("--price-per-gpu-hour", "nan"),
        ("--price-per-gpu-hour", "-2"),
        ("--bubble-ms", "1e308"),
        ("--bubble-ms", "inf"),
        ("--gpus", "1" + 400 * "0"),
    ],
)
def test_an_amount_that_makes_no_sense_is_wrong_usage(bad: tuple[str, str], bubblescope: Runner) -> None:
    done = bubblescope(*TEN_MS, *bad, "--json", "-")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")


def test_the_name_of_the_currency_cannot_act_on_the_terminal(bubblescope: Runner) -> None:
    done = bubblescope(*TEN_MS, "--price-per-gpu-hour", "2", "--currency", "\x1b[31mX")
    assert "\x1b" not in done.stdout and "\\x1b[31mX" in done.stdout
