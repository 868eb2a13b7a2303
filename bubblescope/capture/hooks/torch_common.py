"""Hooks of torch that every framework on it shares: optimizer steps, data loading, collectives."""

from __future__ import annotations

import functools
import inspect
import threading
from time import perf_counter_ns
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
    """Through torch's own global hooks. A wrapper that steps an inner optimizer counts once (the outermost)."""
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
    depth = threading.local()

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not hook.enabled:
            return
        try:
            stack = depth.__dict__.setdefault("stack", [])
            # An optimizer that raised left its entry behind; the same one stepping again replaces it.
            stack[:] = [entry for entry in stack if entry[0] != id(optimizer)]
            stack.append((id(optimizer), recorder.mark() if not stack and recorder.rule.current.sampled else None))
        except Exception as error:  # ours; must not reach the job
            recorder.patches.fail(hook, error)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not hook.enabled:
            return
        try:
            entered = perf_counter_ns()
            stack = depth.__dict__.get("stack", [])
            if not stack or stack[-1][0] != id(optimizer):
                return
            _, start = stack.pop()
            if stack:
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
    state = _Collectives(recorder, dist)
    for name in COLLECTIVES:
        function = getattr(dist.distributed_c10d, name, None)
        if function is not None:
            _hook_collective(recorder, state, dist, name, function)


def _hook_collective(recorder: Recorder, state: _Collectives, dist: Any, name: str, function: Any) -> None:
    module = dist.distributed_c10d
    payload = [one for one in _PAYLOAD if one in inspect.signature(function).parameters]
    measured = recorder.patches.wrapped(
        module,
        name,
        f"dist.{name}",
        needs=("group",),
        optional={"async_op": False, **dict.fromkeys(payload)},
        before=functools.partial(state.before, name),
        after=state.after,
        abort=state.abort,
    )
    if measured is None:
        return
    replacement = _unless_compiling(function, measured)
    recorder.patches.replace(module, name, replacement)
    if getattr(dist, name, None) is function:
        recorder.patches.replace(dist, name, replacement)


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


def _unless_compiling(original: Any, measured: Any) -> Any:
    """While torch.compile traces, the original is called: our clock would break the user's graph."""
    import torch

    is_compiling = torch.compiler.is_compiling

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        return measured(*args, **kwargs)

    return wrapper


class _Collectives:
    """Numbers the collectives of each group, and names groups alike in all their ranks."""

    def __init__(self, recorder: Recorder, dist: Any) -> None:
        self._recorder = recorder
        self._dist = dist
        self._inside = threading.local()
        self._count: dict[str, int] = {}
        self._names: dict[int, tuple[Any, str]] = {}

    def before(self, name: str, group: Any, is_async: bool, *payload: Any) -> tuple[Any, ...] | None:
        if getattr(self._inside, "depth", 0):
            return None
        text = self.group_text(group)
        number = self._count[text] = self._count.get(text, -1) + 1
        if not self._recorder.rule.current.sampled:
            return None
        size = -1
        for one in payload:
            if one is not None:
                size = _size(one)
                break
        lane = Lane.POST if is_async else Lane.WAIT
        start = self._recorder.mark()
        self._inside.depth = 1
        return lane, start, (_collective, (name, size, text, number))

    def abort(self, token: Any) -> None:
        self._inside.depth = 0

    def after(self, token: tuple[Any, ...], result: Any) -> None:
        self._inside.depth = 0
        lane, start, labels = token
        recorder = self._recorder
        now = perf_counter_ns()
        end = start if lane is Lane.POST and not isinstance(start, int) else recorder.mark()
        recorder.add(lane, start, end, labels, now)

    def group_text(self, group: Any) -> str:
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
