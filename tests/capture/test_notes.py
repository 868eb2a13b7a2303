"""What the processes of a launched job leave for `bubblescope run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bubblescope.capture import launched, notes
from bubblescope.capture.environment import Settings
from bubblescope.capture.recorder import Options, Recorder, record, span


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "notes"
    made.mkdir()
    monkeypatch.setenv(notes.VARIABLE, str(made))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("BUBBLESCOPE_OWNER", "")  # which a recorder sets
    return made


def test_a_rank_that_shall_not_record_says_how_many_there_are(folder: Path, tmp_path: Path) -> None:
    launched.prepare(Settings("record", str(tmp_path / "out"), ranks=frozenset({5, 6})))
    assert notes.read(folder) == {notes.LOADED: "", notes.UNCHOSEN: "2"}


def test_a_rank_that_learns_its_number_late_says_so_too(folder: Path, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "out", Options(launched=True, ranks=frozenset({5})))
    assert not recorder._start_writer()
    assert notes.read(folder) == {notes.UNCHOSEN: "2"}


def test_that_a_loop_of_ones_own_was_seen_is_left_before_any_step_of_it_ends(folder: Path, tmp_path: Path) -> None:
    with record(tmp_path / "out"):
        with span("data"):
            pass
        assert notes.MARKED not in notes.read(folder)
        with span("F", 0, 0):
            pass
        assert notes.MARKED in notes.read(folder) and not list(tmp_path.glob("out/*"))


def test_a_recording_that_cannot_be_written_is_left_with_its_rank(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file" / "out", Options(launched=True))
    assert recorder._start_writer()
    recorder.writer.submit(dict)
    recorder.writer.close()
    left = notes.read(folder)
    assert notes.ranks(left) == {"rank-00001"}
    assert left[notes.LOST].startswith("cannot write the recording in ")
    assert recorder.patches.warnings == [f"{left[notes.LOST]}; training goes on without it"]


def test_the_end_line_repeats_the_warnings_when_lines_were_lost(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "out")
    recorder.patches.warn("first")
    assert recorder._losses()["warnings"] == ["first"]
    assert "warnings" not in recorder._end_line()
    recorder.writer.lost_lines = 1
    assert recorder._end_line()["warnings"] == ["first"]


def test_a_folder_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(notes.VARIABLE, str(tmp_path / "gone"))
    notes.leave(notes.LOADED)
    assert notes.read(tmp_path / "gone") == {} and notes.read(None) == {}


def test_a_script_that_records_by_itself_is_left_alone_and_its_folder_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "_begun", False)
    with record(tmp_path / "own") as own:
        launched.begin(Settings("record", str(tmp_path / "out")))
        assert own.recorder is not None and own.recorder.running
    assert notes.read(folder) == {notes.IMPORTED: "", notes.INNER: str(tmp_path / "own")}
    assert not (tmp_path / "out").exists()
