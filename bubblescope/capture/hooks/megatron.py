"""Hooks of Megatron-Core's pipeline schedules, 0.13 to 0.20 (also NeMo, Megatron-Bridge and others that run them).

`get_forward_backward_func` hands out the schedule functions themselves, so a job that fetched one before recording
began shows no schedule call; what the schedules call inside (`forward_step`, `backward_step`, `_communicate`) is
looked up at each call and is recorded all the same.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.shared import (
    Enclosing,
    TimedWork,
    check_version,
    device_of,
    installed_version,
)
from bubblescope.capture.hooks.torch_common import group_name
from bubblescope.capture.imports import when_imported
from bubblescope.capture.messages import message_number
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

OLDEST, NEWEST = "0.13", "0.20"

_SCHEDULES = {
    "forward_backward_no_pipelining": "custom",
    "forward_backward_pipelining_without_interleaving": "1F1B",
    "forward_backward_pipelining_with_interleaving": "Interleaved1F1B",
}
_OPTIMIZERS = ("megatron.core.optimizer.optimizer", "megatron.core.optimizer.distrib_optimizer")
COMBINED = "combined"
"""Name of the forward and the backward that ran interleaved layer by layer: both have the interval of the two."""


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
    job = _Job(recorder, schedules)
    _hook_schedules(job, schedules)
    _hook_compute(job, schedules)
    _hook_messages(job, p2p_communication)
    _hook_gradients(job)
    for module in _OPTIMIZERS:
        recorder.patches.on_restore(when_imported(module, functools.partial(_hook_optimizers, recorder, module)))


# ---- who is who


@dataclass
class _Shape:
    """The pipeline of one schedule call, as seen from this rank. ranks: global, by position."""

    ranks: list[int]
    position: int
    chunks: int
    microbatches: int
    group: str
    orders: dict[tuple[str, str], list[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.ranks) * self.chunks

    def stage(self, chunk: int) -> int:
        return chunk * len(self.ranks) + self.position


def schedule_order(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of the forwards of any rank, in order; backwards go through the chunks the other way.

    >>> schedule_order(4, 2, 2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    """
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]


def message_orders(
    position: int, ranks: int, chunks: int, order: list[tuple[int, int]]
) -> dict[tuple[str, str], list[tuple[int, int, int]]]:
    """{("send" | "recv", "act" | "grad"): [(micro-batch, own stage, consuming stage)] in the order of the messages}.

    Messages of a pair of ranks come in the order in which the sender made them, which is the schedule's order less
    what is not sent; so both ends can number them alike.

    >>> message_orders(1, 2, 1, [(0, 0), (1, 0)])["recv", "act"]
    [(0, 1, 1), (1, 1, 1)]
    """
    last = ranks - 1
    made: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for direction, hop in (("act", 1), ("grad", -1)):
        edge = last if hop == 1 else 0  # the position whose output goes round to the other end
        sent: list[tuple[int, int, int]] = []
        received: list[tuple[int, int, int]] = []
        for microbatch, forward_chunk in order:
            chunk = forward_chunk if hop == 1 else chunks - 1 - forward_chunk
            own = chunk * ranks + position
            if 0 <= own + hop < ranks * chunks:
                sent.append((microbatch, own, own + hop))
            if position != last - edge:
                received.append((microbatch, own, own))
            elif 0 <= own + hop * ranks < ranks * chunks:
                # The far end of the ring sends what its chunk made to our next chunk.
                received.append((microbatch, own + hop * ranks, own + hop * ranks))
        made["send", direction], made["recv", direction] = sent, received
    return made


