"""torchtitan runs torch's pipeline schedules, which have hooks of their own; here is its name and its step.

0.2 and 0.3: `Trainer.train_step` is what the user calls a step: several schedule calls when gradients accumulate, and
the waiting for data between them.
"""

from __future__ import annotations

import functools
import sys
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.shared import check_version, installed_version
from bubblescope.capture.imports import when_imported
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

OLDEST, NEWEST = "0.2", "0.3"

_TRAINERS = ("torchtitan.trainer", "torchtitan.train")
"""Where `Trainer` is: since 0.3, and before."""


def knows(thing: Any) -> bool:
    """Whether it is torchtitan's trainer."""
    trainers = [getattr(sys.modules.get(name), "Trainer", None) for name in _TRAINERS]
    return any(trainer is not None and isinstance(thing, trainer) for trainer in trainers)


def install(recorder: Recorder) -> None:
    """Hook the trainer's step, wherever this version has its trainer."""
    recorder.framework = "torchtitan"
    check_version(recorder, "torchtitan", installed_version("torchtitan", "torchtitan"), OLDEST, NEWEST)
    for name in _TRAINERS:
        recorder.patches.on_restore(when_imported(name, functools.partial(_hook_trainer, recorder, name)))


def _hook_trainer(recorder: Recorder, name: str) -> None:
    trainer = getattr(sys.modules[name], "Trainer", None)
    if trainer is None or trainer.__module__ != name:
        return
    label = (Label(Kind.OTHER, name="train_step"),)

    def before() -> int:
        recorder.data_begins()
        return perf_counter_ns()

    def after(start: int, result: Any) -> None:
        if recorder.rule.current.sampled:
            recorder.add(Lane.RANGE, start, perf_counter_ns(), label)

    recorder.patches.around(trainer, "train_step", "train_step", needs=(), before=before, after=after)
