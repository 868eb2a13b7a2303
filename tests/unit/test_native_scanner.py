"""The native scanner gives the columns of the Python path on every input, and never reads beyond it."""

from __future__ import annotations

import ctypes
import gzip
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bubblescope.errors import InputError
from bubblescope.ingest import ReadOptions, kineto_scan, native
from bubblescope.ingest.events import Scan
from bubblescope.ingest.kineto_scan import scan_blocks
from bubblescope.ingest.native import build, scanner
from bubblescope.ingest.options import DEFAULT
from tests.support.kineto_bulk import Bulk, events_for_fuzzing, pieces
from tests.support.kineto_gen import Shape, Style, dumps, simulate, traces

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data" / "kineto"
FILES = sorted(DATA.rglob("*.json*")) if DATA.is_dir() else []
BULK = "".join(pieces(Bulk(300_000, layers=2, microbatches=3))).encode()
SHAPE = Shape(stages=2, scale=(1.0, 1.0), microbatches=2)
STYLES = (Style(), Style(launches=True, autograd=True), Style(ranges="torch", launches=True))
DOCUMENTS = [traces(simulate(SHAPE), style)[0] for style in STYLES]
PLAIN = json.dumps({"traceEvents": DOCUMENTS[1]["traceEvents"][:40]}).encode()


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if build.find_compiler() is None:
        pytest.skip("no C compiler here, so the native scanner is not in use")
    monkeypatch.delenv("BUBBLESCOPE_NATIVE", raising=False)
    native.status.cache_clear()
    assert native.status().library is not None, native.status().why
    yield
    native.status.cache_clear()


def both(data: bytes, options: ReadOptions = DEFAULT) -> tuple[Scan | str, Scan | str]:
    """What the native path and the Python path make of the same bytes."""
    out: list[Scan | str] = []
    for opened in (kineto_scan.open_scanner, lambda columns: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kineto_scan, "open_scanner", opened)
            try:
                out.append(scan_blocks([data], "x", options))
            except InputError as error:
                out.append(str(error))
    return out[0], out[1]


def agree(data: bytes, options: ReadOptions = DEFAULT) -> None:
    first, second = both(data, options)
    if isinstance(first, str) or isinstance(second, str):
        assert first == second
        return
    for column in first.events.__dataclass_fields__:
        a, b = getattr(first.events, column), getattr(second.events, column)
        assert a.dtype == b.dtype, column
        assert np.array_equal(a, b), column
    for name in ("comms", "head", "processes", "base_ns", "file_ranks", "notices"):
        assert getattr(first, name) == getattr(second, name), name
    assert first.names.texts == second.names.texts
    assert np.array_equal(first.arrows, second.arrows)


@pytest.mark.skipif(not FILES, reason="../shared/data is not beside this checkout")
@pytest.mark.parametrize("path", FILES, ids=[p.name for p in FILES])
def test_columns_of_real_traces_are_identical(path: Path) -> None:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    agree(data)
    agree(data, ReadOptions(keep_cpu_ops=True))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("number", range(len(STYLES)))
def test_columns_of_generated_traces_are_identical(number: int, compact: bool) -> None:
    agree(dumps(DOCUMENTS[number], compact=compact).encode())


def test_a_trace_as_torch_writes_it_is_read_by_the_native_scanner_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    agree(BULK)
    monkeypatch.setattr(kineto_scan, "_try", lambda *args: pytest.fail("a chunk went through Python"))
    assert len(scan_blocks([BULK], "x").events) > 400


def test_chunks_do_not_change_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scan_blocks([BULK], "x")
    monkeypatch.setattr(kineto_scan, "CHUNK", 3000)
    small = scan_blocks([BULK[i : i + 777] for i in range(0, len(BULK), 777)], "x")
    assert np.array_equal(whole.events.start_ns, small.events.start_ns)
    assert np.array_equal(whole.events.name, small.events.name)
    assert whole.names.texts == small.names.texts
    assert whole.comms == small.comms


