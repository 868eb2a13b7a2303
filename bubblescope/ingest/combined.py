"""Calls that ran a forward and a backward mixed, layer by layer: whose time is whose."""

from __future__ import annotations

import numpy as np

from bubblescope.model import Kind, Lane, Names, Spans

COMBINED = "combined"
"""Name of rows that share the interval of one call."""

_FORWARD_SHARE = {Kind.BACKWARD: 1 / 3, Kind.BACKWARD_INPUT: 1 / 2}
"""Of what forward and backward take together: a gradient of inputs, or of weights, costs about as much as a forward."""


def split_combined(spans: Spans, names: Names) -> tuple[Spans, int]:
    """Divide the time of combined calls; and how many of them mixed a forward and a backward.

    The rows of a call's forward and backward have the same interval. Here they follow each other in it: first the
    forward, for its usual share, then the backward. Weight gradients that the call put off were measured, somewhere
    inside: what they took together comes last.

    >>> names = Names()
    >>> rows = Spans.from_columns(4, kind=[Kind.FORWARD, Kind.BACKWARD_INPUT] + [Kind.BACKWARD_WEIGHT] * 2, stage=1,
    ...     microbatch=[3, 0, 0, 0], start_ns=[0, 0, 10, 30], end_ns=[120, 120, 15, 45], name=names.intern("combined"))
    >>> made, calls = split_combined(rows, names)
    >>> [(Kind(k).name, s, e) for k, s, e in zip(made.kind.tolist(), made.start_ns.tolist(), made.end_ns.tolist())]
    [('FORWARD', 0, 50), ('BACKWARD_INPUT', 50, 100), ('BACKWARD_WEIGHT', 100, 120)]
    """
    if COMBINED not in names.texts:
        return spans, 0
    shared = (spans.name == names.intern(COMBINED)) & (spans.lane == Lane.COMPUTE)
    rows = np.flatnonzero(shared)
    forwards = {int(spans.start_ns[row]): int(row) for row in rows if spans.kind[row] == Kind.FORWARD}
    put_off: dict[tuple[int, int], list[int]] = {}
    for row in rows[spans.kind[rows] == Kind.BACKWARD_WEIGHT].tolist():
        put_off.setdefault(_operation(spans, row), []).append(row)
    divided: list[tuple[int, int, int]] = []
    mixed = 0
    for back in rows[np.isin(spans.kind[rows], list(_FORWARD_SHARE))].tolist():
        start, end = int(spans.start_ns[back]), int(spans.end_ns[back])
        late = put_off.get(_operation(spans, back), [])
        weights = end - int((spans.end_ns[late] - spans.start_ns[late]).sum())
        ahead = forwards.get(start)
        cut = start
        if ahead is not None:
            mixed += 1
            cut += int((weights - start) * _FORWARD_SHARE[Kind(int(spans.kind[back]))])
            divided.append((ahead, start, cut))
        divided.append((back, cut, weights))
        if late:
            divided.append((late[0], weights, end))
    if not divided:
        return spans, 0
    source, begin, until = np.array(divided, dtype=np.int64).T
    return Spans.concat([spans.take(~shared), spans.take(source).with_columns(start_ns=begin, end_ns=until)]), mixed


def _operation(spans: Spans, row: int) -> tuple[int, int]:
    return int(spans.stage[row]), int(spans.microbatch[row])
