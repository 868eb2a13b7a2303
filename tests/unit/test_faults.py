"""Every Kineto row of FAULTS.md: rank 2 of 4 is bad (or all are), the others must not notice.

Each case says in one sentence what must hold. The truth is that of the generator.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bubblescope.algebra import intervals
from bubblescope.align import prepare
from bubblescope.errors import InputError
from bubblescope.ingest import ReadOptions, jsonrepair, read
from bubblescope.ingest.kineto_scan import scan
from bubblescope.ingest.native import status
from bubblescope.ingest.options import KernelRule
from bubblescope.model import Kind, Lane, Run
from bubblescope.report.build import build
from tests.support.kineto_gen import Json, Shape, Style, Truth, dumps, simulate, traces

SHAPE = Shape(microbatches=4, steps=2, optimizer_ns=300_000)
TRUTH = simulate(SHAPE)
KERNELS = "kernel"


def busy_ns(run: Run, rank: int) -> int:
    s = run.spans
    rows = (s.rank == rank) & (s.lane == Lane.COMPUTE) & (s.step >= 0)
    return intervals.total(intervals.union(s.start_ns[rows], s.end_ns[rows]))


def codes(run: Run) -> list[str]:
    return [n.code for n in run.notices]


def documents(**style: Any) -> dict[int, Json]:
    return traces(TRUTH, Style(**style))


def write_all(folder: Path, docs: dict[int, Json], compact: bool = False) -> list[Path]:
    out = []
    folder.mkdir(exist_ok=True)
    for rank, document in docs.items():
        path = folder / f"rank{rank}.json"
        path.write_text(dumps(document, compact=compact))
        out.append(path)
    return out


def read_with_bad_rank_2(folder: Path, spoil: Callable[[bytes], bytes]) -> Run:
    files = write_all(folder, documents())
    files[2].write_bytes(spoil(files[2].read_bytes()))
    run = read(folder)
    for rank in (0, 1, 3):
        assert busy_ns(run, rank) == TRUTH.busy_ns(rank)
    return run


def kernels(document: Json) -> list[Json]:
    return [e for e in document["traceEvents"] if e.get("cat") == KERNELS and "gemm" in e["name"]]


def name_of_a_kernel(text: bytes, new: bytes) -> bytes:
    """Give the tenth compute kernel another name, raw."""
    places = [m.span(1) for m in re.finditer(rb'"name": "((?:fwd|bwd)_gemm_\d)"', text)]
    low, high = places[10]
    return text[:low] + new + text[high:]


# --- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.7, 0.999])
def test_a_truncated_gzip_gives_its_complete_events_and_says_how_many(tmp_path: Path, share: float) -> None:
    files = write_all(tmp_path, documents())
    packed = gzip.compress(files[2].read_bytes())
    files[2].unlink()
    (tmp_path / "rank2.json.gz").write_bytes(packed[: int(len(packed) * share)])
    run = read(tmp_path)
    assert {"file-truncated", "trace-truncated"} <= set(codes(run)) or share > 0.9
    assert "file-truncated" in codes(run)
    assert 0 < busy_ns(run, 2) <= TRUTH.busy_ns(2)
    assert busy_ns(run, 1) == TRUTH.busy_ns(1)


@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_a_truncated_json_gives_its_complete_events(tmp_path: Path, share: float) -> None:
    run = read_with_bad_rank_2(tmp_path, lambda text: text[: int(len(text) * share)])
    assert 0 < busy_ns(run, 2) <= TRUTH.busy_ns(2)
    notice = next(n for n in run.notices if n.code == "trace-truncated")
    assert notice.where.endswith("rank2.json")
    assert re.search(r"\d+ complete events .* last at \d+ us", notice.message)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("control characters", b"fwd\x01\x0b\ngemm"),
        ("bad UTF-8", b"fwd_\xff\xfe_gemm"),
        ("Windows path", b"C:\\Users\\gemm"),
        ("trailing backslash escape", b"a\\q\\u12 gemm"),
    ],
)
def test_a_bad_name_is_repaired_and_counted(tmp_path: Path, name: str, text: bytes) -> None:
    run = read_with_bad_rank_2(tmp_path, lambda whole: name_of_a_kernel(whole, text))
    assert busy_ns(run, 2) == TRUTH.busy_ns(2), name
    assert "json-repaired" in codes(run)


def test_after_an_unescaped_quote_reading_goes_on_with_the_next_event(tmp_path: Path) -> None:
    run = read_with_bad_rank_2(tmp_path, lambda text: name_of_a_kernel(text, b'fwd "quoted" gemm'))
    notice = next(n for n in run.notices if n.code == "events-skipped")
    assert notice.message.startswith("1 unreadable")
    assert 0 < TRUTH.busy_ns(2) - busy_ns(run, 2) < 1_000_000


def _many(tmp_path: Path, names: list[bytes]) -> Path:
    event = b'{"ph": "X", "cat": "kernel", "name": "%s", "pid": 1, "tid": 7, "ts": %d, "dur": 1}'
    path = tmp_path / "rank0.json"
    path.write_bytes(b'{"traceEvents": [' + b", ".join(event % (n, i) for i, n in enumerate(names)) + b"]}")
    return path


def test_where_no_damaged_event_can_be_repaired_they_are_counted_quickly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleaned = []
    clean = jsonrepair.clean
    monkeypatch.setattr(jsonrepair, "clean", lambda text, counts: cleaned.append(1) or clean(text, counts))
    found = scan(str(_many(tmp_path, [b'a "b" \\x', *[b"sound"] * 3] * 10_000)))
    assert len(found.events) == 30_000
    (notice,) = found.notices
    assert notice.message == "10000 unreadable events were skipped, the first after event 0"
    assert len(cleaned) < 5_000


def test_repairs_go_on_where_they_help(tmp_path: Path) -> None:
    found = scan(str(_many(tmp_path, [b'a "b"', *[b"c\\x"] * 2] * 6_000)))
    assert len(found.events) == 12_000
    assert [n.message for n in found.notices] == [
        "the JSON was repaired: 12000 × bad escape",
        "6000 unreadable events were skipped, the first after event 0",
    ]


def test_an_unterminated_string_at_the_end_is_a_truncation(tmp_path: Path) -> None:
    run = read_with_bad_rank_2(tmp_path, lambda text: text[: text.rindex(b'"cat"') + 3])
    assert "trace-truncated" in codes(run)


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("a comma too much", lambda t: t.replace(b"}\n ],", b"},\n ],", 1)),
        ("a value missing", lambda t: re.sub(rb'"pid": \d+', b'"pid": ', t, count=20)),
        ("bare words", lambda t: t.replace(b'"tid": 7', b'"tid": undefined', 3)),
    ],
)
def test_other_broken_exports_lose_only_the_broken_events(
    tmp_path: Path, what: str, spoil: Callable[[bytes], bytes]
) -> None:
    run = read_with_bad_rank_2(tmp_path, spoil)
    assert busy_ns(run, 2) > 0.5 * TRUTH.busy_ns(2), what


def test_a_bare_list_is_read_and_its_rank_taken_from_the_name(tmp_path: Path) -> None:
    for rank, document in documents().items():
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(document["traceEvents"]))
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    assert busy_ns(run, 2) == TRUTH.busy_ns(2)


def test_compact_json_keeps_its_ranks(tmp_path: Path) -> None:
    write_all(tmp_path, documents(), compact=True)
    assert read(tmp_path).ranks == [0, 1, 2, 3]


def test_all_members_of_a_gzip_count(tmp_path: Path) -> None:
    for path in write_all(tmp_path, documents()):
        text = path.read_bytes()
        path.unlink()
        parts = [text[:1000], text[1000:20_000], text[20_000:]]
        path.with_suffix(".json.gz").write_bytes(b"".join(gzip.compress(p) for p in parts))
    run = read(tmp_path)
    assert [busy_ns(run, r) for r in range(4)] == [TRUTH.busy_ns(r) for r in range(4)]
    assert not run.notices


def test_events_may_begin_with_different_keys(tmp_path: Path) -> None:
    docs = documents()
    for i, event in enumerate(docs[2]["traceEvents"]):
        if i % 3:
            event["ts"] = event.pop("ts")
            docs[2]["traceEvents"][i] = dict(sorted(event.items(), reverse=bool(i % 2)))
    files = write_all(tmp_path, docs)
    files[2].write_bytes(name_of_a_kernel(files[2].read_bytes(), b'fwd "quoted" gemm'))
    run = read(tmp_path)
    assert TRUTH.busy_ns(2) - busy_ns(run, 2) < 1_000_000
    assert any(n.code == "events-skipped" and n.message.startswith("1 unreadable") for n in run.notices)


# --- who it is -----------------------------------------------------------------------------------------------


def test_without_distributed_info_the_process_group_tells_the_rank(tmp_path: Path) -> None:
    for rank, document in documents().items():
        del document["distributedInfo"]
        (tmp_path / f"trace_{'abcd'[rank]}.json").write_text(dumps(document))
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    assert run.layout.inferred["ranks"] == "process-group arguments"


def test_the_ends_of_messages_tell_the_rank(tmp_path: Path) -> None:
    """Without a Rank among the arguments: a send comes from this rank, a receive goes to it."""
    for rank, document in documents().items():
        del document["distributedInfo"]
        for event in document["traceEvents"]:
            event["args"].pop("Rank", None)
        (tmp_path / f"{'abcd'[rank]}.json").write_text(dumps(document))
    run = read(tmp_path)
    assert [busy_ns(run, r) for r in range(4)] == [TRUTH.busy_ns(r) for r in range(4)]
    assert run.layout.inferred["ranks"] == "process-group arguments"


@pytest.mark.parametrize("metadata", [True, False])
def test_a_rank_beyond_the_world_size_is_not_believed(tmp_path: Path, metadata: bool) -> None:
    docs = documents(metadata=metadata)
    docs[2]["distributedInfo"]["rank"] = 7
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    assert run.layout.missing_ranks == []
    (notice,) = [n for n in run.notices if n.code == "rank-not-believed"]
    how = "process-group arguments" if metadata else "file name"
    assert notice.message == f"distributedInfo says rank 7 of 4, which cannot be; rank 2 is what the {how} says"


def test_files_that_all_say_one_rank_have_those_of_their_names(tmp_path: Path) -> None:
    docs = documents(metadata=False)
    for document in docs.values():
        document["distributedInfo"]["rank"] = 0
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert [busy_ns(run, r) for r in range(4)] == [TRUTH.busy_ns(r) for r in range(4)]
    said = [n.message for n in run.notices if n.code == "rank-not-believed"]
    assert len(said) == 3
    assert said[0].endswith("rank 1 is what the file name says")


def test_two_windows_of_a_rank_do_not_become_two_ranks(tmp_path: Path) -> None:
    docs = documents(metadata=False)
    later = json.loads(json.dumps(docs[0]))
    for event in later["traceEvents"]:
        event["ts"] += 1e6
    write_all(tmp_path, {0: docs[0], 1: later})
    run = read(tmp_path)
    assert run.ranks == [0]
    (notice,) = [n for n in run.notices if n.code == "rank-duplicate"]
    assert notice.where == str(tmp_path / "rank1.json")


def test_a_file_that_lost_its_base_time_has_that_of_the_others(tmp_path: Path) -> None:
    """Kineto writes it behind the events, so that every file that is cut has lost it."""
    base = 1_700_000_000_000_000_000
    bases = dict.fromkeys(range(4), base)
    docs = documents(base_ns=bases, host=lambda rank: "node0")
    for document in docs.values():
        for event in document["traceEvents"]:
            event["ts"] += base / 1000 if event["ph"] == "X" else 0
    files = write_all(tmp_path, docs)
    text = files[2].read_bytes()
    files[2].write_bytes(text[: text.rindex(b'"ProfilerStep') - 400])
    run = prepare(read(tmp_path))
    (notice,) = [n for n in run.notices if n.code == "base-time-lost"]
    assert notice.message.endswith("that of the other files is taken")
    assert "host-not-believed" not in codes(run)
    assert int(np.ptp(run.spans.start_ns)) < 1_000_000_000


def test_without_any_sign_of_a_rank_the_files_are_refused_and_listed(tmp_path: Path) -> None:
    for rank, document in documents(metadata=False).items():
        del document["distributedInfo"]
        (tmp_path / f"trace_{'abcd'[rank]}.json").write_text(dumps(document))
    with pytest.raises(InputError, match=r"ranks of 4 files cannot be told \(trace_a\.json"):
        read(tmp_path)


def test_one_file_without_a_rank_among_others_is_left_out_and_named(tmp_path: Path) -> None:
    files = write_all(tmp_path, documents(metadata=False))
    text = files[2].read_text()
    files[2].unlink()
    (tmp_path / "other.json").write_text(re.sub(r'"distributedInfo": \{[^}]*\},', "", text))
    run = read(tmp_path)
    assert run.ranks == [0, 1, 3]
    assert {"rank-unknown", "rank-missing"} <= set(codes(run))


def test_a_pipe_beside_the_traces_is_not_waited_for_but_named(tmp_path: Path) -> None:
    files = write_all(tmp_path, documents())
    files[2].unlink()
    os.mkfifo(files[2])
    run = read(tmp_path, options=ReadOptions(cache=True))
    assert run.ranks == [0, 1, 3]
    (notice,) = (n for n in run.notices if n.code == "file-unreadable")
    assert "pipe" in notice.message


def test_a_missing_rank_is_said(tmp_path: Path) -> None:
    write_all(tmp_path, documents())[1].unlink()
    notice = next(n for n in read(tmp_path).notices if n.code == "rank-missing")
    assert notice.message.startswith("1 of 4 ranks have no trace: 1")


def test_a_file_of_another_job_is_left_out_and_named(tmp_path: Path) -> None:
    files = write_all(tmp_path, documents())
    text = files[2].read_text()
    files[2].write_text(text.replace('"world_size": 4', '"world_size": 128'))
    run = read(tmp_path)
    assert run.ranks == [0, 1, 3]
    assert {"other-job", "rank-missing"} == set(codes(run))


def test_files_of_several_jobs_are_refused(tmp_path: Path) -> None:
    files = write_all(tmp_path, documents())
    for path in files[:2]:
        path.write_text(path.read_text().replace('"world_size": 4', '"world_size": 8'))
    with pytest.raises(InputError, match=r"different jobs \(world sizes 4, 8\)"):
        read(tmp_path)


def test_of_two_files_of_one_rank_that_with_gpu_events_is_used_and_the_reason_is_said(tmp_path: Path) -> None:
    docs = documents()
    files = write_all(tmp_path, docs)
    events = [e for e in docs[2]["traceEvents"] if e.get("cat") != KERNELS]
    more = [
        {"ph": "X", "cat": "user_annotation", "name": "x", "pid": 1, "tid": 1, "ts": 9_000 + i, "dur": 1}
        for i in range(999)
    ]
    (tmp_path / "copy_rank2.json").write_text(dumps(docs[2] | {"traceEvents": events + more}))
    (notice,) = (n for n in read(tmp_path).notices if n.code == "rank-duplicate")
    assert notice.message == f"rank 2 is claimed by two files; {files[2]} is used (this one has no GPU events)"


def test_steps_that_are_marked_and_hold_no_work_are_not_asked_for(tmp_path: Path) -> None:
    docs = documents()
    for document in docs.values():
        for event in kernels(document):
            event["ts"] += 1_000_000
    write_all(tmp_path, docs)
    with pytest.raises(InputError, match="no finished training step") as caught:
        build(prepare(read(tmp_path)))
    assert caught.value.hint.startswith("steps are marked, and nothing was recorded that ran in them")


def test_two_files_of_one_rank_are_never_merged(tmp_path: Path) -> None:
    files = write_all(tmp_path, documents())
    (tmp_path / "copy_rank2.json").write_bytes(files[2].read_bytes())
    run = read(tmp_path)
    assert "rank-duplicate" in codes(run)
    assert busy_ns(run, 2) == TRUTH.busy_ns(2)
    assert int(np.sum((run.spans.rank == 2) & (run.spans.kind == Kind.STEP))) == 2


def test_two_ranks_in_one_file_are_detected_and_that_file_is_left_out(tmp_path: Path) -> None:
    files = write_all(tmp_path, documents())
    both = json.loads(files[2].read_text())
    both["traceEvents"] += json.loads(files[3].read_text())["traceEvents"]
    files[2].write_text(dumps(both))
    run = read(tmp_path)
    assert run.ranks == [0, 1, 3]
    assert any("two ranks wrote into one file (ranks 2, 3)" in n.message for n in run.notices)


def test_a_shorter_trace_written_over_a_longer_one_is_noticed(tmp_path: Path) -> None:
    longer = dumps(traces(simulate(Shape(steps=4)))[3])
    run = read_with_bad_rank_2(tmp_path, lambda text: text + longer.encode()[len(text) :])
    assert "trailing-bytes" in codes(run)
    assert busy_ns(run, 2) == TRUTH.busy_ns(2)


def test_two_documents_in_one_file_are_detected(tmp_path: Path) -> None:
    docs = documents()
    run = read_with_bad_rank_2(tmp_path, lambda text: text + dumps(docs[3]).encode())
    assert {"trailing-bytes", "file-unreadable"} & set(codes(run))


def test_equal_correlation_ids_on_two_ranks_do_not_mix(tmp_path: Path) -> None:
    write_all(tmp_path, documents(launches=True))
    run = read(tmp_path)
    launch, device = run.links.launch[:, 0], run.links.launch[:, 1]
    assert len(launch) > 100
    assert (run.spans.rank[launch] == run.spans.rank[device]).all()


def test_group_local_peers_are_mapped_through_the_group(tmp_path: Path) -> None:
    docs = traces(TRUTH, Style(local_ranks=True, first_rank=8, members=(8, 9, 10, 11), world=12))
    write_all(tmp_path, docs)
    run = prepare(read(tmp_path))
    assert run.layout.stage_rank == {(0, s): 8 + s for s in range(4)}
    assert len(run.links.p2p) == len(TRUTH.messages)


# --- times ---------------------------------------------------------------------------------------------------


def shorten(document: Json) -> None:
    for i, event in enumerate(kernels(document)):
        event["ts"] += 0.001 * (i % 3)
        event["dur"] = 0.251


def test_kernels_below_a_microsecond_keep_their_nanoseconds(tmp_path: Path) -> None:
    docs = documents()
    for document in docs.values():
        shorten(document)
    write_all(tmp_path, docs)
    s = read(tmp_path).spans
    compute = s.lane == Lane.COMPUTE
    assert set(s.duration_ns[compute & (s.kind == Kind.OTHER)].tolist()) == {251}


@pytest.mark.parametrize(
    ("what", "event", "code"),
    [
        ("an event of one hour", {"dur": 3.6e9}, "events-quarantined"),
        ("an event at time zero", {"ts": 0}, "events-quarantined"),
        ("a negative duration", {"dur": -5}, "events-dropped"),
        ("a duration that is no number", {"dur": "NaN?"}, "events-dropped"),
        ("no duration", {"dur": None}, "events-dropped"),
    ],
)
def test_impossible_times_are_left_out_and_counted(tmp_path: Path, what: str, event: Json, code: str) -> None:
    docs = documents(base_ns=dict.fromkeys(range(4), 0), clock_ns=dict.fromkeys(range(4), (10**12, 0.0)))
    lost = kernels(docs[2])[5]
    length = round(lost["dur"] * 1000)
    lost.update(event)
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert busy_ns(run, 2) == TRUTH.busy_ns(2) - length, what
    assert [n.code for n in run.notices] == [code]
    assert "1 event" in run.notices[0].message
    for rank in (0, 1, 3):
        assert busy_ns(run, rank) == TRUTH.busy_ns(rank)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (lambda e: {"ts": 1_712_195_495_502_094_531 + round(e["ts"] * 1000)}, "ts 17121954955"),
        (lambda e: {"ts": f"{e['ts']:,.1f}"}, "ts '5,000.0'"),
        (lambda e: {"dur": -e["dur"]}, "negative duration"),
    ],
    ids=["nanoseconds", "text with commas", "negative"],
)
def test_a_rank_without_one_usable_time_is_refused_for_that(
    tmp_path: Path, event: Callable[[Json], Json], said: str
) -> None:
    docs = documents()
    for one in (e for e in docs[2]["traceEvents"] if e["ph"] == "X"):
        one.update(event(one))
    files = write_all(tmp_path, docs)
    run = read(tmp_path)
    assert run.ranks == [0, 1, 3]
    (notice,) = [n for n in run.notices if n.code == "file-unreadable"]
    assert "GPU events cannot be used" in notice.message
    assert said in notice.message
    with pytest.raises(InputError, match="GPU events cannot be used") as caught:
        read(files[2])
    assert "microseconds" in caught.value.hint


@pytest.mark.parametrize("name", [None, "", " "])
def test_kernels_without_names_are_refused_unless_metadata_tells_them_apart(tmp_path: Path, name: str | None) -> None:
    for metadata in (True, False):
        docs = documents(metadata=metadata)
        for event in (e for e in docs[2]["traceEvents"] if e.get("cat") == KERNELS):
            event["name"] = name
        write_all(tmp_path, docs)
        run = read(tmp_path)
        assert run.ranks == ([0, 1, 2, 3] if metadata else [0, 1, 3])
        assert all(busy_ns(run, rank) == TRUTH.busy_ns(rank) for rank in run.ranks)


@pytest.mark.parametrize("by_arguments", [True, False])
def test_a_file_with_two_devices_at_work_is_refused_and_costs_no_other(tmp_path: Path, by_arguments: bool) -> None:
    """One process that drives two GPUs: the union of both would be nobody's busy time."""
    docs = documents()
    for i, event in enumerate(e for e in docs[2]["traceEvents"] if e.get("cat") == KERNELS):
        event["pid"] = i % 2
        event["args"]["device"] = i % 2 if by_arguments else None
    files = write_all(tmp_path, docs)
    run = read(tmp_path)
    assert run.ranks == [0, 1, 3]
    with pytest.raises(InputError, match=r"one process drove 2 devices \(.* on device [01], .* on device [01]\)"):
        read(files[2])


