"""What a user may type after `analyze`: files, folders, globs, URLs, and what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from bubblescope.errors import InputError, UsageError
from bubblescope.ingest import read
from tests.support.kineto_gen import Shape, Style, dumps, simulate, traces, write

SMALL = Shape(microbatches=4, kernels=(1, 1))


@pytest.fixture
def documents() -> dict[int, dict[str, object]]:
    return traces(simulate(SMALL))


def test_a_folder_of_ranks(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    write(tmp_path / "t", documents)
    assert read(tmp_path / "t").ranks == [0, 1, 2, 3]


def test_a_glob_in_quotes(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    write(tmp_path, documents)
    assert read(f"{tmp_path}/rank[0-1].json.gz").ranks == [0, 1]


def test_files_one_by_one_and_twice(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    files = write(tmp_path, documents, packed=False)
    assert read([files[0], files[3], files[0]]).ranks == [0, 3]


def test_a_url_that_fsspec_knows(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    write(tmp_path, documents)
    assert read(f"file://{tmp_path}").ranks == [0, 1, 2, 3]


def test_a_tensorboard_folder_gives_its_latest_window(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    for rank, document in documents.items():
        for stamp in (1700000000000 + rank, 1700000900000 + rank):
            (tmp_path / f"host_{rank}.{stamp}.pt.trace.json").write_text(dumps(document))
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    assert all(".17000009" in f for f in run.source.files)
    assert "windows-skipped" in [n.code for n in run.notices]


def test_torchtitan_iterations_are_not_glued_together(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    for iteration in (9, 10):
        folder = tmp_path / "profiling" / "traces" / f"iteration_{iteration}"
        folder.mkdir(parents=True)
        for rank, document in documents.items():
            (folder / f"rank{rank}_trace.json").write_text(dumps(document))
    run = read(tmp_path)
    assert all("iteration_10" in f for f in run.source.files)
    assert run.ranks == [0, 1, 2, 3]


def test_other_json_files_in_the_folder_do_no_harm(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    write(tmp_path, documents)
    (tmp_path / "report.json").write_text('{"schema_version": 1}')
    (tmp_path / "notes.txt").write_text("nothing")
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    assert not run.notices


@pytest.mark.parametrize("what", ["missing.json", "*.nothing"])
def test_what_is_not_there_is_said(tmp_path: Path, what: str) -> None:
    with pytest.raises(InputError) as caught:
        read(str(tmp_path / what))
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_an_empty_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no readable trace"):
        read(tmp_path)


def test_a_file_that_is_no_trace_says_why(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"loss": [3, 2, 1]}')
    with pytest.raises(InputError, match="no traceEvents"):
        read(tmp_path / "other.json")


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text("")
    with pytest.raises(InputError, match="empty"):
        read(tmp_path / "rank0.json")


def test_an_unknown_format_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown format"):
        read(tmp_path, format="dtrace")


def test_ranks_come_from_an_executor_too(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    from concurrent.futures import ProcessPoolExecutor

    write(tmp_path, documents)
    with ProcessPoolExecutor(2) as pool:
        there = read(tmp_path, executor=pool)
    here = read(tmp_path)
    assert there.names.texts == here.names.texts
    assert (there.spans.start_ns == here.spans.start_ns).all()


def test_styles_share_one_truth() -> None:
    assert simulate(SMALL).ops == simulate(SMALL).ops
    assert Style().profiler_step