@pytest.mark.parametrize("rows", [1, 50, 10_000])
def test_how_many_rows_are_handed_on_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(scanner, "_ENOUGH", rows)
    monkeypatch.setattr(kineto_scan, "CHUNK", 20_000)
    damaged = BULK.replace(b'"ts": ', b'"ts": 1 ', 1).replace(b'"dur": ', b'"dur": -', 40)
    for data in (BULK, damaged):
        agree(data)
        agree(data, ReadOptions(keep_cpu_ops=True))


def test_ids_take_32_bits_until_one_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanner, "_ENOUGH", 2)
    monkeypatch.setattr(kineto_scan, "CHUNK", 150)
    kernel = '{"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1, "pid": 0, "tid": %d, "args": {"device": %d}}'
    data = f"[{', '.join(kernel % (i if i < 9 else 1 << 40, i) for i in range(12))}]".encode()
    agree(data)
    events = scan_blocks([data], "x").events
    assert events.device.dtype == np.int32 and events.device.tolist() == list(range(12))
    assert events.tid.dtype == np.int64 and events.tid.tolist() == [*range(9), *[1 << 40] * 3]


DEEP = '{"ph": "X", "z": ' + "[" * 5000 + "]" * 5000 + "}"
TIMES = (
    "0", "-0", "1", "-1.5", "1.0005", "1.0015", "2.00050000000001", "0.0004999", "123456789.0005", "-3.0005",
    "4398046511103.999", "4398046511104.001", "4398046511104.0015", "1712195495502094.531", "1683564901548726",
    "9007199254740993.001", "1e3", "1.5E2", "12345678901234567890", "1e999", "NaN", "-Infinity", "null", '"12.5"',
    '"abc"', "true", "01", "1.", ".5", "-", "3999999999999999.999", "4000000000000001.5", "0.1234567890123456",
)  # fmt: skip
ODD = (
    "7", '"7"', '" 7 "', '"0x1F"', '"-3"', '"main"', "null", "7.0", "7.5", "true", "18446744073709551615", "[]", "{}",
    "-9223372036854775808", '"0x"', '"1_0"', "123456789012345678", "1234567890123456789",
)  # fmt: skip


@pytest.mark.parametrize("text", TIMES)
@pytest.mark.parametrize("key", ["ts", "dur"])
def test_times_are_rounded_alike_however_they_are_written(key: str, text: str) -> None:
    times = {"ts": "5.25", "dur": "2"} | {key: text}
    agree(_event(f'"ts": {times["ts"]}, "dur": {times["dur"]}, "pid": 1, "tid": 2'))


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("key", ["pid", "tid", "stream", "correlation", "External id", "Sequence number", "device"])
def test_ids_of_any_type_are_read_alike(key: str, text: str) -> None:
    ids = {"pid": "1", "tid": "2"} | ({key: text} if key in ("pid", "tid") else {})
    args = "" if key in ("pid", "tid") else f'"{key}": {text}'
    agree(_event(f'"ts": 1.5, "dur": 2.5, "pid": {ids["pid"]}, "tid": {ids["tid"]}, "args": {{{args}}}'))


@pytest.mark.parametrize(
    "inside",
    [
        '"ts": 1, "dur": 2, "pid": 1, "tid": 1, "pid": 3',
        '"ts": 1, "dur": 2, "pid": 1, "tid": 1, "\\u0063at": "memset"',
        '"ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": null',
        '"ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": [1]',
        '"ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {"stream": 1, "stream": 2}',
        '"ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {"Collective name": null, "Process Group Name": null}',
        '"ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {"Collective name": "send", "Collective name": null}',
        '"ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {"Collective name": "send", "Rank": 1e400}',
        '"ts": 1, "dur": 2, "pid": 1, "tid": 1, "args": {"x": "\\ud83d\\ude00", "y": "\\ud83d"}',
        '"ts": 1, "dur": -2, "pid": 1, "tid": 1',
        '"ts": 1, "pid": 1, "tid": 1',
        '"dur": 1, "pid": 1, "tid": 1',
        '"ts": 1, "dur": 2',
        '"args": {"correlation": 5}, "tid": 1, "dur": 2, "pid": 1, "ts": 1',
    ],
)
def test_odd_events_are_read_alike(inside: str) -> None:
    agree(_event(inside))


