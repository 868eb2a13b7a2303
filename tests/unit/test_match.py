"""Messages find their other end; wait and transfer are what they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bubblescope.align import prepare, wait_transfer
from bubblescope.align.match import collective_transfer, local_transfer, match, one_sided_transfer
from bubblescope.ingest import read
from bubblescope.model import Kind, Lane, Layout, Links, Names, Run, Source, SpanBuilder
from tests.support.kineto_gen import Shape, Style, Truth, simulate, traces, write

ONE_HOST = Style(host=lambda rank: "host")


def read_back(folder: Path, truth: Truth, style: Style) -> Run:
    write(folder, traces(truth, style))
    return read(folder)


def prepared(folder: Path, truth: Truth, style: Style = ONE_HOST) -> Run:
    return prepare(read_back(folder, truth, style))


@pytest.mark.parametrize("eager", [False, True])
def test_every_message_is_matched_with_itself(tmp_path: Path, eager: bool) -> None:
    truth = simulate(Shape(steps=2, eager=eager))
    run = prepared(tmp_path, truth)
    s = run.spans
    found = sorted(
        (int(s.rank[a]), int(s.rank[b]), int(s.start_ns[a]), int(s.end_ns[b])) for a, b in run.links.p2p.tolist()
    )
    assert found == sorted((m.source, m.destination, m.send[0], m.receive[1]) for m in truth.messages)


def test_wait_and_transfer_are_the_true_ones(tmp_path: Path) -> None:
    truth = simulate(Shape())
    run = prepared(tmp_path, truth)
    messages = wait_transfer(run)
    assert set(messages.transfer.tolist()) == {truth.shape.transfer_ns}
    assert (messages.transfer_low == messages.transfer).all()
    true_wait = sorted(max(0, m.send[0] - m.receive[0]) for m in truth.messages)
    assert sorted(messages.wait.tolist()) == true_wait
    assert (messages.wait + messages.transfer == messages.arrived - messages.posted).all()


def test_an_eager_sender_does_not_wait(tmp_path: Path) -> None:
    truth = simulate(Shape(eager=True))
    run = prepared(tmp_path, truth)
    messages = wait_transfer(run)
    late = sum(m.send[1] < m.receive[0] for m in truth.messages)
    assert int(messages.eager.sum()) == late > 0
    assert (messages.send_wait[messages.eager] == 0).all()
    assert set(messages.transfer.tolist()) == {truth.shape.transfer_ns}


def queue(sends: list[int], receives: list[int], sizes: tuple[list[int], list[int]]) -> Run:
    """Two ranks of one host, no steps: sends at these times, receives that end at these."""
    builder, names = SpanBuilder(), Names()
    host = names.intern("h")
    for at, size in zip(sends, sizes[0], strict=True):
        builder.add(rank=0, lane=Lane.COMM, kind=Kind.SEND, device=0, peer=1, start_ns=at, end_ns=at + 5, bytes=size)
    for at, size in zip(receives, sizes[1], strict=True):
        builder.add(rank=1, lane=Lane.COMM, kind=Kind.RECV, device=0, peer=0, start_ns=at - 5, end_ns=at, bytes=size)
    pair = np.array([0, 1])
    layout = Layout(ranks=pair, pp=pair, replica=pair * 0, tp=pair * 0, host=np.array([host, host]))
    return Run(builder.build(), names, layout, source=Source("kineto", timing="kernels"))


def test_a_missing_head_is_dropped_by_bytes() -> None:
    run = match(queue([10, 20, 30], [25, 35], ([8, 16, 32], [16, 32])))
    assert run.links.p2p.tolist() == [[1, 3], [2, 4]]
    assert {"p2p-shifted", "p2p-unmatched"} == {n.code for n in run.notices}


def test_a_missing_head_of_the_sender_is_dropped_by_causality() -> None:
    run = match(queue([20, 30], [15, 25, 35], ([8, 8], [8, 8, 8])))
    assert run.links.p2p.tolist() == [[0, 3], [1, 4]]


def test_a_step_that_both_sides_count_differently_is_left_alone() -> None:
    run = queue([10, 20, 30, 40], [15, 25, 45], ([8] * 4, [8] * 3))
    run = match(replace(run, spans=run.spans.with_columns(step=np.array([0, 0, 1, 1, 0, 0, 1]))))
    assert run.links.p2p.tolist() == [[0, 4], [1, 5]]
    assert [n.message for n in run.notices] == ["2 messages were matched; ends without a partner: 3 (no counterpart)"]


def test_queues_that_cannot_fit_are_left_alone() -> None:
    run = match(queue([10, 20], [15, 25, 35], ([1, 2], [3, 4, 5])))
    assert len(run.links.p2p) == 0


def test_links_that_a_reader_made_are_kept() -> None:
    run = queue([10], [15], ([8], [8]))
    made = replace(run, links=Links(p2p=np.array([[0, 1]]), p2p_wait=np.array([[-1, -1]])))
    assert match(made).links.p2p is made.links.p2p


def test_subgroup_names_that_differ_between_ranks_do_not_hinder(tmp_path: Path) -> None:
    truth = simulate(Shape())
    docs = traces(truth, ONE_HOST)
    for rank, document in docs.items():
        for event in document["traceEvents"]:
            if "Process Group Name" in event.get("args", {}):
                event["args"]["Process Group Name"] = str(100 + rank)
    write(tmp_path, docs)
    assert len(prepare(read(tmp_path)).links.p2p) == len(truth.messages)


def test_a_coalesced_kernel_carries_all_its_messages(tmp_path: Path) -> None:
    """Batched P2P leaves no arguments on its one kernel; the host operations before the launch tell."""
    document = traces(simulate(Shape(stages=3, scale=(1.0, 1.0, 1.0))), Style(launches=True))[1]
    events = document["traceEvents"]
    first = min(e["ts"] for e in events if e["name"].startswith("ProfilerStep"))
    thread = next(e["tid"] for e in events if e.get("cat") == "cuda_runtime")
    template = next(e["args"] for e in events if "Src Rank" in e.get("args", {}))
    document["traceEvents"] = [e for e in events if "SendRecv" not in e["name"]]
    for i, (name, src, dst) in enumerate((("send", 1, 2), ("recv", 2, 1), ("recv", 0, 1))):
        args = {k: v for k, v in template.items() if k not in ("device", "stream", "correlation")}
        args |= {"Collective name": name, "Src Rank": src, "Dst Rank": dst}
        document["traceEvents"].append(
            {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": thread, "tid": thread,
             "ts": first + 1 + i, "dur": 0.5, "args": args}
        )  # fmt: skip
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": thread, "tid": thread,
              "ts": first + 5, "dur": 1, "args": {"correlation": 77}}  # fmt: skip
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_SendRecv(x)", "pid": 1, "tid": 20,
              "ts": first + 20, "dur": 50, "args": {"device": 1, "stream": 20, "correlation": 77}}  # fmt: skip
    document["traceEvents"] += [launch, kernel]
    write(tmp_path, {1: document})
    s = read(tmp_path).spans
    rows = (s.lane == Lane.COMM) & (s.corr == 77)
    found = sorted(zip(s.kind[rows].tolist(), s.peer[rows].tolist(), strict=True))
    assert found == [(Kind.SEND, 2), (Kind.RECV, 0), (Kind.RECV, 2)]
    assert len(set(s.start_ns[rows].tolist())) == 1


# --- one side only -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", range(4))
def test_one_rank_alone_estimates_the_transfer_of_each_of_its_messages(tmp_path: Path, rank: int) -> None:
    """Receives are resident while they wait: only the quickest of a pair and size show the transfer."""
    truth = simulate(Shape(steps=4))
    documents = traces(truth, Style())
    write(tmp_path, {rank: documents[rank]})
    run = prepare(read(tmp_path))
    s = run.spans
    estimate = one_sided_transfer(run)
    messages = (s.lane == Lane.COMM) & np.isin(s.kind, (Kind.SEND, Kind.RECV))
    assert (estimate[~messages] == -1).all()
    assert estimate[messages].tolist() == pytest.approx([truth.shape.transfer_ns] * int(messages.sum()), abs=1_000)


def test_the_estimate_is_the_low_quantile_of_both_directions() -> None:
    rows = SpanBuilder()
    durations = {Kind.RECV: (50, 52, 900), Kind.SEND: (51, 2000)}
    for kind, lengths in durations.items():
        for length in lengths:
            rows.add(rank=0, lane=Lane.COMM, kind=kind, device=0, peer=3, bytes=8 << 20, end_ns=length)
    rows.add(rank=0, lane=Lane.COMM, kind=Kind.RECV, device=0, peer=3, bytes=1 << 10, end_ns=700)
    rows.add(rank=0, lane=Lane.COMPUTE, device=0, end_ns=5)
    run = replace(Run.empty(), spans=rows.build())
    assert one_sided_transfer(run).tolist() == [50, 50, 50, 50, 50, 700, -1]
    assert len(one_sided_transfer(Run.empty())) == 0


def test_the_last_member_of_a_collective_waits_for_nobody(tmp_path: Path) -> None:
    """So its kernel tells how long the all-reduce takes, on every member and whatever their clocks."""
    truth = simulate(Shape(steps=2, embedding_ns=300_000))
    hosts = Style(host=lambda rank: f"host{rank}", clock_ns={3: (7_000_000, 0.0)})
    run = match(read_back(tmp_path, truth, hosts))
    rows = np.flatnonzero((run.spans.kind == Kind.COLLECTIVE) & (run.spans.lane == Lane.COMM))
    assert run.spans.duration_ns[rows].max() > 6_000_000
    assert set(collective_transfer(run)[rows].tolist()) == {300_000}


def test_a_collective_of_one_member_is_as_long_as_the_quickest_of_its_kind_at_most(tmp_path: Path) -> None:
    rows = SpanBuilder()
    for size, lengths in {8 << 20: (300, 310, 6_000), 1 << 10: (5, 700)}.items():
        for length in lengths:
            rows.add(rank=3, lane=Lane.COMM, kind=Kind.COLLECTIVE, device=0, group=1, bytes=size, end_ns=length)
    rows.add(rank=3, lane=Lane.COMPUTE, device=0, end_ns=5)
    run = replace(Run.empty(), spans=rows.build())
    assert collective_transfer(run).tolist() == [300, 300, 300, 5, 5, -1]
    truth = simulate(Shape(steps=2, embedding_ns=300_000))
    write(tmp_path, {3: traces(truth, Style())[3]})
    (said,) = [n.message for n in match(read(tmp_path)).notices if n.code == "collective-unmatched"]
    assert "2 kernels found no partner" in said
    assert "upper limit" in said


def test_a_matched_receive_is_split_by_its_message_and_others_by_their_own(tmp_path: Path) -> None:
    """Rank 1 without rank 0: its activations are estimated, its gradients seen. Nothing waits for less than a transfer,
    so the estimate is right as well."""
    truth = simulate(Shape(steps=2))
    documents = traces(truth, ONE_HOST)
    del documents[0]
    write(tmp_path, documents)
    run = prepare(read(tmp_path))
    received = (run.spans.kind == Kind.RECV) & (run.spans.lane == Lane.COMM)
    assert set(local_transfer(run)[received].tolist()) == {truth.shape.transfer_ns}
    assert (local_transfer(run)[~np.isin(run.spans.kind, (Kind.SEND, Kind.RECV))] == -1).all()