class _Job:
    """What the hooks of one recorder know of the running schedule call."""

    def __init__(self, recorder: Recorder, schedules: Any) -> None:
        self.recorder = recorder
        self.schedules = schedules
        self.shape: _Shape | None = None
        self._outputs: dict[int, tuple[Any, int, int]] = {}
        self._sent: dict[tuple[str, str], int] = {}
        self._shapes: dict[tuple[Any, ...], tuple[_Shape, dict[str, Any]]] = {}
        self._counted: dict[tuple[str, int], int] = {}

    def begin(self, model: Any, microbatches: int, name: str, communicator: Any) -> dict[str, Any]:
        """A schedule call begins; gives its layout."""
        modules = list(model) if isinstance(model, list) else [model]
        group = None if name == "forward_backward_no_pipelining" else _pipeline_group(communicator)
        key = (name, len(modules), microbatches, group)
        known = self._shapes.get(key)
        if known is None:
            known = self._shapes[key] = self._describe(modules, microbatches, name, group)
        self.shape, layout = known
        self._sent.clear()
        self._counted.clear()
        self._outputs.clear()
        return layout

    def end(self) -> None:
        """The schedule call is over: nothing of it is kept alive."""
        self._outputs.clear()

    def _describe(self, modules: list[Any], microbatches: int, name: str, group: Any) -> tuple[_Shape, dict[str, Any]]:
        import torch.distributed as dist

        me = dist.get_rank()
        ranks = [me] if group is None else list(dist.get_process_group_ranks(group))
        text = "" if group is None else group_name(group, ranks)
        shape = _Shape(ranks, ranks.index(me), len(modules), microbatches, text)
        config = self.schedules.get_model_config(modules[0])
        per_chunk = getattr(config, "microbatch_group_size_per_vp_stage", None) or len(ranks)
        order = schedule_order(microbatches, len(modules), per_chunk if len(modules) > 1 else max(microbatches, 1))
        shape.orders = message_orders(shape.position, len(ranks), len(modules), order)
        return shape, {
            "stages": [shape.stage(chunk) for chunk in range(shape.chunks)],
            "num_stages": shape.stages,
            "microbatches": microbatches,
            "schedule": _SCHEDULES[name],
            "schedule_class": name,
            "pp_ranks": ranks,
            "stage_ranks": [ranks[stage % len(ranks)] for stage in range(shape.stages)],
            "device": device_of(modules[0]),
        }

    # forward outputs lead their backward to (micro-batch, chunk)

    def made(self, output: Any, microbatch: int, chunk: int) -> None:
        self._outputs[id(output)] = (output, microbatch, chunk)  # the reference keeps the id from being used again

    def maker(self, output: Any) -> tuple[int, int]:
        found = self._outputs.pop(id(output), None)
        if found is not None:
            return found[1], found[2]
        return self.count("B", 0), 0

    def count(self, what: str, chunk: int) -> int:
        number = self._counted[what, chunk] = self._counted.get((what, chunk), -1) + 1
        return number

    def stage(self, chunk: int) -> int:
        return -1 if self.shape is None else self.shape.stage(chunk)

    def message(self, end: str, direction: str, tensor: Any) -> Label | None:
        """Label of the next message of that end and direction; None when there should be none by the schedule."""
        shape = self.shape
        if shape is None:
            return None
        number = self._sent[end, direction] = self._sent.get((end, direction), -1) + 1
        order = shape.orders[end, direction]
        if number >= len(order):
            return None
        microbatch, stage, consumer = order[number]
        onward = (direction == "act") == (end == "send")
        peer = shape.ranks[(shape.position + (1 if onward else -1)) % len(shape.ranks)]
        return Label(
            Kind.SEND if end == "send" else Kind.RECV,
            stage,
            microbatch,
            direction,
            peer,
            _bytes(tensor),
            shape.group,
            message_number(microbatch, consumer, shape.stages, direction == "grad"),
        )


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size()) if hasattr(tensor, "element_size") else -1


