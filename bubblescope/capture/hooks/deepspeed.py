"""Hooks of DeepSpeed's pipeline engines, 0.9.5 to 0.19: PipelineEngine and DualPipeVEngine.

An engine looks its instructions up in `_INSTRUCTION_MAP`, where the functions lie as they were when the class was
made: patching the methods would change nothing. So each engine gets a map of its own, with measured functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.shared import (
    Enclosing,
    check_version,
    device_name,
    installed_version,
)
from bubblescope.capture.hooks.torch_common import group_name
from bubblescope.capture.messages import message_number
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

OLDEST, NEWEST = "0.9", "0.19"

_SCHEDULES = {"TrainSchedule": "1F1B", "DualPipeVSchedule": "DualPipeV", "InferenceSchedule": "1F1B"}

_MESSAGES = {
    # instruction: (end, direction, buffer that holds the payload)
    "SendActivation": (Kind.SEND, "act", "outputs"),
    "RecvActivation": (Kind.RECV, "act", "inputs"),
    "SendGrad": (Kind.SEND, "grad", "inputs"),
    "RecvGrad": (Kind.RECV, "grad", "outputs"),
}


def knows(thing: Any) -> bool:
    """Whether it is a pipeline engine of DeepSpeed."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return isinstance(thing, PipelineEngine)


def install(recorder: Recorder) -> None:
    """Hook the engines' schedule execution; instructions are hooked when an engine first executes one."""
    engine = sys.modules["deepspeed.runtime.pipe.engine"].PipelineEngine
    check_version(recorder, "DeepSpeed", installed_version("deepspeed", "deepspeed"), OLDEST, NEWEST)
    job = _Job(recorder)
    recorder.patches.around(
        engine,
        "_exec_schedule",
        "schedule.step",
        needs=("self", "pipe_schedule"),
        before=job.begin,
        after=job.end,
        abort=job.fail,
    )


# ---- one engine


@dataclass
class _Engine:
    """One engine's place and the state of its running schedule call.

    ranks: global, by position. virtual: whether each rank has two stages, one in each phase (DualPipeV).
    """

    ranks: list[int]
    position: int
    virtual: bool
    microbatches: int
    group: str
    device: dict[str, Any]
    counted: dict[tuple[str, int], int] = field(default_factory=dict)
    queued: list[_Sent] = field(default_factory=list)
    loss_from: Any = None

    @property
    def stages(self) -> int:
        return len(self.ranks) * (2 if self.virtual else 1)

    def stage(self, phase: int) -> int:
        return self.stages - 1 - self.position if phase else self.position

    def rank_of(self, stage: int) -> int:
        return self.ranks[stage if stage < len(self.ranks) else self.stages - 1 - stage]

    def microbatch(self, instruction: str, buffer: int, phase: int) -> int:
        """Buffers are a ring, so the instruction is counted; DualPipeV has one buffer for each micro-batch."""
        if self.virtual:
            return buffer % self.microbatches
        number = self.counted[instruction, phase] = self.counted.get((instruction, phase), -1) + 1
        return number


