"""Combined 1F1B: the forward of one micro-batch and the backward of another in one call, layer by layer in turn.

Of such a call is recorded when it waited for its inputs; when it computed, which belongs to the forward and the
backward alike and is divided by the reader (`ingest.combined`); when it computed weight gradients that were put off
(`delay_wgrad_compute`); and its loss.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, field
from typing import Any

from bubblescope.capture.hooks.megatron.compute import work_begins
from bubblescope.capture.hooks.megatron.job import Forward, Job
from bubblescope.capture.hooks.shared import rest_of
from bubblescope.capture.imports import when_imported
from bubblescope.capture.steps import Label, StepBuffer
from bubblescope.model.kinds import Kind, Lane

COMBINED = "combined"
"""Name of rows that share the interval of one call."""

_LAYER_NODES = ("megatron.core.models.gpt.fine_grained_callables", "megatron.core.models.common.utils")
"""Where `TransformerLayerNode` is: until 0.18, and since 0.19."""

_MESSAGES = (Kind.SEND, Kind.RECV)


_Piece = tuple[int, Any, Any]
"""How many events the buffer had when it began; its start and end."""


@dataclass
class _Call:
    """One call. ahead: its forward; back: (micro-batch, chunk) of its backward. first: events of `buffer` before it.
    weights: pieces of put-off weight gradients."""

    ahead: Forward | None
    back: tuple[int, int] | None
    start: Any
    buffer: StepBuffer
    first: int
    weights: list[_Piece] = field(default_factory=list)


def hook_combined(job: Job) -> None:
    """Hook the call, where this version of Megatron-Core has it (0.14 on), and what it puts off."""
    module = sys.modules.get("megatron.core.pipeline_parallel.combined_1f1b")
    if module is None or not hasattr(module, "combined_forward_backward_step"):
        return
    calls: list[_Call] = []
    job.recorder.patches.around(
        module,
        "combined_forward_backward_step",
        "combined_1f1b",
        needs=("current_microbatch", "f_model", "f_model_chunk_id", "b_model", "b_output_tensor"),
        before=functools.partial(_begins, job, calls),
        after=functools.partial(_ends, job, calls),
        abort=functools.partial(_fails, job, calls),
    )
    for name in _LAYER_NODES:
        hook = functools.partial(_hook_weight_gradients, job, calls, name)
        job.recorder.patches.on_restore(when_imported(name, hook))


def _begins(
    job: Job, calls: list[_Call], microbatch: int | None, ahead: Any, chunk: int | None, back: Any, output: Any
) -> _Call | None:
    if not work_begins(job):
        return None
    # The call switches to a stream for communication and back: that one is none of ours.
    job.recorder.hold_stream(True)
    buffer = job.recorder.rule.current
    call = _Call(None, None if back is None else job.maker(output), job.recorder.mark(), buffer, len(buffer.events))
    if ahead is not None:
        call.ahead = Forward(microbatch or 0, chunk or 0, call.start)
        job.running.append(call.ahead)
    calls.append(call)
    return call


def _fails(job: Job, calls: list[_Call], call: _Call) -> None:
    calls.clear()
    job.running.clear()
    job.recorder.hold_stream(False)


def _ends(job: Job, calls: list[_Call], call: _Call, result: Any) -> None:
    end = job.recorder.mark()
    _fails(job, calls, call)
    if call.ahead is not None:
        job.made(result[0], call.ahead.microbatch, call.ahead.chunk)
    if call.buffer is not job.recorder.rule.current or call.start is None or end is None:
        return
    _add_rows(job, call, end)


def _add_rows(job: Job, call: _Call, end: Any) -> None:
    """The call waits for its inputs first, then computes both, and hands over both results before the rest."""
    add, ahead, back = job.recorder.add, call.ahead, call.back
    until = end
    if ahead is not None and ahead.loss_from is not None:
        until = ahead.loss_from
        add(Lane.COMPUTE, until, end, (Label(Kind.LOSS, job.stage(ahead.chunk), ahead.microbatch),))
    job.recorder.settle()
    seen = enumerate(call.buffer.events[call.first :], call.first)
    messages = [(place, event) for place, event in seen if event[6] and event[6][0].kind in _MESSAGES]
    first = next((i for i, (_, event) in enumerate(messages) if event[0] is Lane.POST), len(messages))
    begun = messages[first - 1][1][2] if first else call.start
    handed_over, done = (messages[first][0], messages[first][1][1]) if first < len(messages) else (sys.maxsize, until)
    for part in rest_of([event for _, event in messages[:first]], call.start, begun):
        add(Lane.COMPUTE, *part, (Label(Kind.OTHER, name="schedule plan"),))
    _add_both(job, call, begun, done, [piece for piece in call.weights if piece[0] <= handed_over])
    late = [(place, (Lane.COMPUTE, *piece, -1, -1, 0, ())) for place, *piece in call.weights if place > handed_over]
    if back is not None:
        label = Label(Kind.BACKWARD_WEIGHT, job.stage(back[1]), back[0])
        for _, event in late:
            add(Lane.COMPUTE, event[1], event[2], (label,))
    others = [event for _, event in sorted([*late, *messages[first:]], key=lambda entry: entry[0])]
    for part in rest_of(others, done, until):
        add(Lane.COMPUTE, *part, (Label(Kind.OTHER, name="results"),))


def _add_both(job: Job, call: _Call, begun: Any, done: Any, weights: list[_Piece]) -> None:
    add, ahead, back = job.recorder.add, call.ahead, call.back
    name = COMBINED if back is not None and (ahead is not None or weights) else ""
    labels = []
    if ahead is not None:
        labels.append(Label(Kind.FORWARD, job.stage(ahead.chunk), ahead.microbatch, name))
    if back is not None:
        stage, microbatch = job.stage(back[1]), back[0]
        labels.append(Label(Kind.BACKWARD_INPUT if call.weights else Kind.BACKWARD, stage, microbatch, name))
        for _, start, end in weights:
            add(Lane.COMPUTE, start, end, (Label(Kind.BACKWARD_WEIGHT, stage, microbatch, name),))
    add(Lane.COMPUTE, begun, done, tuple(labels))


def _hook_weight_gradients(job: Job, calls: list[_Call], module: str) -> None:
    """A layer's part of a combined call may compute its weight gradients apart from its backward."""
    owner = getattr(sys.modules[module], "TransformerLayerNode", None)
    if owner is None or owner.__module__ != module:
        return
    recorder = job.recorder

    def before(node: Any) -> Any:
        return recorder.mark() if calls and node.delay_wgrad_compute else None

    def after(start: Any, result: Any) -> None:
        end = recorder.mark()
        if calls and end is not None:
            calls[-1].weights.append((len(calls[-1].buffer.events), start, end))

    recorder.patches.around(owner, "backward_dw", "weight", needs=("self",), before=before, after=after)
