"""What a user may type after `analyze`: files, folders, globs, URLs, and what is not there."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path

import pytest

from bubblescope.errors import InputError, UsageError
from bubblescope.ingest import read
from tests.support.kineto_gen import Shape, Style, dumps, simulate, traces, write
from tests.support.small_recording import write_recording
from tests.support.synthetic import Job, constant

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
    (notice,) = (n for n in run.notices if n.code == "windows-skipped")
    assert (
        "(iteration_10/rank0_trace.json …) is analysed, and not those of iteration_9/rank0_trace.json" in notice.message
    )
    assert run.ranks == [0, 1, 2, 3]


def test_other_json_files_in_the_folder_do_no_harm(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    write(tmp_path, documents)
    (tmp_path / "report.json").write_text('{"schema_version": 1}')
    (tmp_path / "notes.txt").write_text("nothing")
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    assert not run.notices


@pytest.mark.parametrize("content", [b"", b"{", b'{"schemaVersion": 1, "distr'])
def test_a_damaged_rank_beside_packed_ones_is_named(
    tmp_path: Path, documents: dict[int, dict[str, object]], content: bytes
) -> None:
    write(tmp_path, documents)[0].unlink()
    damaged = tmp_path / "rank0.json"
    damaged.write_bytes(content)
    run = read(tmp_path)
    assert run.ranks == [1, 2, 3]
    assert [n.where for n in run.notices if n.code == "file-unreadable"] == [str(damaged)]


@pytest.mark.parametrize("what", ["missing.json", "*.nothing"])
def test_what_is_not_there_is_said(tmp_path: Path, what: str) -> None:
    with pytest.raises(InputError) as caught:
        read(str(tmp_path / what))
    assert caught.value.exit_code == 3
    assert caught.value.hint


def test_an_empty_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no readable trace"):
        read(tmp_path)


RECORDING = Job(steps=2)


@pytest.mark.parametrize("content", [b"", b"\0\0\0", b'{"kind": "step"}\n'])
def test_a_rank_file_that_holds_nothing_costs_no_trace_beside_it(
    tmp_path: Path, documents: dict[int, dict[str, object]], content: bytes
) -> None:
    files = write(tmp_path, documents)
    stray = tmp_path / "rank-00000.jsonl"
    stray.write_bytes(content)
    for given, where in ((tmp_path, tmp_path), ([*files, stray], stray)):
        run = read(given)
        assert (run.source.format, run.ranks) == ("kineto", sorted(documents))
        assert [(n.code, n.where) for n in run.notices] == [("file-empty", str(where))]
    with pytest.raises(InputError, match="no line of a bubblescope recording"):
        read(stray)


def test_traces_beside_a_recording_are_said_not_to_be_read(
    tmp_path: Path, documents: dict[int, dict[str, object]]
) -> None:
    recording(tmp_path)
    assert "other-format" not in {n.code for n in read(tmp_path).notices}
    files = write(tmp_path, documents)
    run = read(tmp_path)
    assert run.source.format == "recording"
    (notice,) = (n for n in run.notices if n.code == "other-format")
    assert notice.message.startswith(f"{len(files)} of the files here are of format kineto (rank0.json.gz, ")
    assert notice.message.endswith("are not read; --format kineto reads them, and not the recording")
    assert notice.where == str(tmp_path)


def recording(folder: Path) -> Path:
    return write_recording(folder, RECORDING, constant(10, 20))


@pytest.mark.parametrize("inside", ["recording", "only"])
def test_a_recording_one_folder_down_is_what_is_meant(tmp_path: Path, inside: str) -> None:
    recording(tmp_path / inside)
    (tmp_path / "report.json").write_text('{"schema_version": 1}')
    assert read(tmp_path).ranks == [0, 1, 2, 3]


def test_a_format_that_is_named_is_looked_for_past_a_recording(
    tmp_path: Path, documents: dict[int, dict[str, object]]
) -> None:
    recording(tmp_path / "recording")
    write(tmp_path / "traces", documents)
    assert read(tmp_path).source.format == "recording"
    assert read(tmp_path, format="kineto").source.format == "kineto"


def test_several_recordings_are_listed_and_none_is_chosen(tmp_path: Path) -> None:
    for name in ("monday", "tuesday"):
        recording(tmp_path / name)
    with pytest.raises(InputError, match="2 recordings in this folder: monday, tuesday") as caught:
        read(tmp_path)
    assert "tuesday" in caught.value.hint


def test_rank_files_that_were_renamed_are_read_in_a_folder_as_they_are_one_by_one(tmp_path: Path) -> None:
    for i, path in enumerate(sorted(recording(tmp_path).glob("rank-*.jsonl"))):
        lines = [json.dumps(json.loads(line), separators=(",", ":")) for line in path.read_text().splitlines()]
        (tmp_path / f"foo{i}.jsonl").write_text("\n".join(lines) + "\n")
        path.unlink()
    (tmp_path / "other.jsonl").write_text('{"loss": 1}\n')
    assert read(tmp_path).ranks == [0, 1, 2, 3]


def test_traces_beside_a_folder_with_a_recording_are_still_what_is_read(
    tmp_path: Path, documents: dict[int, dict[str, object]]
) -> None:
    write(tmp_path, documents)
    recording(tmp_path / "recording")
    assert read(tmp_path).source.format == "kineto"


def test_a_stray_file_of_a_newer_run_does_not_hide_a_complete_one(tmp_path: Path) -> None:
    recording(tmp_path)
    stray = (tmp_path / "rank-00000.jsonl").read_text().splitlines(keepends=True)
    first = json.loads(stray[0])
    first |= {"job": "another", "clock": [first["clock"][0], first["clock"][1] + 10**12]}
    (tmp_path / "rank-00001.77.jsonl").write_text(json.dumps(first, separators=(",", ":")) + "\n" + "".join(stray[1:]))
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    (notice,) = [n for n in run.notices if n.code == "several-jobs"]
    assert "most ranks (4)" in notice.message
    assert "rank-00001.77.jsonl" in notice.message


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_before_its_first_kernel_is_said_to_be_cut(
    tmp_path: Path, packed: bool, documents: dict[int, dict[str, object]]
) -> None:
    text = dumps(documents[0]).encode()
    path = tmp_path / ("rank0.json.gz" if packed else "rank0.json")
    cut = text[: text.index(b'"kernel"') - 20]
    path.write_bytes(gzip.compress(cut)[:-8] if packed else cut)
    with pytest.raises(InputError, match=r"the file is cut.* \d+ complete events .* no GPU event is among them"):
        read(path)


def test_a_file_that_is_nested_too_deep_is_said_to_be_so(tmp_path: Path) -> None:
    deep = 100_000 * '{"a":' + "1" + 100_000 * "}"
    (tmp_path / "rank0.json").write_text('{"traceEvents": [{"ph": "X", "cat": "kernel", "args": ' + deep + "}]}")
    with pytest.raises(InputError, match="nested too deep: 1 unreadable"):
        read(tmp_path / "rank0.json")


def test_a_file_that_is_no_trace_says_why(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"loss": [3, 2, 1]}')
    with pytest.raises(InputError, match="no traceEvents"):
        read(tmp_path / "other.json")


def test_an_empty_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_text("")
    with pytest.raises(InputError, match="empty"):
        read(tmp_path / "rank0.json")


def test_a_packed_file_of_which_nothing_unpacks_is_not_called_empty(tmp_path: Path) -> None:
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}')[:10])
    with pytest.raises(InputError, match="the gzip stream ends early; nothing of it could be unpacked"):
        read(tmp_path / "rank0.json.gz")


@pytest.mark.parametrize(
    ("name", "begin", "said"),
    [
        ("x.zip", b"PK\x03\x04", "packed by zip"),
        ("x.7z", b"7z\xbc\xaf\x27\x1c", "packed by 7z"),
        ("x.tar", bytes(257) + b"ustar", "a tar archive"),
        ("x.tar.gz", gzip.compress(bytes(257) + b"ustar", mtime=0), "a tar archive"),
        ("rank0.json.gz", gzip.compress(bytes(257) + b"ustar", mtime=0), "a tar archive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_archive_is_refused_by_name_whatever_it_is_called(
    tmp_path: Path, name: str, begin: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(begin)
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path / name)
    assert caught.value.hint.startswith("unpack it")


def test_files_that_are_given_and_not_read_are_named(tmp_path: Path, documents: dict[int, dict[str, object]]) -> None:
    files = write(tmp_path, documents)
    (tmp_path / "more.zip").write_bytes(b"PK\x03\x04")
    (tmp_path / "notes.txt").write_text("later")
    run = read([*files, tmp_path / "more.zip", tmp_path / "notes.txt"])
    assert [(n.message, n.where) for n in run.notices] == [
        ("the file is packed by zip, which is not supported; it is not read", str(tmp_path / "more.zip")),
        ("1 of the files given hold no trace that can be read: notes.txt", str(tmp_path / "notes.txt")),
    ]


def test_a_trace_in_a_folder_under_another_suffix_is_named(
    tmp_path: Path, documents: dict[int, dict[str, object]]
) -> None:
    files = write(tmp_path, documents, packed=False)
    files[2].rename(tmp_path / "rank2.trace")
    (tmp_path / "rank0.txt").write_text("no trace")
    (notice,) = [n for n in read(tmp_path).notices if n.code == "file-ignored"]
    assert notice.where == str(tmp_path / "rank2.trace")


def test_a_folder_of_files_with_an_unsupported_packing_says_so(tmp_path: Path) -> None:
    (tmp_path / "rank0.json.bz2").write_bytes(bz2.compress(b'{"traceEvents": []}'))
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(InputError, match="bzip2, which is not supported"):
        read(tmp_path)


def test_a_time_beyond_the_calendar_is_told_with_the_limit(tmp_path: Path) -> None:
    event = '{"ph": "X", "cat": "kernel", "name": "k", "ts": 2500000000000000, "dur": 3, "pid": 0, "tid": 7}'
    (tmp_path / "rank0.json").write_text(f'{{"traceEvents": [{event}]}}')
    with pytest.raises(InputError, match="1 of 1 GPU events cannot be used") as caught:
        read(tmp_path / "rank0.json")
    assert "after the year 2042" in caught.value.hint


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
