"""CUDA timing by construction: with an event that counts what is done to it, where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from bubblescope.capture import recorder
from bubblescope.capture.recorder import Options, Recorder
from bubblescope.capture.steps import Label, StepBuffer
from bubblescope.capture.timers import ANCHOR_EVERY_NS, CudaTimer
from bubblescope.model import Kind, Lane


class Device:
    """A device that runs `lag_ns` behind the host. Reading an event that has not run is an error, as in CUDA."""

    def __init__(self, lag_ns: int = 0) -> None:
        self.now = 1_000_000
        self.lag_ns = lag_ns
        self.made = 0
        self.capturing = False
        self.stream = "compute"

    def make(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)

    def timer(self, **more: int) -> CudaTimer:
        return CudaTimer(
            self.make, lambda: self.capturing, clock=lambda: self.now, current_stream=lambda: self.stream, **more
        )


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: int | None = None
        self.stream: object = None

    def record(self, stream: object = None) -> None:
        assert not self.device.capturing
        self.stream = stream or self.device.stream
        self.at = self.device.now + self.device.lag_ns

    def query(self) -> bool:
        assert self.at is not None
        return self.device.now >= self.at

    def elapsed_time(self, other: FakeEvent) -> float:
        import numpy as np

        assert self.query() and other.query() and self.at is not None and other.at is not None
        return float(np.float32((other.at - self.at) / 1e6))

    def synchronize(self) -> None:
        raise AssertionError("a recorder must never synchronise")

    wait = synchronize


def run_step(device: Device, timer: CudaTimer, index: int, operations: int = 4, each_ns: int = 1_000) -> StepBuffer:
    buffer = StepBuffer(index)
    for microbatch in range(operations):
        start = timer.mark()
        device.now += each_ns
        end = timer.mark()
        if start is not None and end is not None:
            label = Label(Kind.FORWARD, 0, microbatch)
            buffer.events.append((Lane.COMPUTE, start, end, -1, -1, 0, (label,)))
    return buffer


def durations(buffer: StepBuffer) -> list[int]:
    return [event[2] - event[1] for event in buffer.events]


def test_steps_are_resolved_late_and_only_when_the_device_has_passed_them() -> None:
    device = Device(lag_ns=50_000)
    timer = device.timer()
    steps = [run_step(device, timer, index) for index in range(4)]
    assert timer.close(steps[0]) == [] and timer.close(steps[1]) == []
    assert timer.close(steps[2]) == []  # late enough, but the device has not run it
    device.now += 100_000
    ready = timer.close(steps[3])
    assert [buffer.index for buffer in ready] == [0, 1]
    assert all(duration == 1_000 for buffer in ready for duration in durations(buffer))


def test_the_host_times_stand_beside_the_device_times() -> None:
    device = Device(lag_ns=7_000)
    timer = device.timer()
    buffer = run_step(device, timer, 0, operations=1)
    timer.close(buffer)
    device.now += 100_000
    (ready,) = timer.drain(wait_s=0)
    event = ready.events[0]
    assert event[3:5] == (1_000_000, 1_001_000)
    assert event[1] == 1_000_000 and ready.extra["seen_ns"] == device.now


def test_events_are_used_again() -> None:
    device = Device()
    timer = device.timer(pool_events=300)
    for index in range(500):
        buffer = run_step(device, timer, index)
        device.now += 10_000
        timer.close(buffer)
    assert device.made <= 300 and timer.dropped() == {}


def test_an_empty_pool_loses_marks_and_counts_them() -> None:
    device = Device(lag_ns=10**9)
    timer = device.timer(pool_events=10)
    buffers = [run_step(device, timer, index) for index in range(3)]
    for buffer in buffers:
        timer.close(buffer)
    assert device.made == 10
    assert timer.dropped() == {"event-pool-empty": 24 - 10}
    assert [len(buffer.events) for buffer in buffers] == [4, 1, 0]


def test_nothing_is_recorded_into_a_graph_capture() -> None:
    device = Device()
    timer = device.timer()
    device.capturing = True
    assert timer.mark() is None
    assert timer.dropped() == {"graph-capture": 1}


def test_far_times_stay_exact_by_a_chain_of_anchors() -> None:
    """float32 milliseconds lose the microsecond after 16 s; over 100 steps of 3 s each none is lost here."""
    device = Device()
    timer = device.timer()
    ready: list[StepBuffer] = []
    begin = device.now
    starts = []
    for index in range(100):
        starts.append(device.now)
        buffer = run_step(device, timer, index, operations=3, each_ns=1_000_000_123)
        ready += timer.close(buffer)
    device.now += ANCHOR_EVERY_NS
    ready += timer.drain(wait_s=0)
    assert [buffer.index for buffer in ready] == list(range(100))
    errors = [abs(buffer.events[0][1] - start) for buffer, start in zip(ready, starts, strict=True)]
    assert begin == 1_000_000 and max(errors) < 10_000
    assert all(abs(duration - 1_000_000_123) < 500 for buffer in ready for duration in durations(buffer))


def test_what_the_device_never_finished_is_counted_at_the_end() -> None:
    device = Device(lag_ns=10**12)
    timer = device.timer()
    timer.close(run_step(device, timer, 0))
    assert timer.drain(wait_s=0) == []
    assert timer.dropped() == {"not-finished-at-end": 4}


def test_marks_keep_to_the_stream_that_was_current_when_it_was_held() -> None:
    """Megatron's combined calls switch to a stream for communication, which must carry no event."""
    device = Device()
    timer = device.timer()
    timer.hold_stream(True)
    device.stream = "communication"
    held = timer.mark()
    timer.hold_stream(False)
    free = timer.mark()
    assert held is not None and free is not None
    assert (held.event.stream, free.event.stream) == ("compute", "communication")