@pytest.mark.parametrize(
    "event",
    [
        '{"ph": "M", "name": "process_name", "pid": "Spans", "args": {"name": "python"}}',
        '{"name": "process_labels", "ph": "M", "pid": 3, "tid": "x", "args": {"labels": "GPU 0"}}',
        '{"ph": "?", "args": 5}', '{"ph": 5}', '{}', '{"ph": "s", "args": 7}', '{"ph": "X", "cat": 5}',
        '{"ph": "X", "cat": "python_function", "pid": null}', '{"ph": "X", "cat": "K\u0130ernel"}', "5", "[1]", "null",
    ],
)  # fmt: skip
def test_events_of_other_kinds_are_read_alike(event: str) -> None:
    data = PLAIN.replace(b'"traceEvents": [', b'"traceEvents": [' + event.encode() + b", ", 1)
    agree(data)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("entry", ["5", '"a, {b]"', "null", "[]", "[{}, {}]", "[1, [2]]", "true", DEEP])
def test_entries_that_are_no_events_cost_no_event_beside_them(entry: str, bare: bool, place: int) -> None:
    """And are counted, each once; a file that is whole is not called cut for their sake."""
    entries = [_entry(i) for i in range(3)]
    entries.insert(place, entry)
    listed = f"[{', '.join(entries)}]"
    data = (listed if bare else f'{{"schemaVersion": 1, "traceEvents": {listed}, "end": 2}}').encode()
    agree(data)
    found = scan_blocks([data], "x")
    assert found.events.corr.tolist() == [0, 1, 2]
    assert [n.message for n in found.notices] == [
        f"1 unreadable events were skipped, the first after event {place}",
    ]
    assert found.head == ({} if bare else {"schemaVersion": 1, "end": 2})


def test_only_a_file_that_is_cut_is_called_cut() -> None:
    """A damaged event at the end, or a comma after it, is no missing end; each is said as what it is."""
    head, tail = '{"traceEvents": [', '], "end": 2}'
    for last, code in ((_entry(2).replace('"k"', '"k"k"'), "events-skipped"), (_entry(2) + ",", "json-repaired")):
        data = (head + f"{_entry(0)}, {_entry(1)}, {last}" + tail).encode()
        agree(data)
        assert [n.code for n in scan_blocks([data], "x").notices] == [code]
        agree(data[:-14])
        assert "trace-truncated" in [n.code for n in scan_blocks([data[:-14]], "x").notices]


@pytest.mark.parametrize("chunk", [kineto_scan.CHUNK, 700])
@pytest.mark.parametrize(
    ("first", "between", "second"),
    [
        ('{"traceEvents": [%s], "end": 2}', "", '{"traceEvents": [%s]}'),
        ('{"traceEvents": [%s]}', "\n", "[%s]"),
        ('{"traceEvents": [%s], "end": 2', ", ", '"traceEvents": [%s]}'),
        ("[%s]", "", "[%s]"),
    ],
)
def test_a_second_list_of_events_is_counted_and_not_read(
    monkeypatch: pytest.MonkeyPatch, first: str, between: str, second: str, chunk: int
) -> None:
    """Of whatever size: the events of two files, or of two lists, are no one's."""
    monkeypatch.setattr(kineto_scan, "CHUNK", chunk)
    other = second % ", ".join(map(_entry, range(100, 160)))
    data = (first % ", ".join(map(_entry, range(30))) + between + other).encode()
    agree(data)
    found = scan_blocks([data], "x")
    assert found.events.corr.tolist() == list(range(30))
    (notice,) = found.notices
    assert notice.code == "trailing-bytes"
    assert abs(int(notice.message.split()[0].replace(",", "")) - len(other)) <= 1
    assert found.head == ({"end": 2} if "end" in first else {})


