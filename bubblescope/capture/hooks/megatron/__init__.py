"""Hooks of Megatron-Core's pipeline schedules, 0.13 to 0.20 (also NeMo, Megatron-Bridge and others that run them).

`get_forward_backward_func` hands out the schedule functions themselves, so a job that fetched one before recording
began shows no schedule call; what the schedules call inside (`forward_step`, `backward_step`, `_communicate`) is
looked up at each call and is recorded all the same.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.megatron.calls import hook_schedules
from bubblescope.capture.hooks.megatron.combined import hook_combined
from bubblescope.capture.hooks.megatron.compute import hook_compute
from bubblescope.capture.hooks.megatron.gradients import hook_gradients, hook_optimizers
from bubblescope.capture.hooks.megatron.job import Job
from bubblescope.capture.hooks.megatron.messages import hook_messages
from bubblescope.capture.hooks.shared import check_version, installed_version

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

OLDEST, NEWEST = "0.13", "0.20"


def knows(thing: Any) -> bool:
    """Megatron's schedules are functions: there is no object of its own to point at."""
    return False


def install(recorder: Recorder) -> None:
    """Hook schedules, their compute and messages, gradients and optimizers."""
    # Not by import statements: Megatron is still being imported, and its packages lack these names yet.
    schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
    p2p_communication = importlib.import_module("megatron.core.pipeline_parallel.p2p_communication")
    version = installed_version("megatron.core", "megatron-core")
    check_version(recorder, "Megatron-Core", version, OLDEST, NEWEST)
    job = Job(recorder, schedules)
    hook_schedules(job)
    hook_compute(job)
    hook_combined(job)
    hook_messages(job, p2p_communication)
    hook_gradients(recorder)
    hook_optimizers(recorder)
