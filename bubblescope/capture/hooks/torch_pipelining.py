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

from bubblescope.capture.hooks import torch_ddp
from bubblescope.capture.hooks.shared import TimedWork, check_version, installed_version, timed
from bubblescope.capture.hooks.torch_common import group_name
from bubblescope.capture.layers import LayerTimers
from bubblescope.capture.messages import message_number
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

OLDEST, NEWEST = "2.4", "2.14"

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
    check_version(recorder, "torch", installed_version("torch", "torch"), OLDEST, NEWEST)
    _hook_compute(recorder, stage._PipelineStageBase, schedules._PipelineSchedule)
    torch_ddp.install(recorder, stage._PipelineStageBase)
    messages = _Messages(recorder)
    _hook_messages(recorder, messages, stage._PipelineStageBase, schedules)
    _hook_steps(recorder, messages, schedules)


# ---- compute


def _hook_compute(recorder: Recorder, base: Any, schedule: Any) -> None:
    measure = functools.partial(timed, recorder, lane=Lane.COMPUTE)

    def begins(stage: Any, microbatch: int) -> None:
        if not recorder.device_known:
            recorder.use_device(*_device(stage))
        recorder.forward_begins()

    one = ("self", "bwd_chunk_id")
    measure(base, "forward_one_chunk", "forward", labels=_forward, needs=("self", "fwd_chunk_id"), opens=begins)
    measure(base, "backward_one_chunk", "backward", labels=_backward, needs=one, optional={"full_backward": True})
    measure(base, "backward_weight_one_chunk", "weight", labels=_weight, needs=one)
    reduce = "perform_reduce_grad" if hasattr(base, "perform_reduce_grad") else "scale_grads"
    measure(base, reduce, "reduce_grad", labels=_reduce, needs=("self",))
    measure(schedule, "_maybe_compute_loss", "loss", labels=_loss, needs=("self", "stage", "mb_index"))


def _forward(stage: Any, microbatch: int) -> tuple[Label, ...]:
    return _labels(Kind.FORWARD, stage.stage_index, microbatch)


def _backward(stage: Any, microbatch: int, full: bool) -> tuple[Label, ...]:
    if not stage.has_backward:
        return ()
    return _labels(Kind.BACKWARD if full else Kind.BACKWARD_INPUT, stage.stage_index, microbatch)


def _weight(stage: Any, microbatch: int) -> tuple[Label, ...]:
    if not stage.has_backward:
        return ()
    # On the first stage torch does nothing for I and the whole backward for W, unless dW is the user's own.
    whole = stage.is_first and getattr(stage, "dw_builder", None) is None
    return _labels(Kind.BACKWARD_WEIGHT, stage.stage_index, microbatch, "full backward" if whole else "")


def _reduce(stage: Any) -> tuple[Label, ...]:
    return _labels(Kind.OTHER, stage.stage_index, -1, "reduce_grad") if stage.has_backward else ()


def _loss(owner: Any, stage: Any, microbatch: int) -> tuple[Label, ...]:
    computed = stage.is_last and owner._loss_fn is not None
    return _labels(Kind.LOSS, stage.stage_index, microbatch) if computed else ()


def _labels(kind: Kind, stage: int, microbatch: int, name: str = "") -> tuple[Label, ...]:
    return (Label(kind, stage, microbatch, name),)


def _device(stage: Any) -> tuple[str, int]:
    device = stage.device
    return device.type, device.index if device.index is not None else 0


# ---- messages


_Note = tuple[str, str, Any, int, int]
"""What the stage that built a P2P operation knows of it: (end, direction, stage, micro-batch, index to that peer)."""

_Carried = list[tuple[_Note, int, int]]
"""Operations that were posted: their notes, peers and bytes."""


