"""torch.distributed.pipelining's own ranges: ``PP:2F0``, ``PP:(0F3;3B1)OVERLAP_F_B``, ``Forward 3``, ``Backward 3``.

Kernels inherit kind, stage and micro-batch of the range that stands around their launch, on whatever thread:
backward kernels are launched by autograd's threads while the schedule's thread waits inside the range. Ranges
hold waits for receives as well, so a range itself is never busy time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.label.evidence import Int, Mask, around, backward_evidence, issue_time, launched
from bubblescope.label.structure import rank_of_stage, stage_of_rank
from bubblescope.model import PIPELINE_KINDS, Kind, Lane, Run

_ACTION = r"(\d{1,6})(SEND_F|SEND_B|RECV_F|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|F|I|B|W)(\d{0,6})"
_SINGLE = re.compile(rf"PP:{_ACTION}\Z")
_OVERLAP = re.compile(rf"PP:\({_ACTION};{_ACTION}\)OVERLAP_F_B\Z")
_PLAIN = re.compile(r"(Forward|Backward) (\d{1,6})\Z")

_KINDS = {
    "F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT,
    "SEND_F": Kind.SEND, "SEND_B": Kind.SEND, "RECV_F": Kind.RECV, "RECV_B": Kind.RECV,
    "UNSHARD": Kind.OTHER, "RESHARD": Kind.OTHER, "REDUCE_GRAD": Kind.OTHER,
}  # fmt: skip
_NEIGHBOUR = {"SEND_F": 1, "SEND_B": -1, "RECV_F": -1, "RECV_B": 1}


@dataclass(frozen=True)
class RangeAction:
    """One parsed range. stage -1: the range does not say (``Forward 3``). neighbour: +1 the message is shared
    with the next stage, -1 with the previous one, 0 no message."""

    kind: Kind
    stage: int
    microbatch: int
    neighbour: int = 0


def parse(text: str) -> tuple[RangeAction, ...]:
    """The actions a range name stands for: none, one, or the two of an overlapped pair.

    >>> parse("PP:2F0")
    (RangeAction(kind=<Kind.FORWARD: 1>, stage=2, microbatch=0, neighbour=0),)
    >>> [a.stage for a in parse("PP:(0F3;3B1)OVERLAP_F_B")], parse("PP:1RECV_B3")[0].neighbour
    ([0, 3], 1)
    >>> parse("Forward 3")[0].microbatch, parse("forward pass")
    (3, ())
    """
    single = _SINGLE.match(text)
    if single:
        return (_action(*single.groups()),)
    overlap = _OVERLAP.match(text)
    if overlap:
        parts = overlap.groups()
        return _action(*parts[:3]), _action(*parts[3:])
    plain = _PLAIN.match(text)
    if plain:
        kind = Kind.FORWARD if plain[1] == "Forward" else Kind.BACKWARD
        return (RangeAction(kind, -1, int(plain[2])),)
    return ()


def _action(stage: str, word: str, microbatch: str) -> RangeAction:
    return RangeAction(_KINDS[word], int(stage), int(microbatch) if microbatch else -1, _NEIGHBOUR.get(word, 0))


def label(run: Run) -> Run:
    """Label the ranges, and the kernels that were launched inside them. Needs no layout."""
    spans = run.spans
    ranges, parsed = _ranges(run)
    if len(ranges) == 0:
        return run
    columns = {c: getattr(spans, c).copy() for c in ("kind", "stage", "microbatch")}
    at, sure = issue_time(run), launched(run)
    sense = backward_evidence(run, at, sure)
    for row, actions in zip(ranges.tolist(), parsed, strict=True):
        columns["kind"][row], columns["stage"][row] = actions[0].kind, actions[0].stage
        columns["microbatch"][row] = actions[0].microbatch
    for mine, actions_of in _by_rank(run, ranges, parsed):
        _label_compute(run, mine, actions_of, at, sure, sense, columns)
    return replace(run, spans=spans.with_columns(**columns))


def label_messages(run: Run) -> Run:
    """Stage, micro-batch and peer of the messages posted inside the ranges. Needs `Layout.stage_rank`."""
    spans = run.spans
    ranges, parsed = _ranges(run)
    if len(ranges) == 0:
        return run
    columns = {c: getattr(spans, c).copy() for c in ("peer", "stage", "microbatch")}
    at = issue_time(run)
    for mine, actions_of in _by_rank(run, ranges, parsed):
        _label_messages(run, mine, actions_of, at, columns)
    return replace(run, spans=spans.with_columns(**columns))


def label_loss(run: Run) -> Run:
    """GPipe and 1F1B compute the loss after a forward of the last stage, outside its range: such kernels, up to
    the next range of the same step, are LOSS of that micro-batch. Needs stages."""
    spans = run.spans
    ranges, parsed = _ranges(run)
    last = max((stage for _, stage in run.layout.stage_rank), default=-1)
    if len(ranges) == 0 or last < 0:
        return run
    columns = {c: getattr(spans, c).copy() for c in ("kind", "stage", "microbatch")}
    at, sure = issue_time(run), launched(run)
    open_rows = (spans.lane == Lane.COMPUTE) & (spans.kind == Kind.OTHER) & sure
    for mine, actions in _by_rank(run, ranges, parsed):
        rank = int(spans.rank[mine[0]])
        rows = np.flatnonzero(open_rows & (spans.rank == rank))
        before = np.searchsorted(spans.start_ns[mine], at[rows], side="right") - 1
        for row, k in zip(rows.tolist(), before.tolist(), strict=True):
            if k < 0 or k + 1 >= len(mine) or actions[k][0].kind != Kind.FORWARD:
                continue
            stage = actions[k][0].stage if actions[k][0].stage >= 0 else stage_of_rank(run, rank)
            if stage == last and spans.step[row] == spans.step[mine[k + 1]]:
                columns["kind"][row], columns["stage"][row] = Kind.LOSS, stage
                columns["microbatch"][row] = actions[k][0].microbatch
    return replace(run, spans=spans.with_columns(**columns))


def _ranges(run: Run) -> tuple[Int, list[tuple[RangeAction, ...]]]:
    """Rows of ranges that parse, by rank and start, and what they say."""
    spans = run.spans
    rows = np.flatnonzero(spans.lane == Lane.RANGE)
    meaning = {i: parse(run.names[i]) for i in np.unique(spans.name[rows]).tolist()}
    rows = rows[np.array([bool(meaning[i]) for i in spans.name[rows].tolist()], dtype=np.bool_)]
    rows = rows[np.lexsort((spans.start_ns[rows], spans.rank[rows]))]
    return rows, [meaning[i] for i in spans.name[rows].tolist()]


def _by_rank(
    run: Run, ranges: Int, parsed: list[tuple[RangeAction, ...]]
) -> Iterator[tuple[Int, list[tuple[RangeAction, ...]]]]:
    for part in np.split(np.arange(len(ranges)), np.flatnonzero(np.diff(run.spans.rank[ranges])) + 1):
        yield ranges[part], [parsed[i] for i in part.tolist()]


def _label_compute(
    run: Run, ranges: Int, actions: list[tuple[RangeAction, ...]], at: Int, sure: Mask,
    sense: NDArray[np.int8], columns: dict[str, Int],
) -> None:  # fmt: skip
    spans = run.spans
    is_compute = np.array([a[0].kind in PIPELINE_KINDS for a in actions])
    inner, chosen = ranges[is_compute], [a for a, c in zip(actions, is_compute, strict=True) if c]
    rows = np.flatnonzero((spans.rank == spans.rank[ranges[0]]) & (spans.lane == Lane.COMPUTE) & sure)
    if len(inner) == 0 or len(rows) == 0:
        return
    found = around(spans.start_ns[inner], spans.end_ns[inner], at[rows])
    rows, found = rows[found >= 0], found[found >= 0]
    # Of an overlapped pair the first is the forward, the second the backward.
    second = (sense[rows] < 0).astype(np.int64)
    for column in ("kind", "stage", "microbatch"):
        table = np.array([[int(getattr(a[0], column)), int(getattr(a[-1], column))] for a in chosen])
        columns[column][rows] = table[found, second]


def _label_messages(
    run: Run, ranges: Int, actions: list[tuple[RangeAction, ...]], at: Int, columns: dict[str, Int]
) -> None:
    """Inside ``Forward i`` a receive comes from the stage before and a send goes to the stage after; inside
    ``Backward i`` the other way round. ``PP:sSEND_F3`` says all itself."""
    spans = run.spans
    rank = int(spans.rank[ranges[0]])
    messages = np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & np.isin(spans.lane, (Lane.COMM, Lane.POST))
    rows = np.flatnonzero((spans.rank == rank) & messages)
    found = around(spans.start_ns[ranges], spans.end_ns[ranges], at[rows])
    own = stage_of_rank(run, rank)
    for row, k in zip(rows.tolist(), found.tolist(), strict=True):
        action = actions[k][0] if k >= 0 else None
        sends = spans.kind[row] == Kind.SEND
        if action is None or (action.neighbour == 0 and action.stage >= 0):
            continue
        if action.neighbour and (action.kind == Kind.SEND) != sends:
            continue
        forward = action.kind == Kind.FORWARD
        neighbour = action.neighbour or (1 if sends == forward else -1)
        stage = action.stage if action.stage >= 0 else own
        columns["stage"][row], columns["microbatch"][row] = stage, action.microbatch
        if columns["peer"][row] < 0 and stage >= 0:
            columns["peer"][row] = rank_of_stage(run, rank, stage + neighbour)
