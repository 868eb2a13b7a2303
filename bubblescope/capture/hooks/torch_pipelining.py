"""Hooks of torch.distributed.pipelining, torch 2.4 to 2.14 (also torchtitan and others that run its schedules).

Patched are class attributes of `_PipelineStageBase` and `_PipelineSchedule…` and two globals of `schedules`, which
the schedules look up at call time: schedules and stages made before recording are recorded too. Third
parties override stage methods and call super(): only the base is patched, so that each operation counts once.
"""

from __future__ import annotations

import functools
import threading
import weakref
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.torch_common import group_name
from bubblescope.capture.layers import LayerTimers
from bubblescope.capture.steps import Label
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
_MAX_LABELS = 20_000


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


_KINDS = {
    "F": Kind.FORWARD,
    "B": Kind.BACKWARD,
    "I": Kind.BACKWARD_INPUT,
    "W": Kind.BACKWARD_WEIGHT,
    "W, full": Kind.BACKWARD_WEIGHT,
    "loss": Kind.LOSS,
    "reduce": Kind.OTHER,
}
_NAMES = {"W, full": "full backward", "reduce": "reduce_grad"}


_Key = tuple[str, int, int]
_Running = tuple[_Key, Any]
"""(what, stage, micro-batch) of an operation that is running, and its start mark. Bare tuples that begin with a text:
making a NamedTuple, and hashing an enum, run Python code in every hook."""


