"""The price of recording: the same training step with our hooks in and with the originals, in random order."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """Of one step. cpu_s: of the thread that trains; what other programs do on the same cores is not in it."""

    wall_s: float
    cpu_s: float


Pair = tuple[Cost, Cost]
"""Without hooks and with them: two steps, one after the other."""


class Switch:
    """Puts a started recorder's hooks in and out, without the cost of making the wrappers anew. A wrapper that the job
    has fetched stays, and passes through."""

    def __init__(self, recorder: Any) -> None:
        self._patches = recorder.patches

    def set(self, with_hooks: bool) -> None:
        for patch in self._patches._patches:
            setattr(patch.owner, patch.name, patch.replacement if with_hooks else patch.original)
        for hook in self._patches.hooks.values():
            hook.enabled = with_hooks


def measure_pairs(
    switch: Switch, train: Callable[[], Any], meet: Callable[[], Any], pairs: int, skip: int = 3
) -> list[Pair]:
    """Pairs of steps of this rank, after `skip` pairs to warm up. meet: brings all ranks together before a step."""

    def step(with_hooks: bool) -> Cost:
        switch.set(with_hooks)
        meet()
        began, cpu = time.perf_counter(), time.thread_time()
        train()
        return Cost(time.perf_counter() - began, time.thread_time() - cpu)

    order = random.Random(5)
    found = []
    for index in range(pairs + skip):
        sequence = (False, True) if order.random() < 0.5 else (True, False)
        made = {with_hooks: step(with_hooks) for with_hooks in sequence}
        if index >= skip:
            found.append((made[False], made[True]))
    switch.set(True)
    return found


def interval(values: list[float], rounds: int = 4000) -> tuple[float, float, float]:
    """Median with its 95 % bootstrap interval."""
    import numpy as np

    rng = np.random.default_rng(1)
    sample = rng.choice(np.array(values), size=(rounds, len(values)))
    low, high = np.percentile(np.median(sample, axis=1), [2.5, 97.5])
    return float(np.median(values)), float(low), float(high)
