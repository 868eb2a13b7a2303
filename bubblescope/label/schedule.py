"""Which schedule a labelled run follows, from the order of its operations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bubblescope.algebra import intervals
from bubblescope.model import BACKWARD_KINDS, PIPELINE_KINDS, Kind, Lane, Run

Operation = tuple[Kind, int, int]

_MOST_OTHER = 0.1
"""With more compute between the operations that is of none of them, their order is not all of the schedule."""


def label(run: Run) -> Run:
    """Fill `Layout.schedule` when the order of operations is that of a known schedule."""
    layout = run.layout
    if layout.schedule is not None or not layout.stage_rank or None in (layout.stages, layout.microbatches):
        return run
    name = schedule_of(run)
    if name is None:
        return run
    inferred = {**layout.inferred, "schedule": "order of the operations"}
    return replace(run, layout=replace(layout, schedule=name, inferred=inferred))


def schedule_of(run: Run) -> str | None:
    """A name of CONTRACT.md, or None where the order is of no known schedule."""
    orders = operations(run)
    if not orders:
        return None
    layout = run.layout
    if (layout.chunks or 1) > 1:
        return _interleaved(run, orders)
    if _splits(run) or _other_work(run) > _MOST_OTHER:
        return None
    written = {key: letters(order) for key, order in orders.items()}
    for name in ("1F1B", "GPipe"):
        fits = [text == expected(name, run, rank, text.count("F")) for (rank, _), text in written.items()]
        if sum(fits) >= 0.8 * len(fits):
            return name
    return None


def operations(run: Run) -> dict[tuple[int, int], list[Operation]]:
    """(rank, step) -> its operations (kind, stage, microbatch) by first kernel."""
    spans = run.spans
    rows = np.flatnonzero(
        (spans.lane == Lane.COMPUTE) & np.isin(spans.kind, PIPELINE_KINDS) & (spans.microbatch >= 0) & (spans.step >= 0)
    )
    rows = rows[np.argsort(spans.start_ns[rows], kind="stable")]
    columns = [getattr(spans, c)[rows] for c in ("rank", "step", "kind", "stage", "microbatch")]
    # Most kernels follow one of their own operation: of such neighbours (of one rank) the first is enough.
    by_rank = np.argsort(columns[0], kind="stable")
    new = np.ones(len(rows), dtype=np.bool_)
    new[by_rank[1:]] = np.any([c[by_rank[1:]] != c[by_rank[:-1]] for c in columns], axis=0)
    out: dict[tuple[int, int], dict[Operation, None]] = {}
    for rank, step, kind, stage, microbatch in zip(*(c[new].tolist() for c in columns), strict=True):
        out.setdefault((rank, step), {}).setdefault((Kind(kind), stage, microbatch))
    return {key: list(order) for key, order in out.items()}


def letters(order: list[Operation]) -> str:
    """The kinds of an order as F, B (or the input half of it) and W."""
    return "".join(
        "F" if kind == Kind.FORWARD else "W" if kind == Kind.BACKWARD_WEIGHT else "B" for kind, _, _ in order
    )


def expected(name: str, run: Run, rank: int, m: int) -> str:
    """The letters of `rank` under a schedule with one stage per GPU.

    GPipe: all forwards, then all backwards. 1F1B: p-1-s forwards, then one more before each backward. With few
    micro-batches a first stage looks alike in both, so 1F1B is asked first and all ranks are looked at.
    """
    if name == "GPipe":
        return "F" * m + "B" * m
    p = run.layout.stages or 1
    warm = min(p - 1 - int(run.layout.pp[run.layout.index_of(rank)]), m)
    return "F" * warm + "FB" * (m - warm) + "B" * warm


def _splits(run: Run) -> bool:
    """Whether weight gradients are computed apart, numbered or not."""
    return bool(np.any(run.spans.kind == Kind.BACKWARD_WEIGHT))


def _other_work(run: Run) -> float:
    """Compute between the first and the last operation of a step that is of none of them, as a part of theirs: the
    highest of all ranks. Weight gradients that could not be recognised are such."""
    spans = run.spans
    compute = np.flatnonzero((spans.lane == Lane.COMPUTE) & (spans.step >= 0))
    length = spans.duration_ns
    most = 0.0
    for _, picked in intervals.rows_by(spans.rank[compute]):
        mine = compute[picked]
        known, other = (0, 0)
        for _, of_step in intervals.rows_by(spans.step[mine]):
            rows = mine[of_step]
            pipeline = np.isin(spans.kind[rows], PIPELINE_KINDS)
            if not pipeline.any():
                continue
            low, high = spans.start_ns[rows[pipeline]].min(), spans.end_ns[rows[pipeline]].max()
            within = (spans.kind[rows] == Kind.OTHER) & (spans.start_ns[rows] >= low) & (spans.end_ns[rows] <= high)
            known += int(length[rows[pipeline]].sum())
            other += int(length[rows[within]].sum())
        most = max(most, other / known if known else 0.0)
    return most


def _interleaved(run: Run, orders: dict[tuple[int, int], list[Operation]]) -> str | None:
    split = _splits(run)
    held: dict[int, list[int]] = {}
    for (_, stage), rank in run.layout.stage_rank.items():
        held.setdefault(rank, []).append(stage)
    p = run.layout.stages or 1
    v_shaped = all(len(s) == 2 and sum(s) == 2 * p - 1 for s in held.values())
    overlapped = any("OVERLAP_F_B" in text for text in run.names.texts)
    if v_shaped and p > 1:
        return "DualPipeV" if overlapped else "ZBVZeroBubble" if split else None
    if split:
        return "InterleavedZeroBubble"
    forwards_first = all(
        max(i for i, o in enumerate(order) if o[0] == Kind.FORWARD)
        < min(i for i, o in enumerate(order) if o[0] in BACKWARD_KINDS)
        for order in orders.values()
        if {Kind.FORWARD} < {o[0] for o in order}
    )
    return "LoopedBFS" if forwards_first else "Interleaved1F1B"