class _Guard:
    """Refuses an operation that is already running in an outer call (an override that calls super)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._running: set[_Key] = set()
        self._labels: dict[_Key, tuple[Label, ...]] = {}

    def enter(self, key: _Key) -> _Running | None:
        if key in self._running:
            return None
        self._running.add(key)
        return key, self._recorder.mark()

    def abort(self, op: _Running) -> None:
        self._running.discard(op[0])

    def leave(self, op: _Running, result: Any) -> None:
        end = self._recorder.mark()
        key, start = op
        self._running.discard(key)
        labels = self._labels.get(key)
        if labels is None:
            what, stage, microbatch = key
            labels = self._labels[key] = (Label(_KINDS[what], stage, microbatch, _NAMES.get(what, "")),)
        self._recorder.add(Lane.COMPUTE, start, end, labels)


def _hook_compute(recorder: Recorder, base: Any, schedule: Any) -> None:
    guard = _Guard(recorder)
    rule, enter = recorder.rule, guard.enter

    def forward(stage: Any, microbatch: int) -> _Running | None:
        if not recorder.device_known:
            recorder.use_device(*_device(stage))
        if rule.current.optimizer_seen or not rule.current.busy:
            recorder.forward_begins()
        return enter(("F", stage.stage_index, microbatch)) if rule.current.sampled else None

    def backward(stage: Any, microbatch: int, full: bool) -> _Running | None:
        if not rule.current.sampled or not stage.has_backward:
            return None
        return enter(("B" if full else "I", stage.stage_index, microbatch))

    def weight(stage: Any, microbatch: int) -> _Running | None:
        if not rule.current.sampled or not stage.has_backward:
            return None
        # On the first stage torch does nothing for I and the whole backward for W, unless dW is the user's own.
        whole = stage.is_first and getattr(stage, "dw_builder", None) is None
        return enter(("W, full" if whole else "W", stage.stage_index, microbatch))

    def reduce(stage: Any) -> _Running | None:
        if not rule.current.sampled or not stage.has_backward:
            return None
        return enter(("reduce", stage.stage_index, -1))

    def loss(owner: Any, stage: Any, microbatch: int) -> _Running | None:
        if not rule.current.sampled or not stage.is_last or owner._loss_fn is None:
            return None
        return enter(("loss", stage.stage_index, microbatch))

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


class _Messages:
    """What P2P operations carry: noted when the stage builds them, used when they are posted and waited for."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._in_flight: dict[int, tuple[Any, tuple[Label, ...]]] = {}
        self._inside = threading.local()
        self._pipelines: weakref.WeakKeyDictionary[Any, tuple[Any, list[int], str]] = weakref.WeakKeyDictionary()
        self._labels: dict[tuple[Any, ...], Label] = {}

    def note(self, kind: Kind, direction: str, call: tuple[Any, int], ops: Any) -> None:
        """The stage built `ops` for one micro-batch: write on each what it carries."""
        stage, microbatch = call
        end = "send" if kind is Kind.SEND else "recv"
        seen: dict[int, int] = {}
        for op in ops:
            peer = op.peer
            index = seen[peer] = seen.get(peer, -1) + 1
            key = (end, direction, stage.stage_index, microbatch, peer, op.tensor.nbytes, index, id(stage))
            label = self._labels.get(key)
            if label is None:
                label = self._labels[key] = self._label(kind, direction, stage, microbatch, op, index)
            op._bubblescope = label

    def _label(self, kind: Kind, direction: str, stage: Any, microbatch: int, op: Any, index: int) -> Label:
        """`seq` numbers the message so that both ends compute the same."""
        ranks, group = self._pipeline(stage)
        peer = int(op.peer)
        consumer = stage.stage_index if kind is Kind.RECV else _consumer(stage, direction, peer, ranks)
        seq = ((microbatch * stage.num_stages + consumer) * 2 + (direction == "grad")) * _TENSORS_PER_MESSAGE
        return Label(
            kind,
            stage.stage_index,
            microbatch,
            direction,
            peer,
            int(op.tensor.nbytes),
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

    def post_begins(self, ops: Any) -> tuple[Any, tuple[Label, ...]] | None:
        if not ops or not self.recorder.rule.current.sampled or getattr(self._inside, "busy", False):
            return None
        carried: tuple[Label, ...] = ()
        for op in ops:
            label = getattr(op, "_bubblescope", None)
            if label is not None:
                carried += (label,)
        if not carried:
            return None
        self._inside.busy = True
        return self.recorder.mark(), carried

    def post_fails(self, token: Any) -> None:
        self._inside.busy = False

    def post_ends(self, token: tuple[Any, tuple[Label, ...]], works: Any) -> Any:
        self._inside.busy = False
        start, carried = token
        now = perf_counter_ns()
        # On a CPU rank posting takes the CPU's time; on a GPU rank it is a moment on the compute stream.
        end = self.recorder.mark() if isinstance(start, int) else start
        self.recorder.add(Lane.POST, start, end, carried, now if end is start else -1)
        if isinstance(works, list):
            self._follow(works, carried)
            return None
        return None if works is None else _TimedWork(works, self, carried)

    def _follow(self, works: list[Any], carried: tuple[Label, ...]) -> None:
        alone = len(works) == len(carried)
        for i, work in enumerate(works):
            if work is not None:  # the reference keeps id() from being used again
                self._in_flight[id(work)] = (work, carried[i : i + 1] if alone else carried)
                if not alone:
                    break  # one work stands for the whole coalesced batch

    def wait_begins(self, works: Any) -> tuple[Any, tuple[Label, ...]] | None:
        carried: tuple[Label, ...] = ()
        for work in works or ():
            entry = self._in_flight.pop(id(work), None)
            if entry is not None:
                carried += entry[1]
        if not carried or not self.recorder.rule.current.sampled:
            return None
        return self.recorder.mark(), carried

    def wait_ends(self, token: tuple[Any, tuple[Label, ...]], result: Any) -> None:
        start, carried = token
        self.recorder.add(Lane.WAIT, start, self.recorder.mark(), carried)

    def forget(self) -> None:
        """Drop what nobody waited for, so that nothing is kept alive beyond its schedule call."""
        self._in_flight.clear()
        if len(self._labels) > _MAX_LABELS:  # message sizes that change in every step
            self._labels.clear()


class _TimedWork:
    """torch 2.4 and 2.5 return one Work and wait on it directly: this stands in for it and times the wait."""

    def __init__(self, work: Any, messages: _Messages, carried: tuple[Label, ...]) -> None:
        self._work = work
        self._messages = messages
        self._carried = carried

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self._messages.recorder
        start = recorder.mark() if recorder.running and self._carried else None
        result = self._work.wait(*args, **kwargs)
        if start is not None and recorder.running:
            self._messages.wait_ends((start, self._carried), None)
            self._carried = ()
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
            before=lambda stage, microbatch: (stage, microbatch) if recorder.rule.current.sampled else None,
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
    described: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], dict[str, Any]]] = weakref.WeakKeyDictionary()
    ranges = {name: (Label(Kind.STEP, name=name),) for name in ("step", "eval")}
    layers = LayerTimers(recorder)
    recorder.patches.on_restore(layers.end)

    def layout(schedule: Any) -> dict[str, Any]:
        stages = _stages(schedule)
        shape = (schedule._n_microbatches, len(stages), stages[0].stage_index)
        known = described.get(schedule)
        if known is None or known[0] != shape:
            known = described[schedule] = (shape, describe(schedule))
        return known[1]

    def before(schedule: Any) -> tuple[Any, int] | None:
        if getattr(inside, "busy", False):
            return None
        recorder.framework = recorder.framework or "torch"
        recorder.schedule_begins(layout(schedule), bool(getattr(schedule, "_has_backward", True)))
        inside.busy = True
        layers.begin(_stages(schedule))
        return schedule, perf_counter_ns()

    def abort(token: Any) -> None:
        inside.busy = False
        layers.end()
        recorder.schedule_ends(failed=True)

    def after(token: tuple[Any, int], result: Any) -> None:
        inside.busy = False
        layers.end()
        schedule, start = token
        if recorder.rule.current.sampled:
            name = "step" if getattr(schedule, "_has_backward", True) else "eval"
            recorder.add(Lane.RANGE, start, perf_counter_ns(), ranges[name])
        messages.forget()
        recorder.schedule_ends()

    for owner in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        recorder.patches.around(
            owner, "step", "schedule.step", needs=("self",), before=before, after=after, abort=abort
        )


def _stages(schedule: Any) -> list[Any]:
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def describe(schedule: Any) -> dict[str, Any]:
    """The layout line's fields: who runs which stage, how many micro-batches, by which schedule."""
    stages = _stages(schedule)
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
