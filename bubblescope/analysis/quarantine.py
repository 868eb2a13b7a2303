"""Times that cannot be: one broken stamp must not become a wrong number (FAULTS.md: ts 0, one-hour durations).

A rank's rows of one step lie close together. A row that begins or ends many step lengths away from the middle of its
step, or lasts longer than that, was stamped wrongly. Its step of its rank is then taken out whole: without that
operation the rest of the step would be explained wrongly.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.intervals import rows_by
from bubblescope.model import Notice, Run

Int = NDArray[np.int64]

FAR = 20.0
"""In step lengths (from the 10th to the 90th percentile of the rows' starts); a real step is rarely over 3 of them."""
REACH_NS = 300_000_000_000
"""A row must be at least this far off: a stalled machine or a checkpoint holds a step up for seconds or minutes."""


def quarantine(run: Run) -> Run:
    """The run without the (rank, step) pairs that hold an impossible time; each leaves a Notice.

    Example: of 100 rows of a 700 ms step one starts at 0, fifty years earlier: that step of that rank is taken out.
    """
    spans = run.spans
    rows = np.flatnonzero((spans.step >= 0) & (spans.device >= 0))
    if not len(rows):
        return run
    width = int(spans.step.max()) + 1
    key = spans.rank.astype(np.int64) * width + spans.step
    length = _typical_length(spans.start_ns[rows], key[rows])
    bad: dict[int, int] = {}
    for pair, picked in rows_by(key[rows]):
        own = rows[picked]
        far = _impossible(spans.start_ns[own], spans.end_ns[own], length)
        if far:
            bad[pair] = far
    if not bad:
        return run
    out = np.isin(key, list(bad)) & (spans.step >= 0)
    # Rows keep their places, because links name them: they only lose their step and their device.
    cleaned = spans.with_columns(
        device=np.where(out, -1, spans.device),
        step=np.where(out, -1, spans.step),
        microbatch=np.where(out, -1, spans.microbatch),
    )
    return replace(run, spans=cleaned).with_notices(*(_notice(pair, n, width) for pair, n in sorted(bad.items())))


def _typical_length(start: Int, key: Int) -> float:
    """Median over the (rank, step) pairs of the middle 80 % of their starts."""
    spreads = [np.subtract(*np.quantile(start[rows], [0.9, 0.1])) for _, rows in rows_by(key) if len(rows) > 4]
    return float(np.median(spreads)) if spreads else float("inf")


def _impossible(start: Int, end: Int, length: float) -> int:
    """How many rows lie far from the middle of their step."""
    middle = float(np.median(start))
    reach = max(FAR * length, REACH_NS)
    return int(((np.abs(start - middle) > reach) | (np.abs(end - middle) > reach) | (end < start)).sum())


def _notice(pair: int, count: int, width: int) -> Notice:
    rank, step = divmod(pair, width)
    return Notice(
        "impossible-times",
        f"rank {rank}, step {step}: {count} rows lie far outside the step or end before they begin; this step of this "
        "rank is left out",
    )