def test_a_little_on_another_device_is_left_out_and_said(tmp_path: Path) -> None:
    """A context that is set up there, a copy to it: at most a twentieth of the time of the rank's own kernels."""
    docs = documents()
    ours = kernels(docs[2])
    for one in (ours[0], ours[1]):
        docs[2]["traceEvents"].append({**one, "pid": 0, "args": {"device": 0, "stream": 7}, "dur": 50})
    docs[2]["traceEvents"].append({**ours[2], "cat": "gpu_memcpy", "pid": 1, "args": {"device": 1}, "dur": 9000})
    write_all(tmp_path, docs)
    run = read(tmp_path)
    (notice,) = [n for n in run.notices if n.code == "other-device"]
    assert notice.message == "3 events on device 0, 1 are not used: this rank's work is on device 2"
    for rank in range(4):
        assert busy_ns(run, rank) == TRUTH.busy_ns(rank)


def test_a_bare_nan_is_dropped_and_counted(tmp_path: Path) -> None:
    run = read_with_bad_rank_2(tmp_path, lambda t: re.sub(rb'"dur": [\d.]+', b'"dur": NaN', t, count=1))
    assert {"events-dropped", "json-repaired"} <= set(codes(run))


def test_nanoseconds_in_decimal_text_survive_as_they_are(tmp_path: Path) -> None:
    document = documents()[0]
    event = kernels(document)[0]
    for value, ns in (
        ("1712195495502094.531", 1_712_195_495_502_094_531),
        (1712195495502094, 1_712_195_495_502_094_000),
        (4458676416788.066, 4_458_676_416_788_066),
    ):
        event["ts"] = value
        text = dumps({"traceEvents": [event], "distributedInfo": {"rank": 0}})
        (tmp_path / "one.json").write_text(text.replace(f'"{value}"', str(value)))
        assert scan(str(tmp_path / "one.json")).events.start_ns.tolist() == [ns]


