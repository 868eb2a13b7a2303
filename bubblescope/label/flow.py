"""Stage, chunk and micro-batch by following every micro-batch from message to message, where names do not tell them.

An operation takes a message or none, and gives one or none. A forward that takes none is of stage 0; what it gives is
taken by a forward of stage 1 on another rank, and so on, until a forward gives nothing: the last stage. Backwards run
the same way back. A backward that neither takes nor gives comes after its gradient was sent: it computes weight
gradients. So the number of stages and of chunks per GPU is counted, not assumed, and where the chains of a step are
not whole, of one length and along the same ranks, nothing of it is believed.

Example: ranks 0 and 1 with two chunks each. The chain 0 → 1 → 0 → 1 of forwards and back of backwards: stages 0 and 2
are on rank 0, stages 1 and 3 on rank 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bubblescope.label import sequence
from bubblescope.label.borders import Border, Borders
from bubblescope.label.evidence import Int, backward_evidence, issue_time, launched
from bubblescope.label.habits import B, F, Habits
from bubblescope.label.messages import partners
from bubblescope.model import PIPELINE_KINDS, Kind, Lane, Layout, Notice, Run
from bubblescope.model.notice import some

_AGREE = 0.8
"""The least part of all sends that fit one stage per GPU."""
_ALIKE = 0.25
"""The most by which the kernels of an operation differ in number from one micro-batch to the next."""
_STRAY = 0.25
"""Of a forward of the rank: less is no forward of its own beside a backward."""
_READ = "autograd sequence numbers"
_FOLLOWS = "the last stage, which runs each before its next forward"


def label(run: Run) -> Run:
    """Fill kind, stage, micro-batch, `Layout.chunks` and `Layout.stage_rank` of runs whose GPUs hold several stages or
    split their backwards. A run with one stage per GPU and whole backwards passes through as it is; what contradicts
    one stage per GPU, and is not understood, loses its stages, with a Notice."""
    spans, layout = run.spans, run.layout
    known = (spans.lane == Lane.COMPUTE) & np.isin(spans.kind, PIPELINE_KINDS)
    if layout.stages is None or layout.stages < 2 or known.any() or not np.any(layout.pp >= 0):
        return run
    flow = _Flow.of(run)
    flow.collect()
    found = flow.chains()
    if found:
        return flow.labelled(found)
    return flow.refused() if flow.ring or flow.contradicts() else run


@dataclass(eq=False)
class _Op:
    """One forward or backward of a rank: `takes` and `gives` are rows of messages, -1 for none. last: of its step, so
    that clipping and the like may be in it."""

    rank: int
    kind: int
    rows: Int
    takes: int = -1
    gives: int = -1
    last: bool = False


@dataclass(frozen=True, eq=False)
class _Chains:
    """A step of one pipeline: operations by micro-batch in the order of the stages (forwards[i][stage]), backwards
    likewise, and weights: (operation, stage, micro-batch) of what neither takes nor gives. split: (stage, micro-batch)
    whose weight gradients are among these. how: what tells the micro-batches of the backwards; "" nothing, and they
    stand in the order in which they ran."""

    forwards: list[list[_Op]]
    backwards: list[list[_Op]]
    how: str
    weights: tuple[tuple[_Op, int, int], ...] = ()
    split: frozenset[tuple[int, int]] = frozenset()

    @property
    def path(self) -> tuple[int, ...]:
        return tuple(op.rank for op in self.forwards[0])


@dataclass(eq=False)
class _Flow:
    run: Run
    sense: NDArray[np.int8]
    borders: Borders
    habits: Habits
    numbers: sequence.Numbers
    place: dict[int, int]
    replica: dict[int, int]
    ring: bool
    partner: dict[int, int]
    pieces: dict[tuple[int, int], list[Piece]] = field(default_factory=dict)
    ops: dict[tuple[int, int], list[_Op]] = field(default_factory=dict)
    steps: set[tuple[int, int]] = field(default_factory=set)
    telling: Int = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ahead: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> _Flow:
        at, sure = issue_time(run), launched(run)
        sense = backward_evidence(run, at, sure)
        run = _between_two(run)
        layout = run.layout
        place = dict(zip(layout.ranks.tolist(), layout.pp.tolist(), strict=True))
        replica = dict(zip(layout.ranks.tolist(), layout.replica.tolist(), strict=True))
        ring = layout.chunks is None and (layout.stages or 0) > 2
        return cls(
            run, sense, Borders(run, at, sure), Habits(run, sense), sequence.Numbers.of(run, at),
            place, replica, ring, partners(run),
        )  # fmt: skip

    # -- from rows to operations

    def collect(self) -> None:
        """The operations of every (rank, step), with what they give and take."""
        pieces = self.pieces = {
            (rank, step): _pieces(rows, borders)
            for rank in self.run.ranks
            if self.place.get(rank, -1) >= 0
            for step, rows, borders in self.borders.of_rank(rank)
        }
        for (rank, _), mine in pieces.items():
            self._learn(rank, mine)
            self.ahead.setdefault(rank, []).extend(self._forwards(mine))
        self.telling = self.habits.telling()
        made = {key: [self._operations(key[0], *piece) for piece in mine] for key, mine in pieces.items()}
        carries = {op.gives: op.kind for parts in made.values() for part in parts for op in part if op.gives >= 0}
        for key, parts in made.items():
            waiting: list[int] = []
            for (_, got, _), part in zip(pieces[key], parts, strict=True):
                waiting.extend(got)
                for op in part:
                    op.takes = next((r for r in waiting if carries.get(self.partner.get(r, -1)) == op.kind), -1)
                    if op.takes >= 0:
                        waiting.remove(op.takes)
            self.ops[key] = self._parted([op for part in parts for op in part])
            if parts[-1]:
                self.ops[key][-1].last = True

    def _learn(self, rank: int, pieces: list[Piece]) -> None:
        """Names of forwards and backwards. In a ring of more than two the peers tell them; else the first rank begins
        with a forward, and ends with a backward."""
        for i, (rows, got, gave) in enumerate(pieces):
            kind = 0
            if self.ring:
                kinds = {self._direction(row) for row in (*got, *gave)}
                kind = kinds.pop() if len(kinds) == 1 and got and gave else 0
            elif self.place[rank] == 0 and i == 0 and gave and not got:
                kind = F
            elif self.place[rank] == 0 and i == len(pieces) - 1 and got and not gave:
                kind = B
            if kind:
                self.habits.learn(rank, kind, rows)

    def _forwards(self, pieces: list[Piece]) -> list[int]:
        """The rows of each run of forwards beside a message: not of the optimizer, nor of what a step begins with."""
        out: list[int] = []
        for rows, got, gave in pieces:
            runs = _by_sense(self.sense[rows], rows)
            beside = [*(runs[:1] if got else []), *(runs[-1:] if gave else [])]
            out.extend(len(part) for sense, part in beside if sense == F)
        return out

    def _joined(self, rank: int, runs: list[tuple[int, Int]]) -> list[tuple[int, Int]]:
        """The little that a backward runs outside of autograd's engine (losses, hooks) is part of it."""
        out: list[tuple[int, Int]] = []
        # Of the larger half, since strays are among them, and not the largest, which the first step may have.
        usual = float(np.quantile(self.ahead[rank], 0.75)) if self.ahead[rank] else 0.0
        for kind, rows in runs:
            stray = kind == F and len(runs) > 1 and len(rows) < _STRAY * usual
            kind = B if stray else kind
            if out and kind == out[-1][0]:
                out[-1] = (kind, np.concatenate([out[-1][1], rows]))
            else:
                out.append((kind, rows))
        return out

    def _direction(self, row: int) -> int:
        """Forward when a message goes to, or comes from, the rank that is next or before in the ring."""
        spans = self.run.spans
        rank, peer = int(spans.rank[row]), int(spans.peer[row])
        after = self.place.get(peer, -1) == (self.place[rank] + 1) % (self.run.layout.stages or 1)
        return F if after == (spans.kind[row] == Kind.SEND) else B

    def _operations(self, rank: int, rows: Int, got: list[int], gave: list[int]) -> list[_Op]:
        """Of a piece between messages; several sends behind it are of its last operations, in their order."""
        begins = self._direction(got[-1]) if self.ring and got else 0
        ends = self._direction(gave[0]) if self.ring and gave else 0
        ops = [_Op(rank, kind, part) for kind, part in self._runs(rank, rows, begins, ends)]
        for op, row in zip(ops[-len(gave) :] if gave else [], gave, strict=False):
            op.gives = row
        return ops

    def _runs(self, rank: int, rows: Int, begins: int, ends: int) -> list[tuple[int, Int]]:
        """(F or B, rows) in turn; nothing where it cannot be told. begins, ends: what the messages around say, or 0."""
        sense = self.sense[rows]
        if len(rows) and (sense != 0).all():
            return self._joined(rank, _by_sense(sense, rows))
        telling = self.telling[self.run.spans.name[rows]]
        telling = telling[telling != 0]
        if len(telling):
            begins, ends = begins or int(telling[0]), ends or int(telling[-1])
        begins, ends = begins or ends, ends or begins
        if begins == ends:
            return [(begins, rows)] if begins else []
        cut = self.habits.split(rows, begins, rank)
        return [(begins, rows[:cut]), (ends, rows[cut:])]

    def _parted(self, ops: list[_Op]) -> list[_Op]:
        """Backwards of several micro-batches in a row, with no message between, parted by their sequence numbers."""
        forwards, back = [op.rows for op in ops if op.kind == F], [op.rows for op in ops if op.kind == B]
        if not back:
            return ops
        rows = np.concatenate(back)
        place = np.where(self.sense[rows] > 0, -1, sequence.forward_of(self.numbers, forwards, rows))
        places = iter(np.split(place, np.cumsum([len(rows) for rows in back])[:-1]))
        return [part for op in ops for part in (_cut(op, next(places)) if op.kind == B else [op])]

    # -- from operations to chains

    def chains(self) -> dict[tuple[int, int], _Chains]:
        """(replica, step) -> its chains, where most steps have whole ones, along the same places."""
        taker = {op.takes: op for ops in self.ops.values() for op in ops if op.takes >= 0}
        together: dict[tuple[int, int], list[_Op]] = {}
        seen = Counter(self.replica.values())
        for (rank, step), ops in self.ops.items():
            if seen[self.replica[rank]] == self.run.layout.stages:
                together.setdefault((self.replica[rank], step), []).extend(ops)
        self.steps = set(together)
        found = {key: chain for key, ops in together.items() if (chain := self._whole(ops, taker)) is not None}
        paths = Counter(tuple(self.place[rank] for rank in chain.path) for chain in found.values())
        if not paths:
            return {}
        usual, count = paths.most_common(1)[0]
        if count <= len(together) / 2:
            return {}
        return {key: c for key, c in found.items() if tuple(self.place[rank] for rank in c.path) == usual}

    def _whole(self, ops: list[_Op], taker: dict[int, _Op]) -> _Chains | None:
        forwards = self._followed([op for op in ops if op.kind == F], taker)
        backwards = self._followed([op for op in ops if op.kind == B], taker)
        if not forwards or len(forwards) != len(backwards):
            return None
        path = [op.rank for op in forwards[0]]
        if any([op.rank for op in chain] != path for chain in forwards):
            return None
        if any([op.rank for op in chain] != path[::-1] for chain in backwards):
            return None
        seen = Counter(path)
        if set(seen) != {op.rank for op in ops} or len(set(seen.values())) > 1:
            return None
        backwards = [chain[::-1] for chain in backwards]
        order, how = self._order(forwards, backwards)
        placed = [backwards[order.index(microbatch)] for microbatch in range(len(forwards))]
        return self._weighed(_Chains(forwards, placed, how), ops)

    def _followed(self, ops: list[_Op], taker: dict[int, _Op]) -> list[list[_Op]]:
        """The chains that begin with an operation that takes nothing; none where one breaks, or leaves some over."""
        out = []
        for head in ops:
            if head.takes >= 0 or head.gives < 0:
                continue
            chain = [head]
            while chain[-1].gives >= 0:
                after = taker.get(self.partner.get(chain[-1].gives, -1))
                if after is None or after.kind != head.kind:
                    return []
                chain.append(after)
            out.append(chain)
        passed = sum(op.takes >= 0 or op.gives >= 0 for op in ops)
        return out if sum(map(len, out)) == passed else []

    def _order(self, forwards: list[list[_Op]], backwards: list[list[_Op]]) -> tuple[list[int], str]:
        """The micro-batch of each backward chain, and what tells it. Chains are in the order of the stages.

        Without sequence numbers it is certain only where the last stage runs each backward before its next forward.
        """
        in_turn = list(range(len(backwards)))
        found = set()
        for stage in range(len(forwards[0])):
            rows = [[chain[stage].rows for chain in chains] for chains in (forwards, backwards)]
            order = sequence.pair(self.numbers, *rows)
            if order is not None:
                found.add(tuple(order))
        if found:
            return (list(found.pop()), _READ) if len(found) == 1 else (in_turn, "")
        ahead, back = (np.array([self._when(chain[-1]) for chain in chains]) for chains in (forwards, backwards))
        alone = np.searchsorted(ahead, back) == np.arange(len(back)) + 1
        return in_turn, _FOLLOWS if alone.all() else ""

    # -- weight gradients

    def _weighed(self, chains: _Chains, ops: list[_Op]) -> _Chains | None:
        """With stage and micro-batch of the weight gradients; None where it cannot be told which these are."""
        weights = [op for op in ops if op.kind == B and op.takes < 0 and op.gives < 0]
        usual = np.median([len(op.rows) for chain in chains.backwards for op in chain])
        if sum(len(op.rows) for op in weights) < usual * len(chains.forwards) / 2:
            return chains  # No schedule: a copy or two that autograd's engine makes at the end of a step.
        numbered = self._by_number(chains, weights)
        if numbered is not None:
            return replace(chains, weights=tuple(numbered), split=frozenset((s, i) for _, s, i in numbered))
        found = self._by_names(chains, weights)
        if found is None:
            return None
        m = len(chains.forwards)
        out: list[tuple[_Op, int, int]] = []
        split: set[tuple[int, int]] = set()
        for rank, held in Counter(chains.path).items():
            mine = sorted((op for op in found if op.rank == rank), key=self._when)
            stages = [stage for stage, of in enumerate(chains.path) if of == rank]
            # The first stage gives nothing: its weight gradients may follow at once, and make a whole backward.
            if len(mine) == m * (held - 1) and stages[0] == 0:
                stages = stages[1:]
            if len(mine) != m * len(stages):
                return None
            split.update((stage, i) for stage in stages for i in range(m))
            if held == 1:
                # In the order of the input gradients. Of several stages it is not known which is whose.
                begun = sorted(
                    (self._when(chain[stage]), i) for stage in stages for i, chain in enumerate(chains.backwards)
                )
                out.extend((op, stages[0], i) for op, (_, i) in zip(mine, begun, strict=True))
            else:
                out.extend((op, -1, -1) for op in mine)
        return replace(chains, weights=tuple(out), split=frozenset(split))

    def _when(self, op: _Op) -> int:
        return int(self.run.spans.start_ns[op.rows[0]])

    def _by_number(self, chains: _Chains, weights: list[_Op]) -> list[tuple[_Op, int, int]] | None:
        """Each with the forward that its sequence numbers name; None where one names none."""
        out = []
        for rank in {op.rank for op in weights}:
            ahead = sorted(
                (self._when(op), stage, microbatch)
                for microbatch, chain in enumerate(chains.forwards)
                for stage, op in enumerate(chain)
                if op.rank == rank
            )
            forwards = [chains.forwards[microbatch][stage].rows for _, stage, microbatch in ahead]
            mine = [op for op in weights if op.rank == rank]
            place = sequence.forward_of(self.numbers, forwards, np.concatenate([op.rows for op in mine]))
            for op, found in zip(mine, np.split(place, np.cumsum([len(op.rows) for op in mine])[:-1]), strict=True):
                which = sequence.most(found[found >= 0])
                if which < 0:
                    return None
                out.append((op, *ahead[which][1:]))
        return out

    def _by_names(self, chains: _Chains, weights: list[_Op]) -> list[_Op] | None:
        """All weight gradients, parted from each other and from the backwards that they stand beside with no message
        between, by their kernel names: None where these do not come out. On the first stage, which gives nothing, they
        stand behind a backward, elsewhere before it."""
        out = []
        words = {rank: self._shortest([op for op in weights if op.rank == rank]) for rank in set(chains.path)}
        beside: list[_Op] = []
        for stage in range(len(chains.path)):
            column = [chain[stage] for chain in chains.backwards]
            own = self._shortest(column)
            for chain, op in zip(chains.backwards, column, strict=True):
                n = len(own) if stage == 0 else len(op.rows) - len(own)
                first, second = replace(op, rows=op.rows[:n]), replace(op, rows=op.rows[n:])
                kept, rest = (first, second) if stage == 0 else (second, first)
                if self._names(kept) != own:
                    return None
                chain[stage] = replace(kept, last=False)
                beside.extend([replace(rest, takes=-1, gives=-1)] if len(rest.rows) else [])
        for op in (*weights, *beside):
            parts = self._repeated(op, words[op.rank])
            if parts is None:
                return None
            out.extend(parts)
        return out

    def _names(self, op: _Op) -> tuple[int, ...]:
        return tuple(self.run.spans.name[op.rows].tolist())

    def _shortest(self, ops: list[_Op]) -> tuple[int, ...]:
        """The shortest sequence of kernel names among `ops`."""
        return min((self._names(op) for op in ops), key=lambda word: (len(word), word), default=())

    def _repeated(self, op: _Op, word: tuple[int, ...]) -> list[_Op] | None:
        """`op` in as many parts as it repeats `word`: what is over only the last of a step may have."""
        n = max(len(word), 1)
        parts = [replace(op, rows=op.rows[i : i + n], last=False) for i in range(0, len(op.rows), n)]
        whole = [part for part in parts if self._names(part) == word]
        return whole if whole and (parts[: len(whole)] == whole and (op.last or len(whole) == len(parts))) else None

    # -- the result

    def labelled(self, found: dict[tuple[int, int], _Chains]) -> Run:
        run = self.run
        path = next(iter(found.values())).path
        chunks = len(path) // len(set(path))
        if chunks == 1 and not any(chains.weights for chains in found.values()):
            return run
        columns = {c: getattr(run.spans, c).astype(np.int64) for c in ("kind", "stage", "microbatch")}
        for op in (op for ops in self.ops.values() for op in ops):
            if self.sense[op.rows].all() and (op.kind == B or op.takes >= 0 or op.gives >= 0):
                columns["kind"][op.rows] = Kind.FORWARD if op.kind == F else Kind.BACKWARD
        for chains in found.values():
            self._write(chains, columns)
        layout = _placed(run.layout, [self.place[rank] for rank in path], chunks)
        run = replace(run, spans=run.spans.with_columns(**columns), layout=self._said(layout, found))
        return run.with_notices(*self._left_out(found))

    def _write(self, chains: _Chains, columns: dict[str, Int]) -> None:
        def write(rows: Int, kind: Kind, stage: int, microbatch: int) -> None:
            columns["kind"][rows], columns["stage"][rows], columns["microbatch"][rows] = kind, stage, microbatch

        for stage in range(len(chains.path)):
            usual = int(np.median([len(chain[stage].rows) for chain in chains.backwards]))
            for i, (ahead, back) in enumerate(zip(chains.forwards, chains.backwards, strict=True)):
                rows = back[stage].rows
                write(ahead[stage].rows, Kind.FORWARD, stage, i)
                if back[stage].last and not self.sense[rows].all():
                    # Clipping and the like after the last backward are of no micro-batch.
                    columns["kind"][rows[usual:]] = Kind.OTHER
                    rows = rows[:usual]
                kind = Kind.BACKWARD_INPUT if (stage, i) in chains.split else Kind.BACKWARD
                write(rows, kind, stage, i if chains.how else -1)
        for op, stage, microbatch in chains.weights:
            write(op.rows, Kind.BACKWARD_WEIGHT, stage, microbatch if chains.how else -1)

    def _said(self, layout: Layout, found: dict[tuple[int, int], _Chains]) -> Layout:
        """How each thing was inferred, and in how much of the run it came out."""
        of = f"of {len(self.steps)} (pipeline, step) pairs"
        kinds = "kernel names, learned from the first forward and the last backward of a step"
        if (self.sense < 0).any():
            kinds = "autograd engine calls around the launch"
        elif self.ring:
            kinds = "direction of the messages in the ring, and kernel names"
        orders = Counter(chains.how for chains in found.values())
        told = [f"backwards by {how} in {n} {of}" for how, n in sorted(orders.items()) if how]
        inferred = {
            **layout.inferred,
            "chunks": f"every micro-batch followed from message to message: whole chains in {len(found)} {of}",
            "kinds": kinds,
            "microbatch": "; ".join(["the k-th chain of messages of a step", *told]),
        }
        if any(chains.weights for chains in found.values()):
            inferred["weight gradients"] = (
                "backwards after their gradient was sent, that neither take nor give a message"
            )
        return replace(layout, inferred=inferred)

    def _left_out(self, found: dict[tuple[int, int], _Chains]) -> list[Notice]:
        out = []
        if lost := self.steps - found.keys():
            message = (
                f"in {len(lost)} (pipeline, step) pairs the messages of the micro-batches do not make whole chains; "
                f"their operations are not numbered (steps {_steps(lost)})"
            )
            out.append(Notice("microbatch-uncertain", message))
        if untold := {key for key, chains in found.items() if not chains.how}:
            message = (
                f"in {len(untold)} (pipeline, step) pairs several micro-batches wait for their backward, and no "
                f"sequence number tells whose turn it is: the backwards are not numbered (steps {_steps(untold)})"
            )
            out.append(Notice("microbatch-uncertain", message))
        return out

    # -- when it does not come out

    def contradicts(self) -> bool:
        """Whether what is sent contradicts one stage per GPU: there a forward gives to the next place, a backward to
        the one before; or, where these are not told apart, all that lies between the same messages is alike."""
        fits = [
            self.place[op.rank] + op.kind == goes
            for ops in self.ops.values()
            for op in ops
            if op.gives >= 0 and (goes := self._goes(op)) is not None
        ]
        return sum(fits) < _AGREE * len(fits) if fits else self._uneven()

    def _goes(self, op: _Op) -> int | None:
        """The place that `op` gives to. Where no peer is named, the first and the last have one neighbour only."""
        peer = int(self.run.spans.peer[op.gives])
        if peer >= 0:
            return self.place.get(peer)
        last = (self.run.layout.stages or 0) - 1
        return {0: 1, last: last - 1}.get(self.place[op.rank])

    def _uneven(self) -> bool:
        """Whether pieces of a rank that take from the same peer and give to the same peer differ in kernels."""
        like: dict[tuple[int, int, int], list[int]] = {}
        for (rank, _), pieces in self.pieces.items():
            for rows, got, gave in pieces[1:-1]:
                if got and gave:
                    peers = (int(self.run.spans.peer[got[-1]]), int(self.run.spans.peer[gave[0]]))
                    like.setdefault((rank, *peers), []).append(len(rows))
        off = [abs(n / float(np.median(counts)) - 1) > _ALIKE for counts in like.values() for n in counts]
        return sum(off) > (1 - _AGREE) * len(off)

    def refused(self) -> Run:
        """Without stages: what each rank says of itself is left."""
        message = (
            "what ranks send each other does not fit one stage per GPU, and the micro-batches cannot be followed from "
            "message to message; stages, chunks and micro-batches are not inferred"
        )
        layout = replace(self.run.layout, chunks=None, stage_rank={})
        return replace(self.run, layout=layout).with_notices(Notice("stages-unclear", message))


