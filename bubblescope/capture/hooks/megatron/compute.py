"""Forward, loss and backward of one micro-batch."""

from __future__ import annotations

import sys
from typing import Any

from bubblescope.capture.hooks.megatron.job import Forward, Job
from bubblescope.capture.hooks.shared import timed
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane


def hook_compute(job: Job) -> None:
    recorder, rule, schedules, running = job.recorder, job.recorder.rule, job.schedules, job.running

    def forward(microbatch: int | None, chunk: int | None) -> Forward | None:
        if not work_begins(job):
            return None
        if chunk is None:
            chunk = 0 if job.shape is not None and job.shape.chunks == 1 else _virtual_rank()
        number = job.count("F", chunk) if microbatch is None else microbatch
        op = Forward(number, chunk, recorder.mark())
        running.append(op)
        return op

    def forward_ends(op: Forward, result: Any) -> None:
        end = recorder.mark()
        running.clear()
        output = result[0] if isinstance(result, tuple) else result
        microbatch, chunk, cut = op.microbatch, op.chunk, op.loss_from
        if rule.current.index >= 0:
            job.made(output, microbatch, chunk)
        recorder.add(Lane.COMPUTE, op.start, end if cut is None else cut, (labels, (Kind.FORWARD, microbatch, chunk)))
        if cut is not None:
            recorder.add(Lane.COMPUTE, cut, end, (labels, (Kind.LOSS, microbatch, chunk)))

    def forward_fails(op: Any) -> None:
        running.clear()

    def loss(is_last: bool | None) -> bool | None:
        if not running or is_last is False or (is_last is None and not _on_last_stage(job, running[-1].chunk)):
            return None
        running[-1].loss_from = recorder.mark()
        return True

    def labels(kind: Kind, microbatch: int, chunk: int) -> tuple[Label, ...]:
        return (Label(kind, job.stage(chunk), microbatch),)

    def backward(microbatch: int, chunk: int) -> tuple[Label, ...]:
        return labels(Kind.BACKWARD, microbatch, chunk)

    around = recorder.patches.around
    around(
        schedules,
        "forward_step",
        "forward",
        needs=("current_microbatch",),
        optional={"vp_stage": None},
        before=forward,
        after=forward_ends,
        abort=forward_fails,
    )
    needs = ("output_tensor",)
    timed(recorder, schedules, "backward_step", "backward", Lane.COMPUTE, backward, needs=needs, choose=job.maker)
    name = "backward_step_multimodule"
    if hasattr(schedules, name):
        timed(recorder, schedules, name, "backward", Lane.COMPUTE, backward, needs=needs, choose=job.maker)
    if hasattr(schedules, "forward_step_calc_loss"):
        around(
            schedules,
            "forward_step_calc_loss",
            "loss",
            needs=(),
            optional={"is_last_stage": None},
            before=loss,
            after=lambda token, result: None,
        )


def work_begins(job: Job) -> bool:
    """A forward, or a combined call, is about to run; whether it is recorded."""
    recorder, rule = job.recorder, job.recorder.rule
    if not recorder.device_known:
        from bubblescope.capture.hooks import default_device

        recorder.use_device(*default_device())
    if rule.current.optimizer_seen or not rule.current.busy:
        recorder.forward_begins()
    return rule.current.sampled


def _virtual_rank() -> int:
    # Not by an import statement: in each forward that would cost more than all the rest here.
    get = getattr(sys.modules["megatron.core.parallel_state"], "get_virtual_pipeline_model_parallel_rank", None)
    return int((get() if get is not None else 0) or 0)


def _on_last_stage(job: Job, chunk: int) -> bool:
    return job.shape is not None and job.shape.stage(chunk) == job.shape.stages - 1
