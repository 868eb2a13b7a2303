"""Ranges of the zero-bubble schedules: chunk and micro-batch from the name, stage from who sends to whom."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bubblescope.align import prepare
from bubblescope.ingest import read
from bubblescope.label.ranges import parser_of
from bubblescope.model import Kind, Lane, Run
from bubblescope.report.build import build
from tests.support.kineto_gen import Shape, Style, Truth, simulate, traces, write

KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}
SHAPES = {
    "1F1B": Shape(steps=2),
    "ZB-H1": Shape(schedule="ZB-H1", steps=2),
    "Interleaved1F1B": Shape(schedule="Interleaved1F1B", chunks=2, steps=2),
    "Interleaved1F1B on two": Shape(stages=2, schedule="Interleaved1F1B", chunks=2, steps=2),
    "ZBVZeroBubble": Shape(schedule="ZBVZeroBubble", chunks=2, steps=2),
    "ZBVZeroBubble on two": Shape(stages=2, schedule="ZBVZeroBubble", chunks=2, steps=2),
}


def prepared(folder: Path, truth: Truth) -> Run:
    style = Style(ranges="zero bubble", host=lambda rank: "host", launches=True, per_direction=True)
    write(folder, traces(truth, style))
    return prepare(read(folder))


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_kernel_and_every_message_is_told(tmp_path: Path, name: str) -> None:
    truth = simulate(SHAPES[name])
    run = prepared(tmp_path, truth)
    s = run.spans
    assert run.layout.stages == truth.shape.stages
    assert run.layout.chunks == truth.shape.chunks
    for op in truth.ops:
        rows = (s.rank == op.rank) & (s.lane == Lane.COMPUTE)
        rows &= (s.start_ns >= op.start_ns) & (s.end_ns <= op.end_ns)
        assert {(k, st, m) for k, st, m in zip(s.kind[rows], s.stage[rows], s.microbatch[rows], strict=True)} == {
            (KINDS[op.kind], op.stage, op.microbatch)
        }
    assert len(run.links.p2p) == len(truth.messages)
    receives = run.links.p2p[:, 1]
    columns = ("rank", "start_ns", "end_ns", "stage", "microbatch")
    told = set(zip(*(getattr(s, c)[receives].tolist() for c in columns), strict=True))
    assert told == {(m.destination, *m.receive, m.to_stage, m.microbatch) for m in truth.messages}
    assert np.all(s.microbatch[run.links.p2p[:, 0]] == s.microbatch[receives])


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_the_whole_job_is_replayed(tmp_path: Path, name: str) -> None:
    data = build(prepared(tmp_path, simulate(SHAPES[name]))).data
    assert data["replay"]["trusted"], data["source"]["warnings"]
    assert data["causes"]["stage_imbalance"]["seconds"] is not None


def test_splits_of_a_sequence_are_micro_batches_of_their_own() -> None:
    run = Run.empty()
    for name in ("F0.0.0", "F0.0.1", "B0.0.0"):
        run.names.intern(name)
    parse = parser_of(run)
    assert [parse(f"F{m}.0.{s}")[0].microbatch for m in (0, 1) for s in (0, 1)] == [0, 1, 2, 3]
    assert parse("B1.0.1")[0].kind == Kind.BACKWARD, "without W ranges a B is the whole backward"
