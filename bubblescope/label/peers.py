"""For whom a send or a receive without a peer is, where ranges name the operations around it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bubblescope.algebra import intervals
from bubblescope.label.evidence import Int, Mask, issue_time, launched
from bubblescope.label.structure import rank_of_stage
from bubblescope.model import Kind, Lane, Run

_Ends = dict[tuple[int, int, int], list[tuple[tuple[bool, int], int]]]
"""(source, destination, step) -> (forward and micro-batch, row) of each message, in issue order."""


def label(run: Run) -> Run:
    """Peers of P2P rows that name none: sent is the output of the operation that was issued before, received the input
    of the one that was issued after. Believed of a pair of ranks and a step only where what one sends the other
    receives, micro-batch by micro-batch.

    Example: rank 0 issues F0 send F1 send, and rank 1 receive F0 receive F1: both sends are for rank 1.
    """
    spans, sure = run.spans, launched(run)
    p2p = np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & np.isin(spans.lane, (Lane.COMM, Lane.POST))
    talk = np.flatnonzero(p2p & (spans.peer < 0) & (spans.step >= 0) & sure)
    if not len(talk) or not run.layout.stage_rank:
        return run
    sent, received = _ends(run, talk, sure)
    peer = spans.peer.copy()
    for (source, destination, step), ends in sent.items():
        others = received.get((source, destination, step), [])
        if [carried for carried, _ in ends] == [carried for carried, _ in others]:
            peer[[row for _, row in ends]] = destination
            peer[[row for _, row in others]] = source
    if (peer == spans.peer).all():
        return run
    inferred = {**run.layout.inferred, "messages": "the operations around each send and receive"}
    return replace(run, spans=spans.with_columns(peer=peer), layout=replace(run.layout, inferred=inferred))


def _ends(run: Run, talk: Int, sure: Mask) -> tuple[_Ends, _Ends]:
    spans, at = run.spans, issue_time(run)
    known = (spans.lane == Lane.COMPUTE) & (spans.stage >= 0) & (spans.microbatch >= 0) & sure
    work = np.flatnonzero(known & np.isin(spans.kind, (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT)))
    work_of = intervals.split_by(work[np.argsort(at[work], kind="stable")], spans.rank)
    sent: _Ends = {}
    received: _Ends = {}
    for rank, rows in intervals.split_by(talk[np.argsort(at[talk], kind="stable")], spans.rank).items():
        own = work_of.get(rank, work[:0])
        after = np.searchsorted(at[own], at[rows])
        for row, place in zip(rows.tolist(), after.tolist(), strict=True):
            sends = bool(spans.kind[row] == Kind.SEND)
            k = place - 1 if sends else place
            if not 0 <= k < len(own) or spans.step[own[k]] != spans.step[row]:
                continue
            op = int(own[k])
            forward = bool(spans.kind[op] == Kind.FORWARD)
            other = rank_of_stage(run, rank, int(spans.stage[op]) + (1 if forward == sends else -1))
            if other >= 0 and other != rank:
                key = (rank, other, int(spans.step[row])) if sends else (other, rank, int(spans.step[row]))
                (sent if sends else received).setdefault(key, []).append(((forward, int(spans.microbatch[op])), row))
    return sent, received
