"""Which micro-batch a message carries, where operations are labelled and messages are not.

A rank sends in the order in which it makes: the k-th send of a step from a to b is the k-th output that a made for b
in it. Per ordered pair and communicator messages keep their order, so the k-th receive is the k-th send. No time is
compared, so no clock and no launch delay matters.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bubblescope.label.evidence import Int, issue_time
from bubblescope.label.schedule import Operation, operations
from bubblescope.label.structure import rank_of_stage
from bubblescope.model import Kind, Lane, Run

_INPUT_GRADIENT = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def label(run: Run) -> Run:
    """Stage and micro-batch of P2P rows with a peer and no micro-batch; a pair whose counts differ keeps -1.

    Example: rank 0 runs F0 F1 B0 B1 and sends twice to rank 1: the sends carry F0 and F1 of stage 0. Rank 1
    receives them for its stage 1.
    """
    spans, layout = run.spans, run.layout
    rows = _open_messages(run)
    if len(rows) == 0 or not layout.stage_rank:
        return run
    outputs = _outputs(run)
    columns = np.stack([spans.stage, spans.microbatch], axis=1).astype(np.int64)
    for (a, b, step), (sent, received) in _queues(run, rows).items():
        made = outputs.get((a, b, step), [])
        if len(made) != len(sent):
            continue
        carried = {row: made[i] for i, row in enumerate(sent)}
        for row, partner in [*zip(sent, sent, strict=True), *_partners(run, sent, received)]:
            kind, stage, microbatch = carried[partner]
            columns[row] = stage if row == partner else stage + (1 if kind == Kind.FORWARD else -1), microbatch
    return replace(run, spans=spans.with_columns(stage=columns[:, 0], microbatch=columns[:, 1]))


def partners(run: Run) -> dict[int, int]:
    """Row of a send -> row of its receive, and the other way round, where both ends of a pair count alike."""
    out: dict[int, int] = {}
    for sent, received in _queues(run, _open_messages(run)).values():
        for receive, send in _partners(run, sent, received):
            out[send], out[receive] = receive, send
    return out


def _queues(run: Run, rows: Int) -> dict[tuple[int, int, int], tuple[list[int], list[int]]]:
    """(source, destination, step) -> its sends and its receives, each in issue order."""
    spans = run.spans
    out: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
    sends = (spans.kind[rows] == Kind.SEND).tolist()
    columns = (spans.rank[rows].tolist(), spans.peer[rows].tolist(), spans.step[rows].tolist())
    for row, sent, rank, peer, step in zip(rows.tolist(), sends, *columns, strict=True):
        key = (rank, peer, step) if sent else (peer, rank, step)
        out.setdefault(key, ([], []))[0 if sent else 1].append(row)
    return out


def _partners(run: Run, sent: list[int], received: list[int]) -> list[tuple[int, int]]:
    """(receive, its send): by communicator where both ends name the same ones, else in the order of the pair."""
    if len(sent) != len(received):
        return []
    group = run.spans.group
    by_group = [sorted(rows, key=lambda r: int(group[r])) for rows in (sent, received)]
    if [int(group[r]) for r in by_group[0]] != [int(group[r]) for r in by_group[1]]:
        by_group = [sent, received]
    return list(zip(by_group[1], by_group[0], strict=True))


def _open_messages(run: Run) -> Int:
    """P2P rows with a peer and without a micro-batch, in issue order."""
    spans = run.spans
    rows = np.flatnonzero(
        np.isin(spans.kind, (Kind.SEND, Kind.RECV))
        & np.isin(spans.lane, (Lane.COMM, Lane.POST))
        & (spans.peer >= 0)
        & (spans.microbatch < 0)
        & (spans.step >= 0)
    )
    result: Int = rows[np.argsort(issue_time(run)[rows], kind="stable")]
    return result


def _outputs(run: Run) -> dict[tuple[int, int, int], list[Operation]]:
    """(source, destination, step) -> the operations of source whose output destination needs, in order."""
    out: dict[tuple[int, int, int], list[Operation]] = {}
    for (rank, step), order in operations(run).items():
        for kind, stage, microbatch in order:
            if kind != Kind.FORWARD and kind not in _INPUT_GRADIENT:
                continue
            other = rank_of_stage(run, rank, stage + (1 if kind == Kind.FORWARD else -1)) if stage >= 0 else -1
            if other >= 0 and other != rank:
                out.setdefault((rank, other, step), []).append((kind, stage, microbatch))
    return out
