"""Calls that are timed in one frame, and whose labels are made when the schedule call has ended."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from bubblescope.capture.hooks.shared import timed
from bubblescope.capture.recorder import Recorder
from bubblescope.capture.steps import MAX_EVENTS, Label
from bubblescope.model import Kind, Lane


class Stage:
    """Runs micro-batches; an odd one by way of another call of the same method."""

    stage_index = 2

    def run(self, microbatch: int, tensor: Any = None, *, full: bool = True) -> str:
        if microbatch < 0:
            raise KeyError(microbatch)
        return self.run(microbatch) if tensor == "again" else "done"


def labels(stage: Stage, microbatch: int, full: bool) -> tuple[Label, ...]:
    if microbatch == 99:
        return ()
    return (Label(Kind.FORWARD if full else Kind.BACKWARD, stage.stage_index, microbatch),)


@pytest.fixture
def recorder(tmp_path: Path, request: pytest.FixtureRequest) -> Recorder:
    made = Recorder(tmp_path)
    made.use_device("cpu", 0)
    request.addfinalizer(made.patches.restore)
    return made


def watch(recorder: Recorder, make: Any = labels, **more: Any) -> None:
    timed(
        recorder, Stage, "run", "run", Lane.COMPUTE, make, needs=("self", "microbatch"), optional={"full": True}, **more
    )


def rows(recorder: Recorder) -> list[tuple[Kind, int]]:
    recorder.settle()
    return [(label.kind, label.microbatch) for event in recorder.rule.current.events for label in event[6]]


def test_each_call_is_an_interval_with_the_values_of_its_arguments(recorder: Recorder) -> None:
    watch(recorder)
    stage = Stage()
    assert (stage.run(1), stage.run(microbatch=2, full=False), stage.run(99)) == ("done",) * 3
    assert rows(recorder) == [(Kind.FORWARD, 1), (Kind.BACKWARD, 2)]
    lane, start, end, *_ = recorder.rule.current.events[0]
    assert lane is Lane.COMPUTE and start < end
    assert recorder.patches.hooks["run"].hits == 3 and recorder.patches.hooks["run"].own_ns > 0


def test_a_call_inside_of_the_same_call_counts_once(recorder: Recorder) -> None:
    watch(recorder)
    assert Stage().run(3, "again") == "done"
    assert rows(recorder) == [(Kind.FORWARD, 3)]


def test_what_raises_passes_unchanged_is_no_row_and_may_be_called_again(recorder: Recorder) -> None:
    watch(recorder)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            Stage().run(-1)
        assert caught.value.args == (-1,)
    assert rows(recorder) == [] and recorder.patches.hooks["run"].hits == 0 and recorder.patches.hooks["run"].enabled


def test_nothing_of_the_job_is_kept_once_the_schedule_call_has_ended(recorder: Recorder) -> None:
    watch(recorder)
    stage = Stage()
    stage.run(1)
    gone = weakref.ref(stage)
    recorder.schedule_ends()
    del stage
    gc.collect()
    assert gone() is None
    assert rows(recorder) == [(Kind.FORWARD, 1)]


def test_labels_that_cannot_be_made_are_counted_and_the_others_kept(recorder: Recorder) -> None:
    def broken(stage: Stage, microbatch: int, full: bool) -> tuple[Label, ...]:
        if microbatch == 1:
            raise ZeroDivisionError("ours")
        return labels(stage, microbatch, full)

    watch(recorder, broken)
    for microbatch in (0, 1, 2):
        Stage().run(microbatch)
    assert rows(recorder) == [(Kind.FORWARD, 0), (Kind.FORWARD, 2)]
    assert recorder._losses()["dropped"] == {"no-label": 1}
    assert len(recorder.patches.warnings) == 1 and "ZeroDivisionError" in recorder.patches.warnings[0]
    assert list(recorder.patches.missing) == ["broken"]


@pytest.mark.parametrize("fails", [False, True])
def test_labels_that_a_post_shares_with_its_wait_are_made_once(recorder: Recorder, fails: bool) -> None:
    made = []

    def message(microbatch: int) -> tuple[Label, ...]:
        made.append(microbatch)
        return (Label(Kind.SEND, 2, 1 // 0 if fails else microbatch),)

    for microbatch in (1, 2):
        shared = (message, (microbatch,))
        recorder.add(Lane.POST, 10, 10, shared)
        recorder.add(Lane.WAIT, 10, 20, shared)
    assert rows(recorder) == ([] if fails else [(Kind.SEND, 1)] * 2 + [(Kind.SEND, 2)] * 2)
    assert fails or made == [1, 2]
    assert recorder._losses().get("dropped") == ({"no-label": 4} if fails else None)


@pytest.mark.parametrize("where", ["choose", "opens"])
def test_a_fault_in_the_call_turns_the_hook_off_and_the_job_goes_on(recorder: Recorder, where: str) -> None:
    def broken(*values: Any) -> Any:
        raise ZeroDivisionError("ours")

    watch(recorder, **{where: broken})
    assert [Stage().run(n) for n in (1, 2)] == ["done"] * 2
    assert rows(recorder) == [] and not recorder.patches.hooks["run"].enabled
    assert len(recorder.patches.warnings) == 1


def test_a_step_that_is_not_recorded_costs_no_event_and_one_beyond_the_limit_is_counted(recorder: Recorder) -> None:
    watch(recorder)
    recorder.rule.current.sampled = False
    Stage().run(1)
    assert rows(recorder) == []
    recorder.rule.current.sampled = True
    recorder.rule.current.events = [(Lane.HOST, 0, 1, -1, -1, 0, ())] * MAX_EVENTS
    Stage().run(1)
    assert len(recorder.rule.current.events) == MAX_EVENTS
    assert recorder._losses()["dropped"] == {"events-per-step": 1}