def _between_two(run: Run) -> Run:
    """In a pipeline of two ranks a message that names no peer goes to the other, or comes from it."""
    layout, spans = run.layout, run.spans
    if layout.stages != 2:
        return run
    of = {(pp, r): rank for rank, pp, r in zip(layout.ranks.tolist(), layout.pp, layout.replica, strict=True)}
    other = {rank: of.get((1 - pp, r), -1) for (pp, r), rank in of.items() if pp >= 0}
    peer = spans.peer.copy()
    rows = np.flatnonzero((peer < 0) & np.isin(spans.kind, (Kind.SEND, Kind.RECV)))
    peer[rows] = [other.get(rank, -1) for rank in spans.rank[rows].tolist()]
    return replace(run, spans=spans.with_columns(peer=peer))


def _steps(keys: set[tuple[int, int]]) -> str:
    steps = sorted({step for _, step in keys})
    return some(steps, 5)


def _placed(layout: Layout, path: list[int], chunks: int) -> Layout:
    """`path`: the old place of each stage's rank. The new place is that of its first stage."""
    new = {old: path.index(old) for old in set(path)}
    by_place = {
        (replica, pp): rank
        for rank, pp, replica in zip(layout.ranks.tolist(), layout.pp.tolist(), layout.replica.tolist(), strict=True)
    }
    replicas = sorted({replica for replica, _ in by_place if replica >= 0})
    return replace(
        layout,
        pp=np.array([new.get(pp, -1) for pp in layout.pp.tolist()], dtype=np.int64),
        chunks=chunks,
        stage_rank={
            (replica, stage): by_place[replica, old]
            for replica in replicas
            for stage, old in enumerate(path)
            if (replica, old) in by_place
        },
    )


