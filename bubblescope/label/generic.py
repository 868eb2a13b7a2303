"""Forward, backward and micro-batch of every kernel in a trace that never heard of us.

Evidence, strongest first: ranges (already labelled), autograd's engine around the launch, and the messages: what
comes after an activation has arrived and before one is sent is a forward, what comes after a gradient has arrived
and before one is sent is a backward. The k-th activation and the k-th forward of a step are micro-batch k. Which
forward a backward belongs to is read from autograd's sequence numbers; without them backwards are taken to run in the
order of the forwards, and that is said.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra import intervals, stats
from bubblescope.label import sequence
from bubblescope.label.borders import Border, Borders
from bubblescope.label.evidence import (
    OPTIMIZER_KERNEL,
    Int,
    Mask,
    around,
    backward_evidence,
    issue_time,
    launched,
    name_mask,
)
from bubblescope.label.habits import B, F, Habits
from bubblescope.label.structure import rank_of_stage, stage_of_rank
from bubblescope.model import BACKWARD_KINDS, PIPELINE_KINDS, Kind, Lane, Notice, Run


def label_optimizer(run: Run) -> Run:
    """Compute rows issued inside an ``Optimizer.step`` range, or named like an optimizer kernel."""
    spans = run.spans
    rows = np.flatnonzero((spans.lane == Lane.COMPUTE) & (spans.kind == Kind.OTHER))
    if len(rows) == 0:
        return run
    kind = spans.kind.copy()
    at, sure = issue_time(run), launched(run)
    ranges = np.flatnonzero(spans.where(lane=Lane.RANGE, kind=Kind.OPTIMIZER))
    for rank in np.unique(spans.rank[ranges]).tolist():
        mine = ranges[spans.rank[ranges] == rank]
        mine = mine[np.argsort(spans.start_ns[mine], kind="stable")]
        asked = rows[(spans.rank[rows] == rank) & sure[rows]]
        inside = around(spans.start_ns[mine], spans.end_ns[mine], at[asked]) >= 0
        kind[asked[inside]] = Kind.OPTIMIZER
    named = name_mask(run, rows, OPTIMIZER_KERNEL)
    kind[rows[named]] = Kind.OPTIMIZER
    return replace(run, spans=spans.with_columns(kind=kind))


def label(run: Run) -> Run:
    """Stage of what ranges labelled without one, then kinds and micro-batches from the messages.

    Ranks whose stage or whose order cannot be told keep -1, and it is said.
    """
    run = _stages_of_labelled(run)
    spans = run.spans
    open_rows = (spans.lane == Lane.COMPUTE) & (spans.kind == Kind.OTHER)
    done = {int(r) for r in np.unique(spans.rank[(spans.lane == Lane.COMPUTE) & np.isin(spans.kind, PIPELINE_KINDS)])}
    todo = [r for r in np.unique(spans.rank[open_rows]).tolist() if r not in done]
    if not todo:
        return _only_direction(run, [])
    labeller = _Labeller.of(run)
    placed = [r for r in todo if stage_of_rank(run, r) >= 0 and labeller.tells_direction(r)]
    for rank in placed:
        labeller.collect(rank)
    labeller.learn()
    labeller.assign()
    run = labeller.result()
    left = [r for r in todo if r not in placed]
    return _only_direction(run, left).with_notices(*_undirected(run, left))


def _undirected(run: Run, ranks: list[int]) -> list[Notice]:
    known = [str(r) for r in ranks if stage_of_rank(run, r) >= 0]
    if not known:
        return []
    message = (
        f"the messages of rank {', '.join(known[:8])} name no peer, and no autograd call is around their launches: "
        "forward and backward cannot be told apart there"
    )
    return [Notice("direction-unknown", message)]


def _stages_of_labelled(run: Run) -> Run:
    """``Forward 3`` names no stage: it is the rank's, where it has one."""
    spans = run.spans
    bare = np.flatnonzero(np.isin(spans.kind, PIPELINE_KINDS) & (spans.stage < 0) & (spans.microbatch >= 0))
    if len(bare) == 0:
        return run
    stage = spans.stage.copy()
    for rank, rows in intervals.split_by(bare, spans.rank).items():
        stage[rows] = stage_of_rank(run, rank)
    return replace(run, spans=spans.with_columns(stage=stage))


