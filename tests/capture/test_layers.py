"""Layers are timed in a few steps, forward and backward, and leave nothing behind in the job."""

from __future__ import annotations

import time
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bubblescope.capture.layers import LayerTimers, compiled, find_layers  # noqa: E402
from bubblescope.capture.patching import PatchSet  # noqa: E402
from bubblescope.capture.steps import Label, StepBuffer  # noqa: E402
from bubblescope.ingest.recorded_layers import take_layers  # noqa: E402
from bubblescope.model import Kind, Lane, Names, SpanBuilder  # noqa: E402
from bubblescope.report.advice import Wanted, explore  # noqa: E402
from tests.support.predictions import prompt_wakeups, quiet_reports, typical_step  # noqa: E402
from tests.support.sleeping import SleepRun, sleeping_stage  # noqa: E402


class FakeRecorder:
    """What `LayerTimers` uses of a recorder: marks, events, the open step."""

    def __init__(self, index: int = 1, **flags: Any) -> None:
        self.patches = PatchSet()
        self.rule = SimpleNamespace(current=StepBuffer(index, **flags))

    def mark(self) -> int:
        return perf_counter_ns()

    def add(self, lane: Lane, start: int, end: int, labels: tuple[Label, ...], host_end_ns: int = -1) -> None:
        self.rule.current.events.append((lane, start, end, -1, host_end_ns, 0, labels))

    def settle(self) -> None:
        self.rule.current.settle(lambda what, error: self.patches.warn(f"{what}: {error}"))

    def rows(self, letter: str) -> list[tuple[str, float]]:
        """(name, seconds) of the timed layers."""
        found = [(e[6][0].name, (e[2] - e[1]) * 1e-9) for e in self.rule.current.events if e[0] is Lane.RANGE]
        return [(name[8:], seconds) for name, seconds in found if name.startswith(f"layer {letter}")]