@pytest.mark.parametrize("base", [2**63 - 1, 2**70, -5, 2**61, "soon", 1e300, [1], True])
def test_a_base_time_that_is_none_is_not_added_and_said(tmp_path: Path, base: Any) -> None:
    docs = documents()
    docs[2]["baseTimeNanoseconds"] = base
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert [n.code for n in run.notices] == ["base-time-unusable"]
    assert busy_ns(run, 2) == TRUTH.busy_ns(2)
    assert abs(run.spans.start_ns).max() < 1 << 61


@pytest.mark.parametrize("number", [2**31 - 1, 2**21, -5, 0])
def test_an_impossible_world_size_lists_no_missing_ranks(tmp_path: Path, number: int) -> None:
    """Listing two billion ranks would take all memory; the size of the largest process group stands for it."""
    docs = documents()
    for document in docs.values():
        document["distributedInfo"]["world_size"] = number
    write_all(tmp_path, docs)
    assert read(tmp_path).layout.world_size == 4


def test_every_rank_has_its_own_base_time_added_back(tmp_path: Path) -> None:
    epoch = 1_712_000_000_000_000_000
    style = Style(
        base_ns={0: epoch, 1: epoch, 2: epoch - 7_776_000_000_000_000, 3: epoch},
        clock_ns=dict.fromkeys(range(4), (epoch + 10**11, 0.0)),
        host=lambda rank: "one-host",
    )
    write_all(tmp_path, traces(TRUTH, style))
    run = prepare(read(tmp_path))
    s = run.spans
    first = min(o.start_ns for o in TRUTH.ops if o.rank == 2)
    assert int(s.start_ns[(s.rank == 2) & (s.lane == Lane.COMPUTE)].min()) == first + epoch + 10**11
    assert (s.end_ns[run.links.p2p[:, 1]] >= s.start_ns[run.links.p2p[:, 0]]).all()


