"""Real traces of other people, and a generated job whose truth is known, through reader, labels and matching."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bubblescope.algebra import intervals
from bubblescope.align import prepare, wait_transfer
from bubblescope.errors import InputError
from bubblescope.ingest import kineto_scan, part, read
from bubblescope.ingest.kineto_assemble import assemble
from bubblescope.model import Kind, Lane, Run
from bubblescope.model.spans import is_one_value
from tests.support.kineto_bulk import Bulk, pieces
from tests.support.kineto_gen import Shape, Style, simulate, traces, write

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "kineto"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not beside this checkout")

# file -> kernels on device 0's compute lane, or the reason for which it cannot be analysed
REAL = {
    "cpu_only_rank-34.pt.trace.json.gz": 4,
    "nccl_data.json.gz": 2679,
    "ns_resolution_rank-0.pt.trace.json.gz": 4350,
    "rocm_mi250.json.gz": 14,
    "sendrecv_rank0.json.gz": 6000,
    "tests__data__trace_filter__sampled_rank-0.json.gz": 1144,
    "tests__data__trace_filter__sampled_rank-1.json.gz": 1094,
    "distributed_info_not_found.json.gz": "no GPU events",
    "rank_not_found.json.gz": "no GPU events",
    "rank_non_gpu.json.gz": "no GPU events",
}


@needs_data
@pytest.mark.parametrize("name", sorted(REAL))
def test_a_real_trace_gives_a_run_or_the_right_reason(name: str) -> None:
    expected = REAL[name]
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected) as caught:
            read(DATA / name)
        assert caught.value.hint
        return
    run = prepare(read(DATA / name))
    assert int(np.sum(run.spans.lane == Lane.COMPUTE)) == expected
    assert np.all(run.spans.end_ns >= run.spans.start_ns)


@needs_data
def test_every_file_of_the_collection_is_in_the_table() -> None:
    assert sorted(p.name for p in DATA.glob("*.gz")) == sorted(REAL)


@needs_data
def test_all_to_all_is_no_pipeline_and_its_last_arriver_waits_least() -> None:
    """dlrm, 8 ranks: all end an all_to_all within 3 us, so wait = latest start - own start is known exactly."""
    run = prepare(read(DATA / "dlrm_8rank"))
    s = run.spans
    assert run.layout.stages is None
    assert not np.any(np.isin(s.kind, (Kind.SEND, Kind.RECV)))
    assert run.clock.aligned
    transfers: list[int] = []
    longest = 0
    for number in np.unique(run.links.collective[:, 0]).tolist():
        rows = run.links.collective[run.links.collective[:, 0] == number, 1]
        if "SendRecv" not in run.names[int(s.name[rows[0]])]:
            continue
        assert len(rows) == 8
        assert int(np.ptp(s.end_ns[rows])) <= 3_000
        ready = int(s.start_ns[rows].max())
        transfers.append(int((s.end_ns[rows] - ready).min()))
        longest = max(longest, int((ready - s.start_ns[rows]).max()))
    assert len(transfers) == 5
    assert 6_000 <= min(transfers) <= max(transfers) <= 10_000
    assert longest == pytest.approx(7_600_000, rel=0.02)


@needs_data
def test_two_ranks_of_one_job_are_matched_where_they_can_be() -> None:
    files = sorted(DATA.glob("tests__data__trace_filter__sampled_rank-*.json.gz"))
    run = prepare(read(files))
    assert run.ranks == [0, 1]
    assert run.layout.world_size == 128
    assert run.layout.stages is None


# --- the generated job of known truth ------------------------------------------------------------------------

TRUTH = simulate(Shape())


def idle_without_transfer(run: Run) -> list[float]:
    """Percent of the common window in which no compute kernel ran and no transfer was under way, per rank."""
    s = run.spans
    on_device = s.device >= 0
    low, high = int(s.start_ns[on_device].min()), int(s.end_ns[on_device].max())
    messages = wait_transfer(run)
    receiver = s.rank[run.links.p2p[:, 1]]
    out = []
    for rank in run.ranks:
        rows = (s.rank == rank) & (s.lane == Lane.COMPUTE)
        busy = intervals.total(intervals.union(s.start_ns[rows], s.end_ns[rows]))
        transfer = int(messages.transfer[receiver == rank].sum())
        out.append(100 * (high - low - busy - transfer) / (high - low))
    return out


@pytest.mark.parametrize(
    "style",
    [
        Style(),
        Style(launches=True),
        Style(launches=True, autograd=True),
        Style(ranges="torch"),
        Style(ranges="runtime"),
        Style(host=lambda rank: "one-host"),
    ],
    ids=["bare", "launches", "autograd", "Forward i", "PP:", "one host"],
)
def test_idle_of_the_four_stage_job_is_what_it_must_be(tmp_path: Path, style: Style) -> None:
    write(tmp_path, traces(TRUTH, style))
    run = prepare(read(tmp_path))
    assert idle_without_transfer(run) == pytest.approx([46.55, 45.67, 45.67, 20.26], abs=0.01)


def test_every_kernel_gets_its_operation(tmp_path: Path) -> None:
    """Nothing but kernels, SendRecv with NCCL arguments and ProfilerStep."""
    write(tmp_path, traces(TRUTH))
    run = prepare(read(tmp_path))
    s = run.spans
    layout = run.layout
    assert (layout.stages, layout.chunks, layout.microbatches, layout.schedule) == (4, 1, 8, "1F1B")
    assert layout.stage_rank == {(0, stage): stage for stage in range(4)}
    kind = {"F": Kind.FORWARD, "B": Kind.BACKWARD}
    for op in TRUTH.ops:
        rows = (s.rank == op.rank) & (s.lane == Lane.COMPUTE)
        rows &= (s.start_ns >= op.start_ns) & (s.end_ns <= op.end_ns)
        assert set(s.kind[rows].tolist()) == {kind[op.kind]}
        assert set(s.microbatch[rows].tolist()) == {op.microbatch}
        assert set(s.stage[rows].tolist()) == {op.rank}
        assert set(s.step[rows].tolist()) == {3}
    assert {"stages", "kinds", "microbatch", "schedule", "steps"} <= set(layout.inferred)


def test_one_step_row_stands_for_each_rank_and_step(tmp_path: Path) -> None:
    write(tmp_path, traces(simulate(Shape(steps=3))))
    s = read(tmp_path).spans
    rows = s.where(kind=Kind.STEP, lane=Lane.RANGE)
    assert sorted(zip(s.rank[rows].tolist(), s.step[rows].tolist(), strict=True)) == [
        (rank, step) for rank in range(4) for step in (3, 4, 5)
    ]


def test_reading_twice_gives_the_same_columns(tmp_path: Path) -> None:
    write(tmp_path, traces(TRUTH))
    a, b = prepare(read(tmp_path)), prepare(read(tmp_path))
    assert a.names.texts == b.names.texts
    assert all((getattr(a.spans, c) == getattr(b.spans, c)).all() for c in ("start_ns", "kind", "microbatch", "name"))
    assert a.notices == b.notices


def test_memory_holds_a_large_file_once(tmp_path: Path) -> None:
    write(tmp_path, traces(TRUTH))
    scan = kineto_scan.scan(str(next(tmp_path.iterdir())))
    parts = [assemble(scan)]
    assert parts[0].events and not len(scan.events), "the events stay beside the spans"
    given = list(parts)
    run = part.merge(given, [], "kineto")
    assert len(run.spans) == len(parts[0].spans) and not given, "the parts stay beside the run"


def test_an_empty_run_passes_through_every_pass() -> None:
    assert len(prepare(Run.empty()).spans) == 0


def test_spans_are_not_held_beside_the_events_that_they_are_made_of() -> None:
    """Of a gigabyte of trace each of both takes half of what the process needs."""
    small, large = ([p.encode() for p in pieces(Bulk(size))] for size in (300_000, 15_000_000))
    assemble(kineto_scan.scan_blocks(small, "rank1.json"))  # imports what is needed
    tracemalloc.start()
    try:
        scan = kineto_scan.scan_blocks(large, "rank1.json")
        events = sum(getattr(scan.events, name).nbytes for name in scan.events.__dataclass_fields__)
        tracemalloc.reset_peak()
        spans = assemble(scan).spans
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * (events + sum(column.nbytes for column in spans.columns().values()))


def test_columns_of_one_rank_that_say_nothing_take_no_memory(tmp_path: Path) -> None:
    write(tmp_path, {0: traces(simulate(Shape(stages=2)))[0]})
    spans = read(tmp_path).spans
    assert [name for name in ("rank", "stage", "chunk", "microbatch") if not is_one_value(getattr(spans, name))] == []
    assert len(spans) > 10
