"""The second analysis reads no trace; whatever does not fit exactly is read anew."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bubblescope.errors import InputError
from bubblescope.ingest import ReadOptions, kineto, partcache, partfile, read
from bubblescope.ingest.options import KernelRule, NameRule
from bubblescope.ingest.part import Part
from bubblescope.model import Kind
from bubblescope.model.spans import is_one_value
from tests.support.kineto_gen import Shape, Style, simulate, traces, write

CACHED = ReadOptions(cache=True)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BUBBLESCOPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(partcache, "SMALLEST", 0)
    return tmp_path / "cache" / "parts"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    write(tmp_path / "job", traces(simulate(Shape()), Style(launches=True)))
    return tmp_path / "job"


def one_value_columns(part: Part) -> list[str]:
    return [name for name, column in part.spans.columns().items() if is_one_value(column)]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are scanned from now on."""
    out: list[str] = []
    scan = kineto.scan

    def counted(path: str, options: ReadOptions) -> Any:
        out.append(path)
        return scan(path, options)

    monkeypatch.setattr(kineto, "scan", counted)
    return out


def equal(a: Part, b: Part) -> None:
    for field in fields(Part):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name == "spans":
            for column in fields(x):
                left, right = getattr(x, column.name), getattr(y, column.name)
                assert left.dtype == right.dtype
                assert np.array_equal(left, right), column.name
        elif field.name == "launch":
            assert np.array_equal(x, y)
        elif field.name == "names":
            assert x.texts == y.texts
        else:
            assert x == y, field.name
            assert type(x) is type(y), field.name


def test_a_part_comes_back_from_its_file_as_it_was(job: Path, tmp_path: Path) -> None:
    part = kineto.read_part(str(job / "rank1.json.gz"))
    partfile.write(part, tmp_path / "x.part")
    back = partfile.read(tmp_path / "x.part")
    assert back is not None
    equal(part, back)
    assert one_value_columns(back) == one_value_columns(part) != []
    assert [p.name for p in tmp_path.glob("*part*")] == ["x.part"]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda b: b[: len(b) // 2],
        lambda b: b[:-1],
        lambda b: b + b"\0",
        lambda b: b"",
        lambda b: b"another format\n" + b[15:],
        lambda b: b[:-3000] + bytes([b[-3000] ^ 1]) + b[-2999:],
        lambda b: b.replace(b'"texts"', b'"taxts"', 1),
        lambda b: re.sub(rb'"<i8",\[\d+\]', b'"<i8",[99999999]', b, count=1),
        lambda b: re.sub(rb'"<i4",\[(\d+)\]', lambda m: b'"<i4",[%s]' % (b"7" * len(m[1])), b, count=1),
        lambda b: b.replace(b'"<i8"', b'"|O8"', 1),
    ],
)
def test_a_damaged_or_foreign_file_is_no_part(job: Path, tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "x.part"
    partfile.write(kineto.read_part(str(job / "rank1.json.gz")), path)
    path.write_bytes(spoil(path.read_bytes()))
    assert partfile.read(path) is None


def test_any_flipped_byte_is_survived(job: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.part"
    partfile.write(kineto.read_part(str(job / "rank1.json.gz")), path)
    whole = path.read_bytes()
    dice = random.Random(1)
    for _ in range(300):
        at = dice.randrange(3000)
        path.write_bytes(whole[:at] + bytes([dice.randrange(256)]) + whole[at + 1 :])
        partfile.read(path)


def test_the_second_time_nothing_is_scanned_and_the_run_is_the_same(job: Path, scans: list[str]) -> None:
    first = read(job, options=CACHED)
    assert len(scans) == 4
    second = read(job, options=CACHED)
    assert len(scans) == 4
    assert np.array_equal(first.spans.start_ns, second.spans.start_ns)
    assert first.names.texts == second.names.texts
    assert first.notices == second.notices
    assert first.source == second.source


def test_without_the_option_nothing_is_kept(job: Path, folder: Path) -> None:
    read(job)
    assert not folder.exists()


def test_a_changed_file_is_read_anew_even_with_the_old_time(job: Path, scans: list[str]) -> None:
    read(job, options=CACHED)
    path = job / "rank2.json.gz"
    before = path.stat()
    write(job, {2: traces(simulate(Shape(scale=(1.0, 1.0, 1.2, 1.5))), Style(launches=True))[2]})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    del scans[:]
    read(job, options=CACHED)
    assert scans == [str(path)]


@pytest.mark.parametrize(
    "other",
    [
        ReadOptions(cache=True, names=(KernelRule("x", communication=True),)),
        ReadOptions(cache=True, keep_cpu_ops=True),
        ReadOptions(cache=True, names=(NameRule("a" * 300 + "b", Kind.FORWARD),)),
    ],
)
def test_other_options_are_read_anew(job: Path, scans: list[str], other: ReadOptions) -> None:
    read(job, options=ReadOptions(cache=True, names=(NameRule("a" * 300 + "c", Kind.FORWARD),)))
    read(job, options=other)
    assert len(scans) == 8


def test_a_copy_elsewhere_is_read_anew(job: Path, tmp_path: Path, scans: list[str]) -> None:
    """The rank may be told by the name, and messages name the file."""
    read(job, options=CACHED)
    job.rename(tmp_path / "moved")
    assert all("moved" in f for f in read(tmp_path / "moved", options=CACHED).source.files)
    assert len(scans) == 8


def test_a_damaged_entry_is_replaced(job: Path, folder: Path, scans: list[str]) -> None:
    read(job, options=CACHED)
    for entry in folder.iterdir():
        entry.write_bytes(entry.read_bytes()[:-100])
    read(job, options=CACHED)
    assert len(scans) == 8
    read(job, options=CACHED)
    assert len(scans) == 8


def test_what_cannot_be_read_is_not_kept(tmp_path: Path, folder: Path) -> None:
    bad = tmp_path / "rank0.json"
    bad.write_text("{}")
    with pytest.raises(InputError):
        read(bad, format="kineto", options=CACHED)
    assert not list(folder.iterdir())


def test_the_folder_is_bounded_and_the_oldest_go_first(
    job: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(job, options=CACHED)
    entries = sorted(folder.iterdir())
    for age, entry in enumerate(entries):
        os.utime(entry, (1000 + age, 1000 + age))
    partcache.prune(most_bytes=sum(e.stat().st_size for e in entries[2:]))
    assert sorted(folder.iterdir()) == entries[2:]
    monkeypatch.setenv("BUBBLESCOPE_CACHE_BYTES", "0")
    read(job, options=CACHED)
    assert not list(folder.iterdir())


def test_what_was_not_written_to_its_end_goes_after_an_hour(job: Path, folder: Path) -> None:
    read(job, options=CACHED)
    kept = set(folder.iterdir())
    old, new = folder / ".part-old", folder / ".part-new"
    for path in (old, new):
        path.touch()
    os.utime(old, (1000, 1000))
    partcache.prune()
    assert set(folder.iterdir()) == {*kept, new}


def test_a_cache_folder_that_cannot_be_used_costs_nothing_but_time(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BUBBLESCOPE_CACHE_DIR", str(tmp_path / "file"))
    assert read(job, options=CACHED).ranks == [0, 1, 2, 3]
