"""Ranges that name an operation: what was launched inside one is of its kind, stage and micro-batch.

Each framework's names are parsed by a module of their own (`SCHEMES`); the user's own come first. Kernels inherit from
the range that stands around their launch, on whatever thread: backward kernels are launched by autograd's threads
while the schedule's thread waits inside the range. Ranges hold waits for receives as well, so a range itself is never
busy time. Where a rank of a pipeline computes in both directions and its ranges do not name both, no range of the run
is used: the other evidence tells both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.label import megatron, torch_pipelining, user_names, zero_bubble
from bubblescope.label.actions import Parser, RangeAction
from bubblescope.label.evidence import Int, around, backward_evidence, issue_time, launched
from bubblescope.label.structure import rank_of_stage, stage_of_rank
from bubblescope.model import BACKWARD_KINDS, PIPELINE_KINDS, Kind, Lane, Notice, Run

Scheme = Callable[[Run], Parser]

SCHEMES: list[Scheme] = [lambda run: torch_pipelining.parse, zero_bubble.parser, lambda run: megatron.parse]
"""Names of the frameworks, in this order; the first that knows a name decides."""

_COLUMNS = ("kind", "stage", "chunk", "microbatch")
_LABELLED = (*PIPELINE_KINDS, Kind.OPTIMIZER, Kind.LOSS, Kind.RECOMPUTE)
_OTHER_DIRECTION = 0.25
"""With so much unnamed compute per named forward (or backward), the other direction is in it."""


def parser_of(run: Run) -> Parser:
    """All parsers as one, the user's own names before the built-in ones."""
    parsers = [*user_names.parsers(run), *(scheme(run) for scheme in SCHEMES)]

    def parse(text: str) -> tuple[RangeAction, ...]:
        return next((found for one in parsers if (found := one(text))), ())

    return parse


def label(run: Run) -> Run:
    """Label the ranges, and the kernels that were launched inside them. Needs no layout."""
    spans = run.spans
    ranges, parsed = _known(run)
    if len(ranges) == 0:
        return run
    columns = {c: getattr(spans, c).copy() for c in _COLUMNS}
    at, sure = issue_time(run), launched(run)
    sense = backward_evidence(run, at, sure)
    for row, actions in zip(ranges.tolist(), parsed, strict=True):
        for column in _COLUMNS:
            columns[column][row] = getattr(actions[0], column)
    compute = np.flatnonzero((spans.lane == Lane.COMPUTE) & sure)
    compute_of = intervals.split_by(compute, spans.rank)
    for mine, actions_of in _by_rank(run, ranges, parsed):
        _label_compute(run, mine, actions_of, compute_of.get(int(spans.rank[mine[0]]), compute[:0]), at, sense, columns)
    half = _half_named(run, columns["kind"])
    if half:
        refused = columns["kind"] != Kind.OPTIMIZER
        for column, values in columns.items():
            values[refused] = getattr(spans, column)[refused]
    return replace(run, spans=spans.with_columns(**columns)).with_notices(*_half_notices(half))


def _half_named(run: Run, kind: Int) -> dict[int, str]:
    """Rank -> what its ranges do not name, of ranks that compute much besides: one direction, or both of them where the
    rank exchanges messages and the ranges of others name theirs. kind: as the ranges label the rows."""
    spans = run.spans
    compute = np.flatnonzero((spans.lane == Lane.COMPUTE) & (spans.step >= 0))
    talking = set(spans.rank[np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & (spans.lane != Lane.RANGE)].tolist())
    any_named = bool(np.isin(kind[compute], PIPELINE_KINDS).any())
    out: dict[int, str] = {}
    for rank, picked in intervals.rows_by(spans.rank[compute]):
        rows = compute[picked]
        length = spans.end_ns[rows] - spans.start_ns[rows]
        forward, backward, other = (
            int(length[np.isin(kind[rows], kinds)].sum()) for kinds in (Kind.FORWARD, BACKWARD_KINDS, Kind.OTHER)
        )
        if other <= _OTHER_DIRECTION * (forward + backward) or (forward and backward):
            continue
        if forward or backward:
            out[rank] = "backwards" if forward else "forwards"
        elif any_named and rank in talking:
            out[rank] = "forwards or backwards"
    return out


