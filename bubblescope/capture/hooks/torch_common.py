"""Hooks of torch that every framework on it shares: optimizer steps, data loading, collectives."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from time import perf_counter_ns
from types import FrameType
from typing import TYPE_CHECKING, Any

from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
)
_PAYLOAD = ("tensor", "output_tensor", "output", "input")


def knows(thing: Any) -> bool:
    """Nothing here is a schedule."""
    return False


def install(recorder: Recorder) -> None:
    """Hook optimizer, DataLoader, collectives and the end of the process group."""
    _hook_optimizers(recorder)
    _hook_data_loading(recorder)
    _hook_collectives(recorder)
    _hook_end(recorder)


def _hook_optimizers(recorder: Recorder) -> None:
    """Through torch's own global hooks. Torch wraps the `step` of each class, so they run again inside, for a subclass
    that calls ``super().step()`` as for an optimizer that steps an inner one: the outermost counts."""
    name = "optimizer.step"
    try:
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )
    except ImportError:
        recorder.patches.refuse(name, "torch.optim has no global step hooks")
        return
    hook = recorder.patches.hook(name)
    running = threading.local()

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not hook.enabled:
            return
        try:
            starts = running.__dict__.setdefault("starts", [])
            if starts:  # nested, or one that raised left its entry behind
                del starts[_enclosing(sys._getframe(1)) :]
            starts.append(recorder.mark() if not starts and recorder.rule.current.sampled else None)
        except Exception as error:  # ours; must not reach the job
            recorder.patches.fail(hook, error)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not hook.enabled:
            return
        try:
            entered = perf_counter_ns()
            starts = running.__dict__.get("starts", [])
            if len(starts) > 1:
                del starts[_enclosing(sys._getframe(1)) + 1 :]
            if not starts:
                return
            start = starts.pop()
            if starts:
                return
            if start is not None:
                end = recorder.mark()
                label = Label(Kind.OPTIMIZER, name=type(optimizer).__name__)
                recorder.add(Lane.COMPUTE, start, end, (label,))
            recorder.optimizer_stepped()
            hook.hits += 1
            hook.own_ns += perf_counter_ns() - entered
        except Exception as error:  # as above
            recorder.patches.fail(hook, error)

    recorder.patches.on_restore(register_optimizer_step_pre_hook(before).remove)
    recorder.patches.on_restore(register_optimizer_step_post_hook(after).remove)


def _enclosing(wrapper: FrameType) -> int:
    """How many calls of torch's wrapper of `step` enclose this one."""
    count, outer = 0, wrapper.f_back
    while outer is not None:
        count += outer.f_code is wrapper.f_code
        outer = outer.f_back
    return count


def _hook_data_loading(recorder: Recorder) -> None:
    from torch.utils.data import dataloader

    inside = threading.local()
    loading = (Label(Kind.DATA, name="DataLoader"),)

    def before(iterator: Any) -> int | None:
        if getattr(inside, "loading", False):
            return None
        recorder.data_begins()
        inside.loading = True
        return perf_counter_ns()

    def abort(start: int) -> None:
        inside.loading = False

    def after(start: int, batch: Any) -> None:
        inside.loading = False
        if recorder.rule.current.sampled:
            recorder.add(Lane.HOST, start, perf_counter_ns(), loading)

    recorder.patches.around(
        dataloader._BaseDataLoaderIter,
        "__next__",
        "DataLoader.__next__",
        needs=("self",),
        before=before,
        after=after,
        abort=abort,
    )


def _hook_collectives(recorder: Recorder) -> None:
    """The functions of torch.distributed. What DDP and FSDP launch from C++ does not pass here."""
    import torch.distributed as dist

    if not dist.is_available():
        recorder.patches.refuse("collectives", "this torch has no torch.distributed")
        return
    groups = _Groups(dist)
    for name in COLLECTIVES:
        function = getattr(dist.distributed_c10d, name, None)
        if function is not None:
            _hook_collective(recorder, groups, dist, name, function)