def test_without_profiler_steps_the_optimizer_ends_them(tmp_path: Path) -> None:
    write_all(tmp_path, documents(profiler_step=False))
    run = read(tmp_path)
    assert run.layout.inferred["steps"] == "optimizer kernels"
    assert sorted(set(run.spans.step[run.spans.lane == Lane.COMPUTE].tolist())) == [0, 1]


def unmarked(docs: dict[int, Json], *ranks: int) -> dict[int, Json]:
    """The documents, without the ProfilerSteps of these ranks."""
    for rank in ranks:
        events = docs[rank]["traceEvents"]
        docs[rank]["traceEvents"] = [e for e in events if not e["name"].startswith("ProfilerStep")]
    return docs


@pytest.mark.parametrize("style", [Style(), Style(launches=True), Style(metadata=False)])
def test_kernels_that_were_written_twice_count_once(tmp_path: Path, style: Style) -> None:
    docs = traces(TRUTH, style)
    once = write_all(tmp_path / "once", docs)
    twice = [e for e in docs[2]["traceEvents"] if e.get("cat") == KERNELS]
    docs[2]["traceEvents"] += twice
    run, usual = prepare(read(write_all(tmp_path / "twice", docs))), prepare(read(once))
    assert len(run.spans) == len(usual.spans)
    assert run.links.p2p.tolist() == usual.links.p2p.tolist()
    (notice,) = (n for n in run.notices if n.code == "events-repeated")
    assert notice.message.startswith(f"{len(twice)} events of the device are there more than once")
    assert notice.where.endswith("rank2.json")


