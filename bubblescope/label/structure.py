"""Which rank is which stage: from labelled stages, from who sends to whom, or from process-group members.

SendRecv kernels are no proof of a pipeline: messages must form chains (or, with wrap-around, rings) in which
the first message of a step runs forward. A chain may go on beyond a rank that has no trace: how far, only the members
of its communicator or another pipeline of the job can say.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from bubblescope.algebra import intervals
from bubblescope.label.evidence import Int, issue_time
from bubblescope.model import PIPELINE_KINDS, Kind, Lane, Layout, Notice, Run
from bubblescope.model.names import communicator
from bubblescope.model.notice import some

_PP_WORDS = {"pp", "pipe", "pipeline"}
"""In the description of a communicator that is a pipeline's."""
_OPEN = "stages-open"
_INNER = 1.5
"""So many times the messages of the first stage, and a stage is not the last."""


@dataclass(frozen=True)
class Chains:
    """Pipelines found: the ranks of each in stage order, -1 for one that is only known to be there. ring: the last rank
    sends to the first as well."""

    members: tuple[tuple[int, ...], ...]
    how: str
    ring: bool = False


def stage_of_rank(run: Run, rank: int) -> int:
    """The only stage of `rank`; -1 when it has several, or none is known."""
    if run.layout.chunks != 1:
        return -1
    return next((stage for (_, stage), holder in run.layout.stage_rank.items() if holder == rank), -1)


def rank_of_stage(run: Run, rank: int, stage: int) -> int:
    """The rank that holds `stage` in the pipeline of `rank`; -1 when not known."""
    layout = run.layout
    try:
        replica = int(layout.replica[layout.index_of(rank)])
    except KeyError:
        return -1
    return layout.stage_rank.get((replica, stage), -1)


def label(run: Run) -> Run:
    """Fill `Layout`: pp, replica, stages, chunks, stage_rank. Leaves it as it is where nothing is proven."""
    if run.layout.stage_rank or len(run.layout.ranks) == 0:
        return run
    stages = _labelled_stages(run)
    if stages:
        layout, said = _counted(run, _from_stages(run.layout, stages))
        return replace(run, layout=layout).with_notices(*said)
    found, notice = find_chains(run)
    run = run.with_notices(*_mute(run), *([notice] if notice is not None else []))
    return run if found is None else replace(run, layout=_from_chains(run.layout, found))


def _labelled_stages(run: Run) -> dict[int, tuple[int, ...]]:
    """Rank -> its stages, where ranges or recorded operations name them."""
    spans = run.spans
    named = np.flatnonzero((spans.stage >= 0) & np.isin(spans.kind, PIPELINE_KINDS))
    rows_of = intervals.split_by(named, spans.rank)
    return {rank: tuple(np.unique(spans.stage[rows]).tolist()) for rank, rows in rows_of.items()}


def _from_stages(layout: Layout, stages: dict[int, tuple[int, ...]]) -> Layout:
    """Ranks with the same stages are replicas of each other, numbered by ascending rank."""
    sets = sorted(set(stages.values()))
    chunks = Counter(len(held) for held in stages.values()).most_common(1)[0][0]
    total = max(max(held) for held in sets) + 1
    p = _count(sets, chunks, total)
    # The first stage of a rank is its place, also where other ranks have no trace; not so where chunks lie otherwise.
    firsts = [held[0] for held in sets]
    in_turn = len(set(firsts)) == len(sets) and firsts[-1] < (p or total)
    position = dict(zip(sets, firsts if in_turn else range(len(sets)), strict=True))
    seen: Counter[tuple[int, ...]] = Counter()
    pp = np.full(len(layout.ranks), -1, dtype=np.int64)
    replica = pp.copy()
    stage_rank: dict[tuple[int, int], int] = {}
    for i, rank in enumerate(layout.ranks.tolist()):
        held = stages.get(rank)
        if held is None:
            continue
        pp[i], replica[i] = position[held], seen[held]
        seen[held] += 1
        for stage in held:
            stage_rank[(int(replica[i]), stage)] = rank
    return replace(
        layout,
        pp=pp,
        replica=replica,
        stages=p,
        chunks=chunks,
        data_parallel=max(seen.values()),
        stage_rank=stage_rank,
        inferred={**layout.inferred, "stages": "stage numbers in the ranges"},
    )


