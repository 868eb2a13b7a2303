"""Calls that ran a forward and a backward mixed, layer by layer: whose time is whose."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bubblescope.model import Kind, Lane, Names, Spans

Int = NDArray[np.int64]

COMBINED = "combined"
"""Name of rows that share the intervals of one call."""

_FORWARD_SHARE = {Kind.BACKWARD: 1 / 3, Kind.BACKWARD_INPUT: 1 / 2}
"""Of what forward and backward take together: a gradient of inputs, or of weights, costs about as much as a forward."""


def split_combined(spans: Spans, names: Names) -> tuple[Spans, int]:
    """Divide the time of combined calls; and how many of them mixed a forward and a backward.

    The rows of a call's forward and backward have the same intervals: when it computed, and waited for nothing. Here
    they follow each other in them: first the forward, for its usual share, then the backward. Weight gradients that
    the call put off were measured, inside those intervals: what they took together comes last. A backward has ended
    when its gradient is handed over; what the call did afterwards is neither's.

    >>> names = Names()
    >>> rows = Spans.from_columns(5, kind=[Kind.FORWARD, Kind.BACKWARD_INPUT] * 2 + [Kind.BACKWARD_WEIGHT], stage=1,
    ...     microbatch=[3, 0, 3, 0, 0], start_ns=[0, 0, 60, 60, 70], end_ns=[50, 50, 120, 120, 90],
    ...     name=names.intern("combined"))
    >>> made, calls = split_combined(rows, names)
    >>> [(Kind(k).name, s, e) for k, s, e in zip(made.kind.tolist(), made.start_ns.tolist(), made.end_ns.tolist())]
    ... # doctest: +NORMALIZE_WHITESPACE
    [('FORWARD', 0, 45), ('BACKWARD_INPUT', 45, 50), ('BACKWARD_INPUT', 60, 100), ('BACKWARD_WEIGHT', 100, 120)]
    """
    if COMBINED not in names.texts:
        return spans, 0
    shared = (spans.name == names.intern(COMBINED)) & (spans.lane == Lane.COMPUTE)
    if not shared.any():
        return spans, 0
    rows = np.flatnonzero(shared)
    rows = rows[np.argsort(spans.start_ns[rows], kind="stable")]
    kinds = spans.kind[rows]
    forwards = {int(spans.start_ns[row]): int(row) for row in rows[kinds == Kind.FORWARD]}
    weights = _by_operation(spans, rows[kinds == Kind.BACKWARD_WEIGHT])
    posts = _handed_over(spans, names)
    made: list[tuple[int, int, int, int]] = []
    mixed = 0
    for operation, pieces in _by_operation(spans, rows[np.isin(kinds, list(_FORWARD_SHARE))]).items():
        back, late = pieces[0], weights.get(operation, [])
        ahead = forwards.get(int(spans.start_ns[back]))
        mixed += ahead is not None
        kind = Kind(int(spans.kind[back]))
        total = _length(spans, pieces)
        both = total - _length(spans, late)
        until = min(both, _length(spans, pieces, posts.get(operation)))
        forward_ns = 0 if ahead is None else max(int(both * _FORWARD_SHARE[kind]) - (both - until), 0)
        turns = [
            (forward_ns, ahead, Kind.FORWARD),
            (until, back, kind),
            (both, back, Kind.OTHER),
            (total, late[0] if late else None, Kind.BACKWARD_WEIGHT),
        ]
        made += _in_turn(spans, pieces, turns)
    source, kind_of, start, end = np.array(made, dtype=np.int64).reshape(-1, 4).T
    divided = spans.take(source).with_columns(kind=kind_of, start_ns=start, end_ns=end)
    return Spans.concat([spans.take(~shared), divided]), mixed


def _handed_over(spans: Spans, names: Names) -> dict[tuple[int, int], int]:
    """{(stage, micro-batch): when its gradient was handed over}."""
    sent = np.flatnonzero(spans.where(lane=Lane.POST, kind=Kind.SEND) & (spans.name == names.intern("grad")))
    return {(int(spans.stage[row]), int(spans.microbatch[row])): int(spans.start_ns[row]) for row in sent}


def _by_operation(spans: Spans, rows: Int) -> dict[tuple[int, int], list[int]]:
    """{(stage, micro-batch): its rows}."""
    found: dict[tuple[int, int], list[int]] = {}
    for row in rows.tolist():
        found.setdefault((int(spans.stage[row]), int(spans.microbatch[row])), []).append(row)
    return found


def _length(spans: Spans, rows: list[int], until_ns: int | None = None) -> int:
    end = spans.end_ns[rows] if until_ns is None else np.minimum(spans.end_ns[rows], until_ns)
    return int(np.maximum(end - spans.start_ns[rows], 0).sum())


def _in_turn(
    spans: Spans, pieces: list[int], turns: list[tuple[int, int | None, Kind]]
) -> list[tuple[int, int, int, int]]:
    """[(row, kind, start, end)]: the intervals of `pieces`, cut where their time so far reaches the end of a turn.

    turns: (time so far at its end, row that it stands for, its kind).
    """
    made: list[tuple[int, int, int, int]] = []
    before = 0
    for piece in pieces:
        low, high = int(spans.start_ns[piece]), int(spans.end_ns[piece])
        reached = 0
        for until, row, kind in turns:
            start, end = low + max(reached - before, 0), min(low + until - before, high)
            reached = until
            if row is not None and end > start:
                made.append((row, kind, start, end))
        before += high - low
    return made
