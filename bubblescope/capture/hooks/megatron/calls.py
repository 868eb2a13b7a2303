"""The calls of the schedule functions: layout, step, and the gradients' finalisation inside."""

from __future__ import annotations

import functools
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.megatron.job import SCHEDULES, Job
from bubblescope.capture.hooks.shared import Enclosing
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder


def hook_schedules(job: Job) -> None:
    recorder, schedules = job.recorder, job.schedules
    ranges = {forward_only: (Label(Kind.STEP, name="eval" if forward_only else "step"),) for forward_only in (0, 1)}

    def before(name: str, model: Any, microbatches: int, forward_only: bool, communicator: Any) -> tuple[Any, ...]:
        recorder.framework = recorder.framework or "megatron"
        layout, new = job.begin(model, microbatches, name, communicator)
        recorder.schedule_begins(layout, not forward_only, new)
        config = schedules.get_model_config(model[0] if isinstance(model, list) else model)
        undo = None if forward_only else _measure_finalize(recorder, config)
        return bool(forward_only), undo, perf_counter_ns()

    def after(token: tuple[Any, ...], result: Any) -> None:
        forward_only, undo, start = token
        _call(undo)
        if recorder.rule.current.sampled:
            recorder.add(Lane.RANGE, start, perf_counter_ns(), ranges[forward_only])
        job.end()
        recorder.schedule_ends()

    def abort(token: tuple[Any, ...]) -> None:
        _call(token[1])
        job.end()
        recorder.schedule_ends(failed=True)

    for name in SCHEDULES:
        recorder.patches.around(
            schedules,
            name,
            "schedule.step",
            needs=("model", "num_microbatches", "forward_only"),
            optional={"p2p_communicator": None},
            before=functools.partial(before, name),
            after=after,
            abort=abort,
        )


def _call(undo: Any) -> None:
    if undo is not None:
        undo()


def _measure_finalize(recorder: Recorder, config: Any) -> Any:
    """The schedule calls `config.finalize_model_grads_func`, whatever the job put there: measured for this call."""
    original = getattr(config, "finalize_model_grads_func", None)
    if original is None:
        return None
    inner = Enclosing(recorder, Kind.OTHER, "finalize_model_grads")
    wrapper = recorder.patches.wrapped(
        config,
        "finalize_model_grads_func",
        "finalize_model_grads",
        needs=(),
        before=inner.before,
        after=inner.after,
        abort=inner.abort,
    )
    if wrapper is None:
        return None
    config.finalize_model_grads_func = wrapper

    def undo() -> None:
        if config.finalize_model_grads_func is wrapper:
            config.finalize_model_grads_func = original

    return undo
