"""Step windows (ATTRIBUTION.md §2): per GPU they tile time; across GPUs of one clock they share their edges.

A window ends where the last optimizer operation of the step ends. Taken per GPU alone, that would push the
cooldown of the stages that finish early into the next step's warmup, and the closed forms of §6 could not hold.
So, on one clock, step k ends for all at T_k, the latest such end of any GPU; only a GPU that already computes for step
k+1 by then has its edge at that beginning. (Waiting for the first input of step k+1 is no beginning: that is how an
early stage spends its cooldown.) An evaluation is in no window: a step after one begins when all of the clock's GPUs
have done with it, or a GPU's own work does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.intervals import rows_by
from bubblescope.ingest.settled import EVALUATION
from bubblescope.model import PIPELINE_KINDS, Kind, Lane, Notice, Run, Spans
from bubblescope.model.notice import some

Int = NDArray[np.int64]

_NEVER = np.iinfo(np.int64).min
_OPEN = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Skipped:
    index: int
    why: str


@dataclass(frozen=True, eq=False)
class Windows:
    """One row per (rank, step) that was finished, sorted by rank, then step.

    rank, step: shape (w,). start_ns, end_ns: the window. first: bool, no step before it was seen, so it starts when
    the last rank began it, or with work of its own before that. close_ns: T_k of its step among the ranks on its clock.
    base_ns: T_{k-1}, or the end of the evaluation since, from which the replay counts.
    """

    rank: Int
    step: Int
    start_ns: Int
    end_ns: Int
    close_ns: Int
    base_ns: Int
    first: NDArray[np.bool_]
    skipped: tuple[Skipped, ...] = ()
    notices: tuple[Notice, ...] = ()

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def steps(self) -> Int:
        return np.unique(self.step)

    def of_rank(self, rank: int) -> slice:
        return slice(int(np.searchsorted(self.rank, rank, "left")), int(np.searchsorted(self.rank, rank, "right")))

    def locate(self, rank: Int, time_ns: Int) -> Int:
        """For each (rank, time) the row of the window [start, end) that holds it, -1 when none does."""
        result = np.full(len(rank), -1, dtype=np.int64)
        for r, mine in rows_by(rank):
            rows = self.of_rank(r)
            if rows.start == rows.stop:
                continue
            t = time_ns[mine]
            i = np.searchsorted(self.start_ns[rows], t, "right") - 1
            inside = (i >= 0) & (t < self.end_ns[rows][np.maximum(i, 0)])
            result[mine[inside]] = rows.start + i[inside]
        return result

    def of_spans(self, spans: Spans) -> Int:
        """For each span the row of the window it belongs to, -1 when none: that of its step unless it comes after it
        (a receive may be posted before its step begins), else the one it starts in."""
        width = int(max(self.step.max(initial=0), spans.step.max(initial=0))) + 2
        key = spans.rank.astype(np.int64) * width + spans.step
        own = self.rank * width + self.step
        row = np.minimum(np.searchsorted(own, key), max(len(own) - 1, 0))
        if not len(own):
            return np.full(len(spans), -1, dtype=np.int64)
        labelled = (spans.step >= 0) & (own[row] == key)
        labelled &= spans.start_ns < self.end_ns[row]
        out = np.where(labelled, row, -1)
        rest = np.flatnonzero(~labelled)
        out[rest] = self.locate(spans.rank[rest].astype(np.int64), spans.start_ns[rest])
        return out


def find_windows(run: Run) -> Windows:
    """Windows of every finished step of every rank; warm-up steps, and those that follow an evaluation, are skipped and
    named as long as others remain; so are those of ``source.details["cut_steps"]`` (step -> why), and those that no
    rank finished. The step that was read only because the next one begins where it ends,
    ``source.details["step_before"]``, has none.

    Example: ranks 0 and 1, one clock, optimizer of step 0 ends at 90 and 100, of step 1 at 190 and 200, first
    operation of step 1 at 105 on both: windows of step 1 are [100, 200) on both.
    """
    edges = _edges(run.spans)
    if edges is None:
        return _empty()
    given, edges = edges, _drop_unfinished(edges)
    clock = run.clock_part(edges.rank)
    evaluated, leaves = _evaluations(run, edges)
    skipped, all_warm = _skipped(run, np.unique(edges.step), np.unique(edges.step[evaluated != _NEVER]))
    starts, ends, closes, bases, first = _place(edges, clock, evaluated, leaves)
    why = {**_unfinished(given, edges), **run.source.details.get("cut_steps", {})}
    before = run.source.details.get("step_before", -1)
    cut = tuple(Skipped(step, why[step]) for step in sorted(why) if step != before)
    left_out = [before, *(s.index for s in (*skipped, *cut))]
    keep = ~np.isin(edges.step, left_out) & (ends > starts)
    return Windows(
        edges.rank[keep],
        edges.step[keep],
        starts[keep],
        ends[keep],
        closes[keep],
        bases[keep],
        first[keep],
        (*skipped, *cut),
        (*all_warm, *_edge_notices(run, edges), *_holes(run, edges)),
    )


def _empty() -> Windows:
    z = np.empty(0, dtype=np.int64)
    return Windows(z, z, z, z, z, z, np.empty(0, dtype=np.bool_))


@dataclass(frozen=True, eq=False)
class _Edges:
    """Per (rank, step): the first thing seen, when its training loop entered it (`_OPEN` where no marker says so, or no
    optimizer ends steps), the first pipeline operation, the own end and how it was found."""

    rank: Int
    step: Int
    begin_ns: Int
    entered_ns: Int
    busy_from_ns: Int
    own_end_ns: Int
    by_optimizer: NDArray[np.bool_]
    finished: NDArray[np.bool_]


def _edges(spans: Spans) -> _Edges | None:
    known = spans.step >= 0
    if not known.any():
        return None
    width = int(spans.step.max()) + 1
    key = spans.rank.astype(np.int64) * width + spans.step
    keys = np.unique(key[known])
    place = np.searchsorted(keys, key)
    device = known & (spans.device >= 0)
    compute = device & (spans.lane == Lane.COMPUTE)
    pipeline = compute & np.isin(spans.kind, PIPELINE_KINDS)
    marker = known & (spans.kind == Kind.STEP)
    optimizer = compute & (spans.kind == Kind.OPTIMIZER)

    def least(mask: NDArray[np.bool_]) -> Int:
        out = np.full(len(keys), _OPEN)
        np.minimum.at(out, place[mask], spans.start_ns[mask])
        return out

    def most(mask: NDArray[np.bool_]) -> Int:
        out = np.full(len(keys), _NEVER)
        np.maximum.at(out, place[mask], spans.end_ns[mask])
        return out

    by_optimizer = np.isin(keys, np.unique(key[optimizer]))
    has_compute = np.isin(keys, np.unique(key[compute]))
    begin = np.minimum(least(known & ((spans.lane != Lane.HOST) | marker)), least(device))
    # Kernels may outlive the marker's CPU end, and the last wait (a send) may outlive the last kernel.
    fallback = most(device)
    own_end = np.where(by_optimizer, most(optimizer), fallback)
    ranks = keys // width
    # A rank whose other steps end with an optimizer has not finished a step that lacks one.
    rank_has = np.isin(ranks, np.unique(ranks[by_optimizer]))
    finished = has_compute & (by_optimizer | ~rank_has)
    # Small unlabelled operators (splitting the batch, zeroing gradients) do not begin a stage's work.
    busy_from = np.where(np.isin(keys, np.unique(key[pipeline])), least(pipeline), least(compute))
    entered = np.where(
        by_optimizer & (least(marker) < _OPEN), least(marker | (known & (spans.kind == Kind.DATA))), _OPEN
    )
    return _Edges(ranks, keys % width, begin, entered, busy_from, own_end, by_optimizer, finished)


def _drop_unfinished(e: _Edges) -> _Edges:
    k = e.finished
    return _Edges(
        e.rank[k],
        e.step[k],
        e.begin_ns[k],
        e.entered_ns[k],
        e.busy_from_ns[k],
        e.own_end_ns[k],
        e.by_optimizer[k],
        e.finished[k],
    )


def _unfinished(given: _Edges, finished: _Edges) -> dict[int, str]:
    """Steps that were seen and not finished by any rank, and why they count as such.

    Example: kernels were lost in the middle of step 12: of step 13 there is the marker alone.
    """
    steps = np.setdiff1d(given.step, finished.step)
    worked = np.isin(steps, given.step[given.busy_from_ns < _OPEN])
    return {
        step: "no rank finished it: no optimizer was seen in it" if some_work else "no work of a device is in it"
        for step, some_work in zip(steps.tolist(), worked.tolist(), strict=True)
    }


def _evaluations(run: Run, e: _Edges) -> tuple[Int, Int]:
    """Per row: when this GPU ended the evaluation before that step (`_NEVER` where none was), and when it began the one
    after it (`_OPEN`)."""
    ended, leaves = np.full(len(e.rank), _NEVER), np.full(len(e.rank), _OPEN)
    if EVALUATION not in run.names.texts:
        return ended, leaves
    s = run.spans
    covers = np.flatnonzero((s.step < 0) & (s.lane == Lane.COMPUTE) & (s.name == run.names.texts.index(EVALUATION)))
    for rank, rows in rows_by(e.rank):
        mine = covers[s.rank[covers] == rank]
        place = np.searchsorted(e.busy_from_ns[rows], s.end_ns[mine], "left")
        # One within a step, between its schedule calls, is part of it.
        between = (place == 0) | (e.own_end_ns[rows[place - 1]] <= s.start_ns[mine])
        before, after = between & (place < len(rows)), between & (place > 0)
        np.maximum.at(ended, rows[place[before]], s.end_ns[mine[before]])
        np.minimum.at(leaves, rows[place[after] - 1], s.start_ns[mine[after]])
    return ended, leaves


def _skipped(run: Run, steps: Int, evaluated: Int) -> tuple[tuple[Skipped, ...], tuple[Notice, ...]]:
    """Warm-up steps named by the recorder, and steps after an evaluation, as long as something else remains to analyse;
    else what to say of them."""
    warm = {int(s) for s in run.source.details.get("warmup_steps", ())} & {int(s) for s in steps}
    said = []
    if warm and len(warm) >= len(steps):
        message = (
            f"every recorded step ({len(steps)} in all) is marked as warm-up; they are analysed nevertheless, with "
            "what only first steps do: creating communicators, inferring shapes, autotuning"
        )
        said.append(Notice("warmup-only", message))
        warm = set()
    after = {int(s) for s in evaluated} - warm
    if after and len(warm | after) >= len(steps):
        message = (
            f"each of the {len(after)} steps follows an evaluation. The evaluation is in no step, but what a framework "
            "sets up anew after one is (torch infers shapes again): it counts as host_launch"
        )
        said.append(Notice("evaluations-between", message))
        after = set()
    why = dict.fromkeys(after, "it follows an evaluation, after which frameworks set up anew")
    why |= dict.fromkeys(warm, "warm-up: communicators, metadata inference and autotuning happen here")
    return tuple(Skipped(s, why[s]) for s in sorted(why)), tuple(said)


def _place(e: _Edges, clock: Int, evaluated: Int, leaves: Int) -> tuple[Int, Int, Int, Int, NDArray[np.bool_]]:
    """start, end, T_k, base and "first" per row; rows are sorted by rank, then step. clock: number per row; rows of
    one number share their edges. evaluated, leaves: see `_evaluations`."""
    n = len(e.rank)
    follows = np.zeros(n, dtype=np.bool_)
    if n:
        follows[1:] = (e.rank[1:] == e.rank[:-1]) & (e.step[1:] == e.step[:-1] + 1)
    together, where = np.unique(np.stack([clock, e.step], axis=1), axis=0, return_inverse=True)
    where = where.reshape(-1)
    close_of = np.full(len(together), _NEVER)
    np.maximum.at(close_of, where, e.own_end_ns)
    close = close_of[where]
    next_busy = leaves.copy()
    next_busy[:-1][follows[1:]] = np.minimum(leaves[:-1], e.busy_from_ns[1:])[follows[1:]]
    end = np.maximum(np.minimum(close, next_busy), e.own_end_ns)
    # T_{k-1}. Where that step was not recorded: when the last of the ranks entered this one, as its own optimizer had
    # just ended (the others are in it early by their cooldown). Where ranks do not say: when the first did anything.
    before_of, entered_of = np.full(len(together), _OPEN), np.full(len(together), _NEVER)
    np.minimum.at(before_of, where, e.begin_ns)
    np.maximum.at(entered_of, where, e.entered_ns)
    before_of = np.where(entered_of < _OPEN, entered_of, before_of)
    adjacent = np.flatnonzero((np.diff(together, axis=0) == [0, 1]).all(axis=1))
    before_of[adjacent + 1] = close_of[adjacent]
    start = np.minimum(before_of[where], e.busy_from_ns)
    start[1:][follows[1:]] = end[:-1][follows[1:]]
    evaluated_of = np.full(len(together), _NEVER)
    np.maximum.at(evaluated_of, where, evaluated)
    start = np.maximum(start, np.minimum(evaluated_of[where], e.busy_from_ns))
    return start, end, close, np.maximum(before_of, evaluated_of)[where], ~follows


def _holes(run: Run, e: _Edges) -> list[Notice]:
    """Finished steps that are missing in the middle: of all ranks, or of some."""
    if run.source.format == "straggler" or not len(e.step):
        return []  # sampled steps, by its own description
    steps = np.unique(e.step)
    stride = int(np.gcd.reduce(np.diff(steps))) if len(steps) > 1 else 1
    out = []
    # Counted, not listed: a damaged number may lie a billion steps ahead.
    absent = int(steps[-1] - steps[0]) // stride + 1 - len(steps)
    if absent:
        numbers = (s for a, b in itertools.pairwise(steps.tolist()) for s in range(a + stride, b, stride))
        first = some(list(itertools.islice(numbers, 9)))
        out.append(Notice("steps-missing", f"{absent} steps are missing of every rank: {first}"))
    for rank, rows in rows_by(e.rank):
        own = e.step[rows]
        lacking = np.setdiff1d(steps[(steps > own.min()) & (steps < own.max())], own)
        if len(lacking):
            out.append(Notice("steps-missing", f"rank {rank} lacks {len(lacking)} steps: {some(lacking.tolist())}"))
    return out


def _edge_notices(run: Run, e: _Edges) -> tuple[Notice, ...]:
    if not len(e.rank) or e.by_optimizer.any():
        return ()
    seen = "no optimizer step was seen"
    if run.source.details.get("steps_marked"):
        seen = "steps are marked by bubblescope.step, and no optimizer by bubblescope.span('optimizer')"
    message = f"{seen}, so step windows end with the last operation of each step"
    if run.layout.missing_ranks:
        message += "; what a rank waits after it for one that has no trace is in none of them: idle is a lower limit"
    return (Notice("no-optimizer", message),)