class _Messages:
    """What P2P operations carry: noted when the stage builds them, used when they are posted and waited for.

    in_flight: {id of the list of works that posting returned: (that list, which keeps the id theirs, its length then,
    what they carry)}.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.in_flight: dict[int, tuple[list[Any], int, _Carried]] = {}
        self._apart: dict[int, tuple[Any, _Carried]] = {}
        self._pipelines: weakref.WeakKeyDictionary[Any, tuple[Any, list[int], str]] = weakref.WeakKeyDictionary()
        self._labels: dict[tuple[Any, ...], Label] = {}

    def labels(self, carried: _Carried) -> tuple[Label, ...]:
        """For rows of a post or a wait, when the schedule call has ended."""
        made = []
        for (end, direction, stage, microbatch, index), peer, size in carried:
            key = (end, direction, stage.stage_index, microbatch, peer, size, index, id(stage))
            label = self._labels.get(key)
            if label is None:
                label = self._labels[key] = self._label(end, direction, stage, microbatch, index, peer, size)
            made.append(label)
        return tuple(made)

    def _label(self, end: str, direction: str, stage: Any, microbatch: int, index: int, peer: int, size: int) -> Label:
        ranks, group = self._pipeline(stage)
        consumer = stage.stage_index if end == "recv" else _consumer(stage, direction, peer, ranks)
        number = message_number(microbatch, consumer, stage.num_stages, direction == "grad", index)
        kind = Kind.SEND if end == "send" else Kind.RECV
        return Label(kind, stage.stage_index, microbatch, direction, int(peer), int(size), group, number)

    def _pipeline(self, stage: Any) -> tuple[list[int], str]:
        """Ranks of all stages and name of the group, kept until a schedule maps its stages anew."""
        mapping = stage.stage_index_to_group_rank
        known = self._pipelines.get(stage)
        if known is None or known[0] is not mapping:
            group = stage.group if stage.group is not None else _default_group()
            known = self._pipelines[stage] = (mapping, _stage_ranks(stage), group_name(group, _ranks(group)))
        return known[1], known[2]

    def waited_for(self, works: Any) -> tuple[_Carried] | None:
        """What the works carry that a call is about to wait for; None when that is unknown."""
        known = self.in_flight.get(id(works))
        if known is not None and known[1] == len(works) and None not in works:
            del self.in_flight[id(works)]
            return (known[2],)
        carried = self._waited_one_by_one(works)
        return (carried,) if carried else None

    def _waited_one_by_one(self, works: Any) -> _Carried:
        """Of a list that the job made itself, of works that it was given."""
        for posted, _, carried in self.in_flight.values():
            alone = len(posted) == len(carried)
            for i, work in enumerate(posted):
                if work is not None:
                    self._apart[id(work)] = (work, carried[i : i + 1] if alone else carried)
                    if not alone:
                        break  # one work stands for the whole coalesced batch
        self.in_flight.clear()
        found = [self._apart.pop(id(work), (None, []))[1] for work in works or ()]
        return [item for carried in found for item in carried]

    def forget(self) -> None:
        """Drop what nobody waited for, so that nothing is kept alive beyond its schedule call."""
        self.in_flight.clear()
        self._apart.clear()
        if len(self._labels) > _MAX_LABELS:  # message sizes that change in every step
            self._labels.clear()


def _hook_messages(recorder: Recorder, messages: _Messages, base: Any, schedules: Any) -> None:
    for name, end, direction in (
        ("get_fwd_recv_ops", "recv", "act"),
        ("get_fwd_send_ops", "send", "act"),
        ("get_bwd_recv_ops", "recv", "grad"),
        ("get_bwd_send_ops", "send", "grad"),
    ):
        _hook_building(recorder, base, name, end, direction)
    _hook_posting(recorder, messages, schedules)
    if hasattr(schedules, "_wait_batch_p2p"):
        wait = "_wait_batch_p2p"
        waited = messages.waited_for
        timed(recorder, schedules, wait, "p2p_wait", Lane.WAIT, messages.labels, needs=("work",), choose=waited)
    recorder.patches.on_restore(messages.forget)


def _hook_building(recorder: Recorder, base: Any, name: str, end: str, direction: str) -> None:
    """Write on each operation that a stage builds what it carries. In one frame, for what `timed` says."""
    chunk = "fwd_chunk_id" if direction == "act" else "bwd_chunk_id"
    bound = recorder.patches.bind(base, name, name, ("self", chunk))
    if bound is None:
        return
    original, hook, pick = bound.original, bound.hook, bound.arguments.pick
    fail, rule, clock = recorder.patches.fail, recorder.rule, perf_counter_ns

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        ops = original(*args, **kwargs)
        if not ops or not hook.enabled or not rule.current.sampled:
            return ops
        try:
            entered = clock()
            stage, microbatch = args if len(args) == 2 else pick(args, kwargs)
            before: dict[int, int] = {}
            for op in ops:
                index = before[op.peer] = before.get(op.peer, -1) + 1
                op._bubblescope = (end, direction, stage, microbatch, index)
            hook.hits += 1
            hook.own_ns += clock() - entered
        except Exception as error:  # ours; must not reach the job
            fail(hook, error)
        return ops

    recorder.patches.replace(base, name, wrapper)


def _hook_posting(recorder: Recorder, messages: _Messages, schedules: Any) -> None:
    bound = recorder.patches.bind(schedules, "_batch_p2p", "p2p_post", ("p2p_ops",))
    if bound is None:
        return
    original, hook, pick = bound.original, bound.hook, bound.arguments.pick
    fail, rule, labels, clock = recorder.patches.fail, recorder.rule, messages.labels, perf_counter_ns

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not hook.enabled or not rule.current.sampled:
            return original(*args, **kwargs)
        carried: _Carried = []
        try:
            entered = clock()
            for op in args[0] if args else pick(args, kwargs)[0]:
                note = getattr(op, "_bubblescope", None)
                if note is not None:
                    op._bubblescope = None  # it is posted once, also where one way of posting ends in another
                    carried.append((note, op.peer, op.tensor.nbytes))
            start = recorder.mark() if carried else None
        except Exception as error:  # ours; must not reach the job
            fail(hook, error)
            carried = []
        if not carried:
            return original(*args, **kwargs)
        began = clock()
        works = original(*args, **kwargs)
        try:
            ended = clock()
            # On a CPU rank posting takes the CPU's time; on a GPU rank it is a moment on the compute stream.
            if isinstance(start, int):
                recorder.add(Lane.POST, start, ended, (labels, (carried,)))
            else:
                recorder.add(Lane.POST, start, start, (labels, (carried,)), ended)
            if isinstance(works, list):
                messages.in_flight[id(works)] = (works, len(works), carried)
            elif works is not None:  # torch 2.4 and 2.5 return one Work and wait on it directly
                works = TimedWork(recorder, works, (labels, (carried,)))
            hook.hits += 1
            hook.own_ns += began - entered + clock() - ended
        except Exception as error:  # as above
            fail(hook, error)
        return works

    recorder.patches.replace(schedules, "_batch_p2p", wrapper)


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

    def layout(schedule: Any) -> tuple[dict[str, Any], bool]:
        """Its layout, and whether the schedule is new."""
        stages = _stages(schedule)
        shape = (schedule._n_microbatches, len(stages), stages[0].stage_index)
        known = described.get(schedule)
        new = known is None
        if known is None or known[0] != shape:
            known = described[schedule] = (shape, describe(schedule))
        return known[1], new

    def before(schedule: Any) -> tuple[Any, int] | None:
        if getattr(inside, "busy", False):
            return None
        recorder.framework = recorder.framework or "torch"
        described_as, new = layout(schedule)
        recorder.schedule_begins(described_as, bool(getattr(schedule, "_has_backward", True)), new)
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
