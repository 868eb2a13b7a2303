"""Causes in the report of a generated job are the truth, whatever the clocks, the buffers and the missing files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bubblescope.align import prepare
from bubblescope.ingest import read
from bubblescope.report.build import build
from tests.support.kineto_gen import Shape, Style, Truth, simulate, traces, write

MS = 1_000_000
CLOCKS: dict[str, dict[int, tuple[int, float]]] = {
    "200 us": {1: (200_000, 0.0), 2: (-200_000, 0.0), 3: (90_000, 0.0)},
    "5 ms": {1: (5 * MS, 0.0), 2: (-5 * MS, 0.0), 3: (2 * MS, 0.0)},
    "20 ms and 20 ppm": {1: (20 * MS, 20e-6), 2: (-20 * MS, -20e-6), 3: (0, 10e-6)},
}
REPLICAS = (range(4), range(4, 8))
SHAPES = {
    "rendezvous": Shape(steps=3),
    "eager": Shape(steps=3, eager=True, bytes=1 << 20),
    "with an optimizer": Shape(steps=3, optimizer_ns=500_000),
}


def report(folder: Path, truth: Truth, style: Style, without: int | None = None) -> dict[str, Any]:
    documents = traces(truth, style)
    if without is not None:
        del documents[without]
    write(folder, documents)
    return build(prepare(read(folder))).data


def half_width_s(data: dict[str, Any]) -> float:
    return max((h["high"] - h["low"]) / 2 for h in data["clock"]["hosts"])


@pytest.mark.parametrize("clocks", sorted(CLOCKS))
@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_causes_are_within_the_printed_interval_of_the_truth(tmp_path: Path, clocks: str, shape: str) -> None:
    """The truth is what one common clock gives. A wait moves by at most the half width per gap, and every message
    is one gap; the printed half width bounds the difference per GPU and step."""
    truth = simulate(SHAPES[shape])
    exact = report(tmp_path / "one", truth, Style(host=lambda rank: "host"))
    off = report(tmp_path / "many", truth, Style(host=lambda rank: f"host{rank}", clock_ns=CLOCKS[clocks]))
    assert off["clock"]["aligned"]
    half = half_width_s(off)
    assert 0 < half < 200e-6
    gaps = 2 * truth.shape.microbatches
    for cause, row in off["causes"].items():
        true = exact["causes"][cause]["seconds"]
        if row["seconds"] is None:
            assert row["sure"] == "unavailable"
            continue
        assert row["sure"] != "exact" or row["seconds"] == pytest.approx(true, abs=1e-9), cause
        assert row["seconds"] == pytest.approx(true, abs=gaps * half), cause
        # The interval is what is promised; where operations end together it is far better than that.
        assert row["seconds"] == pytest.approx(true, abs=5e-6), cause
    assert off["bubble"]["fraction"] == pytest.approx(exact["bubble"]["fraction"], abs=1e-3)


@pytest.mark.parametrize("clocks", sorted(CLOCKS))
def test_no_cause_is_invented_by_clocks_that_drift(tmp_path: Path, clocks: str) -> None:
    """Stamps that are corrected by a line are a nanosecond off: a send seems to begin before its producer ends. It is
    not a host that waited all that operation long, and a transfer is never negative."""
    truth = simulate(Shape(steps=3))
    data = report(tmp_path, truth, Style(host=lambda rank: f"host{rank}", clock_ns=CLOCKS[clocks]))
    window = sum(gpu["window"] for gpu in data["gpus"])
    assert 0 <= data["causes"]["p2p_transfer"]["seconds"] < 0.005 * window
    assert data["causes"]["host_launch"]["seconds"] < 0.001 * window
    assert data["causes"]["stage_imbalance"]["seconds"] == pytest.approx(0.043 * window, rel=0.01)


@pytest.mark.parametrize("clocks", ["one host", *sorted(CLOCKS)])
@pytest.mark.parametrize("without", [0, 1, 2, 3])
@pytest.mark.parametrize("embedding_ns", [0, 300_000])
def test_a_missing_rank_takes_away_what_needs_it_and_leaves_the_rest(
    tmp_path: Path, without: int, clocks: str, embedding_ns: int
) -> None:
    """Where a rank is missing, with its clock's bounds, nothing is made up: what one rank or one matched group tells is
    as in the whole job, what the pipeline would have to tell is unavailable."""
    truth = simulate(Shape(steps=3, embedding_ns=embedding_ns))
    whole = report(tmp_path / "all", truth, Style(host=lambda rank: "host"))
    many = Style(host=lambda rank: "host" if clocks == "one host" else f"host{rank}", clock_ns=CLOCKS.get(clocks, {}))
    data = report(tmp_path / "few", truth, many, without=without)
    assert data["source"]["missing_ranks"] == [without]
    for cause in ("warmup", "cooldown", "stage_imbalance", "slow_worker", "transient"):
        assert data["causes"][cause]["seconds"] is None
        assert data["causes"][cause]["sure"] == "unavailable"
    assert data["causes"]["p2p_transfer"]["sure"] == "estimated"
    there = {gpu["rank"]: gpu for gpu in whole["gpus"]}
    for gpu in data["gpus"]:
        true = there[gpu["rank"]]
        _, drift = many.clock_ns.get(gpu["rank"], (0, 0.0))
        assert gpu["busy"] == pytest.approx(true["busy"], abs=1e-9 + abs(drift) * true["busy"])
        assert sum(v for v in gpu["causes"].values() if v is not None) == pytest.approx(gpu["idle"], abs=1e-6)
        assert gpu["causes"]["host_launch"] <= true["causes"]["host_launch"] + 1e-6
        inputs = {0: 8, 3: 8}.get(gpu["rank"], 16)
        assert gpu["causes"]["p2p_transfer"] == pytest.approx(inputs * 50e-6, abs=5e-6)
        if {0, 3} <= set(data["source"]["ranks"]):
            # Only the ends reduce; what rank 3 waits there for rank 0 is no cost of the reduction.
            reduces = embedding_ns * 1e-9 if gpu["rank"] in (0, 3) else 0.0
            assert gpu["causes"]["exposed_collective"] == pytest.approx(reduces, abs=1e-6)


@pytest.mark.parametrize("rank", range(4))
def test_what_a_rank_alone_cannot_know_is_unavailable(tmp_path: Path, rank: int) -> None:
    """Of a job of two pipelines, whose messages go through the communicator of all, one rank has a trace."""
    documents = traces(simulate(Shape()), Style(world=8, members=tuple(range(8)), description="default_pg"))
    write(tmp_path, {rank: documents[rank]})
    data = build(prepare(read(tmp_path))).data
    assert (data["pipeline"]["stages"], data["pipeline"]["schedule"]) == (None, None)
    assert "stages" not in data["pipeline"]["inferred"]
    assert data["gpus"][0]["stage"] == (0 if rank == 0 else None)
    assert data["gpus"][0]["phases"]["steady"] > 0
    (why,) = [n["message"] for n in data["source"]["warnings"] if n["code"] == "fraction-unavailable"]
    assert why.startswith("every pipeline that was seen goes on at a rank without a trace (")
    (ends,) = [n["message"] for n in data["source"]["warnings"] if n["code"] == "no-optimizer"]
    assert ends.endswith("idle is a lower limit")


@pytest.mark.parametrize("clocks", ["one host", *sorted(CLOCKS)])
@pytest.mark.parametrize("without", [0, 1, 2, 3])
def test_messages_between_the_ranks_that_are_there_are_split(tmp_path: Path, without: int, clocks: str) -> None:
    """Wait and transfer of a route need its two ends on one clock, not the whole pipeline."""
    truth = simulate(Shape(steps=3))
    many = Style(host=lambda rank: "host" if clocks == "one host" else f"host{rank}", clock_ns=CLOCKS.get(clocks, {}))
    data = report(tmp_path, truth, many, without=without)
    waits: dict[tuple[int, int, bool], list[float]] = {}
    for m in truth.messages:
        if without not in (m.source, m.destination):
            route = (m.source, m.destination, m.forward)
            waits.setdefault(route, []).append(max(m.send[0] - m.receive[0], 0) * 1e-9)
    found = {(row["src"], row["dst"], row["direction"] == "act"): row for row in data["p2p"]}
    assert found.keys() == waits.keys()
    for route, row in found.items():
        assert row["count"] == len(waits[route]) / 3 == 8
        assert row["wait"] == pytest.approx(sum(waits[route]) / 3, abs=20e-6)
        assert row["transfer"] == pytest.approx(8 * 50e-6, abs=20e-6)


@pytest.mark.parametrize("hosts", [1, 2, 8])
@pytest.mark.parametrize("without", [None, 1, 6])
def test_two_replicas_on_several_hosts(tmp_path: Path, hosts: int, without: int | None) -> None:
    """With all ranks the causes are those of one clock. A missing one leaves the other pipeline all but slow workers,
    and the GPUs of its own what each of them tells, whatever the hosts."""
    truth = simulate(Shape(steps=3, replicas=2, reduce_ns=500_000))
    whole = report(tmp_path / "all", truth, Style(host=lambda rank: "host"))
    clocks = {r: (5 * MS * (r * hosts // 8), 10e-6 * (r * hosts // 8)) for r in range(8)}
    style = Style(host=lambda rank: f"host{rank * hosts // 8}", clock_ns=clocks)
    data = report(tmp_path / "few", truth, style, without=without)
    assert data["clock"]["aligned"]
    assert data["pipeline"]["data_parallel"] == 2
    there = {gpu["rank"]: gpu for gpu in whole["gpus"]}
    for gpu in data["gpus"]:
        true = there[gpu["rank"]]
        assert gpu["window"] == pytest.approx(true["window"], abs=20e-6)
        cut_off = without is not None and gpu["rank"] // 4 == without // 4
        for cause, seconds in gpu["causes"].items():
            if without is not None and cause == "slow_worker":
                assert seconds is None
            elif not cut_off or cause in ("exposed_collective", "data_loading"):
                assert seconds == pytest.approx(true["causes"][cause], abs=20e-6), cause
            elif cause == "host_launch":  # where the step before ended is not known, nor what its host did until then
                assert 0 <= seconds <= true["causes"][cause] + 1e-6
            elif cause not in ("p2p_transfer", "unexplained"):
                assert seconds is None, cause


def test_a_whole_pipeline_of_a_larger_job_is_told_as_if_it_were_all(tmp_path: Path) -> None:
    truth = simulate(Shape(steps=3))
    alone = report(tmp_path / "alone", truth, Style())
    data = report(tmp_path / "part", truth, Style(world=8))
    assert data["source"]["missing_ranks"] == [4, 5, 6, 7]
    assert data["bubble"] == alone["bubble"]
    assert data["p2p"] == alone["p2p"]
    assert data["pipeline"]["data_parallel"] is None
    assert [row["assumptions"] for row in data["advice"]] == [row["assumptions"] for row in alone["advice"]] != []
    for cause, row in data["causes"].items():
        assert row == alone["causes"][cause] or cause == "slow_worker", cause
    assert data["causes"]["slow_worker"]["seconds"] is None


@pytest.mark.parametrize("missing", [(6,), (4, 5, 6, 7)], ids=["one rank", "a whole replica"])
def test_waiting_in_a_collective_for_ranks_that_are_not_replayed_is_unexplained(
    tmp_path: Path, missing: tuple[int, ...]
) -> None:
    """The second pipeline is slower. Why it comes late to the all-reduce is not known: it is no cost of that."""
    truth = simulate(Shape(steps=3, replicas=2, slow=(1.0, 1.3), reduce_ns=500_000, optimizer_ns=100_000))
    whole = report(tmp_path / "all", truth, Style(host=lambda rank: "host"))
    documents = traces(truth, Style(host=lambda rank: "host"))
    write(tmp_path / "few", {rank: document for rank, document in documents.items() if rank not in missing})
    data = build(prepare(read(tmp_path / "few"))).data
    fast, slow = (max(o.end_ns for o in truth.ops if o.kind == "B" and o.step == 0 and o.rank in r) for r in REPLICAS)
    reduces = 500e-6 if 4 not in missing else 0.0  # only a group that is whole shows how long it takes
    for gpu, true in zip(data["gpus"], whole["gpus"], strict=False):
        assert sum(v for v in gpu["causes"].values() if v is not None) == pytest.approx(gpu["idle"], abs=1e-9)
        if gpu["rank"] in REPLICAS[0]:
            assert gpu["causes"]["unexplained"] == pytest.approx((slow - fast) * 1e-9 + 500e-6 - reduces, abs=1e-6)
            assert gpu["causes"]["exposed_collective"] == pytest.approx(reduces, abs=1e-6)
            assert gpu["causes"]["host_launch"] == pytest.approx(true["causes"]["host_launch"], abs=1e-6)
    assert data["causes"]["exposed_collective"]["sure"] == "estimated"
    assert not data["replay"]["trusted"]


def without_kernels(folder: Path, truth: Truth, hosts: int, lost: list[tuple[int, str, int]]) -> dict[str, Any]:
    """The report without the k-th send or receive kernel of some ranks: (rank, "send" or "recv", k)."""
    documents = traces(truth, Style(host=lambda rank: f"host{rank % hosts}"))
    for rank, kind, k in lost:
        events = documents[rank]["traceEvents"]
        kernels = [e for e in events if e.get("cat") == "kernel" and e["args"].get("Collective name") == kind]
        events.remove(kernels[k])
    write(folder, documents)
    return build(prepare(read(folder))).data


@pytest.mark.parametrize("hosts", [1, 4])
@pytest.mark.parametrize(
    "lost",
    [*([(2, kind, 16 + k)] for kind in ("send", "recv") for k in (0, 3, 8, 15)), [(1, "send", 17), (2, "recv", 22)]],
    ids=str,
)
def test_a_lost_message_kernel_costs_its_step_and_no_other(
    tmp_path: Path, lost: list[tuple[int, str, int]], hosts: int
) -> None:
    """Which one is missing cannot be told: taken as the last, all after it would be messages of others."""
    truth = simulate(Shape(steps=4))
    whole = without_kernels(tmp_path / "whole", truth, hosts, [])
    data = without_kernels(tmp_path / "lost", truth, hosts, lost)
    assert data["clock"]["aligned"]
    (skipped,) = data["steps"]["skipped"]
    assert skipped["index"] == 4  # the profiler counts from 3
    assert "no message was matched" in skipped["why"]
    assert data["replay"]["trusted"]
    for cause, row in data["causes"].items():
        # Pauses between steps count in all but the first one.
        assert row["seconds"] == pytest.approx(whole["causes"][cause]["seconds"], abs=20e-6), cause


def test_ranks_that_lost_the_begin_of_their_traces_lose_that_step(tmp_path: Path) -> None:
    """Operations without their first kernels teach nothing about those of other steps."""
    truth = simulate(Shape(steps=4))
    documents = traces(truth, Style(host=lambda rank: f"host{rank}"))
    for document in documents.values():
        document["traceEvents"] = [
            e for e in document["traceEvents"] if e.get("cat") != "kernel" or e["ts"] > truth.shape.start_ns / 1e3 + 5e3
        ]
    write(tmp_path, documents)
    data = build(prepare(read(tmp_path))).data
    assert [step["index"] for step in data["steps"]["skipped"]] == [3]
    assert data["replay"]["trusted"]
    expected = {"warmup": 5.0625e-3, "cooldown": 5.0625e-3, "stage_imbalance": 7.875e-3, "p2p_transfer": 0.65e-3}
    for cause, row in data["causes"].items():
        if cause != "host_launch":  # the pauses between steps
            assert row["seconds"] == pytest.approx(expected.get(cause, 0), abs=5e-6), cause


def test_a_step_whose_order_is_circular_costs_no_other(tmp_path: Path) -> None:
    """Two ranks lost different messages of one queue, which are counted alike: the rest is matched wrongly."""
    truth = simulate(Shape(steps=4))
    data = without_kernels(tmp_path, truth, 1, [(1, "send", 36), (2, "recv", 41)])
    (skipped,) = data["steps"]["skipped"]
    assert skipped["index"] == 5
    assert skipped["why"].startswith("the measured order is circular: ")
    assert (data["steps"]["analysed"], data["replay"]["trusted"]) == (3, True)


@pytest.mark.parametrize("clocks", sorted(CLOCKS))
@pytest.mark.parametrize("ranges", ["", "runtime"])
def test_interleaved_causes_do_not_depend_on_clocks(tmp_path: Path, clocks: str, ranges: str) -> None:
    truth = simulate(Shape(steps=3, schedule="Interleaved1F1B", chunks=2))
    exact = report(tmp_path / "one", truth, Style(host=lambda rank: "host", ranges=ranges))
    style = Style(host=lambda rank: f"host{rank}", clock_ns=CLOCKS[clocks], ranges=ranges)
    off = report(tmp_path / "many", truth, style)
    assert off["clock"]["aligned"]
    for cause, row in off["causes"].items():
        assert (row["seconds"] is None) == (exact["causes"][cause]["seconds"] is None)
        if row["seconds"] is not None:
            assert row["seconds"] == pytest.approx(exact["causes"][cause]["seconds"], abs=20e-6), cause
