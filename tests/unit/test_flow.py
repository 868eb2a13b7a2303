"""Stage, chunk, micro-batch and weight gradients from messages alone: right, or not said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bubblescope.align import prepare
from bubblescope.ingest import read
from bubblescope.label import label
from bubblescope.model import Kind, Lane, Run
from bubblescope.report.build import build
from tests.support.kineto_gen import Shape, Style, Truth, simulate, traces, write

KIND = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT, "O": Kind.OPTIMIZER}
STYLES = {
    "bare": Style(),
    "launches": Style(launches=True),
    "autograd": Style(launches=True, autograd=True),
    "numbers": Style(launches=True, autograd=True, sequence=True),
}


def shape(schedule: str, stages: int, chunks: int, **more: Any) -> Shape:
    values: dict[str, Any] = {"scale": (1.0,) * stages, "steps": 2, "microbatches": 2 * stages, **more}
    return replace(Shape(schedule=schedule, stages=stages, chunks=chunks), **values)


def labelled(folder: Path, truth: Truth, style: Style) -> Run:
    write(folder, traces(truth, style))
    return label(read(folder))


Labels = dict[str, int]


def compare(run: Run, truth: Truth) -> tuple[Labels, Labels]:
    """(labels that are wrong, labels that are left open): how many kernels, per column. "Backward" is no wrong name
    for input and weight gradients where the stage is not said, and on the first, where no message parts them."""
    s, kernels = run.spans, truth.shape.kernels
    wrong, left = (dict.fromkeys(("kind", "stage", "microbatch"), 0) for _ in range(2))
    for rank in run.ranks:
        rows = np.flatnonzero((s.rank == rank) & (s.lane == Lane.COMPUTE))
        rows = rows[np.argsort(s.start_ns[rows], kind="stable")]
        ops = [o for o in truth.ops if o.rank == rank]
        meant = [o for o in ops for _ in range({"F": kernels[0], "O": 2}.get(o.kind, kernels[1]))]
        assert len(meant) == len(rows)
        for row, op in zip(rows.tolist(), meant, strict=True):
            whole = op.kind in "IW" and (op.stage == 0 or s.stage[row] == -1)
            kinds = {KIND[op.kind], Kind.BACKWARD} if whole else {KIND[op.kind]}
            wrong["kind"] += s.kind[row] != Kind.OTHER and s.kind[row] not in kinds
            left["kind"] += s.kind[row] == Kind.OTHER
            if op.kind == "O":
                continue
            for column, true in (("stage", op.stage), ("microbatch", op.microbatch)):
                found = int(getattr(s, column)[row])
                wrong[column] += found not in (-1, true)
                left[column] += found == -1
    return wrong, left


NONE = {"kind": 0, "stage": 0, "microbatch": 0}


def codes(run: Run) -> set[str]:
    return {n.code for n in run.notices}


@pytest.mark.parametrize("style", sorted(STYLES))
@pytest.mark.parametrize(
    "made",
    [
        shape("Interleaved1F1B", 2, 2),
        shape("Interleaved1F1B", 4, 2, scale=(1.0, 1.0, 1.0, 1.5)),
        shape("Interleaved1F1B", 4, 3),
        shape("Interleaved1F1B", 3, 2, optimizer_ns=500_000),
        shape("Interleaved1F1B", 2, 2, optimizer_ns=500_000, scale=(1.0, 2.0)),
        shape("Interleaved1F1B", 4, 2, eager=True, bytes=1 << 20),
        shape("Interleaved1F1B", 4, 2, replicas=2, reduce_ns=400_000),
        shape("Interleaved1F1B", 4, 2, same_names=True),
        shape("Interleaved1F1B", 4, 2, kernels=(1, 1)),
    ],
    ids=["2x2", "4x2 imbalanced", "4x3", "3x2", "2x2 with optimizer", "eager", "replicas", "same names", "one kernel"],
)
def test_interleaved_stages_are_followed_from_message_to_message(tmp_path: Path, made: Shape, style: str) -> None:
    truth = simulate(made)
    run = labelled(tmp_path, truth, STYLES[style])
    assert compare(run, truth) == (NONE, NONE)
    layout = run.layout
    assert (layout.stages, layout.chunks, layout.microbatches) == (made.stages, made.chunks, made.microbatches)
    assert layout.schedule == "Interleaved1F1B"
    assert layout.stage_rank[0, made.stages] == 0
    assert f"whole chains in {2 * made.replicas} of {2 * made.replicas}" in layout.inferred["chunks"]
    messages = np.isin(run.spans.kind, (Kind.SEND, Kind.RECV))
    assert (run.spans.microbatch[messages] >= 0).all()


@pytest.mark.parametrize("stages", [2, 4])
def test_a_reversed_order_of_backwards_is_read_from_numbers_or_left_open(tmp_path: Path, stages: int) -> None:
    """All forwards run first: which of them the first backward belongs to, messages cannot tell."""
    truth = simulate(shape("LoopedBFS", stages, 2))
    run = labelled(tmp_path / "numbers", truth, STYLES["numbers"])
    assert compare(run, truth) == (NONE, NONE)
    assert "autograd sequence numbers" in run.layout.inferred["microbatch"]
    run = labelled(tmp_path / "bare", truth, STYLES["bare"])
    wrong, left = compare(run, truth)
    assert wrong == NONE
    assert left == {"kind": 0, "stage": 0, "microbatch": sum(o.kind == "B" for o in truth.ops) * 7}
    assert "microbatch-uncertain" in codes(run)


@pytest.mark.parametrize("style", ["bare", "autograd", "numbers"])
@pytest.mark.parametrize("schedule", ["ZB-H1", "ZB-H2"])
@pytest.mark.parametrize("stages", [2, 4])
def test_what_runs_after_the_gradient_was_sent_are_weight_gradients(
    tmp_path: Path, schedule: str, stages: int, style: str
) -> None:
    truth = simulate(shape(schedule, stages, 1, optimizer_ns=500_000))
    run = labelled(tmp_path, truth, STYLES[style])
    assert compare(run, truth) == (NONE, NONE)
    assert "weight gradients" in run.layout.inferred
    assert run.layout.schedule is None


def test_weight_gradients_of_several_stages_are_numbered_by_autograd_only(tmp_path: Path) -> None:
    truth = simulate(shape("InterleavedZeroBubble", 4, 2))
    run = labelled(tmp_path / "numbers", truth, STYLES["numbers"])
    assert compare(run, truth) == (NONE, NONE)
    assert run.layout.schedule == "InterleavedZeroBubble"
    run = labelled(tmp_path / "bare", truth, STYLES["bare"])
    wrong, left = compare(run, truth)
    assert wrong == NONE
    assert left["kind"] == 0
    assert 0 < left["microbatch"] == left["stage"] <= sum(o.kind == "W" for o in truth.ops) * 7


@pytest.mark.parametrize(
    ("made", "style"),
    [
        (shape("Interleaved1F1B", 2, 2, same_names=True), STYLES["bare"]),
        (shape("ZBVZeroBubble", 4, 2, same_names=True), STYLES["bare"]),
        *((shape(name, stages, 2), STYLES[how]) for name in ("ZBVZeroBubble", "DualPipeV") for stages in (2, 4)
          for how in ("bare", "numbers")),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_not_said(tmp_path: Path, made: Shape, style: Style) -> None:
    truth = simulate(made)
    run = labelled(tmp_path, truth, style)
    wrong, _ = compare(run, truth)
    assert wrong == NONE
    assert not run.layout.stage_rank
    assert run.layout.chunks is None
    assert "stages-unclear" in codes(run)


@pytest.mark.parametrize("without", [0, 1, 3])
def test_a_ring_with_a_missing_rank_is_not_followed(tmp_path: Path, without: int) -> None:
    truth = simulate(shape("Interleaved1F1B", 4, 2))
    docs = traces(truth, STYLES["autograd"])
    del docs[without]
    write(tmp_path, docs)
    run = label(read(tmp_path))
    wrong, _ = compare(run, truth)
    assert wrong == NONE
    assert not np.any(run.spans.microbatch >= 0)
    assert "stages-unclear" in codes(run)


def test_a_missing_rank_of_one_replica_leaves_the_other(tmp_path: Path) -> None:
    truth = simulate(shape("Interleaved1F1B", 4, 2, replicas=2, reduce_ns=400_000))
    docs = traces(truth, STYLES["bare"])
    del docs[5]
    write(tmp_path, docs)
    run = label(read(tmp_path))
    wrong, left = compare(run, truth)
    assert wrong == NONE
    assert left["microbatch"] == sum(o.rank in (4, 6, 7) for o in truth.ops) * 11 // 2
    assert (run.layout.stages, run.layout.chunks, run.layout.data_parallel) == (4, 2, 2)


def test_a_step_that_lacks_a_message_costs_that_step_only(tmp_path: Path) -> None:
    truth = simulate(shape("Interleaved1F1B", 4, 2, steps=6))
    docs = traces(truth, STYLES["bare"])
    begin, end = truth.windows[2]
    events = docs[1]["traceEvents"]
    lost = next(e for e in events if "Src Rank" in e.get("args", {}) and begin / 1e3 + 5_000 < e["ts"] < end / 1e3)
    events.remove(lost)
    write(tmp_path, docs)
    run = label(read(tmp_path))
    wrong, left = compare(run, truth)
    assert wrong == NONE
    assert left["microbatch"] == sum(o.step == 2 for o in truth.ops) * 11 // 2
    assert any(n.code == "microbatch-uncertain" and "in 1 " in n.message for n in run.notices)


@pytest.mark.parametrize("made", [shape("Interleaved1F1B", 4, 2), shape("Interleaved1F1B", 2, 2)], ids=["4x2", "2x2"])
def test_causes_are_those_that_ranges_would_give(tmp_path: Path, made: Shape) -> None:
    truth = simulate(made)
    write(tmp_path / "bare", traces(truth, Style()))
    write(tmp_path / "ranges", traces(truth, Style(ranges="runtime")))
    bare, ranges = (build(prepare(read(tmp_path / name))).data for name in ("bare", "ranges"))
    assert bare["bubble"]["fraction"] == pytest.approx(ranges["bubble"]["fraction"], abs=1e-6)
    for cause, row in bare["causes"].items():
        assert row["seconds"] == pytest.approx(ranges["causes"][cause]["seconds"], abs=1e-6), cause


@pytest.mark.parametrize(
    "made", [shape("LoopedBFS", 4, 2), shape("InterleavedZeroBubble", 4, 2)], ids=["order", "split"]
)
def test_unnumbered_operations_are_replayed_into_no_cause(tmp_path: Path, made: Shape) -> None:
    """Waits that could not be followed are unexplained, and never a collective that nobody ran."""
    write(tmp_path, traces(simulate(made), Style()))
    data = build(prepare(read(tmp_path))).data
    for cause in ("warmup", "cooldown", "stage_imbalance", "slow_worker", "transient"):
        assert data["causes"][cause]["seconds"] is None
    assert data["causes"]["exposed_collective"]["seconds"] == 0
    assert data["causes"]["unexplained"]["seconds"] > 0
    assert "fraction-unavailable" in {w["code"] for w in data["source"]["warnings"]}
