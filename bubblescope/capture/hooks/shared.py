"""What the hooks of several frameworks need."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from bubblescope.capture.steps import MAX_EVENTS, Event, Label, host_ns
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

_DEVICE_LANES = (Lane.COMPUTE, Lane.WAIT, Lane.POST, Lane.COPY)


def rest_of(events: Sequence[Event], start: Any, end: Any) -> list[tuple[Any, Any]]:
    """Parts of [start, end) that none of `events` covers: those that were recorded while it ran, in their order.

    Marks of any timer; of events that contain each other the outer one counts.

    >>> inner = [(Lane.WAIT, 20, 30, -1, -1, 0, ()), (Lane.COMPUTE, 15, 40, -1, -1, 0, ())]
    >>> rest_of(inner, 10, 50)
    [(10, 15), (40, 50)]
    """
    parts: list[tuple[Any, Any]] = []
    reached = end
    for event in reversed(events):
        if event[0] not in _DEVICE_LANES or host_ns(event[2]) > host_ns(reached) or host_ns(event[1]) < host_ns(start):
            continue
        if host_ns(event[2]) < host_ns(reached):
            parts.append((event[2], reached))
        reached = event[1]
    if host_ns(reached) > host_ns(start):
        parts.append((start, reached))
    return parts[::-1]


def timed(
    recorder: Recorder,
    owner: Any,
    name: str,
    label: str,
    lane: Lane,
    labels: Callable[..., tuple[Label, ...]],
    *,
    needs: Sequence[str],
    optional: Mapping[str, Any] | None = None,
    choose: Callable[..., tuple[Any, ...] | None] | None = None,
    opens: Callable[..., None] | None = None,
) -> bool:
    """Record each call of ``owner.name`` as one interval; False when its signature does not allow it.

    In the call only the time and the values of `needs` and `optional` are noted, in one frame and with few objects:
    mostly caches are cold there, and what touches them is all that it costs.

    labels: called with the values when the schedule call has ended; () for none. choose: called with the values in
    the call; what it returns stands for them (values that must not be kept so long), None leaves this call alone.
    opens: called with the values when the open step has had no work yet.
    """
    bound = recorder.patches.bind(owner, name, label, needs, optional)
    if bound is None:
        return False
    original, hook = bound.original, bound.hook
    enough, take, pick = bound.arguments.enough, bound.arguments.take, bound.arguments.pick
    fail, rule, clock = recorder.patches.fail, recorder.rule, perf_counter_ns
    running: list[tuple[Any, ...]] = []

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not hook.enabled:
            return original(*args, **kwargs)
        values: tuple[Any, ...] | None = None
        start = None
        try:
            entered = clock()
            values = take(args) if len(args) >= enough else tuple(pick(args, kwargs))
            here = rule.current
            if opens is not None and (here.optimizer_seen or not here.busy):
                opens(*values)
                here = rule.current
            if here.sampled:
                if choose is not None:
                    values = choose(*values)
                if values is not None and not (running and values in running):
                    start = recorder.mark()
        except Exception as error:  # whatever it is, it is ours, and must not reach the job
            fail(hook, error)
        if start is None or values is None:
            return original(*args, **kwargs)
        running.append(values)
        began = clock()
        try:
            result = original(*args, **kwargs)
        finally:
            running.remove(values)
        try:
            ended = clock()
            end = ended if isinstance(start, int) else recorder.mark()
            here = rule.current
            if len(here.events) >= MAX_EVENTS:
                recorder.drop("events-per-step")
            elif end is not None:
                here.events.append((lane, start, end, -1, -1, here.offset, (labels, values)))
            hook.hits += 1
            hook.own_ns += began - entered + clock() - ended
        except Exception as error:  # as above
            fail(hook, error)
        return result

    recorder.patches.replace(owner, name, wrapper)
    return True


class Enclosing:
    """Measures a call by what it does itself: rows recorded inside it (collectives, inner optimizers) stay apart.

    Counts the outermost of nested calls only. done: called when that one has ended.
    """

    def __init__(
        self, recorder: Recorder, kind: Kind, name: str, stage: int = -1, done: Callable[[], None] | None = None
    ) -> None:
        self._recorder = recorder
        self._labels = (Label(kind, stage, name=name),)
        self._depth = 0
        self._done = done

    def before(self, *_: Any) -> tuple[Any, Any, int]:
        self._depth += 1
        buffer = self._recorder.rule.current
        start = self._recorder.mark() if self._depth == 1 and buffer.sampled else None
        return start, buffer, len(buffer.events)

    def abort(self, token: Any) -> None:
        self._depth -= 1

    def after(self, token: tuple[Any, Any, int], result: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        start, buffer, first = token
        recorder = self._recorder
        end = recorder.mark()
        if start is not None and end is not None and buffer is recorder.rule.current:
            for part in rest_of(buffer.events[first:], start, end):
                recorder.add(Lane.COMPUTE, *part, self._labels)
        if self._done is not None:
            self._done()


class TimedWork:
    """Stands in for a `Work` that the framework waits for later, and records that wait."""

    def __init__(self, recorder: Recorder, work: Any, labels: tuple[Any, ...]) -> None:
        self._recorder = recorder
        self._work = work
        self._labels = labels

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        start = self._now()
        result = self._work.wait(*args, **kwargs)
        end = None if start is None else self._now()
        if end is not None:
            self._recorder.add(Lane.WAIT, start, end, self._labels)
            self._labels = ()
        return result

    def _now(self) -> Any:
        recorder = self._recorder
        try:
            return recorder.mark() if recorder.running and self._labels else None
        except Exception as error:  # ours; must not reach the job
            recorder.patches.fault(f"a wait was lost: {type(error).__name__}: {error}", "wait")
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def check_version(recorder: Recorder, framework: str, version: str, oldest: str, newest: str) -> None:
    """Say once that the installed version is not among those that were tried."""
    if not _numbers(oldest) <= _numbers(version) <= _numbers(newest):
        recorder.patches.warn(
            f"{framework} {version or 'of unknown version'} was not tried with this bubblescope (tried: {oldest} to "
            f"{newest}); what its functions do not offer is left out"
        )


def installed_version(module: str, package: str) -> str:
    """The framework's version; "" when unknown. While it is still being imported it may not say so itself."""
    from importlib import metadata

    said = getattr(sys.modules.get(module), "__version__", "")
    if said:
        return str(said)
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    """First two numbers of a version.

    >>> _numbers("0.16.1+cpu"), _numbers("1.0rc2")
    ((0, 16), (1, 0))
    """
    found = []
    for part in version.split(".")[:2]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        found.append(int(digits or 0))
    return tuple(found)


@functools.cache
def device_name(kind: str, index: int) -> str:
    """What the layout line calls the device."""
    import platform

    import torch

    if kind == "cuda":
        return str(torch.cuda.get_device_name(index))
    return platform.processor() or platform.machine()


def device_of(module: Any) -> dict[str, Any]:
    """{type, index, name} of the device that holds the module's parameters; the CPU when it has none."""
    parameter = next(iter(module.parameters()), None)
    kind = "cpu" if parameter is None else str(parameter.device.type)
    index = 0 if parameter is None or parameter.device.index is None else int(parameter.device.index)
    return {"type": kind, "index": index, "name": device_name(kind, index)}