def _hook_collective(recorder: Recorder, groups: _Groups, dist: Any, name: str, function: Any) -> None:
    """In one frame, for what `timed` says. While torch.compile traces, the original is called: our clock would break
    the user's graph."""
    import torch

    module = dist.distributed_c10d
    tensors = [one for one in _PAYLOAD if one in inspect.signature(function).parameters]
    optional = {"async_op": False, **dict.fromkeys(tensors)}
    bound = recorder.patches.bind(module, name, f"dist.{name}", ("group",), optional)
    if bound is None:
        return
    hook, enough, take, pick = bound.hook, bound.arguments.enough, bound.arguments.take, bound.arguments.pick
    fail, rule, clock = recorder.patches.fail, recorder.rule, perf_counter_ns
    is_compiling, inside = torch.compiler.is_compiling, groups.inside

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not hook.enabled or getattr(inside, "collective", False):
            return function(*args, **kwargs)
        start = None
        try:
            entered = clock()
            group, is_async, *payload = take(args) if len(args) >= enough else pick(args, kwargs)
            text = groups.text(group)
            number = groups.count[text] = groups.count.get(text, -1) + 1
            if rule.current.sampled:
                size = -1
                for one in payload:
                    if one is not None:
                        size = _size(one)
                        break
                labels = (_collective, (name, size, text, number))
                start = recorder.mark()
        except Exception as error:  # ours; must not reach the job
            fail(hook, error)
        if start is None:
            return function(*args, **kwargs)
        inside.collective = True
        began = clock()
        try:
            result = function(*args, **kwargs)
        finally:
            inside.collective = False
        try:
            ended = clock()
            lane = Lane.POST if is_async else Lane.WAIT
            end = start if is_async and not isinstance(start, int) else recorder.mark()
            recorder.add(lane, start, end, labels, ended)
            hook.hits += 1
            hook.own_ns += began - entered + clock() - ended
        except Exception as error:  # as above
            fail(hook, error)
        return result

    recorder.patches.replace(module, name, wrapper)
    if getattr(dist, name, None) is function:
        recorder.patches.replace(dist, name, wrapper)


def _hook_end(recorder: Recorder) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    owner = dist.distributed_c10d
    wrapper = recorder.patches.wrapped(
        owner,
        "destroy_process_group",
        "destroy_process_group",
        needs=(),
        before=recorder.ending,
        after=lambda token, result: None,
    )
    if wrapper is None:
        return
    for place in (owner, dist):
        recorder.patches.replace(place, "destroy_process_group", wrapper)


class _Groups:
    """Names groups alike in all their ranks, and counts their collectives. inside: whether this thread runs one."""

    def __init__(self, dist: Any) -> None:
        self.inside = threading.local()
        self.count: dict[str, int] = {}
        self._dist = dist
        self._names: dict[int, tuple[Any, str]] = {}

    def text(self, group: Any) -> str:
        """Group name and member ranks: names alone repeat between sibling groups."""
        if group is None:
            group = self._dist.distributed_c10d._get_default_group()
        known = self._names.get(id(group))
        if known is None or known[0] is not group:
            text = group_name(group, self._dist.get_process_group_ranks(group))
            known = self._names[id(group)] = (group, text)
        return known[1]


def _collective(name: str, size: int, group: str, number: int) -> tuple[Label, ...]:
    return (Label(Kind.COLLECTIVE, name=name, bytes=size, group=group, seq=number),)


def group_name(group: Any, ranks: list[int]) -> str:
    """The same text in all ranks of the group, another one for other members.

    >>> class G: group_name = "pp"
    >>> group_name(G(), [0, 1, 2, 3]), group_name(G(), [0, 4])
    ('pp:0-3', 'pp:0,4')
    """
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        members = f"{ranks[0]}-{ranks[-1]}"
    else:
        members = ",".join(map(str, ranks))
    return f"{getattr(group, 'group_name', '') or 'group'}:{members}"


def _size(payload: Any) -> int:
    try:
        return int(payload.nbytes)
    except (AttributeError, RuntimeError):  # a list; a sparse tensor
        return -1
