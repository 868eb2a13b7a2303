"""Which rows of a recording are the two ends of one message, or one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.model import Kind, Lane, Links, Spans

Int = NDArray[np.int64]


def links(spans: Spans) -> Links:
    p2p, waits = _messages(spans)
    return Links(p2p=p2p, p2p_wait=waits, collective=_collectives(spans))


def _messages(spans: Spans) -> tuple[Int, Int]:
    """Pairs (send, receive) of POST rows, and the WAIT rows of the same messages.

    A message is known by step, source, destination and `seq`, in which both ends write direction, consuming stage,
    micro-batch and tensor; the k-th of equal ones (evaluation has step -1 throughout) pairs with the k-th.
    """
    messages = spans.where(kind=(Kind.SEND, Kind.RECV)) & (spans.seq >= 0)
    send = spans.kind == Kind.SEND
    source = np.where(send, spans.rank, spans.peer)
    target = np.where(send, spans.peer, spans.rank)
    ends = {
        (lane, kind): np.flatnonzero(messages & (spans.lane == lane) & (spans.kind == kind))
        for lane in (Lane.POST, Lane.WAIT)
        for kind in (Kind.SEND, Kind.RECV)
    }
    rows = np.concatenate(list(ends.values()))
    key = ids([spans.step[rows], source[rows], target[rows], spans.seq[rows]])
    part = np.repeat(np.arange(len(ends)), [len(r) for r in ends.values()])
    key = ids([key, _occurrence(ids([key, part]))])
    keys = {end: key[part == i] for i, end in enumerate(ends)}
    post_send, post_recv = (Lane.POST, Kind.SEND), (Lane.POST, Kind.RECV)
    both, at_send, at_recv = np.intersect1d(keys[post_send], keys[post_recv], assume_unique=True, return_indices=True)
    pairs = np.column_stack([ends[post_send][at_send], ends[post_recv][at_recv]]).astype(np.int64)
    waits = np.column_stack(
        [_lookup(both, keys[(Lane.WAIT, kind)], ends[(Lane.WAIT, kind)]) for kind in (Kind.SEND, Kind.RECV)]
    ).astype(np.int64)
    return pairs, waits


def _collectives(spans: Spans) -> Int:
    """(instance, row): the k-th collective of a group within a step is one operation in all its ranks."""
    rows = np.flatnonzero(spans.where(kind=Kind.COLLECTIVE) & (spans.seq >= 0))
    if not len(rows):
        return np.empty((0, 2), dtype=np.int64)
    own = ids([spans.step[rows], spans.group[rows], spans.rank[rows]])
    instance = ids([spans.step[rows], spans.group[rows], _occurrence(own)])
    return np.column_stack([instance, rows]).astype(np.int64)


def ids(columns: Sequence[NDArray[Any]]) -> Int:
    """One number for each distinct combination, the same for equal ones."""
    made = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, at = np.unique(column, return_inverse=True)
        made = np.unique(made * max(len(values), 1) + at.reshape(-1), return_inverse=True)[1].reshape(-1)
    return made


def _occurrence(keys: Int) -> Int:
    """0 for the first of equal keys, 1 for the second, …

    >>> _occurrence(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else np.empty(0, np.int64)
    counted = np.arange(len(keys)) - np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    made = np.empty(len(keys), dtype=np.int64)
    made[order] = counted
    return made


def _lookup(wanted: Int, keys: Int, rows: Int) -> Int:
    """rows[i] where keys[i] == wanted, else -1. Keys are distinct."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    hit = keys[order][at] == wanted
    return np.where(hit, rows[order][at], -1)