def as_pairs(document: Json) -> None:
    """Compute kernels written as a begin and an end each."""
    for kernel in kernels(document):
        end = {"ph": "E", "pid": kernel["pid"], "tid": kernel["tid"], "ts": kernel["ts"] + kernel.pop("dur")}
        kernel["ph"] = "B"
        document["traceEvents"].append(end)


@pytest.mark.parametrize("native", ["0", "1"])
def test_kernels_as_begin_and_end_are_not_read_and_their_rank_is_named(
    tmp_path: Path, native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUBBLESCOPE_NATIVE", native)
    status.cache_clear()
    docs = documents()
    as_pairs(docs[2])
    write_all(tmp_path, docs)
    try:
        run = read(tmp_path)
    finally:
        status.cache_clear()
    assert run.ranks == [0, 1, 3]
    (notice,) = (n for n in run.notices if n.code == "file-unreadable")
    count = len(kernels(docs[2]))
    assert f"{count} have begin and end in two events (ph B and E), which are not read" in notice.message
    assert notice.where.endswith("rank2.json")


def test_where_all_ranks_write_kernels_as_begin_and_end_the_error_says_so(tmp_path: Path) -> None:
    docs = documents()
    for document in docs.values():
        as_pairs(document)
    write_all(tmp_path, docs)
    with pytest.raises(InputError, match="ph B and E") as caught:
        read(tmp_path)
    assert "complete events (ph X)" in caught.value.hint


@pytest.mark.parametrize("optimizer_ns", [0, 300_000], ids=["period", "optimizer kernels"])
@pytest.mark.parametrize("rank", range(4))
def test_a_rank_whose_step_marks_are_lost_takes_the_numbers_of_the_others(
    tmp_path: Path, rank: int, optimizer_ns: int
) -> None:
    truth = simulate(Shape(steps=3, optimizer_ns=optimizer_ns))
    write_all(tmp_path, unmarked(traces(truth, Style(launches=True)), rank))
    run = read(tmp_path)
    s = run.spans
    for r in range(4):
        work = s.where(rank=r, lane=Lane.COMPUTE)
        for step in range(3):
            ops = [(o.start_ns, o.end_ns) for o in truth.ops if (o.rank, o.step) == (r, step)]
            mine = work & (s.step == step + 3)
            assert int((s.end_ns - s.start_ns)[mine].sum()) == sum(end - start for start, end in ops)
        assert sorted(s.step[s.where(rank=r, kind=Kind.STEP)].tolist()) == [3, 4, 5]
    (notice,) = (n for n in run.notices if n.code == "steps-by-time")
    assert notice.message.startswith(f"the steps of rank {rank} were found another way (")
    assert notice.where.endswith(f"rank{rank}.json")


def test_a_rank_without_step_marks_in_another_time_is_left_out_and_the_others_stay(tmp_path: Path) -> None:
    docs = unmarked(traces(simulate(Shape(steps=3)), Style(launches=True)), 3)
    for document in docs.values():
        document.pop("distributedInfo")
    for event in docs[3]["traceEvents"]:
        if "ts" in event:
            event["ts"] += 12_000
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2]
    assert run.layout.missing_ranks == [3]
    assert run.layout.inferred["steps"] == "ProfilerStep"
    (notice,) = (n for n in run.notices if n.code == "steps-differ")
    assert notice.message.endswith("this rank is left out")
    assert notice.where.endswith("rank3.json")


