"""How each named schedule orders the operations of one GPU. Pure order: no times, no communication.

Every generator makes *tokens*, (chunk, kind) without a micro-batch; `_numbered` then counts: the n-th forward of a
chunk is micro-batch n. Sources are named at each function.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from bubblescope.model import Action, Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
Token = tuple[int, Kind]
Order = tuple[list[Action], list[int]]
"""The actions of one GPU, and the indices i at which actions i and i+1 run overlapped, as one operation."""


def gpipe(p: int, m: int, v: int, rank: int) -> Order:
    """All forwards, then all backwards (GPipe, NeurIPS'19); v is 1."""
    return [Action(rank, kind, i) for kind in (F, B) for i in range(m)], []


def looped_bfs(p: int, m: int, v: int, rank: int) -> Order:
    """All micro-batches of a chunk before the next chunk, backwards in reverse (Lamy-Poirier, MLSys'23)."""
    stages = range(rank, p * v, p)
    forwards = [Action(stage, F, i) for stage in stages for i in range(m)]
    backwards = [Action(stage, B, i) for stage in reversed(stages) for i in reversed(range(m))]
    return forwards + backwards, []


def one_f_one_b(p: int, m: int, v: int, rank: int) -> Order:
    """Warm up with one forward per GPU below, then one backward per forward (PipeDream-Flush); v is 1."""
    return _alternating(p, m, 1, rank, hop=1, delay=None)


def interleaved_1f1b(p: int, m: int, v: int, rank: int) -> Order:
    """1F1B over v chunks, depth first in rounds of about p micro-batches (Megatron-LM, SC'21 §2.2)."""
    return _alternating(p, m, v, rank, hop=2, delay=None)


def interleaved_zero_bubble(p: int, m: int, v: int, rank: int) -> Order:
    """ZB-H1 over v chunks: weight gradients lag by one operation per GPU above (torch's reading of ZB1P)."""
    return _alternating(p, m, v, rank, hop=1, delay=rank)


def zb_h1(p: int, m: int, v: int, rank: int) -> Order:
    """1F1B's warm-up; the weight gradient lags by `rank` micro-batches (Zero Bubble, ICLR'24 §2.2); v is 1."""
    return _alternating(p, m, 1, rank, hop=1, delay=rank)


def zb_h2(p: int, m: int, v: int, rank: int) -> Order:
    """Twice 1F1B's warm-up, twice the lag: a parallelogram without bubbles (same, §2.3); v is 1."""
    return _alternating(p, m, 1, rank, hop=2, delay=2 * rank)


def _alternating(p: int, m: int, v: int, rank: int, *, hop: int, delay: int | None) -> Order:
    """Forwards alternate with backwards after (v-1) rounds and `hop` forwards per GPU below have gone ahead.

    delay: None = whole backwards; else input gradients, each followed by the weight gradient of `delay` turns ago.
    """
    per_round = m // max(1, m // p)
    total = m * v

    def action(turn: int, kind: Kind) -> Action:
        chunk = turn // per_round % v
        if kind != F:
            chunk = v - 1 - chunk
        microbatch = turn // (per_round * v) * per_round + turn % per_round
        return Action(chunk * p + rank, kind, microbatch)

    ahead = min(total, (v - 1) * per_round + hop * (p - 1 - rank))
    order = [action(turn, F) for turn in range(ahead)]
    for turn in range(total):
        if ahead + turn < total:
            order.append(action(ahead + turn, F))
        order.append(action(turn, B if delay is None else I))
        if delay is not None and turn >= delay:
            order.append(action(turn - delay, W))
    if delay is not None:
        order += [action(turn, W) for turn in range(max(0, total - delay), total)]
    return order, []


def zbv(p: int, m: int, v: int, rank: int) -> Order:
    """ZB-V (Zero Bubble, ICLR'24 §6): two chunks in a V, no bubble when F = I = W; v is 2.

    Made for at least 2p-1 micro-batches; with fewer, the superfluous ones are left out.
    """
    made = max(2 * p - 1, m)
    late = made - (2 * p - 1 - rank)  # forwards of chunk 0 that are left after the warm-up
    tokens = [(0, F)] * (2 * (p - rank) - 1)
    tokens += [(1, F), (0, F)] * rank
    tokens += [(1, F), (1, I), (1, W)] * (p - rank)
    backward0, both1 = [(0, I), (0, W)], [(1, F), (1, I), (1, W)]
    for turn in range(made - p):
        tokens += [(0, F)] * (turn < late) + backward0 + both1
    tokens += [(0, I), (1, I)] * rank
    tokens += [(0, I), (0, W)] * (p - rank)
    tokens += [(1, W)] * rank + [(0, W)] * rank
    actions = _numbered(tokens, _v_stages(p, rank))
    return [action for action in actions if action.microbatch < m], []


def dualpipe_v(p: int, m: int, v: int, rank: int) -> Order:
    """DualPipeV (DeepSeek's DualPipe cut in half; two chunks in a V): forwards overlap backwards; v is 2."""
    below = p - 1 - rank
    tokens: list[Token] = [(0, F)] * (2 * below)
    tokens += [(0, F), (1, F)] * (rank + 1)
    tokens += [(1, I), (1, W), (1, F)] * below
    pairs: list[int] = []

    def overlap(forward_chunk: int) -> None:
        pairs.append(len(tokens))
        tokens.extend([(forward_chunk, F), (1 - forward_chunk, B)])

    for turn in range(m - 2 * p + rank + 1):
        if turn == 0 and rank == p - 1:
            tokens += [(0, F), (1, B)]  # not overlapped: the first backward of all should not wait
        else:
            overlap(0)
        overlap(1)
    for _ in range(below):
        tokens.append((1, B))
        overlap(1)
    tokens += _dualpipe_tail(p, rank)
    return _numbered(tokens, _v_stages(p, rank)), pairs


def _dualpipe_tail(p: int, rank: int) -> Iterator[Token]:
    """The last backwards. From the middle on they are split, and the weight gradients fill the drain."""
    last = 2 * (rank + 1)
    split_from = 2 * ((rank + 1) // 2) + (1 - rank % 2)
    for turn in range(last):
        yield 1 - turn % 2, B if turn < split_from else I
    for _ in range(p - 1 - rank):
        yield -1, W
        yield 0, I
    for _ in range(rank + 1):
        yield -1, W


def _v_stages(p: int, rank: int) -> tuple[int, int]:
    return rank, 2 * p - 1 - rank


def _numbered(tokens: Iterable[Token], stages: tuple[int, ...]) -> list[Action]:
    """Count micro-batches per chunk. A weight gradient takes the oldest input gradient still without one: of its
    own chunk, or, for chunk -1, of any; where there is none it is left out."""
    done: Counter[tuple[int, bool]] = Counter()
    pending: deque[tuple[int, int]] = deque()
    actions: list[Action] = []
    for chunk, kind in tokens:
        if kind == W:
            match = next((entry for entry in pending if chunk in (-1, entry[0])), None)
            if match is not None:
                pending.remove(match)
                actions.append(Action(stages[match[0]], W, match[1]))
            continue
        microbatch = done[chunk, kind == F]
        done[chunk, kind == F] += 1
        actions.append(Action(stages[chunk], kind, microbatch))
        if kind == I:
            pending.append((chunk, microbatch))
    return actions


Generator = Callable[[int, int, int, int], Order]
