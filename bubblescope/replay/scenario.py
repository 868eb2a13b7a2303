"""Replays of a program with some causes removed (R0 … R6 of ATTRIBUTION.md §6, and any other combination)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.maxplus import longest_path
from bubblescope.replay.bases import SCALED_KINDS, BaseTable
from bubblescope.replay.program import Edge, Node, Program

Int = NDArray[np.int64]
Float = NDArray[np.float64]


class Fix(Enum):
    """A cause that a replay leaves out. In this order they are the steps R0 → R6. AWAITED: waiting in collectives for
    ranks that are not replayed, which comes first: nobody knows its cause."""

    AWAITED = "unexplained"
    DATA = "data_loading"
    HOST = "host_launch"
    P2P = "p2p_transfer"
    COLLECTIVE = "exposed_collective"
    OPTIMIZER = "optimizer"
    SPREAD = "transient"
    WORKER = "slow_worker"
    STAGE = "stage_imbalance"


NESTED = tuple(Fix)
_WORK = (Fix.SPREAD, Fix.WORKER, Fix.STAGE)


@dataclass(frozen=True, eq=False)
class Replayed:
    """duration, start, end: shape (n, K), ns, as `Program`. makespan: shape (K,), end of the last closing node."""

    duration: Float
    start: Float
    end: Float
    makespan: Float


def replay(program: Program, bases: BaseTable, fixes: Collection[Fix] = ()) -> Replayed:
    """Run the program without the given causes; without any it gives the measured times back."""
    return replay_with(program, durations(program, bases, fixes), delays(program, fixes))


def replay_with(program: Program, duration: Float, delay: Float) -> Replayed:
    start, end = longest_path(program.graph, duration, delay, program.release)
    return Replayed(duration, start, end, end[program.closing].max(axis=0))


def durations(program: Program, bases: BaseTable, fixes: Collection[Fix]) -> Float:
    """Node durations, shape (n, K)."""
    out = program.duration.copy()
    if Fix.P2P in fixes:
        out[np.isin(program.node, (Node.POST, Node.WAIT, Node.SENT))] = 0.0
    if Fix.OPTIMIZER in fixes:
        # Whatever else is computed outside the pipeline (gradient scaling, clipping) is removed with it.
        out[(program.node == Node.OP) & ~np.isin(program.kind, SCALED_KINDS)] = 0.0
    work = [f for f in _WORK if f in fixes]
    if work:
        row = bases.lookup(program)
        nodes = np.flatnonzero(row >= 0)
        out[nodes] = _worked(program.duration[nodes], bases, row[nodes], set(work))
    return out


def _worked(measured: Float, bases: BaseTable, row: Int, fixes: set[Fix]) -> Float:
    """Durations without the given kinds of unevenness.

    Along the nested order these are the bases themselves. Otherwise a duration is taken as a product, uniform ×
    stage/uniform × worker/stage × measured/worker, and the fixed factors are left out: a slow stage is slow in
    proportion, and nothing becomes negative.
    """
    levels = [
        measured,
        *(np.broadcast_to(b[row][:, None], measured.shape) for b in (bases.worker, bases.by_stage, bases.uniform)),
    ]
    depth = len(fixes)
    if fixes == set(_WORK[:depth]):
        return np.array(levels[depth])
    lowest = 3 if Fix.STAGE in fixes else 2
    out = np.array(levels[lowest])
    for fix, upper, lower in list(zip(_WORK, levels[:-1], levels[1:], strict=True))[:lowest]:
        if fix not in fixes:
            out *= np.divide(upper, lower, out=np.ones_like(out), where=lower > 0)
    return out


def delays(program: Program, fixes: Collection[Fix]) -> Float:
    """Edge delays, shape (e, K); -inf where an edge does not bind."""
    out = program.delay.copy()
    chain = program.edge == Edge.CHAIN
    if Fix.HOST in fixes:
        out[chain] = program.data[chain]
    if Fix.DATA in fixes:
        out[chain] -= program.data[chain]
    if Fix.AWAITED in fixes:
        out[program.edge == Edge.AWAIT] = -np.inf
    if Fix.COLLECTIVE in fixes:
        out[program.edge == Edge.LEAVE] = 0.0
    needs = program.edge == Edge.NEEDS
    if Fix.P2P not in fixes:
        out[needs] = -np.inf
        return out
    # Without transfers the order of posts and the rendezvous do not matter: what counts is who needs what.
    out[np.isin(program.edge, (Edge.POSTED, Edge.TAKEN, Edge.OWN))] = -np.inf
    sent = np.flatnonzero(program.edge == Edge.SENT)
    out[sent] = np.where(_needed(program, sent)[:, None], -np.inf, 0.0)
    return out


def _needed(program: Program, sent: Int) -> NDArray[np.bool_]:
    """Whether the message of a SENT edge also has a NEEDS edge."""
    m = program.messages
    known = (m.producer >= 0) & (m.consumer >= 0)
    n = len(program.rank)
    covered = np.unique(m.send[known] * n + m.wait[known])
    bare = np.unique(m.send[~known] * n + m.wait[~known])
    key = program.src[sent] * n + program.dst[sent]
    # One call may post several messages for one wait; the edge stays as long as one of them needs it.
    result: NDArray[np.bool_] = np.isin(key, covered) & ~np.isin(key, bare)
    return result