def _only_direction(run: Run, ranks: list[int]) -> Run:
    """Ranks with no place in a pipeline: forward or backward where autograd shows it, and no more. What a step issues
    after its last backward (metrics, moving averages) is no forward."""
    if not ranks:
        return run
    spans = run.spans
    at = issue_time(run)
    sense = backward_evidence(run, at, launched(run))
    rows = (spans.lane == Lane.COMPUTE) & (spans.kind == Kind.OTHER) & np.isin(spans.rank, ranks)
    if not np.any(rows & (sense < 0)):
        return run
    kind = spans.kind.copy()
    kind[rows & (sense < 0)] = Kind.BACKWARD
    kind[rows & (sense > 0) & _before_backward(run, rows & (sense < 0), at)] = Kind.FORWARD
    layout = replace(run.layout, inferred={**run.layout.inferred, "kinds": "autograd engine calls around the launch"})
    return replace(run, spans=spans.with_columns(kind=kind), layout=layout)


def _before_backward(run: Run, backward: Mask, at: Int) -> Mask:
    """Rows issued before the last backward of their step on their rank."""
    spans = run.spans
    key = spans.rank.astype(np.int64) * (int(spans.step.max()) + 2) + spans.step + 1
    last = np.full(int(key.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, key[backward], at[backward])
    result: Mask = at < last[key]
    return result


# --- segments between messages -------------------------------------------------------------------------------


@dataclass(eq=False)
class _Segment:
    """Compute rows of one rank and step with no message between them. begins, ends: F, B or 0 (not known)."""

    rank: int
    step: int
    stage: int
    rows: Int
    begins: int
    ends: int
    last: bool = False

    @property
    def pure(self) -> int:
        return self.begins if self.begins == self.ends else 0


@dataclass(eq=False)
class _Labeller:
    run: Run
    at: Int
    sense: NDArray[np.int8]
    kind: Int
    stage: Int
    microbatch: Int
    peer: Int
    borders: Borders
    habits: Habits
    segments: list[_Segment] = field(default_factory=list)
    uncertain: set[tuple[int, int]] = field(default_factory=set)
    paired: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    taken: set[tuple[int, int]] = field(default_factory=set)
    assumed: set[tuple[int, int]] = field(default_factory=set)
    messages: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> _Labeller:
        at, sure = issue_time(run), launched(run)
        spans = run.spans
        sense = backward_evidence(run, at, sure)
        return cls(
            run, at, sense,
            spans.kind.astype(np.int64), spans.stage.astype(np.int64), spans.microbatch.astype(np.int64),
            spans.peer.astype(np.int64), Borders(run, at, sure), Habits(run, sense),
        )  # fmt: skip

    # -- collecting

    def tells_direction(self, rank: int) -> bool:
        """Whether forward and backward messages of `rank` can be told apart: an inner stage exchanges both with both
        neighbours, so there it takes peers or autograd's evidence."""
        spans, stage = self.run.spans, stage_of_rank(self.run, rank)
        if stage in (0, (self.run.layout.stages or 0) - 1):
            return True
        mine = spans.rank == rank
        messages = mine & np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & np.isin(spans.lane, (Lane.COMM, Lane.POST))
        return bool((spans.peer[messages] >= 0).any() or (self.sense[mine] < 0).any())

    def collect(self, rank: int) -> None:
        """Cut the compute rows of every step of `rank` at its messages."""
        stage = stage_of_rank(self.run, rank)
        for step, rows, borders in self.borders.of_rank(rank):
            cuts = [(b, self._is_forward(b, stage, rows)) for b in borders]
            self.messages[rank, step] = [(b.row, F if forward else B) for b, forward in cuts]
            self._cut(rank, step, stage, rows, cuts)

    def _is_forward(self, border: Border, stage: int, rows: Int) -> bool:
        """Whether a message carries an activation: by its peer, at the ends by its direction, else by the
        operation next to it."""
        layout, spans = self.run.layout, self.run.spans
        sends, position = border.sends, border.position
        peer, last = int(spans.peer[border.row]), (layout.stages or 0) - 1
        if peer >= 0:
            there = stage_of_rank(self.run, peer)
            if there >= 0:
                return (there > stage) == sends
        if stage == 0:
            return sends
        if stage == last:
            return not sends
        beside = rows[position - 1] if sends and position > 0 else rows[min(position, len(rows) - 1)]
        return bool(self.sense[beside] >= 0)

    def _cut(self, rank: int, step: int, stage: int, rows: Int, cuts: list[tuple[Border, bool]]) -> None:
        at = 0
        before: list[tuple[Border, bool]] = []
        k = 0
        made: list[_Segment] = []
        while at < len(rows):
            while k < len(cuts) and cuts[k][0].position <= at:
                before.append(cuts[k])
                k += 1
            stop = cuts[k][0].position if k < len(cuts) else len(rows)
            received = [forward for b, forward in before if not b.sends]
            sent = next((forward for b, forward in cuts[k:] if b.position == stop and b.sends), None)
            begins = 0 if not received else F if received[-1] else B
            ends = 0 if sent is None else F if sent else B
            made.append(_Segment(rank, step, stage, rows[at:stop], begins, ends))
            at, before = stop, []
        self._settle(made)
        self.segments.extend(made)

    def _settle(self, made: list[_Segment]) -> None:
        """Fill what one border leaves open from the other border, or from autograd."""
        for i, segment in enumerate(made):
            segment.last = i == len(made) - 1
            if segment.begins == 0 and segment.ends == 0:
                # No message on either side: slicing the batch, clipping, the optimizer.
                if (self.sense[segment.rows] < 0).any():
                    segment.begins = segment.ends = B
                continue
            segment.begins = segment.begins or segment.ends
            segment.ends = segment.ends or segment.begins

    # -- learning and splitting

    def learn(self) -> None:
        """Take the habits of F and B from the segments that are surely one of them, in steps with the usual number of
        messages of their rank: what lies between the others need not be whole."""
        counts: dict[int, list[int]] = {}
        for (rank, _), messages in self.messages.items():
            counts.setdefault(rank, []).append(len(messages))
        usual = {rank: stats.usual(np.array(of_rank)) for rank, of_rank in counts.items()}
        for segment in self.segments:
            whole = len(self.messages[segment.rank, segment.step]) == usual[segment.rank]
            if segment.pure and not segment.last and whole:
                self.habits.learn(segment.rank, segment.pure, segment.rows)

    def assign(self) -> None:
        """Give every row its kind and micro-batch; steps whose counts do not add up lose the micro-batch."""
        per_step: dict[tuple[int, int], list[tuple[int, Int]]] = {}
        for segment in self.segments:
            operations = per_step.setdefault((segment.rank, segment.step), [])
            operations.extend(self._operations(segment))
        expected = self._microbatches(per_step)
        self.paired = self._pairs(per_step)
        for (rank, step), operations in per_step.items():
            self._number(rank, step, operations, expected)

    def _operations(self, segment: _Segment) -> list[tuple[int, Int]]:
        """(F, B or 0; rows) in order."""
        rows = segment.rows
        if segment.begins == 0:
            return [(0, rows)]
        if segment.pure:
            keep = self._before_tail(segment, rows) if segment.last else len(rows)
            return [(segment.pure, rows[:keep]), (0, rows[keep:])]
        split = self.habits.split(rows, segment.begins, segment.rank)
        second = rows[split:]
        keep = len(second)
        if segment.last and segment.ends == B:
            keep = self._before_tail(segment, second)
        return [(segment.begins, rows[:split]), (segment.ends, second[:keep]), (0, second[keep:])]

    def _before_tail(self, segment: _Segment, rows: Int) -> int:
        """Where the last backward of a step ends and clipping, the optimizer or the like begins."""
        strong = np.flatnonzero(self.sense[rows] < 0)
        if len(strong):
            return int(strong[-1]) + 1
        kernels = self.habits.typical_kernels(segment.rank, segment.ends)
        return min(len(rows), kernels) if kernels else len(rows)

    # -- numbering

    def _microbatches(self, per_step: dict[tuple[int, int], list[tuple[int, Int]]]) -> int:
        counts = Counter(
            sum(1 for sense, rows in operations if sense == F and len(rows)) for operations in per_step.values()
        )
        return max(counts, key=lambda c: (counts[c], c)) if counts else 0

    def _pairs(self, per_step: dict[tuple[int, int], list[tuple[int, Int]]]) -> dict[tuple[int, int], list[int]]:
        """(rank, step) -> the micro-batch of each backward in turn, where sequence numbers tell it.

        Gradients arrive in the order in which they were sent: where all ranks of a pipeline that tell an order tell
        the same, it is that of the others too.
        """
        numbers = sequence.Numbers.of(self.run, self.at)
        own: dict[tuple[int, int], list[int]] = {}
        orders: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        for (rank, step), operations in per_step.items():
            forwards, backwards = ([rows for sense, rows in operations if sense == s and len(rows)] for s in (F, B))
            found = sequence.pair(numbers, forwards, backwards)
            if found is not None:
                own[rank, step] = found
                orders.setdefault((self._replica(rank), step), set()).add(tuple(found))
        for rank, step in per_step.keys() - own.keys():
            known = orders.get((self._replica(rank), step), set())
            if len(known) == 1:
                own[rank, step] = list(next(iter(known)))
                self.taken.add((rank, step))
        return own

    def _replica(self, rank: int) -> int:
        return int(self.run.layout.replica[self.run.layout.index_of(rank)])

    def _number(self, rank: int, step: int, operations: list[tuple[int, Int]], expected: int) -> None:
        stage = stage_of_rank(self.run, rank)
        count = Counter(sense for sense, rows in operations if len(rows))
        sure = count[F] == count[B] == expected
        if not sure:
            self.uncertain.add((rank, step))
        order = self._order_of_backwards(rank, step, expected) if sure else None
        done: Counter[int] = Counter()
        for sense, rows in operations:
            if sense == 0 or len(rows) == 0:
                continue
            self.kind[rows] = Kind.FORWARD if sense == F else Kind.BACKWARD
            self.stage[rows] = stage
            self.microbatch[rows] = -1 if order is None else done[F] if sense == F else order[done[B]]
            done[sense] += 1
        self._number_messages(rank, step, stage, order)

    def _order_of_backwards(self, rank: int, step: int, count: int) -> list[int]:
        """The micro-batch of each backward in turn: as paired, else as the forwards ran."""
        found = self.paired.get((rank, step), [])
        if len(found) == count:
            return found
        self.assumed.add((rank, step))
        return list(range(count))

    def _number_messages(self, rank: int, step: int, stage: int, order: list[int] | None) -> None:
        """The k-th activation that a rank sends or receives in a step is micro-batch k, the k-th gradient is its k-th
        backward's; `order`: the micro-batches of the backwards, None when nothing is numbered."""
        spans = self.run.spans
        done: Counter[tuple[int, int]] = Counter()
        for row, sense in sorted(self.messages.get((rank, step), []), key=lambda m: int(self.at[m[0]])):
            stream = (int(spans.kind[row]), sense)
            self.stage[row] = stage
            k = done[stream]
            self.microbatch[row] = -1 if order is None else order[k] if sense == B and k < len(order) else k
            done[stream] += 1
            if self.peer[row] < 0:
                sends = stream[0] == Kind.SEND
                self.peer[row] = rank_of_stage(self.run, rank, stage + (1 if sends == (sense == F) else -1))

    def _how_numbered(self) -> str:
        how = "P2P boundaries, counted per step"
        numbered = {(s.rank, s.step) for s in self.segments} - self.uncertain
        read, taken = len(numbered - self.assumed), len((numbered & self.taken) - self.assumed)
        if read:
            how += f"; backwards by autograd sequence numbers in {read} of {len(numbered)} (rank, step) pairs"
            how += f", {taken} of them by those of another rank of the pipeline" if taken else ""
        if numbered & self.assumed:
            how += f"; {'other ' if read else ''}backwards assumed to run in the order of the forwards"
        return how

    def result(self) -> Run:
        if not self.segments:
            return self.run
        columns = {"kind": self.kind, "stage": self.stage, "microbatch": self.microbatch, "peer": self.peer}
        run = replace(self.run, spans=self.run.spans.with_columns(**columns))
        how = "direction of the messages around the kernels"
        if (self.sense < 0).any():
            how += ", autograd engine calls"
        inferred = {**run.layout.inferred, "kinds": how, "microbatch": self._how_numbered()}
        run = replace(run, layout=replace(run.layout, inferred=inferred))
        steps = sorted({step for _, step in self.uncertain})
        if not steps:
            return run
        message = (
            f"in {len(self.uncertain)} (rank, step) pairs the forwards and backwards between messages do not add up "
            f"to the usual count; their micro-batches are not numbered (steps {', '.join(map(str, steps[:5]))})"
        )
        return run.with_notices(Notice("microbatch-uncertain", message))


def label_waits(run: Run) -> Run:
    """A wait is for what its post said: same rank, kind and number."""
    spans = run.spans
    waits = np.flatnonzero((spans.lane == Lane.WAIT) & (spans.corr >= 0))
    posts = np.flatnonzero((spans.lane == Lane.POST) & (spans.corr >= 0))
    if len(waits) == 0 or len(posts) == 0:
        return run
    place = {key: i for i, key in enumerate(zip(*_wait_key(run, posts), strict=True))}
    found = np.array([place.get(key, -1) for key in zip(*_wait_key(run, waits), strict=True)], dtype=np.int64)
    waits, posts = waits[found >= 0], posts[found[found >= 0]]
    columns = {c: getattr(spans, c).copy() for c in ("stage", "microbatch", "peer")}
    for values in columns.values():
        values[waits] = values[posts]
    return replace(run, spans=spans.with_columns(**columns))


def _wait_key(run: Run, rows: Int) -> tuple[list[int], list[int], list[int]]:
    spans = run.spans
    return spans.rank[rows].tolist(), spans.kind[rows].tolist(), spans.corr[rows].tolist()


def bridge_host_operators(run: Run) -> Run:
    """On a CPU rank the host is the device: between two operators of one operation it runs Python, and is busy.

    The earlier operator is stretched to the later one, unless a post or a wait lies between them. Example:
    operators [0, 10) and [12, 20) of forward 3 become [0, 12) and [12, 20).
    """
    spans = run.spans
    if run.source.timing != "host":
        return run
    rows = np.flatnonzero((spans.lane == Lane.COMPUTE) & (spans.microbatch >= 0))
    end = spans.end_ns.copy()
    for rank in np.unique(spans.rank[rows]).tolist():
        mine = rows[spans.rank[rows] == rank]
        mine = mine[np.argsort(spans.start_ns[mine], kind="stable")]
        reach = np.maximum.accumulate(spans.end_ns[mine])
        first, second = mine[:-1], mine[1:]
        same = spans.start_ns[second] > reach[:-1]
        for column in ("step", "kind", "stage", "microbatch"):
            same &= getattr(spans, column)[first] == getattr(spans, column)[second]
        comm = (spans.rank == rank) & np.isin(spans.lane, (Lane.POST, Lane.WAIT))
        talk = intervals.union(spans.start_ns[comm], spans.end_ns[comm])
        between = intervals.measure_before(talk, spans.start_ns[second]) - intervals.measure_before(talk, reach[:-1])
        same &= between == 0
        end[first[same]] = spans.start_ns[second[same]]
    return replace(run, spans=spans.with_columns(end_ns=end))


def label_chunks(run: Run) -> Run:
    """Chunk of every row with a stage: its place among the stages of its rank."""
    spans, layout = run.spans, run.layout
    if not layout.stage_rank:
        return run
    held: dict[int, list[int]] = {}
    for (_, stage), rank in sorted(layout.stage_rank.items()):
        held.setdefault(rank, []).append(stage)
    chunk = spans.chunk.copy()
    rows_of = intervals.split_by(np.flatnonzero((spans.stage >= 0) & (spans.chunk < 0)), spans.rank)
    for rank, rows in rows_of.items():
        if rank in held:
            chunk[rows] = np.searchsorted(np.unique(held[rank]), spans.stage[rows])
    return replace(run, spans=spans.with_columns(chunk=chunk))


def label_microbatch_count(run: Run) -> Run:
    """`Layout.microbatches`: the usual number of distinct micro-batches of a step on a rank."""
    spans, layout = run.spans, run.layout
    rows = np.isin(spans.kind, (Kind.FORWARD, *BACKWARD_KINDS)) & (spans.microbatch >= 0) & (spans.lane == Lane.COMPUTE)
    if layout.microbatches is not None or not rows.any():
        return run
    step = spans.step[rows].astype(np.int64) + 1
    of_rank = spans.rank[rows] * (step.max() + 1) + step
    m = stats.usual(stats.count_distinct(of_rank, spans.microbatch[rows].astype(np.int64))[1])
    inferred = {**layout.inferred, "microbatches": "distinct micro-batches of a step"}
    return replace(run, layout=replace(layout, microbatches=m, inferred=inferred))