def _half_notices(half: dict[int, str]) -> list[Notice]:
    out = []
    for word in sorted(set(half.values())):
        ranks = [str(rank) for rank, missing in half.items() if missing == word]
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        message = (
            f"the ranges of rank {', '.join(ranks[:8])}{more} name no {word}, and much is computed outside of them: "
            "names of operations are not used, and forward and backward are told by what else the trace shows"
        )
        out.append(Notice("ranges-one-sided", message))
    return out


def label_messages(run: Run) -> Run:
    """Stage, micro-batch and peer of the messages posted inside the ranges. Needs `Layout.stage_rank`."""
    spans = run.spans
    ranges, parsed = _ranges(run)
    if len(ranges) == 0:
        return run
    columns = {c: getattr(spans, c).copy() for c in ("peer", "stage", "microbatch")}
    at = issue_time(run)
    talk = np.flatnonzero(np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & np.isin(spans.lane, (Lane.COMM, Lane.POST)))
    talk_of = intervals.split_by(talk, spans.rank)
    for mine, actions_of in _by_rank(run, ranges, parsed):
        _label_messages(run, mine, actions_of, talk_of.get(int(spans.rank[mine[0]]), talk[:0]), at, columns)
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
    open_rows = np.flatnonzero((spans.lane == Lane.COMPUTE) & (spans.kind == Kind.OTHER) & sure)
    rows_of = intervals.split_by(open_rows, spans.rank)
    for mine, actions in _by_rank(run, ranges, parsed):
        rank = int(spans.rank[mine[0]])
        rows = rows_of.get(rank, open_rows[:0])
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
    """The ranges of `_known` that `label` believed: it gave them their kind."""
    rows, parsed = _known(run)
    kinds = run.spans.kind[rows].tolist()
    believed = [i for i, actions in enumerate(parsed) if actions[0].kind == kinds[i]]
    return rows[np.array(believed, dtype=np.int64)], [parsed[i] for i in believed]


def _known(run: Run) -> tuple[Int, list[tuple[RangeAction, ...]]]:
    """Rows of ranges that parse, by rank and start, and what they say."""
    spans = run.spans
    rows = np.flatnonzero(spans.lane == Lane.RANGE)
    parse = parser_of(run)
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
    run: Run, ranges: Int, actions: list[tuple[RangeAction, ...]], rows: Int, at: Int,
    sense: NDArray[np.int8], columns: dict[str, Int],
) -> None:  # fmt: skip
    spans = run.spans
    is_compute = np.array([a[0].kind in _LABELLED for a in actions])
    inner, chosen = ranges[is_compute], [a for a, c in zip(actions, is_compute, strict=True) if c]
    if len(inner) == 0 or len(rows) == 0:
        return
    found = around(spans.start_ns[inner], spans.end_ns[inner], at[rows])
    rows, found = rows[found >= 0], found[found >= 0]
    # Of an overlapped pair the first is the forward, the second the backward.
    second = (sense[rows] < 0).astype(np.int64)
    for column in _COLUMNS:
        table = np.array([[int(getattr(a[0], column)), int(getattr(a[-1], column))] for a in chosen])
        columns[column][rows] = table[found, second]


def _label_messages(
    run: Run, ranges: Int, actions: list[tuple[RangeAction, ...]], rows: Int, at: Int, columns: dict[str, Int]
) -> None:
    """Inside ``Forward i`` a receive comes from the stage before and a send goes to the stage after; inside
    ``Backward i`` the other way round. ``PP:sSEND_F3`` says all itself."""
    spans = run.spans
    rank = int(spans.rank[ranges[0]])
    found = around(spans.start_ns[ranges], spans.end_ns[ranges], at[rows])
    own = stage_of_rank(run, rank)
    sent = (spans.kind[rows] == Kind.SEND).tolist()
    for row, k, sends in zip(rows.tolist(), found.tolist(), sent, strict=True):
        action = actions[k][0] if k >= 0 else None
        if action is None or (action.neighbour == 0 and (action.stage >= 0 or action.kind not in PIPELINE_KINDS)):
            continue
        if action.neighbour and (action.kind == Kind.SEND) != sends:
            continue
        forward = action.kind == Kind.FORWARD
        neighbour = action.neighbour or (1 if sends == forward else -1)
        stage = action.stage if action.stage >= 0 else own
        columns["stage"][row] = stage
        if action.microbatch >= 0:
            columns["microbatch"][row] = action.microbatch
        if columns["peer"][row] < 0 and stage >= 0:
            columns["peer"][row] = rank_of_stage(run, rank, stage + neighbour)
