"""Waits for reductions of gradients, and the optimizer."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.shared import Enclosing
from bubblescope.capture.hooks.torch_common import group_name
from bubblescope.capture.imports import when_imported
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder


_OPTIMIZERS = ("megatron.core.optimizer.optimizer", "megatron.core.optimizer.distrib_optimizer")


def hook_gradients(recorder: Recorder) -> None:
    """Waits for gradient reductions that were launched during the backwards."""
    name = "megatron.core.distributed.distributed_data_parallel"

    def hook() -> None:
        owner = getattr(sys.modules[name], "DistributedDataParallel", None)
        if owner is None:
            return
        inner = _GradSync(recorder)
        recorder.patches.around(
            owner, "finish_grad_sync", "grad_sync", needs=("self",), before=inner.before, after=inner.after
        )

    recorder.patches.on_restore(when_imported(name, hook))


class _GradSync:
    """Only where reductions overlap is the call a wait of its own; else it makes collectives, recorded as such."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._number = -1

    def before(self, model: Any) -> tuple[Any, Any] | None:
        overlaps = getattr(getattr(model, "ddp_config", None), "overlap_grad_reduce", False)
        if not overlaps or not self._recorder.rule.current.sampled:
            return None
        return model, self._recorder.mark()

    def after(self, token: tuple[Any, Any], result: Any) -> None:
        model, start = token
        self._number += 1
        label = Label(Kind.COLLECTIVE, name="grad_sync", group=_data_parallel(model), seq=self._number)
        self._recorder.add(Lane.WAIT, start, self._recorder.mark(), (label,))


def _data_parallel(model: Any) -> str:
    import torch.distributed as dist

    group = getattr(model, "dp_cp_group", None) or getattr(model, "data_parallel_group", None)
    return "" if group is None else f"grad_sync {group_name(group, list(dist.get_process_group_ranks(group)))}"


def hook_optimizers(recorder: Recorder) -> None:
    """Megatron's optimizers: gradient norm, clipping and copies around the inner optimizer. A step that is skipped
    (infinite gradients) ends the training step all the same."""
    for module in _OPTIMIZERS:
        recorder.patches.on_restore(when_imported(module, functools.partial(_hook_optimizers, recorder, module)))


def _hook_optimizers(recorder: Recorder, module: str) -> None:
    inner = Enclosing(recorder, Kind.OPTIMIZER, "megatron optimizer", done=recorder.optimizer_stepped)
    for owner in list(vars(sys.modules[module]).values()):
        if not isinstance(owner, type) or owner.__module__ != module or "step" not in vars(owner):
            continue
        if getattr(vars(owner)["step"], "__isabstractmethod__", False):
            continue
        recorder.patches.around(
            owner,
            "step",
            "megatron.optimizer",
            needs=(),
            before=inner.before,
            after=inner.after,
            abort=inner.abort,
        )