def test_a_single_byte_behind_the_trace_is_said() -> None:
    data = f'{{"traceEvents": [{_entry(0)}]}}\n'.encode()
    assert not scan_blocks([data], "x").notices
    (notice,) = scan_blocks([data + b"x\n"], "x").notices
    assert notice.message.startswith("1 bytes follow the end of the trace")


@pytest.mark.parametrize("size", [10, 1 << 19])
@pytest.mark.parametrize("chunk", [kineto_scan.CHUNK, 700])
@pytest.mark.parametrize("inside", ['"traceEvents": []', '"a": [{"]}": 1, "traceEvents": [{"ph": "X", "ts": 1}]}]'])
def test_a_list_of_events_inside_another_value_is_not_the_traces(
    monkeypatch: pytest.MonkeyPatch, inside: str, chunk: int, size: int
) -> None:
    """Before it or behind it, and wherever the borders of the blocks lie."""
    monkeypatch.setattr(kineto_scan, "CHUNK", chunk)
    own = '"traceEvents": [' + ", ".join(map(_entry, range(30))) + "]"
    meta = f'"meta": {{{inside}, "b": "{size * "x"}"}}'
    info = '"distributedInfo": {"rank": 3}'
    for order in ((meta, info, own), (own, meta, info), (meta, own, info)):
        data = f"{{{', '.join(order)}}}".encode()
        agree(data)
        found = scan_blocks([data[at : at + 9000] for at in range(0, len(data), 9000)], "x")
        assert found.events.corr.tolist() == list(range(30))
        assert found.head["distributedInfo"] == {"rank": 3}
        assert not found.notices


def test_beside_damage_entries_that_are_no_events_still_cost_no_event() -> None:
    entries = [_entry(0), "5", _entry(1), _entry(2).replace('"k"', '"k"k"'), "null", _entry(3)]
    data = f'{{"traceEvents": [{", ".join(entries)}]}}'.encode()
    agree(data)
    found = scan_blocks([data], "x")
    assert found.events.corr.tolist() == [0, 1, 3]


def _entry(number: int) -> str:
    times = f'"ts": {10 * number}, "dur": 5, "pid": 1, "tid": 7'
    return f'{{"ph": "X", "cat": "kernel", "name": "k", {times}, "args": {{"correlation": {number}}}}}'


def _event(inside: str) -> bytes:
    one = f'{{"ph": "X", "cat": "kernel", "name": "k \\n \u20ac", {inside}}}'
    return f'{{"traceEvents": [{one}, {{"ph": "X", "cat": "cpu_op", "name": "k", {inside}}}]}}'.encode()


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(PLAIN)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(data) - 1))
        action = draw(st.sampled_from(["cut", "write", "end", "byte"]))
        if action == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif action == "write":
            data[at : at + 4] = draw(st.binary(max_size=6))
        elif action == "byte":
            data[at : at + 1] = draw(st.sampled_from([b'"', b"{", b"}", b",", b"\\", b"\xff", b"\n", b"9", b"]"]))
        elif draw(st.booleans()):
            del data[at:]
        if not data:
            return b"[]"
    return bytes(data)


@settings(max_examples=150, deadline=None)
@given(mutated())
def test_damaged_traces_are_read_alike(data: bytes) -> None:
    agree(data)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