def _count(sets: list[tuple[int, ...]], chunks: int, total: int) -> int | None:
    """GPUs of a pipeline whose ranks hold these stages, of which the last is `total` - 1. With several stages each and
    ranks without a trace it is their distance, where that is the same on several ranks; else None.

    >>> _count([(0, 4), (1, 5)], 2, 6), _count([(0, 7), (1, 6)], 2, 8), _count([(0,), (3,)], 1, 4)
    (4, None, 4)
    """
    if chunks == 1 or len({stage for held in sets for stage in held}) == total:
        return max(len(sets), -(-total // chunks))
    apart = {b - a for held in sets for a, b in pairwise(held)}
    return max(apart) if len(apart) == 1 and max(apart) >= len(sets) > 1 else None


def _counted(run: Run, layout: Layout) -> tuple[Layout, list[Notice]]:
    """`layout`, made from ranges, with the stages of ranks without a trace, where the messages tell them; no number of
    stages, and a Notice, where there may be more than are named."""
    if layout.chunks == 1 and layout.missing_ranks:
        found, doubt = find_chains(run)
        if found is not None and doubt is None and not found.ring:
            chained = _from_chains(run.layout, found)
            named = layout.pp >= 0
            agree = (chained.pp[named] == layout.pp[named]).all()
            if agree and layout.stage_rank.items() <= chained.stage_rank.items():
                return replace(chained, inferred=layout.inferred), []
    if layout.chunks != 1 and (layout.stages or 1) > 1:
        return layout, []
    last = max(stage for _, stage in layout.stage_rank)
    holders = [rank for (_, stage), rank in layout.stage_rank.items() if stage == last]
    if layout.stages is not None and not _goes_on(run, layout, holders):
        return layout, []
    message = (
        f"the last stage that a range names is {last} (rank {some(holders)}), and the pipeline may go on beyond it, on "
        "ranks without a trace: the number of stages is not known"
    )
    return replace(layout, stages=None, data_parallel=None), [Notice(_OPEN, message)]


def _goes_on(run: Run, layout: Layout, last: list[int]) -> bool:
    """Whether the ranks that hold the last stage with a name exchange messages with a rank without a trace. Where they
    do not say with whom, an inner stage is known by its number of messages, twice that of the first.

    Example: rank 0 alone, with ranges of stage 0 and SendRecv kernels that name no peer: a pipeline of one stage has
    nobody to send to.
    """
    spans = run.spans
    if layout.world_size is not None and not layout.missing_ranks:
        return False
    p2p = np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & np.isin(spans.lane, (Lane.COMM, Lane.POST))
    talk = p2p | ((spans.lane == Lane.COMM) & (spans.kind == Kind.OTHER))
    peers = np.unique(spans.peer[talk & np.isin(spans.rank, last)])
    if np.isin(peers[peers >= 0], run.layout.ranks, invert=True).any():
        return True
    if not (peers < 0).any():
        return False
    counts = Counter(spans.rank[talk].tolist())
    first = [counts[rank] for (_, stage), rank in layout.stage_rank.items() if stage == 0]
    return layout.stages == 1 or not first or max(counts[rank] for rank in last) > _INNER * max(first)


def _from_chains(layout: Layout, found: Chains) -> Layout:
    known = all(chain and min(chain) >= 0 for chain in found.members)
    place = {rank: (r, s) for r, chain in enumerate(found.members) for s, rank in enumerate(chain) if rank >= 0}
    ranks = layout.ranks.tolist()
    pp = np.array([place.get(rank, (-1, -1))[1] for rank in ranks], dtype=np.int64)
    replica = np.array([place.get(rank, (-1, -1))[0] for rank in ranks], dtype=np.int64)
    stage_rank = {} if found.ring else {(r, s): rank for rank, (r, s) in place.items()}
    return replace(
        layout,
        pp=pp,
        replica=replica,
        stages=max(len(chain) for chain in found.members),
        chunks=None if found.ring else 1,
        data_parallel=len(found.members) if known and set(layout.missing_ranks) <= place.keys() else None,
        stage_rank=stage_rank,
        inferred={**layout.inferred, "stages": found.how},
    )


def place_chunks(run: Run) -> Run:
    """Stages of operations that name their chunk only (``F3.1.0``), once the ranks of each pipeline are known.

    Chunk c of rank d is stage c·p + d. Two chunks may also lie as a V (stage 2p-1-d): then the last rank passes
    on to itself, and sends two messages per micro-batch instead of three.
    """
    spans, layout = run.spans, run.layout
    rows = (spans.chunk >= 0) & (spans.stage < 0) & np.isin(spans.kind, PIPELINE_KINDS)
    if not rows.any() or layout.stages is None or not np.any(layout.pp >= 0):
        return run
    p, chunks = layout.stages, int(spans.chunk[rows].max()) + 1
    v_shaped = chunks == 2 and _last_rank_keeps(run, p)
    stage = spans.stage.astype(np.int64)
    stage_rank: dict[tuple[int, int], int] = {}
    for rank, pp, replica in zip(layout.ranks.tolist(), layout.pp.tolist(), layout.replica.tolist(), strict=True):
        if pp < 0:
            continue
        held = np.array([2 * p - 1 - pp if v_shaped and c else c * p + pp for c in range(chunks)])
        mine = rows & (spans.rank == rank)
        stage[mine] = held[spans.chunk[mine]]
        stage_rank |= {(replica, int(s)): rank for s in held}
    how = f"{chunks} chunks in the ranges{', as a V' if v_shaped else ''}"
    layout = replace(layout, chunks=chunks, stage_rank=stage_rank, inferred={**layout.inferred, "chunks": how})
    return replace(run, spans=spans.with_columns(stage=stage), layout=layout)


def _last_rank_keeps(run: Run, p: int) -> bool:
    """Whether the last rank of a pipeline sends less than 2.5 messages per micro-batch."""
    spans, layout = run.spans, run.layout
    last = layout.ranks[layout.pp == p - 1]
    mine = np.isin(spans.rank, last)
    sends = int(np.sum(mine & (spans.kind == Kind.SEND) & np.isin(spans.lane, (Lane.COMM, Lane.POST))))
    done = mine & (spans.lane == Lane.COMPUTE) & (spans.kind == Kind.FORWARD) & (spans.microbatch >= 0)
    columns = np.stack([spans.rank[done], spans.step[done], spans.microbatch[done]])
    return 0 < sends < 2.5 * int(np.unique(columns, axis=1).shape[1])


def _mute(run: Run) -> list[Notice]:
    """A Notice about SendRecv kernels that say neither direction nor peer."""
    spans = run.spans
    mute = int(np.sum((spans.lane == Lane.COMM) & (spans.kind == Kind.OTHER)))
    if not mute:
        return []
    message = (
        f"{mute} communication kernels say neither direction nor peer (no NCCL metadata, no operation around their "
        "launch); they count as exposed communication, and no message is matched through them"
    )
    return [Notice("p2p-without-peers", message)]


# --- from messages -------------------------------------------------------------------------------------------


def find_chains(run: Run) -> tuple[Chains | None, Notice | None]:
    """Pipelines as the P2P messages show them, and a Notice where messages show something else."""
    messages = _messages(run)
    if len(messages) == 0:
        return None, None
    if np.all(run.spans.peer[messages] < 0):
        return _chain_by_counts(run, messages), None
    votes = _first_direction(run, messages)
    follows: dict[int, set[int]] = {}
    for (a, b), balance in votes.items():
        if balance > 0:
            follows.setdefault(a, set()).add(b)
            follows.setdefault(b, set())
    before = Counter(b for after in follows.values() for b in after)
    undecided = [pair for pair, balance in votes.items() if balance == 0]
    if undecided or any(len(after) > 1 for after in follows.values()) or any(n > 1 for n in before.values()):
        ranks = {rank for pair in votes for rank in pair}
        message = (
            f"point-to-point messages between {len(ranks)} ranks do not form a pipeline (a rank has several "
            "successors, or the direction is not clear); stages are not inferred"
        )
        return None, Notice("no-pipeline-found", message)
    found = _walk(run, follows, before)
    return (found, None) if found is None or found.ring else _completed(run, found)


def _messages(run: Run) -> Int:
    """P2P rows that show when an operation began, in issue order of each rank."""
    spans = run.spans
    rows = np.flatnonzero(np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & np.isin(spans.lane, (Lane.COMM, Lane.POST)))
    at = issue_time(run)
    result: Int = rows[np.lexsort((at[rows], spans.rank[rows]))]
    return result


def _first_direction(run: Run, messages: Int) -> dict[tuple[int, int], int]:
    """(a, b) -> votes that a comes before b: the first message of a step between two stages is an activation.

    Only pairs with a < b or whose balance is positive are kept, so each pair appears once.
    """
    spans = run.spans
    votes: Counter[tuple[int, int]] = Counter()
    seen: set[tuple[int, int, int]] = set()
    for row in messages.tolist():
        rank, peer, step = int(spans.rank[row]), int(spans.peer[row]), int(spans.step[row])
        if peer < 0 or peer == rank or (rank, peer, step) in seen or step < 0:
            continue
        seen.add((rank, peer, step))
        votes[(rank, peer) if spans.kind[row] == Kind.SEND else (peer, rank)] += 1
    out: dict[tuple[int, int], int] = {}
    for a, b in votes:
        balance = votes[(a, b)] - votes[(b, a)]
        if balance > 0 or (balance == 0 and a < b):
            out[(a, b)] = balance
    return out


def _walk(run: Run, follows: dict[int, set[int]], before: Counter[int]) -> Chains | None:
    chains: list[tuple[int, ...]] = []
    ring = False
    left = set(follows)
    for head in sorted(r for r in follows if not before[r]):
        chains.append(_chain(head, follows))
        left -= set(chains[-1])
    while left:
        ring = True
        cycle = _chain(min(left), follows)
        left -= set(cycle)
        start = cycle.index(_first_to_compute(run, cycle))
        chains.append((*cycle[start:], *cycle[:start]))
    chains = [c for c in chains if len(c) > 1]
    how = "who sends to whom; the first message of a step runs forward"
    return Chains(tuple(sorted(chains)), how, ring) if chains else None


def _chain(head: int, follows: dict[int, set[int]]) -> tuple[int, ...]:
    out = [head]
    while follows[out[-1]]:
        (after,) = follows[out[-1]]
        if after in out:
            break
        out.append(after)
    return tuple(out)


def _first_to_compute(run: Run, cycle: tuple[int, ...]) -> int:
    """Of a ring, the rank that computes most before its first receive ends: only stage 0 needs no input."""
    spans = run.spans
    amount: dict[int, int] = {}
    for rank in cycle:
        rows = spans.rank == rank
        received = spans.end_ns[rows & (spans.kind == Kind.RECV) & (spans.lane == Lane.COMM)]
        until = int(received.min()) if len(received) else 0
        busy = rows & (spans.lane == Lane.COMPUTE) & (spans.end_ns <= until)
        amount[rank] = int(spans.duration_ns[busy].sum())
    return max(cycle, key=lambda r: (amount[r], -r))


def _completed(run: Run, found: Chains) -> tuple[Chains, Notice | None]:
    """Chains as long as they are known to be, and a Notice where this is not known of any.

    Example: of ranks 0 to 3 only 3 has a trace, and it talks to 2. Is their communicator [0, 1, 2, 3] a pipeline's, 3
    is stage 3 of 4; else the chain (2, 3) is all there is, and may go on before 2.
    """
    groups = _pipeline_groups(run)
    chains = list(dict.fromkeys(_within_group(run, chain, groups) for chain in found.members))
    open_ = _open_ends(run, chains)
    whole = [c for c in chains if not any(open_[c]) or set(c) in map(set, groups)]
    if len(whole) == len(chains):
        return replace(found, members=tuple(chains)), None
    lengths = {len(chain) for chain in whole}
    if len(lengths) == 1:
        (length,) = lengths
        return replace(found, members=tuple(_of_length(chain, *open_[chain], length) for chain in chains)), None
    ends = sorted({chain[k] for chain in chains for k in (0, -1) if open_[chain][k]})
    message = (
        f"no trace of rank {', '.join(map(str, ends[:8]))} is there, and the pipeline may go on beyond: the number of "
        "stages is not known, nor the stage of a rank that comes after it"
    )
    return replace(found, members=tuple(chains)), Notice(_OPEN, message)


def _open_ends(run: Run, chains: list[tuple[int, ...]]) -> dict[tuple[int, ...], tuple[bool, bool]]:
    """Of each chain whether it may go on before its first and after its last rank: these have no trace, and there is a
    rank without one to go on with."""
    seen = set(run.ranks)
    placed = {rank for chain in chains for rank in chain}
    others = run.layout.world_size is None or bool(set(run.layout.missing_ranks) - placed)
    heads, tails = ({chain for chain in chains if chain[k] not in seen} for k in (0, -1))
    return {
        c: (c in heads and (others or bool(tails - {c})), c in tails and (others or bool(heads - {c}))) for c in chains
    }


def _pipeline_groups(run: Run) -> list[tuple[int, ...]]:
    """Members of the communicators of messages that are a pipeline's: described as one, or of more than two ranks (two
    may be one for each pair) and not all of the job (the default one is everybody's)."""
    spans = run.spans
    described: dict[str, tuple[str, tuple[int, ...]]] = run.source.details.get("groups", {})
    rows = np.isin(spans.kind, (Kind.SEND, Kind.RECV)) & (spans.group > 0)
    out = []
    for group in np.unique(spans.group[rows]).tolist():
        name, members = communicator(run.names[group])
        words = set(re.split("[^a-z]+", described.get(name, ("", ()))[0].lower()))
        if members and (words & _PP_WORDS or 2 < len(members) < (run.layout.world_size or 0)):
            out.append(members)
    return out


def _within_group(run: Run, chain: tuple[int, ...], groups: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The members of the communicator that `chain` is a part of, in their order or turned round; else `chain`."""
    seen = set(run.ranks)
    for group in groups:
        for whole in (group, group[::-1]):
            at = whole.index(chain[0]) if chain[0] in whole else len(whole)
            ends_fit = all(chain[k] not in seen or chain[k] == whole[k] for k in (0, -1))
            if whole[at : at + len(chain)] == chain and ends_fit:
                return whole
    return chain


def _of_length(chain: tuple[int, ...], before: bool, after: bool, length: int) -> tuple[int, ...]:
    """`chain` with unknown ranks at its open end; empty where both ends are open, or it is longer."""
    more = (-1,) * (length - len(chain))
    if len(chain) + len(more) != length or (more and before == after):
        return ()
    return (*more, *chain) if before else (*chain, *more)


def forget_open(run: Run) -> Run:
    """Stages that were counted from a rank which may not be the first, and the number of stages, where `find_chains`
    says that chains may go on. To tell forward from backward their order was enough."""
    if run.layout.stages is None or not any(notice.code == _OPEN for notice in run.notices):
        return run
    layout, spans = run.layout, run.spans
    seen = set(run.ranks)
    begun = {replica for (replica, stage), rank in layout.stage_rank.items() if stage == 0 and rank in seen}
    known = np.isin(layout.replica, list(begun))
    layout = replace(
        layout,
        pp=np.where(known, layout.pp, -1),
        stages=None,
        data_parallel=None,
        stage_rank={key: rank for key, rank in layout.stage_rank.items() if key[0] in begun},
        inferred={what: how for what, how in layout.inferred.items() if what != "stages"},
    )
    stage = np.where(np.isin(spans.rank, layout.ranks[known]), spans.stage, -1)
    return replace(run, spans=spans.with_columns(stage=stage), layout=layout)


def _chain_by_counts(run: Run, messages: Int) -> Chains | None:
    """Messages without peers (gloo): pipelines in rank order, if the counts and first messages fit.

    Stage 0 sends first, all others receive first, so those that send first are the heads. With heads 0, p, 2p, …
    neighbours are consecutive ranks; with heads 0 … k-1 they are k ranks apart (data parallelism counts faster). In a
    chain the inner ranks exchange twice what the ends do.
    """
    spans = run.spans
    ranks = run.layout.ranks.tolist()
    counts = Counter(spans.rank[messages].tolist())
    first = {int(spans.rank[r]): int(spans.kind[r]) for r in messages[::-1].tolist()}
    if len(ranks) < 2 or set(counts) != set(ranks) or run.layout.missing_ranks:
        return None
    heads = [i for i, rank in enumerate(ranks) if first[rank] == Kind.SEND]
    chains = _in_rank_order(ranks, heads)
    if not chains or not all(_fits_chain(counts, chain) for chain in chains):
        return None
    how = "rank order; the message counts fit one chain"
    return Chains(chains, how if len(chains) == 1 else f"rank order; the message counts fit {len(chains)} chains")


def _in_rank_order(ranks: list[int], heads: list[int]) -> tuple[tuple[int, ...], ...]:
    """Equal chains from the places of their heads; none where these are neither evenly apart nor the first ranks."""
    k = len(heads)
    if not k or len(ranks) % k or len(ranks) // k < 2:
        return ()
    p = len(ranks) // k
    if heads == list(range(0, len(ranks), p)):
        return tuple(tuple(ranks[h : h + p]) for h in heads)
    return tuple(tuple(ranks[h::k]) for h in heads) if heads == list(range(k)) else ()


def _fits_chain(counts: Counter[int], chain: tuple[int, ...]) -> bool:
    ends = {counts[chain[0]], counts[chain[-1]]}
    return len(ends) == 1 and {counts[r] for r in chain[1:-1]} <= {2 * counts[chain[0]]}