def on_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int | None,
    connections: str = "",
    device: Device | None = None,
) -> Recorder:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    monkeypatch.setattr(recorder, "cuda_timer", lambda index: (device or Device()).timer())
    made = Recorder(tmp_path, Options(every))
    made.use_device("cuda", 0)
    return made


def recorded(made: Recorder) -> list[int]:
    """Those of the next steps that are."""
    found = []
    for _ in range(25):
        here = made.rule.current
        found += [here.index] if here.sampled else []
        made.forward_begins()
        made.step()
    return found


def test_where_events_may_slow_the_job_one_step_in_ten_is_recorded_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = on_gpu(tmp_path, monkeypatch, None, "1")
    assert recorded(made) == [0, 10, 20]
    assert len(made.patches.warnings) == 1 and "one step in 10 is recorded" in made.patches.warnings[0]


@pytest.mark.parametrize(
    ("every", "connections", "steps", "warnings"),
    [(1, "1", list(range(25)), 1), (12, "1", [0, 12, 24], 0), (None, "32", list(range(25)), 0)],
)
def test_who_chooses_the_share_of_steps_gets_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    every: int | None,
    connections: str,
    steps: list[int],
    warnings: int,
) -> None:
    made = on_gpu(tmp_path, monkeypatch, every, connections)
    assert recorded(made) == steps and len(made.patches.warnings) == warnings


def test_a_job_without_gpus_is_recorded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    made = Recorder(tmp_path)
    made.use_device("cpu", 0)
    assert recorded(made) == list(range(25)) and made.patches.warnings == []


def test_what_runs_while_a_cuda_graph_is_captured_is_skipped_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`FakeEvent.record` asserts that nothing is recorded into the user's graph."""
    device = Device()
    made = on_gpu(tmp_path, monkeypatch, None, device=device)
    label = (Label(Kind.FORWARD, 0, 0),)
    made.forward_begins()
    device.capturing = True
    made.add(Lane.COMPUTE, made.mark(), made.mark(), label)
    device.capturing = False
    made.add(Lane.COMPUTE, made.mark(), made.mark(), label)
    assert len(made.rule.current.events) == 1
    made.step()
    assert made._losses() == {
        "dropped": {"graph-capture": 2},
        "warnings": ["what runs while a CUDA graph is captured is not timed: an event would become part of the graph"],
    }