KEYS = st.sampled_from(["ph", "cat", "name", "pid", "tid", "ts", "dur", "args", "id"])
ARG_KEYS = st.sampled_from(["stream", "correlation", "Collective name", "Process Group Ranks", "Rank", "Seq", "x"])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_values_are_read_alike(data: st.DataObject) -> None:
    events: list[Any] = json.loads(PLAIN)["traceEvents"]
    for _ in range(data.draw(st.integers(1, 4))):
        event = events[data.draw(st.integers(0, len(events) - 1))]
        if data.draw(st.booleans()):
            event[data.draw(KEYS)] = data.draw(VALUES)
        elif isinstance(event.get("args"), dict):
            event["args"][data.draw(ARG_KEYS)] = data.draw(VALUES)
    agree(json.dumps({"traceEvents": events}, ensure_ascii=data.draw(st.booleans())).encode("utf-8", "surrogatepass"))


# --- building ------------------------------------------------------------------------------------------------


def test_sanitizers_find_nothing_in_mutated_traces(tmp_path: Path) -> None:
    """A bounded run; scripts/fuzz_scanner goes on for as long as one likes."""
    events = tmp_path / "events.json"
    events.write_bytes(events_for_fuzzing())
    program = tmp_path / "fuzz"
    compiler = build.find_compiler() or "cc"
    made = subprocess.run(
        [*compiler.split(), "-std=c99", "-g", "-O1", "-ffp-contract=off", "-fsanitize=address,undefined",
         "-fno-sanitize-recover=all", str(ROOT / "tests/support/fuzz_scanner.c"), "-o", str(program), "-lm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode and ("sanitize" in made.stderr or "asan" in made.stderr):
        pytest.skip("this compiler has no address sanitizer")
    assert made.returncode == 0, made.stderr
    for seed in ("1", "2"):
        ran = subprocess.run([program, seed, "8000", events], capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]


def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    compiler = build.find_compiler() or "cc"
    ran = subprocess.run(
        [*compiler.split(), *build.FLAGS, "-Wall", "-Wextra", "-Werror", str(build.SOURCE),
         "-o", str(tmp_path / "x.so"), "-lm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_it_is_built_once_into_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUBBLESCOPE_CACHE_DIR", str(tmp_path / "cache"))
    first = native.built()
    stamp = first.stat().st_mtime_ns
    assert first.parent == tmp_path / "cache" / "native"
    assert native.built().stat().st_mtime_ns == stamp
    assert [p.name for p in first.parent.iterdir()] == [first.name]
    assert ctypes.CDLL(str(first)).bubblescope_abi() == native.ABI


@pytest.mark.parametrize(
    "spoil", [lambda b: b[: len(b) // 2], lambda b: b"", lambda b: b"garbage", lambda b: b + b"\0"],
    ids=["cut", "empty", "garbage", "longer"],
)  # fmt: skip
def test_a_library_that_is_not_what_was_built_is_never_loaded_and_built_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bytes], bytes]
) -> None:
    monkeypatch.setenv("BUBBLESCOPE_CACHE_DIR", str(tmp_path / "cache"))
    path = native.built()
    content = path.read_bytes()
    path.write_bytes(spoil(content))
    assert native.built().read_bytes() == content
    assert len(list(path.parent.iterdir())) == 1


def test_without_a_compiler_python_reads_and_the_reason_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUBBLESCOPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    native.status.cache_clear()
    assert native.status().library is None
    assert "compiler" in native.status().why
    assert not scan_blocks([PLAIN], "x").notices


def test_a_compiler_that_fails_leaves_nothing_and_python_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUBBLESCOPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "false")
    native.status.cache_clear()
    assert native.status().library is None
    assert "false does not compile" in native.status().why
    assert not list((tmp_path / "cache" / "native").iterdir())


def test_a_cache_that_others_can_write_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("BUBBLESCOPE_CACHE_DIR", str(tmp_path / "cache"))
    native.status.cache_clear()
    assert native.status().library is None
    assert "others" in native.status().why


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUBBLESCOPE_NATIVE", "0")
    native.status.cache_clear()
    assert native.status().library is None