def _pipeline_group(communicator: Any) -> Any:
    group = getattr(communicator, "pp_group", None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()


# ---- schedule calls


def _hook_schedules(job: _Job, schedules: Any) -> None:
    recorder = job.recorder
    ranges = {forward_only: (Label(Kind.STEP, name="eval" if forward_only else "step"),) for forward_only in (0, 1)}

    def before(name: str, model: Any, microbatches: int, forward_only: bool, communicator: Any) -> tuple[Any, ...]:
        recorder.framework = recorder.framework or "megatron"
        layout = job.begin(model, microbatches, name, communicator)
        recorder.schedule_begins(layout, not forward_only)
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

    for name in _SCHEDULES:
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


# ---- compute


@dataclass
class _Forward:
    microbatch: int
    chunk: int
    start: Any
    loss_from: Any = None


def _hook_compute(job: _Job, schedules: Any) -> None:
    recorder, rule = job.recorder, job.recorder.rule
    running: list[_Forward] = []

    def forward(microbatch: int | None, chunk: int | None) -> _Forward | None:
        if not recorder.device_known:
            recorder.use_device(*_current_device())
        if rule.current.optimizer_seen or not rule.current.busy:
            recorder.forward_begins()
        if not rule.current.sampled:
            return None
        chunk = _virtual_rank() if chunk is None else chunk
        number = job.count("F", chunk) if microbatch is None else microbatch
        running.append(_Forward(number, chunk, recorder.mark()))
        return running[-1]

    def forward_ends(op: _Forward, result: Any) -> None:
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
    _hook_combined(job)


def _hook_combined(job: _Job) -> None:
    """Forward of one micro-batch and backward of another in one call, layer by layer on two streams."""
    recorder = job.recorder
    combined = sys.modules.get("megatron.core.pipeline_parallel.combined_1f1b")
    if combined is None or not hasattr(combined, "combined_forward_backward_step"):
        return

    def before(
        microbatch: int | None, forward_model: Any, chunk: int | None, backward_model: Any, output: Any
    ) -> tuple[Any, ...] | None:
        if not recorder.rule.current.sampled:
            return None
        ahead = None if forward_model is None else (microbatch or 0, chunk or 0)
        back = None if backward_model is None else job.maker(output)
        return ahead, back, recorder.mark()

    def after(token: tuple[Any, ...], result: Any) -> None:
        ahead, back, start = token
        name = COMBINED if ahead is not None and back is not None else ""
        labels = []
        if ahead is not None:
            job.made(result[0], *ahead)
            labels.append(Label(Kind.FORWARD, job.stage(ahead[1]), ahead[0], name))
        if back is not None:
            labels.append(Label(Kind.BACKWARD, job.stage(back[1]), back[0], name))
        recorder.add(Lane.COMPUTE, start, recorder.mark(), tuple(labels))

    recorder.patches.around(
        combined,
        "combined_forward_backward_step",
        "combined_1f1b",
        needs=("current_microbatch", "f_model", "f_model_chunk_id", "b_model", "b_output_tensor"),
        before=before,
        after=after,
    )


def _current_device() -> tuple[str, int]:
    from bubblescope.capture.hooks import default_device

    return default_device()


def _virtual_rank() -> int:
    from megatron.core import parallel_state

    get = getattr(parallel_state, "get_virtual_pipeline_model_parallel_rank", None)
    return int((get() if get is not None else 0) or 0)


def _on_last_stage(job: _Job, chunk: int) -> bool:
    return job.shape is not None and job.shape.stage(chunk) == job.shape.stages - 1


# ---- messages


def _hook_messages(job: _Job, p2p: Any) -> None:
    """`_communicate` is what all the named functions end in: a method since 0.14, a module function before."""
    owner = getattr(p2p, "P2PCommunicator", None)
    job.recorder.patches.around(
        p2p if owner is None else owner,
        "_communicate",
        "p2p",
        needs=("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next"),
        optional={"wait_on_reqs": True},
        before=functools.partial(_communication_begins, job),
        after=functools.partial(_communication_ends, job),
    )


def _communication_begins(
    job: _Job, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool, waits: bool
) -> tuple[Any, ...] | None:
    if not job.recorder.rule.current.sampled or not (
        send_next is not None or send_prev is not None or recv_prev or recv_next
    ):
        return None
    return send_next, send_prev, recv_prev, recv_next, waits, job.recorder.mark()


def _communication_ends(job: _Job, token: tuple[Any, ...], result: Any) -> Any:
    send_next, send_prev, recv_prev, recv_next, waits, start = token
    recorder = job.recorder
    end = recorder.mark()
    wanted = {
        "send_next": ("send", "act", send_next) if send_next is not None else None,
        "recv_prev": ("recv", "act", result[0]) if recv_prev else None,
        "send_prev": ("send", "grad", send_prev) if send_prev is not None else None,
        "recv_next": ("recv", "grad", result[1]) if recv_next else None,
    }
    found = {name: job.message(*what) for name, what in wanted.items() if what is not None}
    labels = {name: label for name, label in found.items() if label is not None}
    carried = tuple(labels.values())
    if not carried:
        return None
    requests = result[2] if len(result) > 2 else None
    if waits or not requests:
        # The call posts, and returns when all is there: on the compute stream it is one wait.
        recorder.add(Lane.POST, start, start, carried)
        recorder.add(Lane.WAIT, start, end, carried)
        return None
    recorder.add(Lane.POST, start, end, carried)
    return (*result[:2], _timed(recorder, requests, labels))


def _timed(recorder: Recorder, requests: Any, labels: dict[str, Label]) -> Any:
    """The same requests, whose waits are recorded when the schedule comes to them."""
    if isinstance(requests, dict):
        return {
            name: TimedWork(recorder, work, (labels[name],) if name in labels else ())
            for name, work in requests.items()
        }
    carried = tuple(labels.values())
    return [TimedWork(recorder, work, () if i else carried) for i, work in enumerate(requests)]


# ---- gradients and optimizer


def _hook_gradients(job: _Job) -> None:
    """Waits for gradient reductions that were launched during the backwards."""
    recorder = job.recorder
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


def _hook_optimizers(recorder: Recorder, module: str) -> None:
    """Megatron's optimizers: gradient norm, clipping and copies around the inner optimizer. A step that is skipped
    (infinite gradients) ends the training step all the same."""
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
