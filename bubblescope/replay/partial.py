"""What of a job that lacks ranks can be replayed, and what their part in collectives leaves open."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.analysis.windows import Windows
from bubblescope.model import Kind, Lane, Run
from bubblescope.model.names import communicator
from bubblescope.replay.nodes import collective_rows

Int = NDArray[np.int64]


def cut_off(run: Run, windows: Windows) -> dict[int, int]:
    """Ranks of pipelines that go on at a rank without a trace -> such a rank. Who exchanges messages with it, directly
    or through others, cannot be replayed.

    Example: of the pipelines 0-3 and 4-7 only rank 6 has no trace: 4, 5 and 7 are cut off, and 0 to 3 are not.
    """
    spans, seen = run.spans, np.unique(windows.rank)
    talk = np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & (spans.lane != Lane.RANGE) & (spans.peer >= 0)
    pairs = np.unique(np.column_stack([spans.rank[talk], spans.peer[talk]]), axis=0)
    out = {a: b for a, b in pairs.tolist() if b not in seen and a in seen}
    pairs = np.unique(spans.rank[run.links.p2p], axis=0)
    while True:
        more = {a: out[b] for x in (pairs, pairs[:, ::-1]) for a, b in x.tolist() if b in out and a not in out}
        if not more:
            return out
        out |= more


def known_lengths(run: Run, windows: Windows, row_window: Int, chosen: NDArray[np.bool_]) -> Int:
    """Per span: of a collective with ranks that are not in the chosen windows, how much of it is known to be the
    operation itself and not waiting for them, ns; -1 for all other rows.

    That is the shortest kernel where all members were seen, else that of the quickest such collective of equal name,
    bytes and number of members; 0 where there is none.

    Example: rank 0 is replayed and 4 is not; their all-reduce lasts 5.7 ms on rank 0 and 0.3 ms on rank 4, the last to
    come: 0.3 ms are known, and why rank 4 came 5.4 ms after rank 0 is not.
    """
    out = np.full(len(run.spans), -1, dtype=np.int64)
    ranks = np.unique(windows.rank[chosen])
    if not run.layout.missing_ranks and len(ranks) == len(np.unique(windows.rank)):
        return out
    spans = run.spans
    instance, rows = collective_rows(run, row_window).T
    members = {group: communicator(run.names[group])[1] for group in np.unique(spans.group[rows]).tolist()}
    inside = [group for group, all_of in members.items() if all_of and np.isin(all_of, ranks).all()]
    size = np.array([len(members[group]) for group in spans.group[rows].tolist()], dtype=np.int64)
    length = spans.duration_ns[rows]
    least = np.full(int(instance.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, instance, length)
    whole = size == np.bincount(instance, minlength=len(least))[instance]
    known = np.where(whole, least[instance], 0)
    kind = np.column_stack([spans.name[rows], spans.bytes[rows], size])
    for _, picked in intervals.rows_by(np.unique(kind, axis=0, return_inverse=True)[1].reshape(-1)):
        if whole[picked].any():
            quickest = known[picked][whole[picked]].min()
            known[picked] = np.where(whole[picked], known[picked], np.minimum(length[picked], quickest))
    out[rows] = np.where(np.isin(spans.group[rows], inside), -1, known)
    return out