def _by_sense(sense: NDArray[np.int8], rows: Int) -> list[tuple[int, Int]]:
    """(sense, rows) of each run of equal sense."""
    bounds = [0, *(np.flatnonzero(np.diff(sense)) + 1).tolist(), len(rows)]
    return [(int(sense[a]), rows[a:b]) for a, b in pairwise(bounds) if a < b]


def _cut(op: _Op, place: Int) -> list[_Op]:
    """`op` in parts of one forward each, where every forward's rows stand together; place: per row, -1 unknown."""
    known = np.flatnonzero(place >= 0)
    change = np.flatnonzero(np.diff(place[known])) + 1
    if len(change) == 0 or len(change) + 1 != len(np.unique(place[known])):
        return [op]
    parts = [replace(op, rows=rows, takes=-1, gives=-1) for rows in np.split(op.rows, known[change])]
    parts[0].takes, parts[-1].gives = op.takes, op.gives
    return parts


Piece = tuple[Int, list[int], list[int]]
"""Rows without a message between them, the receives before them and the sends after them."""


def _pieces(rows: Int, borders: list[Border]) -> list[Piece]:
    got: dict[int, list[int]] = {}
    gave: dict[int, list[int]] = {}
    for b in borders:
        (gave if b.sends else got).setdefault(b.position, []).append(b.row)
    edges = sorted({0, len(rows)} | {b.position for b in borders if b.position < len(rows)})
    return [(rows[a:b], got.get(a, []), gave.get(b, [])) for a, b in pairwise(edges)]