def test_without_steps_and_optimizer_the_period_is_found_and_named(tmp_path: Path) -> None:
    truth = simulate(Shape(microbatches=4, steps=3))
    write_all(tmp_path, traces(truth, Style(profiler_step=False)))
    run = prepare(read(tmp_path))
    assert run.layout.inferred["steps"] == "period"
    assert run.layout.microbatches == 4


@pytest.mark.parametrize("share", [0.15, 0.33, 0.5, 0.8, 0.95])
def test_the_rest_of_a_cut_trace_is_in_no_step_that_the_period_shows(tmp_path: Path, share: float) -> None:
    """The last stage repeats within a step, and of the cut step as well: how long a step takes, others say."""
    truth = simulate(Shape(microbatches=8, steps=3))
    docs = traces(truth, Style(profiler_step=False))
    begin, end = (t / 1e3 for t in truth.windows[2])
    for document in docs.values():
        document["traceEvents"] = [
            e for e in document["traceEvents"] if e["ph"] != "X" or e["ts"] + e["dur"] <= begin + share * (end - begin)
        ]
    write_all(tmp_path, docs)
    run = prepare(read(tmp_path))
    assert (run.layout.inferred["steps"], run.layout.microbatches) == ("period", 8)
    data = build(run).data
    assert data["steps"]["analysed"] == 2
    assert data["steps"]["seconds_median"] == pytest.approx((truth.windows[0][1] - truth.windows[0][0]) / 1e9, rel=0.01)
    assert "steps-cut" in codes(run)
    assert data["replay"]["trusted"]


