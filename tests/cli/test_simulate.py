"""`bubblescope simulate`: the contract's JSON, orders from a file, and errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bubblescope.cli.main import run

UNIT = ["--forward", "1", "--input-grad", "1", "--weight-grad", "1"]
ONE_F = ["simulate", "--schedule", "1f1b", "--stages", "4", "--microbatches", "8", *UNIT]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert run([*arguments, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_json_is_that_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *ONE_F)
    assert {k: found[k] for k in ("schedule", "stages", "chunks", "microbatches", "makespan", "busy")} == {
        "schedule": "1F1B",
        "stages": 4,
        "chunks": 1,
        "microbatches": 8,
        "makespan": 33,
        "busy": 24,
    }
    assert found["gpus"][1] == {
        "rank": 1,
        "busy": 24,
        "idle": 9,
        "phases": {"warmup": 5, "steady": 0, "cooldown": 4},
    }
    assert found["peak_activations"] == [4, 3, 2, 1]
    assert (found["over_ideal"], round(found["fraction"], 6)) == (0.375, 0.272727)


def test_the_words_name_each_ratio_and_the_plot_has_a_line_per_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ONE_F, "--show-plot"]) == 0
    out = capsys.readouterr().out
    for word in ("fraction", "over_ideal", "own_span_rate", "straggler_waste", "0.2727", "makespan"):
        assert word in out
    rows = [line.split() for line in out.splitlines()[-6:-2]]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert all(set(row[1]) == set("FB.") for row in rows)


def test_a_written_order_replays_the_same_and_keeps_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = str(tmp_path / "order.csv")
    first = answer(capsys, "simulate", "--schedule", "DualPipeV", "--stages", "4", "--microbatches", "8", *UNIT,
                   "--write-csv", csv)  # fmt: skip
    assert answer(capsys, "simulate", "--schedule-csv", csv, *UNIT) == first
    assert first["makespan"] == 54


def test_scale_and_comm_reach_the_replay(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, *ONE_F, "--scale-per-stage", "1,1,1,2")["makespan"] == 57
    assert answer(capsys, *ONE_F, "--comm", "0.1")["makespan"] == pytest.approx(34.6)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["simulate", *UNIT], 2, "no order to replay"),
        (["simulate", "--schedule", "1F1B", *UNIT], 2, "needs --stages and --microbatches"),
        ([*ONE_F, "--schedule", "2F2B"], 2, "known schedules: GPipe"),
        ([*ONE_F, "--scale-per-stage", "1,x"], 2, "not a list of numbers"),
        ([*ONE_F, "--scale-per-stage", "1,2"], 2, "has 2 factors"),
        ([*ONE_F, "--forward", "-1"], 2, "forward time"),
        ([*ONE_F, "--chunks", "2"], 2, "exactly 1 chunk"),
        ([*ONE_F, "--stages", "0"], 2, "at least one stage"),
        ([*ONE_F, "--schedule", "ZBVZeroBubble", "--chunks", "3"], 2, "exactly 2 chunk"),
        ([*ONE_F, "--stages", "100000", "--microbatches", "100000"], 2, "20,000,000,000 operations"),
        ([*ONE_F, "--forward", "1e308", "--json", "-"], 2, "too long, or too short"),
        ([*ONE_F, "--schedule-csv", "nowhere.csv"], 3, "nowhere.csv"),
        ([*ONE_F, "--json", "-", "--write-csv", "-"], 2, "both want stdout"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == status
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_a_deadlocking_order_is_refused_with_its_cycle_and_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = tmp_path / "bad.csv"
    csv.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert run(["simulate", "--schedule-csv", str(csv), *UNIT]) == 3
    err = capsys.readouterr().err
    assert "deadlocks: " in err
    assert "→ 0F1 →" in err or "→ 1F1 →" in err
    assert "bad.csv" in err


def test_one_of_each_is_said_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--schedule", "1F1B", "--stages", "1", "--microbatches", "1", *UNIT]) == 0
    assert capsys.readouterr().out.startswith("1F1B: 1 GPU, 1 chunk each, 1 micro-batch\n")


@pytest.mark.parametrize(
    "content",
    [None, b"\xff0F0", b"0F0,0F0,0B0", b"0F7,0B7", b"0F0,0F2,0B0,0B2", b"", b"0F0;0F1", b"(0F0;0F1;0B0)OVERLAP_F_B"],
)
def test_every_unusable_order_is_exit_3_with_a_hint(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    csv = tmp_path / "order.csv"
    if content is not None:
        csv.write_bytes(content)
    assert run(["simulate", "--schedule-csv", str(csv), *UNIT]) == 3
    err = capsys.readouterr().err
    assert "order.csv" in err
    assert "\nhint: " in err


def test_numbers_that_contradict_the_file_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    csv = tmp_path / "order.csv"
    csv.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert run(["simulate", "--schedule-csv", str(csv), "--stages", "3", *UNIT]) == 2
    assert "2 stages" in capsys.readouterr().err
    assert run(["simulate", "--schedule-csv", str(csv), "--schedule", "GPipe", *UNIT]) == 2
    assert "1F1B, not GPipe" in capsys.readouterr().err
