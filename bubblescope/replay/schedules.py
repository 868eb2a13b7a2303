"""The library of pipeline schedules: names, placements, rules, orders, and what they need of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from bubblescope.errors import ScheduleError, UsageError
from bubblescope.model import Action, Kind
from bubblescope.replay import orders as _orders

Orders = Mapping[int, Sequence[Action]]
"""The actions of each pipeline position (0..p-1), in the order in which it runs them."""


@dataclass(frozen=True)
class Family:
    """What is fixed about a named schedule. `chunks`: the only v it knows, None = any from 2 on."""

    generator: _orders.Generator
    chunks: int | None
    v_shaped: bool = False


FAMILIES: dict[str, Family] = {
    "GPipe": Family(_orders.gpipe, 1),
    "1F1B": Family(_orders.one_f_one_b, 1),
    "LoopedBFS": Family(_orders.looped_bfs, None),
    "Interleaved1F1B": Family(_orders.interleaved_1f1b, None),
    "InterleavedZeroBubble": Family(_orders.interleaved_zero_bubble, None),
    "ZBVZeroBubble": Family(_orders.zbv, 2, v_shaped=True),
    "DualPipeV": Family(_orders.dualpipe_v, 2, v_shaped=True),
    "ZB-H1": Family(_orders.zb_h1, 1),
    "ZB-H2": Family(_orders.zb_h2, 1),
}
NAMES: tuple[str, ...] = tuple(FAMILIES)


def _folded(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "").strip()


MOST_OPERATIONS = 5_000_000
"""What a replay takes: about a kilobyte and five microseconds each."""

_BY_FOLDED = {_folded(name): name for name in (*NAMES, "custom")}


def canonical(name: str) -> str:
    """The one spelling of a schedule's name; case, ``-`` and ``_`` do not matter. Raises UsageError.

    >>> canonical("zb_h1"), canonical("gpipe"), canonical("interleaved-1f1b")
    ('ZB-H1', 'GPipe', 'Interleaved1F1B')
    """
    found = _BY_FOLDED.get(_folded(name)) if isinstance(name, str) else None
    if found is None:
        raise UsageError(f"'{name}' is not a schedule", hint=f"known schedules: {', '.join(NAMES)}, custom")
    return found


def default_chunks(name: str) -> int:
    """The v that a schedule takes when none is said: its only one, or 2."""
    return _family(name).chunks or 2


def _family(name: str) -> Family:
    known = canonical(name)
    if known == "custom":
        raise UsageError("a custom schedule cannot be generated", hint="give its order as a schedule CSV")
    return FAMILIES[known]


@dataclass(frozen=True)
class Schedule:
    """A complete order. `orders`: {position: actions}. `overlapped`: {position: indices i such that actions i and
    i+1 run as one operation}, for DualPipeV's forward-and-backward pairs; empty elsewhere."""

    name: str
    orders: dict[int, list[Action]]
    overlapped: dict[int, list[int]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        """GPUs in the pipeline, p."""
        return len(self.orders)

    @property
    def virtual_stages(self) -> int:
        """p·v."""
        return max((a.stage for order in self.orders.values() for a in order), default=-1) + 1

    @property
    def chunks(self) -> int:
        """The most virtual stages on one GPU, v."""
        return max((len({a.stage for a in order}) for order in self.orders.values()), default=0)

    @property
    def microbatches(self) -> int:
        return max((a.microbatch for order in self.orders.values() for a in order), default=-1) + 1


def make(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The named schedule for p `stages` (GPUs), m `microbatches` and v `chunks` per GPU (None = the usual one).

    Raises UsageError for an unknown name, ScheduleError where the schedule does not exist for these numbers.
    """
    known = canonical(name)
    family = _family(name)
    v = default_chunks(name) if chunks is None else chunks
    check_numbers(known, stages, microbatches, v)
    made = {rank: family.generator(stages, microbatches, v, rank) for rank in range(stages)}
    overlapped = {rank: pairs for rank, (_, pairs) in made.items() if pairs}
    return Schedule(known, {rank: order for rank, (order, _) in made.items()}, overlapped)


def generate(name: str, stages: int, microbatches: int, chunks: int | None = None) -> dict[int, list[Action]]:
    """The actions of every pipeline position; overlapped pairs stand one after the other (see `make`).

    >>> [str(action) for action in generate("1F1B", 2, 2)[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    return make(name, stages, microbatches, chunks).orders


def check_numbers(name: str, p: int, m: int, v: int) -> None:
    """Raise ScheduleError, with the rule, where the schedule does not exist for p, m, v."""
    known = canonical(name)
    for value, what in ((p, "stage"), (m, "micro-batch"), (v, "chunk")):
        if value < 1:
            raise ScheduleError(f"{known} needs at least one {what}, not {value}")
    if 2 * p * m * v > MOST_OPERATIONS:
        raise ScheduleError(
            f"{p:,} stages x {m:,} micro-batches x {v:,} chunks are at least {2 * p * m * v:,} operations; a replay "
            f"takes up to {MOST_OPERATIONS:,}",
            hint="the ratios hardly change beyond some hundred micro-batches: take fewer",
        )
    fixed = _family(name).chunks
    if fixed is not None and v != fixed:
        raise ScheduleError(f"{known} has exactly {fixed} chunk(s) per GPU, not {v}", hint=f"use --chunks {fixed}")
    if fixed is None and v < 2:
        raise ScheduleError(f"{known} needs at least 2 chunks per GPU, not {v}", hint="use --chunks 2 or more")
    if known in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, m // p)
        if m % rounds:
            raise ScheduleError(
                f"{known} needs micro-batches in equal rounds: {m} is not a multiple of {rounds} (= {m} // {p})",
                hint=f"use a multiple of the {p} stages, for example {-(-m // p) * p}",
            )
    if known == "DualPipeV" and m < 2 * p:
        raise ScheduleError(
            f"DualPipeV needs at least as many micro-batches as virtual stages: {m} < {2 * p}",
            hint=f"use --microbatches {2 * p} or more",
        )


def stage_of(name: str, rank: int, chunk: int, stages: int) -> int:
    """The virtual stage of a chunk: a loop (chunk·p + rank), or a V for ZBVZeroBubble and DualPipeV.

    >>> stage_of("Interleaved1F1B", 1, 1, 4), stage_of("ZBVZeroBubble", 1, 1, 4)
    (5, 6)
    """
    if _family(name).v_shaped and chunk % 2:
        return (chunk + 1) * stages - 1 - rank
    return chunk * stages + rank


def rank_of_stage(name: str, stage: int, stages: int) -> int:
    """The pipeline position that holds a virtual stage.

    >>> rank_of_stage("1F1B", 3, 4), rank_of_stage("Interleaved1F1B", 5, 4), rank_of_stage("DualPipeV", 6, 4)
    (3, 1, 1)
    """
    chunk, place = divmod(stage, stages)
    return stages - 1 - place if _family(name).v_shaped and chunk % 2 else place


def stage_ranks(orders: Orders) -> dict[int, int]:
    """{virtual stage: position} of any orders. Raises ScheduleError when a stage lives on two positions."""
    found: dict[int, int] = {}
    for rank, order in orders.items():
        for action in order:
            if found.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} runs on positions {found[action.stage]} and {rank} (at {action})",
                    hint="a stage's forward and backward must be on one GPU",
                )
    return found


def peak_activations(orders: Orders) -> list[int]:
    """Most forward activations alive at once, per position in ascending order; one unit = one chunk's (1/v GPU).

    The rule: a forward keeps its activations until its whole backward B, or, where the backward is split, until
    its weight gradient W: the input gradient I frees nothing, because W still needs a layer's inputs.

    >>> peak_activations(generate("1F1B", 4, 8)), peak_activations(generate("ZB-H2", 4, 8))
    ([4, 3, 2, 1], [7, 7, 7, 7])
    """
    peaks = []
    for _, order in sorted(orders.items()):
        alive = peak = 0
        for action in order:
            if action.kind == Kind.FORWARD:
                alive += 1
                peak = max(peak, alive)
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                alive -= 1
        peaks.append(peak)
    return peaks


@dataclass(frozen=True)
class Recognised:
    """What schedule an order looks like. confidence: 0..1. how: one sentence for the reader. exact: whether every
    place of every position agrees."""

    name: str
    confidence: float
    how: str
    exact: bool = False


def recognise(orders: Orders, stages: int | None = None, chunks: int | None = None) -> Recognised:
    """Which named schedule measured orders follow; "custom" when none fits better than 90 % of the places.

    orders: {position: actions}, of all positions or of some. stages, chunks: p and v where known; else p is one
    more than the highest position, and v the virtual stages per position. Confidence is the share of places (in
    each GPU's order) that hold the same action as the named schedule, over the positions seen; it is lowered where
    several schedules fit equally, and where positions are missing.
    """
    seen = {rank: list(order) for rank, order in orders.items() if len(order)}
    if not seen:
        return Recognised("custom", 0.0, "there are no forward or backward operations to go by")
    p = stages or max(seen) + 1
    v = chunks or max(1, round((max(a.stage for order in seen.values() for a in order) + 1) / p))
    m = max(a.microbatch for order in seen.values() for a in order) + 1
    scores = _scores(seen, p, m, v)
    if not scores:
        return Recognised("custom", 0.5, f"no named schedule exists for p={p} m={m} v={v}")
    best = max(score for score, _ in scores)
    equal = [name for score, name in scores if score == best]
    if best < 0.9:
        return Recognised(
            "custom", round(1 - best, 4), f"the nearest is {equal[0]}, equal in {best:.0%} of places"
        )
    sure = best / len(equal) if len(equal) > 1 else best
    sure *= 1.0 if len(seen) == p else 0.5 + 0.5 * len(seen) / p
    return Recognised(equal[0], round(sure, 4), _how(best, equal, len(seen), p), best == 1 and len(seen) == p)


def _how(best: float, equal: list[str], seen: int, p: int) -> str:
    places = "every place" if best == 1 else f"{best:.1%} of places"
    also = f"; {', '.join(equal[1:])} would look the same here" if len(equal) > 1 else ""
    return f"the order of {seen} of {p} GPUs equals {equal[0]} in {places}{also}"


def _scores(seen: Mapping[int, list[Action]], p: int, m: int, v: int) -> list[tuple[float, str]]:
    """(share of equal places, name) of every schedule that exists for these numbers."""
    scores = []
    for name in NAMES:
        try:
            wanted = _cached(name, p, m, v)
        except ScheduleError:
            continue
        same = sum(
            a == b for rank, order in seen.items() for a, b in zip(order, wanted.get(rank, ()), strict=False)
        )
        places = sum(max(len(order), len(wanted.get(rank, ()))) for rank, order in seen.items())
        scores.append((same / places, name))
    return scores


@lru_cache(maxsize=64)
def _cached(name: str, p: int, m: int, v: int) -> dict[int, list[Action]]:
    return generate(name, p, m, v)
