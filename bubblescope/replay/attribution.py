"""From a prepared `Run` to all gaps with their causes: replayed where a pipeline is whole, local elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals
from bubblescope.algebra.intervals import rows_by
from bubblescope.align.match import collective_transfer, local_transfer
from bubblescope.analysis.idle import COMMUNICATION, DeviceSets, IdleTable, all_sets, measure
from bubblescope.analysis.operations import (
    COOLDOWN,
    PHASES,
    SPLIT,
    STEADY,
    WARMUP,
    Operations,
    find_operations,
    is_pipeline,
)
from bubblescope.analysis.quarantine import quarantine
from bubblescope.analysis.windows import Windows, find_windows
from bubblescope.model import Kind, Notice, Run, Spans
from bubblescope.model.notice import counted, some
from bubblescope.replay.bases import BaseTable, find_bases
from bubblescope.replay.causes import CAUSES, OUTSIDE_PIPELINE, Decomposition, decompose, gap_bounds
from bubblescope.replay.ladder import RUNGS, carve
from bubblescope.replay.partial import cut_off
from bubblescope.replay.program import Edge, Node, Program, build_programs
from bubblescope.replay.scenario import Replayed

Int = NDArray[np.int64]
Float = NDArray[np.float64]

CAUSE_INDEX = {name: i for i, name in enumerate(CAUSES)}


@dataclass(frozen=True, eq=False)
class Gaps:
    """All idle time of all windows, shape (g,), sorted by window, then start.

    window: row of `Windows`. start_ns, end_ns. idle_ns: idle time within (a gap may hold stray compute).
    before: row of `Operations` of the operation that ended the gap, or that the gap lies inside; -1 the window's
    end. inside: the idle time within one operation. phase: index into `PHASES`. causes: shape (g, c), ns, signed,
    sums to idle_ns. rungs: shape (g, 5), ns (`RUNGS`), sums to end - start; nan where nothing was matched.
    culprit: row of `Operations` at the other end, -1 nobody; taken: waited for the peer to take a message.
    """

    window: Int
    start_ns: Int
    end_ns: Int
    idle_ns: Int
    before: Int
    inside: NDArray[np.bool_]
    phase: Int
    causes: Float
    rungs: Float
    culprit: Int
    taken: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.window)


@dataclass(frozen=True, eq=False)
class Attribution:
    """Everything concluded about a run. replayed: shape (w,), whether the window's causes come from the replay.
    cut_off: ranks whose pipeline goes on at one without a trace -> such a rank. left_out: steps that could not be
    replayed -> why."""

    run: Run
    windows: Windows
    operations: Operations
    idle: IdleTable
    gaps: Gaps
    replayed: NDArray[np.bool_]
    programs: tuple[Program, ...] = ()
    decompositions: tuple[Decomposition, ...] = ()
    bases: BaseTable | None = None
    notices: tuple[Notice, ...] = ()
    replay_refused: str = ""
    cut_off: dict[int, int] = field(default_factory=dict)
    left_out: dict[int, str] = field(default_factory=dict)
    sets: dict[int, DeviceSets] = field(default_factory=dict, repr=False)

    @property
    def main(self) -> NDArray[np.bool_]:
        """The windows that figures are means over: the replayed ones, or all where nothing could be replayed."""
        return self.replayed if self.replayed.any() else np.ones(len(self.windows), dtype=np.bool_)

    @property
    def shown(self) -> NDArray[np.bool_]:
        """`main`, and in its steps the windows of GPUs that have none there: their busy and idle time is known."""
        w, main = self.windows, self.main
        result: NDArray[np.bool_] = main | (np.isin(w.step, w.step[main]) & ~np.isin(w.rank, w.rank[main]))
        return result

    @property
    def replicas(self) -> int:
        """Pipelines that were replayed: with one, nothing tells a slow GPU from a heavy stage."""
        first = [np.unique(p.rank[(p.node == Node.OP) & (p.stage == 0)]) for p in self.programs]
        return max(map(len, first), default=0)

    @property
    def bubble_ns(self) -> Float:
        """Of each window what is lost to pipeline bubbles, shape (w,): idle time without what would idle a GPU without
        any pipeline. One stage has none."""
        if self.run.layout.stages == 1:
            return np.zeros(len(self.windows))
        return self.per_window(self.gaps.causes[:, ~np.isin(CAUSES, OUTSIDE_PIPELINE)].sum(axis=1))

    def per_window(self, values: Float) -> Float:
        """Sum a per-gap column (g,) or (g, c) over the gaps of each window: (w,) or (w, c)."""
        out = np.zeros((len(self.windows), *values.shape[1:]))
        np.add.at(out, self.gaps.window, values)
        return out


def attribute(run: Run) -> Attribution:
    """Windows, operations, idle time, gaps and causes of a prepared run (labelled, matched, aligned)."""
    run = quarantine(run)
    windows = find_windows(run)
    sets = all_sets(run, np.unique(windows.rank))
    idle = measure(windows, sets)
    operations = find_operations(run, windows)
    beyond = cut_off(run, windows)
    programs, refused, left_out = _programs(run, windows, operations, beyond)
    bases = find_bases(programs) if programs else None
    replayed = np.zeros(len(windows), dtype=np.bool_)
    parts: list[Gaps] = []
    decompositions = []
    for program in programs:
        assert bases is not None
        decomposition = decompose(program, bases, operations.phase)
        decompositions.append(decomposition)
        parts.append(_replayed_gaps(program, decomposition, windows, sets))
        replayed[program.window[program.node == Node.BEGIN].reshape(-1)] = True
    parts.append(_local_gaps(run, windows, operations, sets, ~replayed))
    parts.append(_inside_gaps(run, windows, operations, sets, replayed))
    return Attribution(
        run,
        windows,
        operations,
        idle,
        _join(parts),
        replayed,
        tuple(programs),
        tuple(decompositions),
        bases,
        (*windows.notices, *_barrier_notices(programs), *_order_notices(run, programs), *_awaited_notices(programs)),
        refused,
        beyond,
        left_out,
        sets,
    )


# --- when a replay is possible --------------------------------------------------------------------------------


def _programs(
    run: Run, windows: Windows, operations: Operations, beyond: dict[int, int]
) -> tuple[list[Program], str, dict[int, str]]:
    """The programs of the ranks that are not cut off (`beyond`, see `cut_off`), or why there are none; and steps that
    have none, with the reason. A damaged step costs no other."""
    refused = _no_pipeline(run, windows, operations, beyond)
    if refused:
        return [], refused, {}
    uncut = ~np.isin(windows.rank, list(beyond))
    steps, count = np.unique(windows.step[uncut], return_counts=True)
    lacking = count < len(np.unique(windows.rank[uncut]))
    left_out = dict.fromkeys(steps[lacking].tolist(), "not there for every rank")
    # A step may hold nothing but what was left of damaged rows.
    mine = is_pipeline(operations.kind) & uncut[operations.window]
    steps = np.intersect1d(steps[~lacking], windows.step[operations.window[mine]])
    if not len(steps):
        return [], "no step is there for every rank of a pipeline", left_out
    unclear = mine & ((operations.microbatch < 0) | (operations.stage < 0))
    unclear_steps = np.intersect1d(steps, windows.step[operations.window[unclear]])
    left_out |= dict.fromkeys(
        unclear_steps.tolist(), "not all of its forwards and backwards have stage and micro-batch"
    )
    steps = np.setdiff1d(steps, unclear_steps)
    if not len(steps):
        return [], "in no step are stage and micro-batch of every forward and backward known", left_out
    programs, circular = build_programs(run, windows, operations, uncut & np.isin(windows.step, steps))
    left_out |= circular
    last = -1 if run.layout.stages is None else run.layout.stages * (run.layout.chunks or 1) - 1
    without = [_unmatched(p, last) for p in programs]
    fed = [p for p, count in zip(programs, without, strict=True) if not count]
    for p, lost in zip(programs, without, strict=True):
        if lost:
            left_out |= dict.fromkeys(
                p.steps.tolist(), f"no message was matched to {counted(lost, 'operation')} that need an input"
            )
    if not programs:
        step, why = min(circular.items())
        return [], f"in step {step} {why}", left_out
    if not fed:
        total = sum(lost * len(p.steps) for p, lost in zip(programs, without, strict=True))
        return [], f"{total} operations need an input from another rank and no message was matched to them", left_out
    return fed, "", left_out


def _no_pipeline(run: Run, windows: Windows, operations: Operations, beyond: dict[int, int]) -> str:
    """Why no step of the run can be replayed; "" where nothing speaks against it."""
    if not is_pipeline(operations.kind).any():
        return "no forward and backward operations of micro-batches were found"
    cut = run.layout.missing_ranks and np.isin(run.spans.kind, (Kind.SEND, Kind.RECV)).any()
    if run.layout.stages is None and not len(run.links.p2p) and not cut:
        if not (operations.kind == Kind.FORWARD).any():
            return "no pipeline was found: only backwards of micro-batches were seen, and no forward"
        return "no pipeline was found: no stages, and no message of which both ends were seen"
    if not run.clock.aligned:
        return "the clocks of the ranks are not aligned"
    if np.isin(windows.rank, list(beyond)).all():
        return f"every pipeline that was seen goes on at a rank without a trace ({some(sorted(set(beyond.values())))})"
    return ""


def _barrier_notices(programs: list[Program]) -> list[Notice]:
    """Barriers that nobody recorded, as inferred by `replay.edges.barrier_edges`."""
    count = steps = 0
    for p in programs:
        unseen = (p.edge == Edge.CHAIN) & (p.node[p.src] == Node.GROUP)
        count += len(np.unique(p.src[unseen])) * len(p.steps)
        steps += len(p.steps)
    if not count:
        return []
    text = (
        f"{count / steps:.1f} barriers per step were inferred: GPUs launched a collective, or all of them their "
        "optimizer, just after the last was ready; their wait is booked on what that one was doing"
    )
    return [Notice("barrier-inferred", text)]


def _awaited_notices(programs: list[Program]) -> list[Notice]:
    """Collectives that may have waited for ranks which are not replayed."""
    ranks = sorted({rank for p in programs for rank in p.rank[p.dst[p.edge == Edge.AWAIT]].tolist()})
    if not ranks:
        return []
    text = (
        f"collectives of rank {some(ranks)} have members that cannot be replayed or have no trace: why these came when "
        "they did is not known, so what may have been waiting for them is unexplained"
    )
    return [Notice("collective-incomplete", text)]


LATE_NS = 1_000_000
"""An operation that begins this much before its input was made was stamped wrongly (beyond the clocks' error)."""


def impossible_starts(run: Run, programs: Sequence[Program]) -> list[tuple[int, int, int]]:
    """(step, rank, micro-batch) of operations that began before the operation that made their input had ended."""
    slack = LATE_NS + 2 * (run.clock.half_width_ns or 0)
    found = []
    for p in programs:
        needs = p.edge == Edge.NEEDS
        early = p.end[p.src[needs]] - p.start[p.dst[needs]] > slack
        for edge, column in zip(*np.nonzero(early), strict=True):
            node = p.dst[needs][edge]
            found.append((int(p.steps[column]), int(p.rank[node]), int(p.microbatch[node])))
    return found


def _order_notices(run: Run, programs: list[Program]) -> list[Notice]:
    found = [f"rank {rank}, step {step}, micro-batch {mb}" for step, rank, mb in impossible_starts(run, programs)]
    if not found:
        return []
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    text = (
        f"{len(found)} operations began before their input was made ({'; '.join(found[:5])}{more}): wrong stamps, or "
        "ranges or kernels that are not what they are taken for"
    )
    return [Notice("impossible-order", text + "; the causes of these steps are not to be trusted")]


def _unmatched(program: Program, last: int) -> int:
    """Operations whose input comes from another rank (stage ± 1 elsewhere) without a matched message. last: the last
    stage of the pipeline, -1 where nobody says."""
    op = (program.node == Node.OP) & (program.microbatch >= 0)
    forward = op & (program.kind == Kind.FORWARD)
    backward = op & np.isin(program.kind, (Kind.BACKWARD, Kind.BACKWARD_INPUT))
    own = set(zip(program.rank[op].tolist(), program.stage[op].tolist(), strict=True))
    fed = set(program.messages.consumer.tolist())
    lacking = 0
    for rows, step, end in ((forward, -1, 0), (backward, 1, last)):
        for node in np.flatnonzero(rows & (program.stage != end)):
            local = (int(program.rank[node]), int(program.stage[node]) + step) in own
            lacking += not local and int(node) not in fed
    return lacking


# --- gaps -----------------------------------------------------------------------------------------------------


def _replayed_gaps(
    program: Program, decomposition: Decomposition, windows: Windows, sets: dict[int, DeviceSets]
) -> Gaps:
    frame = decomposition.frame
    begin = program.window[program.node == Node.BEGIN]
    window = begin[frame.rank_row]
    zero = np.array([int(windows.base_ns[windows.step == s].min()) for s in program.steps])
    close = (windows.close_ns[begin] - zero).max(axis=0).astype(np.float64)
    measured = Replayed(program.duration, program.start, program.end, close)
    u, v = gap_bounds(program, frame, measured)
    ladder = carve(program, frame, u, v)
    start, end = (np.rint(t).astype(np.int64) + zero for t in (u, v))
    idle = _idle_within(windows.rank, window.reshape(-1), start.reshape(-1), end.reshape(-1), sets)
    causes = decomposition.causes.reshape(-1, len(CAUSES)).copy()
    # R0 is the model; what was measured beyond it stays visible instead of being spread over the causes.
    causes[:, CAUSE_INDEX["unexplained"]] += idle - causes.sum(axis=1)
    before = np.where((frame.before >= 0)[:, None], program.operation[frame.before], -1)
    culprit = np.where(
        ladder.culprit >= 0, np.take_along_axis(program.operation, np.maximum(ladder.culprit, 0), axis=0), -1
    )
    phase = np.repeat(frame.phase, len(program.steps))
    return Gaps(
        window.reshape(-1),
        start.reshape(-1),
        end.reshape(-1),
        idle,
        before.reshape(-1),
        np.zeros(len(idle), dtype=np.bool_),
        phase,
        causes,
        ladder.rungs.reshape(-1, len(RUNGS)),
        culprit.reshape(-1),
        ladder.taken.reshape(-1),
    )


def _idle_within(rank_of: Int, window: Int, start: Int, end: Int, sets: dict[int, DeviceSets]) -> Int:
    """Idle nanoseconds in each [start, end) of the window's rank; 0 where end < start."""
    length: Int = np.maximum(end - start, 0)
    out: Int = length.copy()
    for rank, rows in rows_by(rank_of[window]):
        busy = sets[rank].busy
        low = intervals.measure_before(busy, start[rows])
        out[rows] -= np.where(length[rows] > 0, intervals.measure_before(busy, end[rows]) - low, 0)
    return out


def _local_bounds(windows: Windows, operations: Operations, chosen: NDArray[np.bool_]) -> tuple[Int, ...]:
    """(window, start, end, before, phase) of the gaps between operations in the chosen windows."""
    rows = np.flatnonzero(chosen[operations.window])
    chosen_windows = np.flatnonzero(chosen)
    # Each gap starts where the window or an operation ends, and ends where the next operation or the window does.
    from_window = np.concatenate([chosen_windows, operations.window[rows]])
    starts = np.concatenate([windows.start_ns[chosen_windows], operations.end_ns[rows]])
    first = np.concatenate([np.zeros(len(chosen_windows)), np.ones(len(rows))])
    start = starts[np.lexsort((starts, first, from_window))]
    to_window = np.concatenate([operations.window[rows], chosen_windows])
    ends = np.concatenate([operations.start_ns[rows], windows.end_ns[chosen_windows]])
    last = np.concatenate([np.zeros(len(rows)), np.ones(len(chosen_windows))])
    order = np.lexsort((ends, last, to_window))
    w, end = to_window[order], ends[order]
    before = np.concatenate([rows, np.full(len(chosen_windows), -1)])[order]
    phase = np.where(before >= 0, operations.phase[before] if len(operations) else COOLDOWN, COOLDOWN)
    phase = np.where(phase == SPLIT, STEADY, phase)
    end = np.minimum(end, windows.end_ns[w])
    return w, np.clip(start, windows.start_ns[w], end), end, before, phase


def _local_gaps(
    run: Run,
    windows: Windows,
    operations: Operations,
    sets: dict[int, DeviceSets],
    chosen: NDArray[np.bool_],
) -> Gaps:
    """Gaps of windows that cannot be replayed: only what one rank can say by itself (§8)."""
    w, start, end, before, phase = _local_bounds(windows, operations, chosen)
    phase = np.where(has_phases(operations, len(windows))[w], phase, STEADY)
    idle = _idle_within(windows.rank, w, start, end, sets)
    causes = _local_causes(run, windows, w, start, end, idle, before, sets)
    n = len(w)
    return Gaps(
        w,
        start,
        end,
        idle,
        before,
        np.zeros(n, dtype=np.bool_),
        phase,
        causes,
        np.full((n, len(RUNGS)), np.nan),
        np.full(n, -1, dtype=np.int64),
        np.zeros(n, dtype=np.bool_),
    )


def has_phases(operations: Operations, n_windows: int) -> NDArray[np.bool_]:
    """Which windows show micro-batches; without any there is no warmup and no cooldown."""
    out = np.zeros(n_windows, dtype=np.bool_)
    out[operations.window[is_pipeline(operations.kind) & (operations.microbatch >= 0)]] = True
    return out


def _local_causes(
    run: Run, windows: Windows, w: Int, start: Int, end: Int, idle: Int, before: Int, sets: dict[int, DeviceSets]
) -> Float:
    """data_loading and host_launch from the rank itself; of a collective and of a receive the last part, as long as it
    takes once all are there, or at best (§3). What is left of both stays unexplained, as does the time after the last
    thing that a rank did in a step which others had not ended, and the time before its first one in a job that lacks
    ranks: the step before may not have ended yet."""
    causes = np.zeros((len(w), len(CAUSES)))
    spans = run.spans
    moving = np.maximum(local_transfer(run), collective_transfer(run))
    by_rank = dict(rows_by(spans.rank))
    lacks_ranks = bool(run.layout.missing_ranks)
    for rank, rows in rows_by(windows.rank[w]):
        mine = intervals.without_gaps(by_rank.pop(rank))
        own, moved = spans.take(mine), moving[mine]
        busy = sets[rank].busy
        device = own.device >= 0
        talks = device & np.isin(own.lane, COMMUNICATION)
        reducing = talks & (own.kind == Kind.COLLECTIVE)
        collective = _bare(own, reducing, busy)
        p2p = intervals.subtract(_bare(own, talks & (own.kind != Kind.COLLECTIVE), busy), collective)
        data = intervals.subtract(_set(own, own.kind == Kind.DATA), busy, collective, p2p)
        arriving = (moved > 0) & (own.kind == Kind.RECV)
        transfer = intervals.subtract(_tails(own, moved[arriving], arriving), busy, collective)
        length = np.where(moved[reducing] < 0, own.duration_ns[reducing], moved[reducing])
        exposed = intervals.subtract(_tails(own, length, reducing), busy)

        def within(chosen: intervals.Set, rows: Int = rows) -> Int:
            low = intervals.measure_before(chosen, start[rows])
            length: Int = np.maximum(intervals.measure_before(chosen, end[rows]) - low, 0)
            return length

        causes[rows, CAUSE_INDEX["data_loading"]] = within(data)
        causes[rows, CAUSE_INDEX["exposed_collective"]] = within(exposed)
        causes[rows, CAUSE_INDEX["p2p_transfer"]] = within(transfer)
        if talks.any() or run.source.timing == "kernels":
            known = within(data) + within(collective) + within(p2p)
            after = _after_all(own.start_ns[device], own.end_ns[device], start[rows], end[rows])
            over = np.where(before[rows] < 0, after, 0)
            if lacks_ranks:
                first = _before_all(own.start_ns[device], start[rows], end[rows])
                over += np.where(start[rows] == windows.start_ns[w[rows]], first, 0)
            causes[rows, CAUSE_INDEX["host_launch"]] = np.maximum(idle[rows] - known - over, 0)
    causes[:, CAUSE_INDEX["unexplained"]] = idle - causes.sum(axis=1)
    return causes


def _tails(spans: Spans, length: Int, rows: NDArray[np.bool_]) -> intervals.Set:
    """The last `length` ns of each of the rows; shape (rows,)."""
    return intervals.union(spans.end_ns[rows] - length, spans.end_ns[rows])


def _after_all(began: Int, ended: Int, start: Int, end: Int) -> Int:
    """How much of each [start, end) lies after the last span [began, ended) that began before its end; in order."""
    reach = np.maximum.accumulate(ended)
    last = np.searchsorted(began, end, "left") - 1
    over = np.where(last >= 0, reach[np.maximum(last, 0)], start) if len(reach) else start
    result: Int = end - np.clip(over, start, end)
    return result


def _before_all(began: Int, start: Int, end: Int) -> Int:
    """How much of each [start, end) lies before the first span that begins after its start; `began` in order."""
    first = np.append(began, np.iinfo(np.int64).max)[np.searchsorted(began, start, "left")]
    result: Int = np.minimum(first, end) - start
    return result


def _set(spans: Spans, rows: NDArray[np.bool_]) -> intervals.Set:
    return intervals.union(spans.start_ns[rows], spans.end_ns[rows])


def _bare(spans: Spans, rows: NDArray[np.bool_], busy: intervals.Set) -> intervals.Set:
    return intervals.subtract(_set(spans, rows), busy)


def _inside_gaps(
    run: Run, windows: Windows, operations: Operations, sets: dict[int, DeviceSets], replayed: NDArray[np.bool_]
) -> Gaps:
    """Idle time within operations (kernels with pauses): bare communication, else late launches (§5). Where operations
    are not known to be whole, such pauses may be waits for messages as well, and count as gaps between them do."""
    w = operations.window
    end = np.minimum(operations.end_ns, windows.end_ns[w])
    start = np.minimum(operations.start_ns, end)
    idle = _idle_within(windows.rank, w, start, end, sets)
    rows = np.flatnonzero(idle > 0)
    causes = _local_causes(run, windows, w[rows], start[rows], end[rows], idle[rows], rows, sets)
    for rank, mine in rows_by(windows.rank[w[rows]]):
        mine = mine[replayed[w[rows[mine]]]]
        exposed = sets[rank].exposed
        low = intervals.measure_before(exposed, start[rows[mine]])
        bare = intervals.measure_before(exposed, end[rows[mine]]) - low
        causes[mine] = 0.0
        causes[mine, CAUSE_INDEX["exposed_collective"]] = bare
        causes[mine, CAUSE_INDEX["host_launch"]] = idle[rows[mine]] - bare
    n = len(rows)
    phase = operations.phase[rows]
    return Gaps(
        w[rows],
        start[rows],
        end[rows],
        idle[rows],
        rows,
        np.ones(n, dtype=np.bool_),
        np.where(phase == SPLIT, WARMUP, phase),
        causes,
        np.full((n, len(RUNGS)), np.nan),
        np.full(n, -1, dtype=np.int64),
        np.zeros(n, dtype=np.bool_),
    )


def _join(parts: list[Gaps]) -> Gaps:
    columns = {name: np.concatenate([getattr(p, name) for p in parts]) for name in Gaps.__dataclass_fields__}
    order = np.lexsort((columns["start_ns"], columns["window"]))
    return Gaps(**{name: column[order] for name, column in columns.items()})


__all__ = ["CAUSES", "PHASES", "RUNGS", "Attribution", "Gaps", "attribute"]
