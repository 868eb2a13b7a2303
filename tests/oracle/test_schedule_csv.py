"""torch reads the CSV that is written here, and what torch writes is read back unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bubblescope.errors import InputError, ScheduleError, UsageError
from bubblescope.replay import schedule_csv
from bubblescope.replay.schedules import NAMES, make

schedules = pytest.importorskip("torch.distributed.pipelining.schedules", reason="torch is not installed")
stages = pytest.importorskip("torch.distributed.pipelining.stage", reason="torch is not installed")
MULTI = ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def torch_schedule(name: str, p: int, m: int, v: int) -> Any:
    """A real schedule object of torch, on a mocked stage: no process group needed."""
    stage = (
        mock.create_autospec(schedules.PipelineStage, instance=True)
        if hasattr(schedules, "PipelineStage")
        else None
    )
    if stage is None:
        from torch.distributed.pipelining.stage import PipelineStage

        stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, p, p * v, None
    return schedules.get_schedule_class(name)([stage] * v, m)


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("format", schedule_csv.FORMATS)
def test_what_torch_dumps_is_read_as_the_schedule_it_is(name: str, format: str, tmp_path: Path) -> None:
    torch_schedule(name, 4, 8, 2)._dump_csv(str(tmp_path / "s.csv"), format)
    assert schedule_csv.load_csv(tmp_path / "s.csv") == make(name, 4, 8)


@pytest.mark.parametrize("name", MULTI)
def test_compute_only_is_what_torch_writes_but_for_its_waiting_slots(name: str, tmp_path: Path) -> None:
    torch_schedule(name, 4, 8, 2)._dump_csv(str(tmp_path / "s.csv"), "compute_only")
    wanted = [",".join(c for c in row.split(",") if c) for row in (tmp_path / "s.csv").read_text().splitlines()]
    assert schedule_csv.to_csv(make(name, 4, 8)).split() == wanted


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (3, 6, 4)])
def test_messages_and_fsdp_steps_stand_where_torch_puts_them(name: str, p: int, m: int, v: int) -> None:
    v = 2 if name in ("ZBVZeroBubble", "DualPipeV") else v
    theirs = torch_schedule(name, p, m, v).pipeline_order_with_comms
    for rank, cells in schedule_csv.with_comms(make(name, p, m, v)).items():
        assert cells == [str(a) for a in theirs[rank]]


@pytest.mark.parametrize("name", MULTI)
@pytest.mark.parametrize("format", schedule_csv.FORMATS)
def test_torch_loads_what_is_written_into_the_schedule_it_makes_itself(
    name: str, format: str, tmp_path: Path
) -> None:
    schedule_csv.dump_csv(make(name, 4, 8), tmp_path / "s.csv", format)
    loaded, own = torch_schedule(name, 4, 8, 2), torch_schedule(name, 4, 8, 2)
    loaded._load_csv(str(tmp_path / "s.csv"), format)
    assert loaded.pipeline_order_with_comms == own.pipeline_order_with_comms


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("format", schedule_csv.FORMATS)
def test_a_round_trip_changes_nothing(name: str, format: str) -> None:
    made = make(name, 3, 6)
    assert schedule_csv.parse_csv(schedule_csv.to_csv(made, format)) == made


def test_an_order_of_its_own_comes_back_as_custom() -> None:
    assert schedule_csv.parse_csv("0F0,0F1,0B1,0B0\n").name == "custom"


@pytest.mark.parametrize(
    ("text", "says", "where"),
    [
        ("0F0,0X0", "'0X0' is not a schedule action", "row 1, cell 2"),
        ("0F0,0B0\n1F0,(1B0;1F1;1F2)OVERLAP_F_B", "overlaps 3 actions", "row 2, cell 2"),
        ("", "no actions", ""),
        ("0B0,0F0", "deadlocks", ""),
        ("0F0,0SEND_F0,1RECV_F0,0B0", "'1RECV_F0' belongs to no operation of its row", "row 1, cell 3"),
        ("0F0,0SEND_F0,0B0", "'0SEND_F0' has no '1RECV_F0' to match it", "row 1, cell 2"),
        ("0F0,0B0\n1RECV_F0,1F0,1B0", "'1RECV_F0' has no '0SEND_F0' to match it", "row 2, cell 1"),
        ("0F0,0B0\n1F0,1B0,1SEND_B0", "'1SEND_B0' has no '0RECV_B0' to match it", "row 2, cell 3"),
        ("0F0,0SEND_F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0", "'0SEND_F0' is there 2 times", "row 1, cell 2"),
        ("0F0,0SEND_F1,0B0\n1RECV_F1,1F0,1B0", "'0SEND_F1' belongs to no operation of its row", "row 1, cell 2"),
        ("0F0,0SEND_F,0B0", "'0SEND_F' is not a schedule action", "row 1, cell 2"),
    ],
)
def test_a_bad_cell_is_named_by_row_and_cell(text: str, says: str, where: str) -> None:
    with pytest.raises(ScheduleError, match=says) as caught:
        schedule_csv.parse_csv(text, where="s.csv")
    assert where in caught.value.where
    assert "s.csv" in caught.value.where


def test_files_that_cannot_be_read_and_unknown_formats_are_errors_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        schedule_csv.load_csv(tmp_path / "missing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        schedule_csv.load_csv(tmp_path / "binary.csv")
    with pytest.raises(UsageError, match="format"):
        schedule_csv.to_csv(make("1F1B", 2, 2), "xml")
