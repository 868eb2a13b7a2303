"""The best cut of a measured model's layers, and what the step would take with it (ATTRIBUTION.md §7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.errors import UsageError
from bubblescope.model.layers import LayerTime
from bubblescope.replay.partition import Partition, best_partition
from bubblescope.replay.whatif import PipelineModel

Float = NDArray[np.float64]

EXPLAINED = 0.8
"""Below this share of a stage's time, its layers' times do not say how long the stage would take with others."""

EXPLAINED_AT_ENDS = 0.4
"""The same for the first and the last stage, which hold embedding, head and loss besides: of a small model on many
stages, these take longer than the layers."""


@dataclass(frozen=True, eq=False)
class Repartition:
    """partition: of the layers that can move. model: the measured one with the stages of this cut. scale: measured
    work over the sum of the layers' times, by which these were multiplied: 1.0 when they agree."""

    partition: Partition
    model: PipelineModel
    scale: float


def repartition(
    model: PipelineModel, layers: Sequence[LayerTime], memory_limit: float | None = None, stages: int | None = None
) -> Repartition:
    """Cut `layers` into as many runs as the model has virtual stages, none empty, so that the slowest is as fast as
    can be.

    memory_limit: bytes on each virtual stage; the layers must have `bytes`. stages: another number of virtual
    stages. Raises InputError when nothing fits, UsageError when the limit comes without bytes.

    Where a GPU holds several chunks the slowest chunk is minimised, not the slowest GPU.
    """
    n = stages or model.virtual_stages
    first, last = (_pinned(layers, where) for where in ("first", "last"))
    free = [layer for layer in layers if not layer.pinned]
    measured = float((model.forward + model.input_grad + model.weight_grad).sum())
    total = sum(layer.forward_s + layer.backward_s for layer in layers)
    scale = measured / total if total > 0 else 1.0
    limits = {} if memory_limit is None else _memory(layers, free, memory_limit)
    found = best_partition(
        [(layer.forward_s + layer.backward_s) * scale for layer in free],
        n,
        embedding=(first.forward_s + first.backward_s) * scale,
        head=(last.forward_s + last.backward_s) * scale,
        least_layers=1,
        **limits,
    )
    forward = _by_stage([layer.forward_s * scale for layer in free], found, first.forward_s, last.forward_s, scale)
    backward = _by_stage([layer.backward_s * scale for layer in free], found, first.backward_s, last.backward_s, scale)
    share = _input_share(model)
    return Repartition(
        found,
        replace(model, forward=forward, input_grad=backward * share, weight_grad=backward * (1 - share)),
        scale,
    )


def _pinned(layers: Sequence[LayerTime], where: str) -> LayerTime:
    mine = [layer for layer in layers if layer.pinned == where]
    return LayerTime(where, sum(x.forward_s for x in mine), sum(x.backward_s for x in mine))


def _memory(layers: Sequence[LayerTime], free: Sequence[LayerTime], limit: float) -> dict[str, Any]:
    lacking = [layer.name for layer in layers if layer.bytes is None]
    if lacking:
        raise UsageError(
            f"a memory limit needs the bytes of every layer, and {lacking[0]} has none",
            hint="add a bytes column to the --layer-times file, or leave the limit out",
        )
    return {
        "layer_memory": [float(layer.bytes or 0) for layer in free],
        "embedding_memory": float(sum(layer.bytes or 0 for layer in layers if layer.pinned == "first")),
        "head_memory": float(sum(layer.bytes or 0 for layer in layers if layer.pinned == "last")),
        "memory_limit": limit,
    }


def _by_stage(times: list[float], cut: Partition, first: float, last: float, scale: float) -> Float:
    edges = np.concatenate(([0], np.cumsum(cut.layers)))
    total = np.concatenate(([0.0], np.cumsum(times)))
    out: Float = np.diff(total[edges])
    out[0] += first * scale
    out[-1] += last * scale
    return out


def _input_share(model: PipelineModel) -> float:
    """I / (I + W), over the whole model."""
    whole = float((model.input_grad + model.weight_grad).sum())
    return float(model.input_grad.sum()) / whole if whole > 0 else 0.5


def coverage(model: PipelineModel, seen: Sequence[LayerTime]) -> Float:
    """Share of each virtual stage's time that the layers seen on it take; shape (p·v,)."""
    whole = model.forward + model.input_grad + model.weight_grad
    timed = np.zeros(len(whole))
    for layer in seen:
        if 0 <= layer.stage < len(timed):
            timed[layer.stage] += layer.forward_s + layer.backward_s
    return np.divide(timed, whole, out=np.zeros(len(whole)), where=whole > 0)


def unexplained(covered: Float) -> int | None:
    """The stage of which the layers cover the least, where that is too little to say how long it would take with
    others."""
    least = np.full(len(covered), EXPLAINED)
    least[[0, -1]] = EXPLAINED_AT_ENDS
    worst = int((covered - least).argmin())
    return worst if covered[worst] < least[worst] else None


def measured_layers(model: PipelineModel, seen: Sequence[LayerTime]) -> list[LayerTime] | None:
    """The layers that a recording timed, with what else the first and the last stage do pinned to them: embedding,
    head and loss. None for a single stage, and where a stage is `unexplained` by them: what it does beside its layers
    cannot be moved with them.

    Worked example: stage 0 takes F = 5 with two layers of F = 2: an embedding of F = 1 is pinned to it.
    """
    n = model.virtual_stages
    if n < 2 or unexplained(coverage(model, seen)) is not None:
        return None
    ordered = sorted(seen, key=lambda layer: layer.stage)
    backward = model.input_grad + model.weight_grad

    def rest(stage: int, name: str, pinned: str) -> LayerTime:
        mine = [layer for layer in seen if layer.stage == stage]
        return LayerTime(
            name,
            max(float(model.forward[stage]) - sum(x.forward_s for x in mine), 0.0),
            max(float(backward[stage]) - sum(x.backward_s for x in mine), 0.0),
            stage,
            pinned=pinned,
        )

    return [
        rest(0, "the rest of the first stage", "first"),
        *ordered,
        rest(n - 1, "the rest of the last stage", "last"),
    ]
