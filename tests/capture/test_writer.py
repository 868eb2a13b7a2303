"""The file of one rank: whole lines, one writer, and never at the cost of the training."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from bubblescope.capture import writer as module
from bubblescope.capture.writer import QUEUE_LINES, RankWriter, write_job_file


def started(folder: Path, warnings: list[str], rank: int = 3) -> RankWriter:
    made = RankWriter(folder, warnings.append)
    made.start(rank, lambda: {"kind": "header"})
    return made


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()]


def test_lines_are_on_disk_when_it_is_closed(tmp_path: Path) -> None:
    writer = started(tmp_path / "deep" / "run", [])
    for number in range(5):
        assert writer.submit(lambda number=number: {"step": number})  # type: ignore[misc]
    writer.close()
    path = tmp_path / "deep" / "run" / "rank-00003.jsonl"
    assert lines(path) == [{"kind": "header"}, *({"step": n} for n in range(5))]


def test_a_file_of_another_process_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "rank-00003.jsonl").write_text("theirs\n")
    first, second = started(tmp_path, []), started(tmp_path, [])
    for writer in (first, second):
        writer.submit(lambda: {"step": 0})
        writer.close()
    assert (tmp_path / "rank-00003.jsonl").read_text() == "theirs\n"
    assert (tmp_path / f"rank-00003.{os.getpid()}.jsonl").exists()
    assert first.path != second.path


def test_a_folder_that_cannot_be_made_costs_one_warning_and_counts_the_lines(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    warnings: list[str] = []
    writer = started(tmp_path / "file" / "run", warnings)
    for _ in range(4):
        writer.submit(lambda: {"step": 0})
    writer.close()
    assert len(warnings) == 1 and "cannot write the recording" in warnings[0]
    assert writer.lost_lines == 4


def test_a_full_disk_loses_only_what_did_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk takes half of the second step's line, is full for a while, and then has room again."""
    warnings: list[str] = []
    real = os.write
    calls: list[int] = []

    def write(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) == 3:
            return real(fd, data[: len(data) // 2])
        if len(calls) in (4, 5):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(module.os, "write", write)
    writer = started(tmp_path, warnings)
    for number in range(4):
        writer.submit(lambda number=number: {"step": number})  # type: ignore[misc]
    writer.close()
    kept = []
    for line in (tmp_path / "rank-00003.jsonl").read_bytes().split(b"\n"):
        try:
            kept.append(json.loads(line))
        except ValueError:
            continue
    assert kept == [{"kind": "header"}, {"step": 0}, {"step": 3}]
    assert writer.lost_lines == 2 and len(warnings) == 1


def test_on_a_disk_that_stays_full_the_end_line_still_says_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 200
    real = os.write

    def write(fd: int, data: bytes) -> int:
        fits = room - os.fstat(fd).st_size
        if fits <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data[:fits])

    monkeypatch.setattr(module.os, "write", write)
    writer = started(tmp_path, [])
    for number in range(4):
        writer.submit(lambda number=number: {"step": number, "long": "x" * 80})  # type: ignore[misc]
    writer.submit(lambda: {"kind": "end", "lost_lines": writer.lost_lines})
    writer.close()
    kept = lines(tmp_path / "rank-00003.jsonl")
    assert [line.get("step") for line in kept[:-1]] == [None, 0] and kept[-1] == {"kind": "end", "lost_lines": 3}


def test_dev_full_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    writer = RankWriter(tmp_path, warnings.append)

    def open_full() -> None:
        writer._fd = os.open("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(writer, "_open", open_full)
    writer.start(0, lambda: {"kind": "header"})
    for _ in range(10):
        writer.submit(lambda: {"step": 0})
    writer.close()
    assert writer.lost_lines == 10 and len(warnings) == 1


def test_memory_is_bounded_while_the_file_system_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    real = os.write
    monkeypatch.setattr(module.os, "write", lambda fd, data: (release.wait(10), real(fd, data))[1])
    warnings: list[str] = []
    writer = started(tmp_path, warnings)
    taken = [writer.submit(lambda: {"step": 0}) for _ in range(10 * QUEUE_LINES)]
    assert QUEUE_LINES <= sum(taken) <= QUEUE_LINES + 1
    assert writer.lost_lines == len(taken) - sum(taken)
    writer.close(wait_s=0.05)
    assert len(warnings) == 1 and "did not take the last lines" in warnings[0]
    release.set()


def test_a_line_that_cannot_be_encoded_does_not_end_the_writer(tmp_path: Path) -> None:
    warnings: list[str] = []
    writer = started(tmp_path, warnings)
    writer.submit(lambda: {"step": object()})
    writer.submit(lambda: {"step": 1})
    writer.close()
    assert lines(tmp_path / "rank-00003.jsonl")[-1] == {"step": 1} and len(warnings) == 1


def test_the_job_file_is_whole_and_rank_0_has_the_last_word(tmp_path: Path) -> None:
    for rank in (2, 1, 0):
        write_job_file(tmp_path, rank, {"by": rank})
    assert json.loads((tmp_path / "job.json").read_text()) == {"by": 0}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.json"]


def test_without_msgspec_the_lines_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": [1, 2, 3], "b": (1, 2), "c": None, "d": "ü"}
    fast = module._encode(value)
    monkeypatch.setattr(module, "msgspec", None)
    assert json.loads(module._encode(value)) == json.loads(fast)
