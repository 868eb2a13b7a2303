"""Hooks of torch.distributed.pipelining, torch 2.4 to 2.14 (also torchtitan and others that run its schedules).

Patched are class attributes of `_PipelineStageBase` and `_PipelineSchedule…` and two globals of `schedules`, which
the schedules look up at call time: schedules and stages made before recording are recorded too. Third
parties override stage methods and call super(): only the base is patched, so that each operation counts once.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.torch_common import group_name
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

SCHEDULES = {
    "ScheduleGPipe": "GPipe",
    "_ScheduleForwardOnly": "GPipe",
    "Schedule1F1B": "1F1B",
    "ScheduleLoopedBFS": "LoopedBFS",
    "ScheduleInterleaved1F1B": "Interleaved1F1B",
    "ScheduleInterleavedZeroBubble": "InterleavedZeroBubble",
    "ScheduleZBVZeroBubble": "ZBVZeroBubble",
    "ScheduleDualPipeV": "DualPipeV",
}
"""torch's class name → our schedule name; other classes are "custom"."""

_TENSORS_PER_MESSAGE = 64


def knows(thing: Any) -> bool:
    """Whether it is a pipeline schedule of torch."""
    from torch.distributed.pipelining import schedules

    return isinstance(thing, schedules._PipelineSchedule)


def install(recorder: Recorder) -> None:
    """Hook stages, P2P and schedules."""
    try:
        from torch.distributed.pipelining import schedules, stage
    except ImportError as error:
        recorder.patches.refuse("torch.distributed.pipelining", f"cannot be imported: {error}")
        return
    _hook_compute(recorder, stage._PipelineStageBase, schedules._PipelineSchedule)
    messages = _Messages(recorder)
    _hook_messages(recorder, messages, stage._PipelineStageBase, schedules)
    _hook_steps(recorder, messages, schedules)


# ---- compute


@dataclass(frozen=True)
class _Running:
    """One operation that is running: what it is and when it began."""

    kind: Kind
    stage: Any
    microbatch: int
    start: Any
    name: str = ""


