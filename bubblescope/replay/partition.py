"""Where to cut a model's layers into stages: exact, for whole layers in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bubblescope.errors import InputError, UsageError

Float = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True)
class Partition:
    """The best cut. layers: how many layers each stage gets, in order. stage_times: with embedding and head.
    slowest: the largest of them, which is the least possible for whole layers. bound: what no cut can beat, even
    one through the middle of a layer: max of the mean and of what is pinned. memory: per stage, None when not given.
    """

    layers: tuple[int, ...]
    stage_times: tuple[float, ...]
    slowest: float
    bound: float
    memory: tuple[float, ...] | None = None

    @property
    def cuts(self) -> tuple[int, ...]:
        """Index of the first layer of each stage but the first."""
        return tuple(np.cumsum(self.layers[:-1]).tolist())


def best_partition(
    layer_times: ArrayLike,
    stages: int,
    *,
    embedding: float = 0.0,
    head: float = 0.0,
    layer_memory: ArrayLike | None = None,
    embedding_memory: float = 0.0,
    head_memory: float = 0.0,
    memory_limit: float | Sequence[float] | None = None,
    least_layers: int = 0,
) -> Partition:
    """Cut layers 0..n-1 into `stages` runs whose slowest is as fast as can be; of equal ones the most even.

    layer_times: shape (n,), any unit. embedding and head are pinned to the first and the last stage.
    layer_memory, memory_limit: any unit; a stage's layers (and pinned part) must fit its limit (one for all, or one
    per stage). least_layers: least number of layers on a stage. "Most even" = least sum of squared stage times.

    Dynamic programme over (stages used, layers used), O(stages · n²) on arrays. Raises UsageError for numbers that
    make no sense, InputError when nothing fits.

    >>> best_partition([1, 1, 1, 1, 1, 1, 1, 1], 4, head=1).layers
    (2, 2, 2, 2)
    >>> best_partition([1, 1, 1, 1, 1, 1, 1], 3, head=2)
    Partition(layers=(3, 3, 1), stage_times=(3.0, 3.0, 3.0), slowest=3.0, bound=3.0, memory=None)
    """
    times = _checked(layer_times, "layer time")
    if stages < 1:
        raise UsageError(f"a model cannot be cut into {stages} stages")
    if not (np.isfinite([embedding, head]).all() and min(embedding, head) >= 0):
        raise UsageError("the embedding and head times must be finite and 0 or more")
    pinned = _pinned(stages, embedding, head)
    memory = _Memory.of(times, stages, layer_memory, embedding_memory, head_memory, memory_limit)
    if len(times) < stages * least_layers:
        raise InputError(
            f"no cut of {len(times)} layers into {stages} stages has at least {least_layers} on each",
            hint="give all layers of the model, or use fewer stages",
        )
    slowest = _least_slowest(times, pinned, memory, least_layers)
    if not np.isfinite(slowest):
        raise InputError(
            f"no cut of {len(times)} layers into {stages} stages fits"
            + (" the memory limit" if memory is not None else f" with at least {least_layers} layers each"),
            hint="raise the memory limit, use more stages, or lower the least number of layers",
        )
    layers = _most_even(times, pinned, memory, least_layers, slowest)
    edges = np.concatenate(([0], np.cumsum(layers)))
    stage_times = _between(times, edges) + pinned
    return Partition(
        layers=tuple(layers),
        stage_times=tuple(stage_times.tolist()),
        slowest=float(stage_times.max()),
        bound=max(float((times.sum() + pinned.sum()) / stages), float(pinned.max())),
        memory=None if memory is None else tuple((_between(memory.layers, edges) + memory.pinned).tolist()),
    )


def _checked(values: ArrayLike, what: str) -> Float:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise UsageError(f"{what}s must be a list of at least one number")
    if not (np.isfinite(array).all() and (array >= 0).all()):
        raise UsageError(f"a {what} is negative or not a number")
    return array


def _pinned(stages: int, first: float, last: float) -> Float:
    extra = np.zeros(stages)
    extra[0] += first
    extra[-1] += last
    return extra


def _between(values: Float, edges: Int) -> Float:
    return np.array([float(values[a:b].sum()) for a, b in pairwise(edges.tolist())])


@dataclass(frozen=True, eq=False)
class _Memory:
    """layers: shape (n,); pinned, limit: shape (stages,)."""

    layers: Float
    pinned: Float
    limit: Float

    @classmethod
    def of(
        cls,
        times: Float,
        stages: int,
        layers: ArrayLike | None,
        first: float,
        last: float,
        limit: float | Sequence[float] | None,
    ) -> _Memory | None:
        if limit is None:
            return None
        if layers is None:
            raise UsageError("a memory limit needs the memory of each layer")
        needed = _checked(layers, "layer memory")
        limits = np.asarray(limit, dtype=np.float64)
        if len(needed) != len(times) or limits.ndim > 1 or (limits.ndim == 1 and len(limits) != stages):
            raise UsageError(f"give the memory of {len(times)} layers, and one limit or {stages} of them")
        return cls(needed, _pinned(stages, first, last), np.broadcast_to(limits, (stages,)).astype(np.float64))


def _segment_costs(times: Float, stage: int, pinned: Float, memory: _Memory | None, least: int) -> Float:
    """[i, j] → time of a stage that holds layers i..j-1; inf where it may not."""
    before = np.concatenate(([0.0], np.cumsum(times)))
    cost: Float = before[None, :] - before[:, None] + pinned[stage]
    count = np.arange(len(before))
    cost[count[None, :] - count[:, None] < least] = np.inf
    if memory is not None:
        held = np.concatenate(([0.0], np.cumsum(memory.layers)))
        need = held[None, :] - held[:, None] + memory.pinned[stage]
        # Sums of the same numbers in another order differ in the last digits.
        cost[need > memory.limit[stage] * (1 + 1e-12)] = np.inf
    return cost


def _least_slowest(times: Float, pinned: Float, memory: _Memory | None, least: int) -> float:
    """best[j] = least possible slowest stage, with the stages so far holding layers 0..j-1."""
    best = np.full(len(times) + 1, np.inf)
    best[0] = 0.0
    for stage in range(len(pinned)):
        cost = _segment_costs(times, stage, pinned, memory, max(least, 0))
        best = np.maximum(best[:, None], cost).min(axis=0)
    return float(best[-1])


def _most_even(times: Float, pinned: Float, memory: _Memory | None, least: int, slowest: float) -> list[int]:
    """Among the cuts no slower than `slowest`, the one with the least sum of squared stage times."""
    best = np.full(len(times) + 1, np.inf)
    best[0] = 0.0
    came_from: list[Int] = []
    for stage in range(len(pinned)):
        cost = _segment_costs(times, stage, pinned, memory, max(least, 0))
        square = np.where(cost <= slowest * (1 + 1e-12), cost, np.inf) ** 2
        total = best[:, None] + square
        came_from.append(total.argmin(axis=0))
        best = total.min(axis=0)
    layers: list[int] = []
    end = len(times)
    for step in reversed(came_from):
        begin = int(step[end])
        layers.append(end - begin)
        end = begin
    return layers[::-1]
