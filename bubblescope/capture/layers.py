"""Light timers around the layers of a stage, in a few steps only: what moving layers between stages needs to know.

Between the beginning and the end of a chosen schedule call, the repeated children of each stage's module carry
hooks; before and after they carry none. Forward: from the layer's call to its return. Backward: from the gradient of
its output to the gradient of its input, seen by hooks on these two tensors (no module backward hooks: those wrap
tensors and can break views and in-place code). It is kept only where it lies in a whole backward; where the backward
is split into I and W, readers take it in proportion to the forward.

Not timed: a stage with a compiled module (a hook there would break the graph), recomputation of checkpointed layers
as a forward (it belongs to the backward), anything while a CUDA graph is captured (marks are None there).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from bubblescope.capture.steps import Event, Label, host_ns
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

STEPS = 2
"""So many steps after warm-up are timed, unless `STEPS_VARIABLE` says otherwise (0: none)."""
STEPS_VARIABLE = "BUBBLESCOPE_LAYER_STEPS"
MARKS_PER_CALL = 1000
"""Time marks in one schedule call: the pool of CUDA events serves the operations first."""
PREFIX = "layer"
"""Rows of layers: lane RANGE, kind OTHER, name ``layer F 0003 layers.3`` (or B)."""


def wanted_steps() -> int:
    """From the environment, else `STEPS`."""
    text = os.environ.get(STEPS_VARIABLE, "")
    return int(text) if text.isdigit() else STEPS


def find_layers(module: Any) -> list[tuple[str, Any]]:
    """(name, module) of the repeated children: the outermost container whose children are all of one class, of
    several on that level the longest. Empty when there is none.

    A container is a ModuleList, ModuleDict or Sequential; in a Sequential there must be at least two children.
    """
    import torch

    best: list[tuple[str, Any]] = []
    best_depth = -1
    for name, part in module.named_modules():
        if not isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)):
            continue
        children = list(part.named_children())
        depth = name.count(".") + 1 if name else 0
        alike = len({f"{type(c).__module__}.{type(c).__qualname__}" for _, c in children}) == 1
        enough = len(children) >= (2 if isinstance(part, torch.nn.Sequential) else 1)
        better = not best or depth < best_depth or (depth == best_depth and len(children) > len(best))
        if alike and enough and better:
            best = [(f"{name}.{key}" if name else key, child) for key, child in children]
            best_depth = depth
    return best


def compiled(module: Any) -> bool:
    """Whether torch.compile was used on the module or on a part of it."""
    return any(
        getattr(part, "_compiled_call_impl", None) is not None or type(part).__name__ == "OptimizedModule"
        for part in module.modules()
    )


class LayerTimers:
    """Of one recorder. `begin` and `end` stand around each schedule call; both never raise."""

    def __init__(self, recorder: Recorder, steps: int | None = None) -> None:
        self._recorder = recorder
        self._left = wanted_steps() if steps is None else steps
        self._step = -1
        self._handles: list[Any] = []
        self._backward: list[tuple[int, str, Any, Any]] = []
        self._open: dict[tuple[int, str, int], Any] = {}
        self._on = False
        self._hook = recorder.patches.hook("layers")

    def begin(self, stages: Sequence[Any]) -> None:
        """A schedule call begins that runs these stages (``stage_index``, ``submod``)."""
        current = self._recorder.rule.current
        if not (current.sampled and not current.warmup and not current.evaluation and self._hook.enabled):
            return
        if current.index != self._step:
            if self._left <= 0:
                return
            self._left -= 1
            self._step = current.index
        try:
            self._attach(stages)
        except Exception as error:  # ours; must not reach the job
            self._give_up(error)

    def end(self) -> None:
        """The schedule call ended, or raised: take every hook away again, and write down the backwards."""
        if not self._on:
            return
        try:
            self._detach()
            self._write_backwards()
        except Exception as error:  # as above
            self._give_up(error)

    # ---- hooks on and off

    def _attach(self, stages: Sequence[Any]) -> None:
        found = [(stage, find_layers(stage.submod)) for stage in stages if not compiled(stage.submod)]
        total = sum(len(layers) for _, layers in found)
        if not total:
            return
        self._on = True
        calls = max(1, MARKS_PER_CALL // (4 * total))
        for stage, layers in found:
            for index, (name, layer) in enumerate(layers):
                self._watch(layer, _Layer(int(stage.stage_index), f"{index:04d} {name}", calls))

    def _watch(self, layer: Any, seen: _Layer) -> None:
        self._handles.append(layer.register_forward_pre_hook(partial(self._before, seen), with_kwargs=True))
        self._handles.append(layer.register_forward_hook(partial(self._after, seen), with_kwargs=True))

    def _detach(self) -> None:
        self._on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _give_up(self, error: Exception) -> None:
        self._on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._backward.clear()
        self._open.clear()
        self._recorder.patches.fail(self._hook, error)

    # ---- inside the job

    def _before(self, seen: _Layer, module: Any, args: Any, kwargs: Any) -> None:
        try:
            if self._on and seen.calls > 0 and not _in_backward():
                seen.start = self._recorder.mark()
        except Exception as error:  # ours; must not reach the job
            self._give_up(error)

    def _after(self, seen: _Layer, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        start, seen.start = seen.start, None
        if start is None or not self._on:
            return
        try:
            end = self._recorder.mark()
            seen.calls -= 1
            self._hook.hits += 1
            label = Label(Kind.OTHER, seen.stage, name=f"{PREFIX} F {seen.name}")
            self._recorder.add(Lane.RANGE, start, end, (label,))
            made = _with_gradient(output)
            if made is not None:
                key = (seen.stage, seen.name, seen.calls)
                self._handles.append(made.register_hook(self._guarded(partial(self._gradient_arrives, key))))
                taken = _with_gradient((args, kwargs))
                if taken is not None:
                    self._handles.append(taken.register_hook(self._guarded(partial(self._gradient_leaves, key))))
        except Exception as error:  # ours; must not reach the job
            self._give_up(error)

    def _guarded(self, note: Callable[[], None]) -> Callable[[Any], None]:
        def hook(gradient: Any) -> None:
            if not self._on:
                return
            try:
                note()
            except Exception as error:  # as above
                self._give_up(error)

        return hook

    def _gradient_arrives(self, key: tuple[int, str, int]) -> None:
        self._open[key] = self._recorder.mark()

    def _gradient_leaves(self, key: tuple[int, str, int]) -> None:
        start = self._open.pop(key, None)
        if start is not None:
            self._backward.append((key[0], key[1], start, self._recorder.mark()))

    # ---- afterwards

    def _write_backwards(self) -> None:
        """Only those that lie in a whole backward. A first layer whose input needs no gradient ends with it."""
        self._recorder.settle()
        events = self._recorder.rule.current.events
        backwards = [e for e in events if e[0] is Lane.COMPUTE and e[6] and _whole_backward(e[6][0])]
        unended = [(stage, name, start, None) for (stage, name, _), start in self._open.items()]
        for stage, name, start, end in (*self._backward, *unended):
            around = _around(backwards, stage, start)
            if around is not None:
                label = Label(Kind.OTHER, stage, name=f"{PREFIX} B {name}")
                self._recorder.add(Lane.RANGE, start, around[2] if end is None else end, (label,))
        self._backward.clear()
        self._open.clear()


class _Layer:
    """One layer that is watched. calls: how many are still to be timed. start: of the call that runs."""

    __slots__ = ("calls", "name", "stage", "start")

    def __init__(self, stage: int, name: str, calls: int) -> None:
        self.stage = stage
        self.name = name
        self.calls = calls
        self.start: Any = None


def _in_backward() -> bool:
    """Whether autograd runs in this thread: then a forward is a recomputation."""
    import torch

    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1


def _with_gradient(value: Any) -> Any:
    """The first tensor in nested tuples, lists and dicts that a gradient will reach; None when there is none."""
    if hasattr(value, "register_hook"):
        return value if value.requires_grad else None
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            found = _with_gradient(item)
            if found is not None:
                return found
    return None


def _whole_backward(label: Label) -> bool:
    return label.kind is Kind.BACKWARD or (label.kind is Kind.BACKWARD_WEIGHT and label.name == "full backward")


def _around(backwards: Sequence[Event], stage: int, mark: Any) -> Event | None:
    """The backward of that stage that ran when `mark` was taken, by the host's clock."""
    now = host_ns(mark)
    for event in backwards:
        if event[6][0].stage == stage and host_ns(event[1]) <= now <= host_ns(event[2]):
            return event
    return None