def test_kernels_before_the_first_step_belong_to_no_step(tmp_path: Path) -> None:
    docs = documents()
    begin = min(e["ts"] for e in docs[0]["traceEvents"] if e["name"].startswith("ProfilerStep"))
    early = dict(kernels(docs[0])[0]) | {"ts": begin - 900, "dur": 100.0, "name": "warmup_gemm"}
    docs[0]["traceEvents"].append(early)
    write_all(tmp_path, docs)
    run = read(tmp_path)
    s = run.spans
    row = [i for i in range(len(s)) if run.names[int(s.name[i])] == "warmup_gemm"]
    assert s.step[row].tolist() == [-1]
    assert busy_ns(run, 0) == TRUTH.busy_ns(0)


def test_the_profilers_own_window_events_are_no_work(tmp_path: Path) -> None:
    docs = documents()
    for cat, name in (("Trace", "PyTorch Profiler (0)"), ("Trace", "Record Window End"), ("", "Iteration Start")):
        docs[2]["traceEvents"].append(
            {"ph": "X", "cat": cat, "name": name, "pid": "Spans", "tid": "Profiler", "ts": 1.0, "dur": 9e10}
        )
    write_all(tmp_path, docs)
    assert busy_ns(read(tmp_path), 2) == TRUTH.busy_ns(2)


# --- what counts ---------------------------------------------------------------------------------------------


def added(events: Callable[[Json], list[Json]]) -> dict[int, Json]:
    docs = documents()
    docs[2]["traceEvents"] += events(docs[2])
    return docs


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("overlapping kernels of one stream are a union", {"tid": 7}),
        ("kernels of two streams are a union", {"tid": 9, "args": {"stream": 9, "device": 2, "correlation": 7}}),
        ("synchronisation is not busy", {"cat": "cuda_sync", "dur": 900_000.0}),
        ("a projected annotation is not busy", {"cat": "gpu_user_annotation", "dur": 40_000.0}),
        ("a zero duration is no fault", {"dur": 0}),
        ("strings for numbers are read", {"pid": "2", "tid": "0x7", "args": {"stream": "0x7", "device": "2"}}),
        ("another spelling of the category", {"cat": "Kernel"}),
    ],
)
def test_busy_is_a_union_of_compute_kernels(tmp_path: Path, what: str, changes: Json) -> None:
    docs = added(lambda d: [dict(kernels(d)[5]) | changes])
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert busy_ns(run, 2) == TRUTH.busy_ns(2), what


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)",
        "rcclGenericKernel_1_false(ncclDevComm*, unsigned long, ncclWork*)",
        "void deep_ep::internode::dispatch<false, 8>(int4*)",
        "hcom_allReduce__123_456",
        "ncclSymkDevKernel_AllReduce_AGxLL_R_sum_bf16(ncclSymkDevWorkArgs)",
        "ncclSymDevKernel_ReduceScatter_LD_sum_f32(ncclSymDevArgs)",
        "void nvshmemi_barrier_on_stream_kernel(int)",
        "void mscclpp::allreduce7<__half>(__half*)",
        "mscclpp_allgather_kernel",
        "cnclAllReduce_mlu590",
        "xccl_send_recv_kernel",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<2, __half>(Params)",
        "user_ring_exchange_kernel",
    ],
)
def test_communication_is_never_busy_whatever_it_is_called(tmp_path: Path, name: str) -> None:
    def waiting(document: Json) -> list[Json]:
        first = kernels(document)[0]
        return [dict(first) | {"ts": first["ts"] - 900.0, "dur": 800.0, "name": name, "tid": 30}]

    write_all(tmp_path, added(waiting))
    run = read(tmp_path, options=ReadOptions(names=(KernelRule("^user_ring", communication=True),)))
    assert busy_ns(run, 2) == TRUTH.busy_ns(2)
    assert name in {run.names[int(i)] for i in run.spans.name[run.spans.lane == Lane.COMM]}


@pytest.mark.parametrize("around", ["nccl:all_reduce", "c10d::allreduce_", "record_param_comms"])
def test_what_an_operation_of_communication_launches_is_communication_and_said(tmp_path: Path, around: str) -> None:
    """torch's own kernels there only move data, and stay work."""

    def waiting(document: Json) -> list[Json]:
        first = kernels(document)[0]
        at, args = first["ts"] - 900.0, first["args"]
        common = {"ph": "X", "pid": 7, "tid": 77}
        name = "void at::native::vectorized_elementwise_kernel<4>"
        return [
            dict(first) | {"ts": at, "dur": 800.0, "name": "vendor_ring", "tid": 30, "args": args | {"correlation": 9}},
            dict(first) | {"ts": at + 801, "dur": 50.0, "name": name, "args": args | {"correlation": 8}},
            common | {"cat": "cpu_op", "name": around, "ts": at - 100, "dur": 50.0},
            common | {"cat": "cuda_runtime", "name": "launch", "ts": at - 90, "dur": 1, "args": {"correlation": 9}},
            common | {"cat": "cuda_runtime", "name": "launch", "ts": at - 80, "dur": 1, "args": {"correlation": 8}},
        ]

    write_all(tmp_path, added(waiting))
    run = read(tmp_path)
    assert busy_ns(run, 2) == TRUTH.busy_ns(2) + 50_000
    (notice,) = [n for n in run.notices if n.code == "comm-by-launch"]
    assert notice.message.startswith("1 kernels of 1 names ('vendor_ring') count as communication")
    work = (KernelRule("^vendor_", communication=False),)
    assert busy_ns(read(tmp_path, options=ReadOptions(names=work)), 2) == TRUTH.busy_ns(2) + 850_000