class _Guard:
    """Refuses an operation that is already running in an outer call (an override that calls super)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._running: set[tuple[Kind, int, int]] = set()

    def enter(self, kind: Kind, stage: Any, microbatch: int, name: str = "") -> _Running | None:
        key = (kind, id(stage), microbatch)
        if key in self._running:
            return None
        made = _Running(kind, stage, microbatch, self._recorder.mark(), name)
        self._running.add(key)
        return made

    def abort(self, op: _Running) -> None:
        self._running.discard((op.kind, id(op.stage), op.microbatch))

    def leave(self, op: _Running, result: Any) -> None:
        end = self._recorder.mark()
        self.abort(op)
        self._recorder.add(
            op.kind,
            Lane.COMPUTE,
            op.start,
            end,
            stage=op.stage.stage_index,
            microbatch=op.microbatch,
            name=op.name,
        )


def _hook_compute(recorder: Recorder, base: Any, schedule: Any) -> None:
    guard = _Guard(recorder)

    def forward(stage: Any, microbatch: int) -> _Running | None:
        recorder.forward_begins(*_device(stage))
        return guard.enter(Kind.FORWARD, stage, microbatch) if recorder.sampled else None

    def backward(stage: Any, microbatch: int, full: bool) -> _Running | None:
        if not recorder.sampled or not stage.has_backward:
            return None
        return guard.enter(Kind.BACKWARD if full else Kind.BACKWARD_INPUT, stage, microbatch)

    def weight(stage: Any, microbatch: int) -> _Running | None:
        if not recorder.sampled or not stage.has_backward:
            return None
        # On the first stage torch does nothing for I and the whole backward for W, unless dW is the user's own.
        whole = stage.is_first and getattr(stage, "dw_builder", None) is None
        return guard.enter(Kind.BACKWARD_WEIGHT, stage, microbatch, "full backward" if whole else "")

    def reduce(stage: Any) -> _Running | None:
        if not recorder.sampled or not stage.has_backward:
            return None
        return guard.enter(Kind.OTHER, stage, -1, "reduce_grad")

    def loss(owner: Any, stage: Any, microbatch: int) -> _Running | None:
        if not recorder.sampled or not stage.is_last or owner._loss_fn is None:
            return None
        return guard.enter(Kind.LOSS, stage, microbatch)

    around = functools.partial(recorder.patches.around, after=guard.leave, abort=guard.abort)
    around(base, "forward_one_chunk", "forward", needs=("self", "fwd_chunk_id"), before=forward)
    around(
        base,
        "backward_one_chunk",
        "backward",
        needs=("self", "bwd_chunk_id"),
        optional={"full_backward": True},
        before=backward,
    )
    around(base, "backward_weight_one_chunk", "weight", needs=("self", "bwd_chunk_id"), before=weight)
    if hasattr(base, "perform_reduce_grad"):
        around(base, "perform_reduce_grad", "reduce_grad", needs=("self",), before=reduce)
    else:
        around(base, "scale_grads", "reduce_grad", needs=("self",), before=reduce)
    around(schedule, "_maybe_compute_loss", "loss", needs=("self", "stage", "mb_index"), before=loss)


def _device(stage: Any) -> tuple[str, int]:
    device = stage.device
    return device.type, device.index if device.index is not None else 0


# ---- messages


@dataclass(frozen=True)
class _Message:
    """One tensor on its way, as either end sees it. seq: a number that both ends compute alike."""

    kind: Kind
    direction: str
    stage: int
    microbatch: int
    peer: int
    bytes: int
    group: str
    seq: int


@dataclass
class _Messages:
    """What P2P operations carry: noted when the stage builds them, used when they are posted and waited for."""

    recorder: Recorder
    _in_flight: dict[int, tuple[Any, list[_Message]]] = field(default_factory=dict)
    _inside: threading.local = field(default_factory=threading.local)
    _pipelines: weakref.WeakKeyDictionary[Any, tuple[Any, list[int], str]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def note(self, kind: Kind, direction: str, call: tuple[Any, int], ops: Any) -> None:
        """The stage built `ops` for one micro-batch: write on each what it carries."""
        stage, microbatch = call
        ranks, group = self._pipeline(stage)
        seen: dict[int, int] = {}
        for op in ops:
            peer = int(op.peer)
            index = seen[peer] = seen.get(peer, -1) + 1
            consumer = stage.stage_index if kind is Kind.RECV else _consumer(stage, direction, peer, ranks)
            seq = ((microbatch * stage.num_stages + consumer) * 2 + (direction == "grad")) * _TENSORS_PER_MESSAGE
            op._bubblescope = _Message(
                kind,
                direction,
                stage.stage_index,
                microbatch,
                peer,
                op.tensor.numel() * op.tensor.element_size(),
                group,
                seq + index % _TENSORS_PER_MESSAGE,
            )

    def _pipeline(self, stage: Any) -> tuple[list[int], str]:
        """Ranks of all stages and name of the group, kept until a schedule maps its stages anew."""
        mapping = stage.stage_index_to_group_rank
        known = self._pipelines.get(stage)
        if known is None or known[0] is not mapping:
            group = stage.group if stage.group is not None else _default_group()
            known = self._pipelines[stage] = (mapping, _stage_ranks(stage), group_name(group, _ranks(group)))
        return known[1], known[2]

    def post_begins(self, ops: Any) -> tuple[Any, list[_Message]] | None:
        if not ops or not self.recorder.sampled or getattr(self._inside, "busy", False):
            return None
        carried = [op._bubblescope for op in ops if hasattr(op, "_bubblescope")]
        if not carried:
            return None
        self._inside.busy = True
        return self.recorder.mark(), carried

    def post_fails(self, token: Any) -> None:
        self._inside.busy = False

    def post_ends(self, token: tuple[Any, list[_Message]], works: Any) -> Any:
        self._inside.busy = False
        start, carried = token
        now = perf_counter_ns()
        # On a CPU rank posting takes the CPU's time; on a GPU rank it is a moment on the compute stream.
        end = self.recorder.mark() if isinstance(start, int) else start
        for message in carried:
            self._add(message, Lane.POST, start, end, now)
        if isinstance(works, list):
            self._follow(works, carried)
            return None
        return None if works is None else _TimedWork(works, self, carried)

    def _follow(self, works: list[Any], carried: list[_Message]) -> None:
        alone = len(works) == len(carried)
        for i, work in enumerate(works):
            if work is not None:  # the reference keeps id() from being used again
                self._in_flight[id(work)] = (work, [carried[i]] if alone else carried)
                if not alone:
                    break  # one work stands for the whole coalesced batch

    def wait_begins(self, works: Any) -> tuple[Any, list[_Message]] | None:
        found = [self._in_flight.pop(id(work), None) for work in works or ()]
        carried = [message for entry in found if entry is not None for message in entry[1]]
        if not carried or not self.recorder.sampled:
            return None
        return self.recorder.mark(), carried

    def wait_ends(self, token: tuple[Any, list[_Message]], result: Any) -> None:
        start, carried = token
        end = self.recorder.mark()
        now = perf_counter_ns()
        for message in carried:
            self._add(message, Lane.WAIT, start, end, now)

    def forget(self) -> None:
        """Drop what nobody waited for, so that nothing is kept alive beyond its schedule call."""
        self._in_flight.clear()

    def _add(self, message: _Message, lane: Lane, start: Any, end: Any, host_end_ns: int) -> None:
        self.recorder.add(
            message.kind,
            lane,
            start,
            end,
            stage=message.stage,
            microbatch=message.microbatch,
            peer=message.peer,
            bytes=message.bytes,
            group=message.group,
            seq=message.seq,
            name=message.direction,
            host_end_ns=host_end_ns,
        )


class _TimedWork:
    """torch 2.4 and 2.5 return one Work and wait on it directly: this stands in for it and times the wait."""

    def __init__(self, work: Any, messages: _Messages, carried: list[_Message]) -> None:
        self._work = work
        self._messages = messages
        self._carried = carried

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._messages.recorder
        start = recorder.mark() if recorder.running and self._carried else None
        result = self._work.wait(*args, **kwargs)
        if start is not None and recorder.running:
            self._messages.wait_ends((start, self._carried), None)
            self._carried = []
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _hook_messages(recorder: Recorder, messages: _Messages, base: Any, schedules: Any) -> None:
    for name, kind, direction in (
        ("get_fwd_recv_ops", Kind.RECV, "act"),
        ("get_fwd_send_ops", Kind.SEND, "act"),
        ("get_bwd_recv_ops", Kind.RECV, "grad"),
        ("get_bwd_send_ops", Kind.SEND, "grad"),
    ):
        chunk = "fwd_chunk_id" if direction == "act" else "bwd_chunk_id"
        recorder.patches.around(
            base,
            name,
            name,
            needs=("self", chunk),
            before=lambda stage, microbatch: (stage, microbatch) if recorder.sampled else None,
            after=functools.partial(messages.note, kind, direction),
        )
    recorder.patches.around(
        schedules,
        "_batch_p2p",
        "p2p_post",
        needs=("p2p_ops",),
        before=messages.post_begins,
        after=messages.post_ends,
        abort=messages.post_fails,
    )
    if hasattr(schedules, "_wait_batch_p2p"):
        recorder.patches.around(
            schedules,
            "_wait_batch_p2p",
            "p2p_wait",
            needs=("work",),
            before=messages.wait_begins,
            after=messages.wait_ends,
        )
    recorder.patches.on_restore(messages.forget)


def _default_group() -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_group()


def _ranks(group: Any) -> list[int]:
    import torch.distributed as dist

    return list(dist.get_process_group_ranks(_default_group() if group is None else group))


def _stage_ranks(stage: Any) -> list[int]:
    """Global rank of each global stage of the pipeline that `stage` belongs to."""
    members = _ranks(stage.group)
    return [members[stage.stage_index_to_group_rank[i]] for i in range(stage.num_stages)]


def _consumer(stage: Any, direction: str, peer: int, ranks: list[int]) -> int:
    """The stage that will use what `stage` sends to rank `peer`: the nearest one there, down- or upstream."""
    here = stage.stage_index
    onward = range(here + 1, stage.num_stages) if direction == "act" else range(here - 1, -1, -1)
    return next((i for i in onward if ranks[i] == peer), here)


# ---- steps


def _hook_steps(recorder: Recorder, messages: _Messages, schedules: Any) -> None:
    inside = threading.local()

    def before(schedule: Any) -> tuple[Any, int] | None:
        if getattr(inside, "busy", False):
            return None
        recorder.schedule_begins(describe(schedule), bool(getattr(schedule, "_has_backward", True)))
        inside.busy = True
        return schedule, perf_counter_ns()

    def abort(token: Any) -> None:
        inside.busy = False
        recorder.schedule_ends(failed=True)

    def after(token: tuple[Any, int], result: Any) -> None:
        inside.busy = False
        schedule, start = token
        if recorder.sampled:
            name = "step" if getattr(schedule, "_has_backward", True) else "eval"
            recorder.add(Kind.STEP, Lane.RANGE, start, perf_counter_ns(), name=name)
        messages.forget()
        recorder.schedule_ends()

    for owner in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        recorder.patches.around(
            owner, "step", "schedule.step", needs=("self",), before=before, after=after, abort=abort
        )


def describe(schedule: Any) -> dict[str, Any]:
    """The layout line's fields: who runs which stage, how many micro-batches, by which schedule."""
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    first = stages[0]
    kind, index = _device(first)
    names = (SCHEDULES.get(cls.__name__) for cls in type(schedule).__mro__)
    return {
        "stages": sorted(int(stage.stage_index) for stage in stages),
        "num_stages": int(first.num_stages),
        "microbatches": int(schedule._n_microbatches),
        "schedule": next((name for name in names if name), "custom"),
        "schedule_class": type(schedule).__name__,
        "pp_ranks": _ranks(first.group),
        "stage_ranks": _stage_ranks(first),
        "device": {"type": kind, "index": index, "name": _device_name(kind, index)},
    }


@functools.cache
def _device_name(kind: str, index: int) -> str:
    import platform

    import torch

    if kind == "cuda":
        return str(torch.cuda.get_device_name(index))
    return platform.processor() or platform.machine()
