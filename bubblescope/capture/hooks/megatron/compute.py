"""Forward, loss and backward of one micro-batch."""

from __future__ import annotations

from typing import Any

from bubblescope.capture.hooks.megatron.job import Forward, Job
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane


def hook_compute(job: Job) -> None:
    recorder, rule, schedules, running = job.recorder, job.recorder.rule, job.schedules, job.running

    def forward(microbatch: int | None, chunk: int | None) -> Forward | None:
        if not work_begins(job):
            return None
        chunk = _virtual_rank() if chunk is None else chunk
        number = job.count("F", chunk) if microbatch is None else microbatch
        running.append(Forward(number, chunk, recorder.mark()))
        return running[-1]

    def forward_ends(op: Forward, result: Any) -> None:
        end = recorder.mark()
        running.clear()
        output = result[0] if isinstance(result, tuple) else result
        if rule.current.index >= 0:
            job.made(output, op.microbatch, op.chunk)
        stage = job.stage(op.chunk)
        to = end if op.loss_from is None else op.loss_from
        recorder.add(Lane.COMPUTE, op.start, to, (Label(Kind.FORWARD, stage, op.microbatch),))
        if op.loss_from is not None:
            recorder.add(Lane.COMPUTE, op.loss_from, end, (Label(Kind.LOSS, stage, op.microbatch),))

    def forward_fails(op: Any) -> None:
        running.clear()

    def loss(is_last: bool | None) -> bool | None:
        if not running or is_last is False or (is_last is None and not _on_last_stage(job, running[-1].chunk)):
            return None
        running[-1].loss_from = recorder.mark()
        return True

    def backward(output: Any) -> tuple[int, int, Any] | None:
        if not rule.current.sampled:
            return None
        microbatch, chunk = job.maker(output)
        return microbatch, chunk, recorder.mark()

    def backward_ends(op: tuple[int, int, Any], result: Any) -> None:
        microbatch, chunk, start = op
        label = Label(Kind.BACKWARD, job.stage(chunk), microbatch)
        recorder.add(Lane.COMPUTE, start, recorder.mark(), (label,))

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
    around(schedules, "backward_step", "backward", needs=("output_tensor",), before=backward, after=backward_ends)
    if hasattr(schedules, "backward_step_multimodule"):
        around(
            schedules,
            "backward_step_multimodule",
            "backward",
            needs=("output_tensor",),
            before=backward,
            after=backward_ends,
        )
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
    from megatron.core import parallel_state

    get = getattr(parallel_state, "get_virtual_pipeline_model_parallel_rank", None)
    return int((get() if get is not None else 0) or 0)


def _on_last_stage(job: Job, chunk: int) -> bool:
    return job.shape is not None and job.shape.stage(chunk) == job.shape.stages - 1