def test_a_copied_file_is_no_rank_of_its_own(tmp_path: Path) -> None:
    """Where the file names alone tell the ranks."""
    docs = documents(metadata=False)
    for document in docs.values():
        del document["distributedInfo"]
    write_all(tmp_path, docs | {4: docs[2]})
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    (notice,) = [n for n in run.notices if n.code == "rank-duplicate"]
    assert notice.where == str(tmp_path / "rank4.json")
    assert f"the same events as in {tmp_path / 'rank2.json'}" in notice.message


def test_kernels_of_a_graph_share_one_launch(tmp_path: Path) -> None:
    docs = documents(launches=True)
    graph = kernels(docs[2])[0]["args"]["correlation"]
    for event in kernels(docs[2])[:3]:
        event["args"]["correlation"] = graph
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert busy_ns(run, 2) == TRUTH.busy_ns(2)
    s = run.spans
    rows = (s.rank[run.links.launch[:, 0]] == 2) & (s.corr[run.links.launch[:, 0]] == graph)
    assert int(rows.sum()) == 3


def test_kernels_without_correlation_are_read(tmp_path: Path) -> None:
    docs = documents(launches=True)
    for event in kernels(docs[2]):
        del event["args"]["correlation"]
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert busy_ns(run, 2) == TRUTH.busy_ns(2)


def test_lost_kernels_are_said(tmp_path: Path) -> None:
    docs = documents(launches=True)
    gone = {id(e) for e in kernels(docs[2])[:30]}
    docs[2]["traceEvents"] = [e for e in docs[2]["traceEvents"] if id(e) not in gone]
    write_all(tmp_path, docs)
    notice = next(n for n in read(tmp_path).notices if n.code == "kernels-missing")
    assert notice.message.startswith("30 of ")


def test_a_file_of_metadata_only_costs_that_rank_alone(tmp_path: Path) -> None:
    docs = documents()
    docs[2]["traceEvents"] = [e for e in docs[2]["traceEvents"] if e["ph"] == "M"]
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert "no-device-events" in codes(run)
    assert run.source.details["untimed_ranks"] == [2]
    assert 2 in run.layout.ranks.tolist()
    assert busy_ns(run, 1) == TRUTH.busy_ns(1)


def test_a_rank_without_device_events_is_never_zero_percent_idle(tmp_path: Path) -> None:
    docs = documents(launches=True)
    docs[2]["traceEvents"] = [e for e in docs[2]["traceEvents"] if e.get("cat") != KERNELS]
    write_all(tmp_path, docs)
    run = read(tmp_path)
    assert not np.any((run.spans.rank == 2) & (run.spans.lane == Lane.COMPUTE))
    assert any(n.code == "no-device-events" and "unavailable" in n.message for n in run.notices)


def test_no_device_events_on_any_rank_is_an_input_error(tmp_path: Path) -> None:
    docs = documents(launches=True)
    for document in docs.values():
        document["traceEvents"] = [e for e in document["traceEvents"] if e.get("cat") != KERNELS]
    write_all(tmp_path, docs)
    with pytest.raises(InputError, match="no GPU events"):
        read(tmp_path)


def test_crossing_ranges_are_survived(tmp_path: Path) -> None:
    docs = documents(ranges="runtime")
    begin = kernels(docs[2])[0]["ts"]
    for k in range(5):
        docs[2]["traceEvents"].append(
            {"ph": "X", "cat": "user_annotation", "name": f"mine {k}", "pid": 1, "tid": 1,
             "ts": begin + 300 * k, "dur": 1000.0}
        )  # fmt: skip
    write_all(tmp_path, docs)
    assert prepare(read(tmp_path)).layout.microbatches == SHAPE.microbatches


def test_unequal_numbers_of_collectives_are_survived(tmp_path: Path) -> None:
    docs = documents()
    for rank, count in ((0, 3), (1, 5)):
        base = kernels(docs[rank])[0]
        docs[rank]["traceEvents"] += [
            dict(base) | {"name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "ts": base["ts"] + i, "tid": 40}
            for i in range(count)
        ]
    write_all(tmp_path, docs)
    run = prepare(read(tmp_path))
    assert len(run.links.p2p) == len(TRUTH.messages)
    assert "collective-unmatched" in codes(run)


# --- limits --------------------------------------------------------------------------------------------------


def test_too_many_events_are_refused_with_the_limit(tmp_path: Path) -> None:
    path = write_all(tmp_path, documents())[0]
    with pytest.raises(InputError, match="more than 10 events"):
        read(path, options=ReadOptions(max_events=10))


def test_deep_nesting_is_no_crash(tmp_path: Path) -> None:
    run = read_with_bad_rank_2(
        tmp_path, lambda text: text.replace(b'"traceEvents": [', b'"deep": ' + b"[" * 90_000 + b', "traceEvents": [', 1)
    )
    assert 1 in run.ranks


def test_an_integer_beyond_64_bits_is_no_crash(tmp_path: Path) -> None:
    run = read_with_bad_rank_2(tmp_path, lambda text: text.replace(b"18446744073709551557", b"9" * 40))
    assert busy_ns(run, 2) == TRUTH.busy_ns(2)


def test_the_truth_itself_is_conserved() -> None:
    truth: Truth = TRUTH
    for rank in range(4):
        ops = [o for o in truth.ops if o.rank == rank]
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(ops))
