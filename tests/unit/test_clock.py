"""Clocks of several hosts: aligned within the printed interval, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bubblescope.align import prepare, wait_transfer
from bubblescope.ingest import read
from bubblescope.model import Lane, Run
from tests.support.kineto_gen import Shape, Style, Truth, simulate, traces, write

MS = 1_000_000
OFFSETS = {
    "200 us": {1: (200_000, 0.0), 2: (-200_000, 0.0), 3: (90_000, 0.0)},
    "5 ms": {1: (5 * MS, 0.0), 2: (-5 * MS, 0.0), 3: (2 * MS, 0.0)},
    "20 ms and 20 ppm": {1: (20 * MS, 20e-6), 2: (-20 * MS, -20e-6), 3: (0, 10e-6)},
}


def prepared(folder: Path, truth: Truth, clocks: dict[int, tuple[int, float]]) -> Run:
    style = Style(clock_ns=clocks, host=lambda rank: f"host{rank}")
    write(folder, traces(truth, style))
    return prepare(read(folder))


def errors_ns(run: Run, truth: Truth) -> dict[int, int]:
    """How far the first and last kernel of each rank are from the truth after alignment; the worse one."""
    return {rank: max(abs(a), abs(b)) for rank, (a, b) in differences_ns(run, truth).items()}


def differences_ns(run: Run, truth: Truth) -> dict[int, tuple[int, int]]:
    """Of the first and the last kernel of each rank: stamp after alignment minus truth."""
    s = run.spans
    out = {}
    for rank in run.ranks:
        rows = np.flatnonzero((s.rank == rank) & (s.lane == Lane.COMPUTE))
        ops = [o for o in truth.ops if o.rank == rank]
        first = int(s.start_ns[rows].min()) - min(o.start_ns for o in ops)
        last = int(s.end_ns[rows].max()) - max(o.end_ns for o in ops)
        out[rank] = (first, last)
    return out


@pytest.mark.parametrize("name", sorted(OFFSETS))
@pytest.mark.parametrize(
    "shape",
    [Shape(steps=4), Shape(steps=4, eager=True, bytes=1 << 20), Shape(steps=4, eager=True, bytes=64 << 20)],
    ids=["rendezvous", "eager", "eager beyond the default"],
)
def test_hosts_are_aligned_within_the_printed_interval(tmp_path: Path, name: str, shape: Shape) -> None:
    truth = simulate(shape)
    run = prepared(tmp_path, truth, OFFSETS[name])
    assert run.clock.aligned
    half = run.clock.half_width_ns
    assert half is not None
    assert half < 200_000
    errors = errors_ns(run, truth)
    assert max(errors.values()) <= half
    assert max(errors.values()) < 10_000
    for host in run.clock.hosts:
        assert host.low_ns is not None
        assert host.high_ns is not None
        assert host.low_ns - 10_000 <= host.offset_ns <= host.high_ns + 10_000


def test_drift_is_seen_once_the_window_is_long_enough(tmp_path: Path) -> None:
    truth = simulate(Shape(steps=40, kernels=(1, 1)))
    run = prepared(tmp_path, truth, OFFSETS["20 ms and 20 ppm"])
    drift = {h.host: h.drift for h in run.clock.hosts}
    assert drift["host1"] == pytest.approx(-20e-6, rel=0.05)
    assert drift["host2"] == pytest.approx(20e-6, rel=0.05)
    assert max(errors_ns(run, truth).values()) < 5_000


@pytest.mark.parametrize("name", sorted(OFFSETS))
def test_transfers_lie_within_their_low_and_high(tmp_path: Path, name: str) -> None:
    truth = simulate(Shape(steps=4))
    messages = wait_transfer(prepared(tmp_path, truth, OFFSETS[name]))
    assert len(messages) == len(truth.messages)
    true = truth.shape.transfer_ns
    assert (messages.transfer_low <= true + 3_000).all()
    assert (messages.transfer_high >= true - 3_000).all()
    assert np.abs(messages.transfer - true).max() < 10_000


def test_ranks_of_one_host_share_its_clock(tmp_path: Path) -> None:
    truth = simulate(Shape())
    write(tmp_path, traces(truth, Style(host=lambda rank: f"host{rank // 2}", clock_ns={2: (MS, 0.0), 3: (MS, 0.0)})))
    run = prepare(read(tmp_path))
    assert [h.host for h in run.clock.hosts] == ["host0", "host1"]
    assert run.clock.hosts[1].offset_ns == pytest.approx(-MS, abs=5_000)


def test_one_host_needs_no_alignment(tmp_path: Path) -> None:
    truth = simulate(Shape())
    write(tmp_path, traces(truth, Style(host=lambda rank: "h")))
    run = prepare(read(tmp_path))
    assert (run.clock.aligned, run.clock.how, run.clock.half_width_ns) == (True, "one host", 0)


def test_contradictory_clocks_are_refused_and_nothing_is_moved(tmp_path: Path) -> None:
    """A clock that jumps by 3 ms in mid-run contradicts itself."""
    docs = traces(simulate(Shape(steps=2)), Style(host=lambda rank: f"h{rank}"))
    middle = 5_000 + 45_650 + 100
    for event in docs[1]["traceEvents"]:
        if event["ph"] == "X" and event["ts"] > middle:
            event["ts"] += 3_000
    write(tmp_path, docs)
    before = read(tmp_path)
    run = prepare(before)
    assert not run.clock.aligned
    assert "clock-infeasible" in [n.code for n in run.notices]
    assert (run.spans.start_ns == before.spans.start_ns).all()
    # What needs no clock is left: of a rendezvous the shorter kernel is the transfer, at most.
    messages = wait_transfer(run)
    assert not messages.eager.any()
    assert (messages.transfer >= 50_000).all()
    assert (np.minimum(messages.wait, messages.send_wait) == 0).all()


def jumping(folder: Path, steps: int, jumps: dict[int, float], hosts: list[str], from_step: int) -> Run:
    """Ranks whose clock is set by so many us before that step."""
    truth = simulate(Shape(steps=steps))
    documents = traces(truth, Style(host=lambda rank: hosts[rank]))
    since = truth.windows[from_step][0] / 1000 - 100
    for rank, jump in jumps.items():
        for event in documents[rank]["traceEvents"]:
            if event["ph"] == "X" and event["ts"] > since:
                event["ts"] += jump
    write(folder, documents)
    return prepare(read(folder))


@pytest.mark.parametrize("from_step", [1, 2, 3])
@pytest.mark.parametrize("jump", [3_000, -3_000])
def test_where_a_clock_was_set_the_steps_that_agree_are_aligned_and_the_others_named(
    tmp_path: Path, from_step: int, jump: float
) -> None:
    run = jumping(tmp_path, 4, {2: jump}, ["h0", "h0", "h2", "h3"], from_step)
    assert run.clock.aligned
    lost = range(4)[:1] if from_step == 1 else range(4)[from_step:]
    assert sorted(run.source.details["cut_steps"]) == [step + 3 for step in lost]  # the profiler counts from 3
    assert all("the times of h2 contradict" in why for why in run.source.details["cut_steps"].values())
    assert "clock-steps" in [n.code for n in run.notices]
    offsets = {h.host: h.offset_ns for h in run.clock.hosts}
    assert offsets["h2"] == pytest.approx(-jump * 1000 if from_step == 1 else 0, abs=5_000)
    assert abs(offsets["h3"]) < 5_000
    assert not np.isin(run.spans.step[run.links.p2p], list(run.source.details["cut_steps"])).any()


def test_hosts_that_contradict_nobody_stay_together(tmp_path: Path) -> None:
    """With two steps nobody can say which of them is right; the hosts beside the one whose clock was set agree."""
    run = jumping(tmp_path, 2, {2: 3_000}, ["h0", "h1", "h2", "h3"], 1)
    assert not run.clock.aligned
    assert run.clock.parts == (0, 0, 2, 3)
    assert "cut_steps" not in run.source.details
    (notice,) = [n for n in run.notices if n.code == "clock-infeasible"]
    assert "the clocks of h0, h1 | h2 | h3 are not aligned" in notice.message


PARTS = {0: [0, 0, 0], 1: [0, 1, 1], 2: [0, 0, 2], 3: [0, 0, 0]}
"""The missing rank of four -> the part of each of the others."""


@pytest.mark.parametrize("without", sorted(PARTS))
@pytest.mark.parametrize("name", sorted(OFFSETS))
def test_what_a_missing_rank_cuts_apart_is_aligned_in_parts(tmp_path: Path, name: str, without: int) -> None:
    """Each part is on the clock of its first host, within the printed interval."""
    truth = simulate(Shape(steps=4))
    docs = traces(truth, Style(clock_ns=OFFSETS[name], host=lambda rank: f"host{rank}"))
    del docs[without]
    write(tmp_path, docs)
    run = prepare(read(tmp_path))
    assert list(run.clock.parts) == PARTS[without]
    assert run.clock.aligned == (len(set(PARTS[without])) == 1)
    assert run.clock_part(run.layout.ranks).tolist() == PARTS[without]
    off = differences_ns(run, truth)
    for i, (rank, host) in enumerate(zip(run.ranks, run.clock.hosts, strict=True)):
        first = run.ranks[PARTS[without][i]]
        assert host.low_ns is not None
        assert host.high_ns is not None
        assert host.high_ns - host.low_ns < 400_000
        error = max(abs(a - b) for a, b in zip(off[rank], off[first], strict=True))
        assert error <= min(10_000, (host.high_ns - host.low_ns) / 2)
    cut = [n.message for n in run.notices if n.code == "clock-unbounded"]
    assert len(cut) == (not run.clock.aligned)
    assert all(f"host{rank}" in text for text in cut for rank in run.ranks)


def test_messages_within_a_part_are_split_where_the_whole_is_not_aligned(tmp_path: Path) -> None:
    truth = simulate(Shape(steps=4))
    docs = traces(truth, Style(clock_ns=OFFSETS["5 ms"], host=lambda rank: f"host{rank}"))
    del docs[1]
    write(tmp_path, docs)
    messages = wait_transfer(prepare(read(tmp_path)))
    assert len(messages) == sum({m.source, m.destination} == {2, 3} for m in truth.messages)
    assert np.abs(messages.transfer - truth.shape.transfer_ns).max() < 10_000
    assert (messages.transfer_high - messages.transfer_low < 200_000).all()


@pytest.mark.parametrize("name", sorted(OFFSETS))
def test_data_parallel_groups_reconnect_what_a_missing_rank_cuts(tmp_path: Path, name: str) -> None:
    truth = simulate(Shape(steps=12, replicas=2, reduce_ns=500_000))
    clocks = {**OFFSETS[name], **{rank + 4: (-2 * o, -d) for rank, (o, d) in OFFSETS[name].items()}}
    docs = traces(truth, Style(clock_ns=clocks, host=lambda rank: f"host{rank}"))
    del docs[1]
    write(tmp_path, docs)
    run = prepare(read(tmp_path))
    assert run.clock.aligned
    assert run.clock.half_width_ns is not None
    assert max(errors_ns(run, truth).values()) <= run.clock.half_width_ns


def test_ranks_of_one_host_are_not_cut_apart_by_a_missing_rank(tmp_path: Path) -> None:
    docs = traces(simulate(Shape()), Style(host=lambda rank: "one"))
    del docs[1]
    write(tmp_path, docs)
    run = prepare(read(tmp_path))
    assert (run.clock.aligned, run.clock.how) == (True, "one host")


def test_a_host_known_too_widely_is_apart_and_the_others_stay_together(tmp_path: Path) -> None:
    """Rank 0 meets rank 3 in one all-reduce a step, for which rank 3 waits long: that bounds a clock to some ms."""
    truth = simulate(Shape(steps=4, embedding_ns=300_000))
    docs = traces(truth, Style(clock_ns=OFFSETS["5 ms"], host=lambda rank: f"host{rank}"))
    del docs[1]
    write(tmp_path, docs)
    run = prepare(read(tmp_path))
    assert list(run.clock.parts) == [0, 1, 1]
    assert [n.code for n in run.notices if n.code.startswith("clock")] == ["clock-too-wide"]


def test_an_interval_that_is_too_wide_is_refused(tmp_path: Path) -> None:
    truth = simulate(Shape(transfer_ns=3 * MS, forward_ns=MS // 2, backward_ns=MS // 2, microbatches=2))
    run = prepared(tmp_path, truth, OFFSETS["200 us"])
    assert not run.clock.aligned
    assert "clock-too-wide" in [n.code for n in run.notices]