class _Job:
    """All engines that one recorder has seen."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._engines: dict[int, tuple[Any, _Engine]] = {}
        self._ranges = {name: (Label(Kind.STEP, name=name),) for name in ("step", "eval")}
        self._layouts: dict[tuple[Any, ...], dict[str, Any]] = {}

    def begin(self, engine: Any, schedule: Any) -> tuple[Any, _Engine, bool, int]:
        recorder = self.recorder
        known = self._engines.get(id(engine))
        new = known is None or known[0] is not engine
        if known is None or new:
            known = self._engines[id(engine)] = (engine, self._adopt(engine, schedule))
        state = known[1]
        state.microbatches = int(schedule.micro_batches)
        state.counted.clear()
        state.queued.clear()
        training = type(schedule).__name__ != "InferenceSchedule" and not getattr(schedule, "forward_only", False)
        recorder.framework = recorder.framework or "deepspeed"
        recorder.schedule_begins(self._layout(engine, state, schedule), training, new)
        return engine, state, training, perf_counter_ns()

    def end(self, token: tuple[Any, _Engine, bool, int], result: Any) -> None:
        _, _, training, start = token
        recorder = self.recorder
        if recorder.rule.current.sampled:
            recorder.add(Lane.RANGE, start, perf_counter_ns(), self._ranges["step" if training else "eval"])
        recorder.schedule_ends()

    def fail(self, token: Any) -> None:
        self.recorder.schedule_ends(failed=True)

    def _adopt(self, engine: Any, schedule: Any) -> _Engine:
        """Describe an engine that is new to us, and give it measured instructions."""
        positions = int(engine.num_stages)
        ranks = [int(engine.grid.stage_to_global(i)) for i in range(positions)]
        device = engine.device
        kind, index = str(device.type), int(device.index or 0)
        state = _Engine(
            ranks,
            int(engine.stage_id),
            hasattr(engine.module, "phase_bounds"),
            int(schedule.micro_batches),
            group_name(None, ranks),
            {"type": kind, "index": index, "name": device_name(kind, index)},
        )
        _measure_instructions(self.recorder, engine, state)
        _measure_loss(self.recorder, engine, state)
        return state

    def _layout(self, engine: Any, state: _Engine, schedule: Any) -> dict[str, Any]:
        key = (id(engine), type(schedule).__name__, state.microbatches)
        made = self._layouts.get(key)
        if made is None:
            phases = (0, 1) if state.virtual else (0,)
            made = self._layouts[key] = {
                "stages": sorted(state.stage(phase) for phase in phases),
                "num_stages": state.stages,
                "microbatches": state.microbatches,
                "schedule": _SCHEDULES.get(type(schedule).__name__, "custom"),
                "schedule_class": type(schedule).__name__,
                "pp_ranks": state.ranks,
                "stage_ranks": [state.rank_of(stage) for stage in range(state.stages)],
                "device": state.device,
            }
        return made


# ---- instructions


def _measure_instructions(recorder: Recorder, engine: Any, state: _Engine) -> None:
    made = {cls: _measured(recorder, engine, state, cls.__name__, fn) for cls, fn in engine._INSTRUCTION_MAP.items()}
    recorder.patches.replace(engine, "_INSTRUCTION_MAP", made)


def _measured(recorder: Recorder, engine: Any, state: _Engine, instruction: str, function: Any) -> Any:
    """The instruction's function with our hook around it; itself when nothing is known of it."""
    found = _handlers(recorder, engine, state, instruction)
    if found is None:
        return function
    before, after, abort = found
    wrapper = recorder.patches.wrapped(
        SimpleNamespace(run=function),
        "run",
        instruction,
        needs=(),
        optional={"buffer_id": -1, "phase": 0},
        before=before,
        after=after,
        abort=abort,
    )
    return function if wrapper is None else wrapper


_Handlers = tuple[Callable[..., Any], Callable[[Any, Any], Any], Callable[[Any], None] | None]


def _handlers(recorder: Recorder, engine: Any, state: _Engine, instruction: str) -> _Handlers | None:
    if instruction in ("ForwardPass", "BackwardPass"):
        compute = _Compute(recorder, state, instruction)
        return compute.before, compute.after, None
    if instruction in _MESSAGES:
        message = _Message(recorder, engine, state, instruction)
        return message.before, message.after, None
    if instruction == "CommitP2P":
        commit = _Commit(recorder, state)
        return commit.before, commit.after, None
    if instruction == "LoadMicroBatch":
        loading = _Loading(recorder)
        return loading.before, loading.after, None
    if instruction in ("ReduceGrads", "ReduceTiedGrads"):
        inner = Enclosing(recorder, Kind.OTHER, instruction, state.stage(0))
        return inner.before, inner.after, inner.abort
    if instruction == "OptimizerStep":
        inner = Enclosing(recorder, Kind.OPTIMIZER, "DeepSpeed optimizer", done=recorder.optimizer_stepped)
        return inner.before, inner.after, inner.abort
    return None


class _Compute:
    def __init__(self, recorder: Recorder, state: _Engine, instruction: str) -> None:
        self._recorder = recorder
        self._state = state
        self._instruction = instruction
        self._kind = Kind.FORWARD if instruction == "ForwardPass" else Kind.BACKWARD

    def before(self, buffer: int, phase: int) -> tuple[int, int, Any] | None:
        recorder, state = self._recorder, self._state
        microbatch = state.microbatch(self._instruction, buffer, phase)
        if not recorder.rule.current.sampled:
            return None
        state.loss_from = None
        return phase, microbatch, recorder.mark()

    def after(self, token: tuple[int, int, Any], result: Any) -> None:
        phase, microbatch, start = token
        recorder, kind = self._recorder, self._kind
        end = recorder.mark()
        cut = self._state.loss_from if kind is Kind.FORWARD else None
        recorder.add(Lane.COMPUTE, start, end if cut is None else cut, (self._labels, (kind, phase, microbatch)))
        if cut is not None:
            recorder.add(Lane.COMPUTE, cut, end, (self._labels, (Kind.LOSS, phase, microbatch)))

    def _labels(self, kind: Kind, phase: int, microbatch: int) -> tuple[Label, ...]:
        return (Label(kind, self._state.stage(phase), microbatch),)