class Model(torch.nn.Module):
    """An embedding, three layers of 2, 4 and 6 ms forward and twice that backward, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Linear(8, 8)
        self.layers = torch.nn.ModuleList(sleeping_stage(ms / 1e3, ms / 1e3, ms / 1e3, False) for ms in (2, 4, 6))
        self.head = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())

    def forward(self, x: Any) -> Any:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def train(recorder: FakeRecorder, timers: LayerTimers, model: Any, kind: Kind = Kind.BACKWARD) -> Any:
    """One schedule call of one micro-batch; returns the gradient of the first weight."""
    timers.begin([SimpleNamespace(stage_index=2, submod=model)])
    out = model(torch.ones(2, 8))
    start = recorder.mark()
    out.sum().backward()
    recorder.add(Lane.COMPUTE, start, recorder.mark(), (Label(kind, 2, 0),))
    timers.end()
    return next(model.parameters()).grad.clone()


def hooks_of(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.real
def test_forward_and_backward_of_each_layer_are_measured() -> None:
    recorder, model = FakeRecorder(), Model()
    timers = LayerTimers(recorder)
    with prompt_wakeups():
        for _ in range(4):
            train(recorder, timers, model)
    for letter, factor in (("F", 1), ("B", 2)):
        rows = recorder.rows(letter)
        assert len(rows) == 12
        for name, ms in (("0000 layers.0", 2), ("0001 layers.1", 4), ("0002 layers.2", 6)):
            # Sleeping takes longer when the machine is busy, never shorter.
            best = min(seconds for n, seconds in rows if n == name)
            assert best * 1e3 == pytest.approx(ms * factor, abs=1.5)
    assert all(e[6][0].kind is Kind.OTHER for e in recorder.rule.current.events if e[0] is Lane.RANGE)


def test_nothing_is_left_in_the_model_and_its_gradients_are_the_same() -> None:
    torch.manual_seed(0)
    recorder, model = FakeRecorder(), Model()
    timers = LayerTimers(recorder, steps=1)
    first = train(recorder, timers, model)
    assert hooks_of(model) == 0
    model.zero_grad()
    recorder.rule.current = StepBuffer(2)
    second = train(recorder, timers, model)
    assert torch.equal(first, second)
    assert recorder.rows("F") == []
    assert recorder.patches.warnings == []


@pytest.mark.parametrize("flags", [{"warmup": True}, {"sampled": False}, {"evaluation": True}])
def test_steps_that_do_not_count_are_not_timed(flags: dict[str, bool]) -> None:
    recorder = FakeRecorder(**flags)
    train(recorder, LayerTimers(recorder), Model())
    assert recorder.rows("F") == []


def test_the_environment_chooses_how_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUBBLESCOPE_LAYER_STEPS", "0")
    recorder = FakeRecorder()
    train(recorder, LayerTimers(recorder), Model())
    assert recorder.rows("F") == []


def test_a_split_backward_gives_no_backward_of_layers() -> None:
    recorder = FakeRecorder()
    train(recorder, LayerTimers(recorder), Model(), Kind.BACKWARD_INPUT)
    assert len(recorder.rows("F")) == 3
    assert recorder.rows("B") == []


def test_recomputation_of_a_checkpointed_layer_is_backward_and_not_forward() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Model):
        def forward(self, x: Any) -> Any:
            x = self.embedding(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    recorder = FakeRecorder()
    train(recorder, LayerTimers(recorder), Checkpointed())
    assert len(recorder.rows("F")) == 3
    backward = dict(recorder.rows("B"))
    assert backward["0002 layers.2"] * 1e3 > 6 + 12


def test_a_compiled_stage_is_left_alone() -> None:
    model = Model()
    model.layers[1].compile(backend="eager")
    assert compiled(model)
    recorder = FakeRecorder()
    timers = LayerTimers(recorder)
    timers.begin([SimpleNamespace(stage_index=0, submod=model)])
    assert hooks_of(model) == 0
    timers.end()


def test_our_own_failure_ends_the_timing_and_never_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, model = FakeRecorder(), Model()

    def broken(*args: Any, **kwargs: Any) -> None:
        if args[0] is Lane.RANGE:
            raise ZeroDivisionError("made to raise")

    monkeypatch.setattr(recorder, "add", broken)
    train(recorder, LayerTimers(recorder), model)
    assert hooks_of(model) == 0
    assert any("layers failed and is off" in w for w in recorder.patches.warnings)


def test_our_own_failure_before_a_layer_never_reaches_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, model = FakeRecorder(), Model()
    monkeypatch.setattr("bubblescope.capture.layers._in_backward", lambda: 1 / 0)
    train(recorder, LayerTimers(recorder), model)
    assert hooks_of(model) == 0 and len(recorder.patches.warnings) == 1


def test_a_step_has_a_limited_number_of_marks() -> None:
    recorder, model = FakeRecorder(), Model()
    timers = LayerTimers(recorder)
    timers.begin([SimpleNamespace(stage_index=0, submod=model.embedding), SimpleNamespace(stage_index=1, submod=model)])
    fast = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    timers.end()
    timers.begin([SimpleNamespace(stage_index=1, submod=fast)])
    for _ in range(500):
        fast(torch.ones(1, 8))
    timers.end()
    assert len(recorder.rows("F")) == 2 * (1000 // 8)


def test_the_outermost_repeated_children_are_the_layers() -> None:
    def experts() -> Any:
        return torch.nn.ModuleDict({"mlp": torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(16))})

    linear = torch.nn.Linear(2, 2)
    whole = torch.nn.ModuleDict({"body": torch.nn.ModuleList(experts() for _ in range(2)), "head": linear})
    assert [name for name, _ in find_layers(whole)] == ["body.0", "body.1"]
    assert [name for name, _ in find_layers(torch.nn.Sequential(linear, torch.nn.Linear(2, 2)))] == ["0", "1"]
    assert find_layers(linear) == []


def test_readers_take_the_rows_out_and_fill_a_split_backward_in_proportion() -> None:
    names, spans = Names(), SpanBuilder()
    at = {text: names.intern(text) for text in ("layer F 0000 a", "layer F 0001 b", "layer B 0000 a")}
    common = {"rank": 0, "step": 1, "stage": 0}
    for letter, length in (("0000 a", 10), ("0000 a", 30), ("0000 a", 20), ("0001 b", 40)):
        spans.add(**common, lane=Lane.RANGE, name=at[f"layer F {letter}"], start_ns=0, end_ns=length)
    spans.add(**common, lane=Lane.RANGE, name=at["layer B 0000 a"], start_ns=0, end_ns=70)
    for kind, length in ((Kind.FORWARD, 60), (Kind.BACKWARD_INPUT, 60), (Kind.BACKWARD_WEIGHT, 30)):
        spans.add(**common, lane=Lane.COMPUTE, kind=kind, device=0, start_ns=0, end_ns=length)
    left, layers = take_layers(spans.build(), names)
    assert len(left) == 3
    found = [(x.name, x.forward_s * 1e9, x.backward_s * 1e9) for x in layers]
    assert [f[0] for f in found] == ["a", "b"]
    assert np.allclose([f[1:] for f in found], [(20, 70), (40, 60)])


@pytest.mark.real
def test_a_recorded_run_advises_the_whole_cut_and_it_comes_true(tmp_path: Path) -> None:
    base = SleepRun("1F1B", 4, 8, 0.012, 0.024, scale={3: 2.0}, steps=5, layers=4)
    even = SleepRun("1F1B", 4, 8, 0.015, 0.030, steps=5, layers=5)
    reports = quiet_reports(tmp_path, {"base": base, "even": even})
    found = explore(reports["base"], Wanted(rebalance=True))
    assert found["layer_times"] == "measured"
    (change,) = found["changes"]
    assert change["detail"]["layers"] == [5, 5, 5, 5]
    assert change["step_seconds"] == pytest.approx(typical_step(reports["even"]), rel=0.05)


def test_timing_costs_little() -> None:
    recorder = FakeRecorder()
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(10)))
    timers = LayerTimers(recorder)
    timers.begin([SimpleNamespace(stage_index=0, submod=model)])
    began = time.perf_counter()
    for _ in range(20):
        model(torch.ones(1, 8, requires_grad=True)).sum().backward()
    per_layer = (time.perf_counter() - began) / 200
    timers.end()
    assert per_layer < 1e-3
