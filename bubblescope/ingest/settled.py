"""Rows of a recorded step that stand for something else than they seem to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bubblescope.errors import InputError
from bubblescope.ingest.recorded_links import ids
from bubblescope.model import PIPELINE_KINDS, Kind, Lane, Names, Notice, Spans
from bubblescope.model.notice import some

EVALUATION = "evaluation"
"""Name of the row that covers an evaluation."""

_TENSORS_PER_MESSAGE = 64


def evaluation(spans: Spans, names: Names) -> Spans:
    """An evaluation's rows, out of the way: they are evidence (device -1), and one busy row covers them.

    Its forwards and messages are no part of the training step in whose window they fall, and its waits no bubbles
    of that step.

    >>> rows = Spans.from_columns(2, kind=Kind.FORWARD, device=0, start_ns=[0, 10], end_ns=[5, 20])
    >>> made = evaluation(rows, Names())
    >>> made.device.tolist(), made.kind.tolist(), made.end_ns.tolist()
    ([-1, -1, 0], [1, 1, 0], [5, 20, 20])
    """
    busy = spans.take(spans.device >= 0)
    if not len(busy):
        return spans
    cover = Spans.from_columns(
        1,
        rank=int(busy.rank[0]),
        step=-1,
        lane=Lane.COMPUTE,
        kind=Kind.OTHER,
        device=int(busy.device[0]),
        start_ns=int(busy.start_ns.min()),
        end_ns=int(busy.end_ns.max()),
        name=names.intern(EVALUATION),
    )
    return Spans.concat([spans.with_columns(device=np.full(len(spans), -1)), cover])


def join_evaluations(spans: Spans, names: Names) -> Spans:
    """One busy row for several evaluation calls in a row on this rank: loading their batches and adding up their losses
    is evaluation too. What else was recorded between them is evidence, as within them.

    >>> names = Names()
    >>> rows = Spans.from_columns(4, device=0, name=names.intern("evaluation"), step=[-1, -1, 7, -1],
    ...     start_ns=[0, 20, 30, 40], end_ns=[10, 30, 40, 50])
    >>> made = join_evaluations(rows, names)
    >>> made.step.tolist(), made.start_ns.tolist(), made.end_ns.tolist()
    ([7, -1, -1], [30, 0, 40], [40, 30, 50])
    """
    if EVALUATION not in names.texts:
        return spans
    busy = spans.where(lane=Lane.COMPUTE) & (spans.device >= 0)
    covers = np.flatnonzero(busy & (spans.step == -1) & (spans.name == names.intern(EVALUATION)))
    covers = covers[np.argsort(spans.start_ns[covers], kind="stable")]
    trained = np.sort(spans.start_ns[busy & (spans.step >= 0)])
    before = np.searchsorted(trained, spans.start_ns[covers])
    first = np.flatnonzero(np.append(True, before[1:] != before[:-1]))
    if len(first) >= len(covers):
        return spans
    start = spans.start_ns[covers[first]]
    end = np.maximum.reduceat(spans.end_ns[covers], first)
    place = np.searchsorted(start, spans.start_ns, "right") - 1
    inside = (place >= 0) & (spans.step >= 0) & (spans.end_ns <= end[place])
    rest = spans.with_columns(device=np.where(inside, -1, spans.device)).take(~np.isin(np.arange(len(spans)), covers))
    joined = spans.take(covers[first]).with_columns(end_ns=end)
    return Spans.concat([rest, joined])


def from_zero(spans: Spans, world: int | None) -> tuple[Spans, list[Notice]]:
    """Stages and micro-batches that the training loop numbered itself (`bubblescope.span`), counted from 0, and what is
    to be said of it. Those that begin at 1 throughout are moved; stages only when every rank of the job was seen, as
    stage 0 may be one that was not recorded.

    >>> rows = Spans.from_columns(2, kind=Kind.FORWARD, rank=[0, 1], stage=[1, 2], microbatch=1, step=0)
    >>> made, said = from_zero(rows, 2)
    >>> made.stage.tolist(), made.microbatch.tolist(), len(said)
    ([0, 1], [0, 0], 2)
    >>> from_zero(rows, 3)[0].stage.tolist()
    [1, 2]
    """
    ran = spans.where(kind=PIPELINE_KINDS, lane=Lane.COMPUTE) & (spans.step >= 0)
    placed, counted = ran & (spans.stage >= 0), ran & (spans.microbatch >= 0)
    said = []
    lowest = int(spans.stage[placed].min()) if placed.any() else 0
    if lowest == 1 and len(np.unique(spans.rank[placed])) == world:
        spans = spans.with_columns(stage=np.where(spans.stage > 0, spans.stage - 1, spans.stage))
        said.append(Notice("numbered-from-one", "the job numbers its stages from 1; stage 1 is called stage 0 here"))
    elif lowest > 0:
        text = f"the lowest stage that was recorded is {lowest}: bubblescope.span counts stages from 0"
        said.append(Notice("stages-not-from-zero", text))
    if not counted.any():
        return spans, said
    of_rank = spans.step[counted].astype(np.int64) * (int(spans.rank.max()) + 1) + spans.rank[counted]
    least = _least(of_rank, spans.microbatch[counted])
    first = _least(spans.step[counted], spans.microbatch[counted])
    if not least.any():
        return spans, said
    if (least != first).any():  # ranks of one step disagree on where it begins
        missing = len(np.unique(of_rank[least > 0]))
        text = (
            f"in {missing} of {len(np.unique(of_rank))} steps of a rank no micro-batch has number 0: bubblescope.span "
            "counts them from 0 in every step"
        )
        return spans, [*said, Notice("microbatches-not-from-zero", text)]
    steps, at = np.unique(spans.step[counted], return_index=True)
    place = np.minimum(np.searchsorted(steps, spans.step), len(steps) - 1)
    by = np.where((spans.microbatch >= 0) & (steps[place] == spans.step), first[at][place], 0)
    if (first == 1).all():
        text = "the job numbers its micro-batches from 1; micro-batch 1 is called micro-batch 0 here"
        said.append(Notice("numbered-from-one", text))
    else:
        text = "the job does not begin each step with micro-batch 0, as is done here"
        said.append(Notice("microbatches-count-on", text))
    return spans.with_columns(microbatch=np.maximum(spans.microbatch - by, -1)), said


def _least(group: NDArray[np.integer], value: NDArray[np.integer]) -> NDArray[np.int64]:
    """Of each entry the least value in its group.

    >>> _least(np.array([7, 3, 7]), np.array([5, 1, 4])).tolist()
    [4, 1, 4]
    """
    groups, at = np.unique(group, return_inverse=True)
    least = np.full(len(groups), np.iinfo(np.int64).max)
    np.minimum.at(least, at, value)
    return least[at]


def ended(spans: Spans) -> tuple[Spans, list[Notice]]:
    """Without the steps in which a stage runs a micro-batch forward again after its backward, and what is to be said of
    them: nobody said where the first of the steps in them ends. Raises InputError when that is all of them.

    >>> rows = Spans.from_columns(5, kind=[1, 2, 1, 1, 2], stage=0, microbatch=0, step=[0, 0, 0, 1, 1],
    ...     start_ns=[0, 1, 2, 3, 4], end_ns=[1, 2, 3, 4, 5])
    >>> made, said = ended(rows)
    >>> made.step.tolist(), said[0].message.partition(":")[0]
    ([1, 1], '1 of 2 steps left out (0)')
    """
    ran = np.flatnonzero(spans.where(kind=PIPELINE_KINDS, lane=Lane.COMPUTE) & (spans.step >= 0) & (spans.stage >= 0))
    ran = ran[spans.microbatch[ran] >= 0]
    at = ids([column[ran] for column in (spans.step, spans.rank, spans.stage, spans.microbatch)])
    forward, count = spans.kind[ran] == Kind.FORWARD, int(at.max(initial=-1)) + 1
    last, first = np.full(count, np.iinfo(np.int64).min), np.full(count, np.iinfo(np.int64).max)
    np.maximum.at(last, at[forward], spans.start_ns[ran[forward]])
    np.minimum.at(first, at[~forward], spans.end_ns[ran[~forward]])
    again = ran[(last >= first)[at]]
    if not len(again):
        return spans, []
    steps, left = np.unique(spans.step[spans.step >= 0]), np.unique(spans.step[again])
    row = again[0]
    what = (
        f"in step {spans.step[row]} rank {spans.rank[row]} runs micro-batch {spans.microbatch[row]} of stage "
        f"{spans.stage[row]} forward again after its backward, so it is more than one step"
    )
    hint = "call bubblescope.step() where each step ends; where gradients accumulate, number the micro-batches on"
    if len(left) == len(steps):
        raise InputError(f"the recording does not say where steps end: {what}", hint=hint)
    message = f"{len(left)} of {len(steps)} steps left out ({some(left.tolist(), count_rest=True)}): {what}; {hint}"
    return spans.take(~np.isin(spans.step, left)), [Notice("step-not-ended", message)]


def find_peers(spans: Spans) -> Spans:
    """Name the rank at the other end of messages that tell only their stage (`bubblescope.span`): the one rank that
    runs the neighbouring stage. With several such ranks (replicas) it stays open.
    """
    rows = np.flatnonzero(
        spans.where(kind=(Kind.SEND, Kind.RECV)) & (spans.peer < 0) & (spans.seq >= 0) & (spans.stage >= 0)
    )
    if not len(rows):
        return spans
    ran = spans.where(kind=Kind.FORWARD, lane=Lane.COMPUTE)
    where: dict[int, set[int]] = {}
    for stage, rank in set(zip(spans.stage[ran].tolist(), spans.rank[ran].tolist(), strict=True)):
        where.setdefault(stage, set()).add(rank)
    peer = spans.peer.copy()
    # `seq` is even for activations and odd for gradients, in units of the tensors of a message.
    grad = (spans.seq[rows] // _TENSORS_PER_MESSAGE) % 2 == 1
    onward = (spans.kind[rows] == Kind.SEND) != grad
    for row, neighbour in zip(rows, spans.stage[rows] + np.where(onward, 1, -1), strict=True):
        ranks = where.get(int(neighbour), set())
        if len(ranks) == 1:
            peer[row] = next(iter(ranks))
    return spans.with_columns(peer=peer)


def shape_of(spans: Spans) -> tuple[list[int], list[int]] | None:
    """(rank of each stage, distinct ranks in pipeline order) of a recording without layout lines, from who ran which
    stage; None when a stage is missing, or was run by several ranks.

    >>> rows = Spans.from_columns(2, kind=Kind.FORWARD, rank=[4, 6], stage=[1, 0])
    >>> shape_of(rows)
    ([6, 4], [6, 4])
    """
    ran = spans.where(kind=Kind.FORWARD, lane=Lane.COMPUTE) & (spans.stage >= 0)
    pairs = sorted(set(zip(spans.stage[ran].tolist(), spans.rank[ran].tolist(), strict=True)))
    stages = [stage for stage, _ in pairs]
    if len(pairs) < 2 or stages != list(range(len(pairs))):
        return None
    of_stage = [rank for _, rank in pairs]
    return of_stage, list(dict.fromkeys(of_stage))