def _measure_loss(recorder: Recorder, engine: Any, state: _Engine) -> None:
    """The loss is computed inside the last stage's forward: from there on it is told apart."""
    import torch

    loss = getattr(engine.module, "loss_fn", None)
    if loss is None:
        return

    def before() -> bool | None:
        if not recorder.rule.current.sampled:
            return None
        state.loss_from = recorder.mark()
        return True

    owner, name = (loss, "forward") if isinstance(loss, torch.nn.Module) else (engine.module, "loss_fn")
    recorder.patches.around(owner, name, "loss", needs=(), before=before, after=lambda token, result: None)


class _Message:
    """A send or a receive: blocking in PipelineEngine, queued until CommitP2P in DualPipeVEngine."""

    def __init__(self, recorder: Recorder, engine: Any, state: _Engine, instruction: str) -> None:
        self._recorder = recorder
        self._engine = engine
        self._state = state
        self._instruction = instruction
        self._kind, self._direction, self._payload = _MESSAGES[instruction]

    def before(self, buffer: int, phase: int) -> tuple[Any, ...] | None:
        microbatch = self._state.microbatch(self._instruction, buffer, phase)
        if not self._recorder.rule.current.sampled:
            return None
        # A send may empty its buffer.
        size = self._bytes(buffer) if self._kind is Kind.SEND else -1
        return buffer, phase, microbatch, size, self._recorder.mark()

    def after(self, token: tuple[Any, ...], result: Any) -> None:
        buffer, phase, microbatch, size, start = token
        recorder, state = self._recorder, self._state
        end = recorder.mark()
        sent = (self, phase, microbatch, self._bytes(buffer) if size < 0 else size)
        labels = (_message_labels, (sent,))
        if state.virtual:
            recorder.add(Lane.POST, start, end, labels)
            state.queued.append(sent)
            return
        recorder.add(Lane.POST, start, start, labels)
        recorder.add(Lane.WAIT, start, end, labels)

    def _bytes(self, buffer: int) -> int:
        payload = self._engine.pipe_buffers[self._payload][buffer]
        if not isinstance(payload, list | tuple):
            return getattr(payload, "nbytes", -1)
        found = [t.nbytes for t in payload if hasattr(t, "nbytes")]
        return sum(found) if found else -1

    def label(self, phase: int, microbatch: int, size: int) -> Label:
        state = self._state
        own = state.stage(phase)
        onward = 1 if self._direction == "act" else -1
        other = own + onward if self._kind is Kind.SEND else own - onward
        consumer = other if self._kind is Kind.SEND else own
        return Label(
            self._kind,
            own,
            microbatch,
            self._direction,
            state.rank_of(other),
            size,
            state.group,
            message_number(microbatch, consumer, state.stages, self._direction == "grad"),
        )


_Sent = tuple[_Message, int, int, int]
"""What was sent or received: by which instruction, phase, micro-batch, bytes."""


def _message_labels(*sent: _Sent) -> tuple[Label, ...]:
    return tuple(message.label(*what) for message, *what in sent)


class _Commit:
    """DualPipeV posts and waits for all that is queued in one go."""

    def __init__(self, recorder: Recorder, state: _Engine) -> None:
        self._recorder = recorder
        self._state = state

    def before(self, buffer: int, phase: int) -> Any:
        return self._recorder.mark() if self._state.queued else None

    def after(self, start: Any, result: Any) -> None:
        self._recorder.add(Lane.WAIT, start, self._recorder.mark(), (_message_labels, tuple(self._state.queued)))
        self._state.queued.clear()


class _Loading:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._labels = (Label(Kind.DATA, name="LoadMicroBatch"),)

    def before(self, buffer: int, phase: int) -> int | None:
        return perf_counter_ns() if self._recorder.rule.current.sampled else None

    def after(self, start: int, result: Any) -> None:
        self._recorder.add(Lane.HOST, start, perf_counter_ns(), self._labels)
