"""What the papers say a schedule costs, as formulas: the replay's oracle, and the answer from one rank alone."""

from __future__ import annotations

from dataclasses import dataclass

from bubblescope.replay.schedules import canonical


@dataclass(frozen=True)
class ClosedForm:
    """Cost of equal stages, in the unit of the times given. bubble = makespan - useful, per GPU; own_bubble is the
    bubble within a GPU's own first start and last end (Zero Bubble §5.3), None where no formula is known.

    useful: m·v·(F + I + W), one GPU's work. source: where the formula stands.
    """

    makespan: float
    useful: float
    own_bubble: float | None
    source: str

    @property
    def bubble(self) -> float:
        return self.makespan - self.useful

    @property
    def fraction(self) -> float:
        """bubble / makespan."""
        return self.bubble / self.makespan

    @property
    def over_ideal(self) -> float:
        """bubble / useful."""
        return self.bubble / self.useful

    @property
    def own_span_rate(self) -> float | None:
        return None if self.own_bubble is None else self.own_bubble / (self.useful + self.own_bubble)


HOLDS = {
    "LoopedBFS": "m ≥ p",
    "Interleaved1F1B": "p divides m",
    "ZB-H1": "m ≥ p, W ≤ F and W ≤ I",
    "ZB-H2": "m ≥ 2p - 1, W ≤ F and 2W ≤ F + I",
    "ZBVZeroBubble": "m ≥ 2p and F = I = W",
}
"""When the formula of a schedule holds, of p stages with m micro-batches, without latency. GPipe's and 1F1B's always
do; for those that are not here none is known."""


def closed_form(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    *,
    forward: float,
    input_grad: float,
    weight_grad: float,
    comm: float = 0.0,
) -> ClosedForm | None:
    """The formula for p equal stages, or None where none is known to hold for these numbers.

    forward, input_grad, weight_grad are F, I, W of one chunk operation; comm is the latency c of one hop.

    >>> form = closed_form("1F1B", 4, 8, forward=1, input_grad=1, weight_grad=1, comm=0.1)
    >>> form.makespan, closed_form("DualPipeV", 4, 8, 2, forward=1, input_grad=1, weight_grad=1) is None
    (34.6, True)
    """
    p, m, v, f, i, w, c = stages, microbatches, chunks, forward, input_grad, weight_grad, comm
    known = canonical(name)
    useful = m * v * (f + i + w)
    bubble = (p - 1) * (f + i + w)
    if p == 1:
        return ClosedForm(useful, useful, 0.0, "one stage has no bubble")
    if known == "GPipe":
        return ClosedForm(useful + bubble + 2 * (p - 1) * c, useful, bubble + 2 * (p - 1) * c, "GPipe, NeurIPS'19")
    if known == "1F1B" and (c == 0 or m % p == 0):
        wait = c * latency_hops(p, m) if c else 0.0
        return ClosedForm(useful + bubble + wait, useful, bubble + wait, "PipeDream-Flush; Megatron-LM SC'21 §2.2")
    if c:
        return None
    if known == "LoopedBFS" and m >= p:
        return ClosedForm(useful + bubble, useful, bubble, "Lamy-Poirier, MLSys'23")
    if known == "Interleaved1F1B" and m % p == 0:
        return ClosedForm(useful + bubble, useful, bubble, "Megatron-LM SC'21 §2.2")
    return _zero_bubble(known, p, m, f, i, w)


def _zero_bubble(known: str, p: int, m: int, f: float, i: float, w: float) -> ClosedForm | None:
    """Zero Bubble, ICLR'24, table 1 (ZB-H1, ZB-H2) and §6 (ZB-V), within the range in which they hold.

    Outside, a weight gradient longer than a forward delays the next GPU's forward, and the formula is too low.
    """
    useful = m * (f + i + w)
    if known == "ZB-H1" and m >= p and w <= min(f, i):
        own = (p - 1) * (f + i - w)
        return ClosedForm(useful + own, useful, own, "Zero Bubble, ICLR'24, table 1")
    if known == "ZB-H2" and m >= 2 * p - 1 and w <= f and 2 * w <= f + i:
        own = (p - 1) * (f + i - 2 * w)
        # The first GPU ends its bubble late, or the last one its shifted work later.
        whole = useful + (p - 1) * (f + max(0.0, i - 2 * w))
        return ClosedForm(whole, useful, own, "Zero Bubble, ICLR'24, table 1")
    if known == "ZBVZeroBubble" and f == i == w and m >= 2 * p:
        return ClosedForm(2 * useful + (p - 1) * f, 2 * useful, 0.0, "Zero Bubble, ICLR'24, §6")
    return None


def latency_hops(p: int, m: int) -> int:
    """How often 1F1B pays one hop's latency in a step, for p ≥ 2 that divides m: 2(p-1)m/p + 2(p-2).

    Only every p-th steady micro-batch can hide nothing: the forward and backward between neighbours go round a
    cycle of p micro-batches, which takes 2(p-1) hops more than the compute on it.

    >>> latency_hops(4, 8)
    16
    """
    return 2 * (p - 1) * m // p + 2 * (p - 2)


def stage_idle_1f1b(stages: int, stage: int, forward: float, backward: float) -> tuple[float, float]:
    """(warm-up, cool-down) idle of one stage of 1F1B or GPipe with equal stages; its steady phase has none.

    >>> [stage_idle_1f1b(4, s, 1, 2) for s in range(4)]
    [(6, 3), (5, 4), (4, 5), (3, 6)]
    """
    below = stages - 1 - stage
    return stage * forward + below * backward, below * forward + stage * backward
