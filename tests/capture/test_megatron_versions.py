"""Shapes of Megatron-Core that are not the installed one, as stand-ins: module functions (0.13), no `model_type`
(0.17 on), combined 1F1B, a version of tomorrow."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bubblescope.capture.hooks import megatron
from bubblescope.capture.hooks.megatron.job import message_orders, schedule_order
from bubblescope.capture.recorder import Recorder
from bubblescope.model import Kind, Lane

PIPELINE = "megatron.core.pipeline_parallel"


class Config:
    microbatch_group_size_per_vp_stage = None
    finalize_model_grads_func: Any = None


class Group:
    """A pipeline of two ranks, of which this is the second."""


class Tensor:
    nbytes = 24


class Model:
    config = Config()

    def parameters(self) -> Iterator[Any]:
        return iter(())


def schedules_module() -> Any:
    """The shape of `schedules`: its functions look each other up in the module."""
    made = types.ModuleType(f"{PIPELINE}.schedules")

    def forward_step(step: Any, model: Any, current_microbatch: Any = None, vp_stage: Any = None) -> Any:
        made.forward_step_calc_loss(model, is_last_stage=True)  # type: ignore[attr-defined]
        return [Tensor()], 1

    def backward_step(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
        return [Tensor()]

    def forward_backward_pipelining_without_interleaving(
        *, forward_step_func: Any, model: Any, num_microbatches: int, forward_only: bool = False
    ) -> None:
        p2p = sys.modules[f"{PIPELINE}.p2p_communication"]
        outputs = []
        for i in range(num_microbatches):
            p2p.recv_forward()
            outputs.append(made.forward_step(None, model, current_microbatch=i)[0])  # type: ignore[attr-defined]
        for output in () if forward_only else outputs:
            made.backward_step(None, output, None, None)  # type: ignore[attr-defined]
            p2p.send_backward()
        if model.config.finalize_model_grads_func is not None:
            model.config.finalize_model_grads_func([model])

    made.forward_step, made.backward_step = forward_step, backward_step  # type: ignore[attr-defined]
    made.forward_step_calc_loss = lambda model, is_last_stage=None: None  # type: ignore[attr-defined]
    made.get_model_config = lambda model: model.config  # type: ignore[attr-defined]
    made.forward_backward_pipelining_without_interleaving = (  # type: ignore[attr-defined]
        forward_backward_pipelining_without_interleaving
    )
    return made


def p2p_module(requests: Any = None) -> Any:
    """As up to 0.13: functions of the module, `_communicate` with a config."""
    made = types.ModuleType(f"{PIPELINE}.p2p_communication")

    def _communicate(
        *, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool, tensor_shape: Any = None,
        config: Any = None, wait_on_reqs: bool = True,
    ) -> Any:  # fmt: skip
        return Tensor() if recv_prev else None, Tensor() if recv_next else None, requests

    def call(**given: Any) -> Any:
        usual = {"tensor_send_next": None, "tensor_send_prev": None, "recv_prev": False, "recv_next": False}
        return made._communicate(**{**usual, **given})  # type: ignore[attr-defined]

    made._communicate = _communicate  # type: ignore[attr-defined]
    made.recv_forward = lambda: call(recv_prev=True)  # type: ignore[attr-defined]
    made.send_backward = lambda: call(tensor_send_prev=Tensor())  # type: ignore[attr-defined]
    made.recv_later = lambda: call(recv_prev=True, wait_on_reqs=False)  # type: ignore[attr-defined]
    return made


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """A recorder hooked into stand-ins for Megatron-Core 0.13 on rank 1 of 2."""
    dist = pytest.importorskip("torch").distributed
    core = types.ModuleType("megatron.core")
    core.__version__ = "0.13.2"  # type: ignore[attr-defined]
    parallel = types.ModuleType("megatron.core.parallel_state")
    parallel.get_pipeline_model_parallel_group = Group  # type: ignore[attr-defined]
    core.parallel_state = parallel  # type: ignore[attr-defined]
    for name, module in {
        "megatron": types.ModuleType("megatron"),
        "megatron.core": core,
        "megatron.core.parallel_state": parallel,
        f"{PIPELINE}.schedules": schedules_module(),
        f"{PIPELINE}.p2p_communication": p2p_module(),
        PIPELINE: types.ModuleType(PIPELINE),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    made = Recorder(tmp_path)
    made.running = True
    yield made
    made.patches.restore()
    made.writer.close()


def events(recorder: Recorder) -> list[tuple[Lane, Kind, int, int]]:
    found = []
    recorder.settle()
    for lane, _, _, _, _, _, labels in recorder.rule.current.events:
        found += [(lane, label.kind, label.stage, label.microbatch) for label in labels]
    return found


def run(model: Any, **given: Any) -> None:
    schedule = sys.modules[f"{PIPELINE}.schedules"].forward_backward_pipelining_without_interleaving
    schedule(forward_step_func=None, model=model, num_microbatches=2, **given)


def test_module_functions_and_a_backward_without_model_type(recorder: Recorder) -> None:
    megatron.install(recorder)
    run(Model())
    assert recorder.patches.warnings == []
    forward = [(Lane.POST, Kind.RECV), (Lane.WAIT, Kind.RECV), (Lane.COMPUTE, Kind.FORWARD), (Lane.COMPUTE, Kind.LOSS)]
    back = [(Lane.COMPUTE, Kind.BACKWARD), (Lane.POST, Kind.SEND), (Lane.WAIT, Kind.SEND)]
    expected = [(*row, 1, mb) for mb in range(2) for row in forward] + [
        (*row, 1, mb) for mb in range(2) for row in back
    ]
    assert events(recorder) == [*expected, (Lane.RANGE, Kind.STEP, -1, -1)]
    assert recorder.framework == "megatron"


def test_finalize_is_measured_while_the_schedule_runs_and_put_back(recorder: Recorder) -> None:
    megatron.install(recorder)
    model = Model()
    model.config = Config()

    def finalize(models: Any) -> None:
        sum(range(2000))

    model.config.finalize_model_grads_func = finalize
    run(model)
    assert model.config.finalize_model_grads_func is finalize
    names = [label.name for event in recorder.rule.current.events for label in event[6]]
    assert names.count("finalize_model_grads") == 1


def test_requests_that_are_waited_for_later_are_timed_then(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        def wait(self) -> str:
            return "done"

        def is_completed(self) -> bool:
            return True

    monkeypatch.setitem(sys.modules, f"{PIPELINE}.p2p_communication", p2p_module({"recv_prev": Work()}))
    megatron.install(recorder)
    p2p = sys.modules[f"{PIPELINE}.p2p_communication"]
    schedule = sys.modules[f"{PIPELINE}.schedules"]
    schedule.forward_step = lambda *args, **kwargs: ([Tensor()], 1)
    p2p.recv_forward = lambda: None
    run(Model(), forward_only=True)  # gives the hooks a layout
    recorder.rule.current.events.clear()
    _, _, requests = p2p.recv_later()
    assert requests["recv_prev"].is_completed()
    before = len(events(recorder))
    assert requests["recv_prev"].wait() == "done"
    lanes = [row[0] for row in events(recorder)]
    assert lanes[:before] == [Lane.POST] and lanes[before:] == [Lane.WAIT]


def test_what_a_message_carried_is_not_kept_until_its_label_is_made(recorder: Recorder) -> None:
    megatron.install(recorder)
    p2p = sys.modules[f"{PIPELINE}.p2p_communication"]
    p2p.recv_forward = lambda: None
    run(Model(), forward_only=True)  # gives the hooks a layout
    tensor = Tensor()
    gone = weakref.ref(tensor)
    p2p._communicate(tensor_send_next=None, tensor_send_prev=tensor, recv_prev=False, recv_next=False)
    del tensor
    assert gone() is None
    assert [row[:2] for row in events(recorder)][-2:] == [(Lane.POST, Kind.SEND), (Lane.WAIT, Kind.SEND)]


class Layer:
    """As Megatron's `TransformerLayerNode`: a layer's part of a combined call."""

    delay_wgrad_compute = True

    def backward_dw(self) -> None:
        sum(range(1000))


def combined_module(arrived: Any) -> Any:
    """A combined call as with `overlap_p2p_comm`: waits for its input, computes, sends the gradient, computes on."""
    made = types.ModuleType(f"{PIPELINE}.combined_1f1b")
    schedules, p2p = (sys.modules[f"{PIPELINE}.{name}"] for name in ("schedules", "p2p_communication"))

    def combined_forward_backward_step(
        f_model: Any, b_model: Any, b_output_tensor: Any, f_model_chunk_id: Any = None, current_microbatch: Any = None
    ) -> Any:
        if f_model is not None:
            arrived["recv_prev"].wait()
        sum(range(1000))
        if b_model is not None:
            Layer().backward_dw()
            p2p.send_backward()
            Layer().backward_dw()
        if f_model is not None:
            schedules.forward_step_calc_loss(f_model)
        return [Tensor()], 1, None

    def forward_backward_pipelining_with_interleaving(
        *, model: Any, num_microbatches: int, forward_only: bool = False
    ) -> None:
        output = None
        for i in range(num_microbatches + 1):
            ahead, back = i < num_microbatches, output is not None
            if ahead:
                _, _, requests = p2p.recv_later()
                arrived.update(requests)
            output = made.combined_forward_backward_step(  # type: ignore[attr-defined]
                model[0] if ahead else None, model[0] if back else None, output, 0, i if ahead else None
            )[0]

    made.combined_forward_backward_step = combined_forward_backward_step  # type: ignore[attr-defined]
    schedules.forward_backward_pipelining_with_interleaving = forward_backward_pipelining_with_interleaving
    return made


def test_a_combined_call_is_what_lies_between_its_inputs_and_its_results(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Work:
        def wait(self) -> None:
            sum(range(1000))

    monkeypatch.setitem(sys.modules, f"{PIPELINE}.p2p_communication", p2p_module({"recv_prev": Work()}))
    layers = types.ModuleType("megatron.core.models.gpt.fine_grained_callables")
    layers.TransformerLayerNode = Layer  # type: ignore[attr-defined]
    monkeypatch.setattr(Layer, "__module__", layers.__name__)
    monkeypatch.setitem(sys.modules, layers.__name__, layers)
    monkeypatch.setitem(sys.modules, f"{PIPELINE}.combined_1f1b", combined_module({}))
    megatron.install(recorder)
    schedules = sys.modules[f"{PIPELINE}.schedules"]
    schedules.forward_backward_pipelining_with_interleaving(model=[Model()], num_microbatches=2)
    assert recorder.patches.warnings == []
    rows = [
        (event[0], label.kind, label.microbatch, label.name, event[1], event[2])
        for event in recorder.rule.current.events
        for label in event[6]
    ]
    both = [row for row in rows if row[3] == "combined"]
    mixed = [row[4:] for row in both if row[1:3] in ((Kind.FORWARD, 1), (Kind.BACKWARD_INPUT, 0))]
    assert len(mixed) == 2 and mixed[0] == mixed[1]
    start, end = mixed[0]
    inside = [row[1] for row in rows if start < row[4] and row[5] < end]
    assert inside == [Kind.BACKWARD_WEIGHT]
    before = [row for row in rows if row[5] == start]
    assert [row[:2] for row in before] == [(Lane.WAIT, Kind.RECV)]
    sent = [row for row in rows if row[4] == end]
    assert (Lane.POST, Kind.SEND) in [row[:2] for row in sent]
    late = [row[2] for row in rows if row[1] is Kind.BACKWARD_WEIGHT and row[3] != "combined" and row[4] > end]
    assert late == [0, 1]
    assert [row[2] for row in rows if row[1] is Kind.LOSS] == [0, 1]
    alone = [row for row in both if row[1:3] == (Kind.BACKWARD_INPUT, 1)]
    assert len(alone) == 1


def test_a_version_of_tomorrow_is_said_and_degrades_to_its_steps(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    sys.modules["megatron.core"].__version__ = "1.4.0"  # type: ignore[attr-defined]
    schedules = sys.modules[f"{PIPELINE}.schedules"]
    schedules.forward_step = lambda *args, **kwargs: ([Tensor()], 1)
    schedules.backward_step = lambda *args, **kwargs: None
    del sys.modules[f"{PIPELINE}.p2p_communication"]._communicate  # type: ignore[attr-defined]
    p2p = sys.modules[f"{PIPELINE}.p2p_communication"]
    p2p.recv_forward = p2p.send_backward = lambda: None  # type: ignore[attr-defined]
    megatron.install(recorder)
    assert len(recorder.patches.warnings) == 1 and "1.4.0 was not tried" in recorder.patches.warnings[0]
    assert set(recorder.patches.refused) >= {"forward", "backward", "p2p"}
    run(Model())
    assert events(recorder) == [(Lane.RANGE, Kind.STEP, -1, -1)]


def test_everything_is_put_back(recorder: Recorder) -> None:
    schedules = sys.modules[f"{PIPELINE}.schedules"]
    p2p = sys.modules[f"{PIPELINE}.p2p_communication"]
    before = [dict(vars(schedules)), dict(vars(p2p))]
    megatron.install(recorder)
    assert vars(schedules) != before[0] and vars(p2p) != before[1]
    recorder.patches.restore()
    assert [dict(vars(schedules)), dict(vars(p2p))] == before


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches", "group"), [(2, 1, 4, 4), (4, 2, 8, 4), (3, 3, 6, 3), (2, 2, 5, 2)]
)
def test_both_ends_number_their_messages_alike(ranks: int, chunks: int, microbatches: int, group: int) -> None:
    order = schedule_order(microbatches, chunks, group)
    made = [message_orders(position, ranks, chunks, order) for position in range(ranks)]
    for position in range(ranks):
        after = (position + 1) % ranks
        for direction, source, target in (("act", position, after), ("grad", after, position)):
            sent = [(m, consumer) for m, _, consumer in made[source]["send", direction]]
            received = [(m, consumer) for m, _, consumer in made[target]["recv", direction]]
            assert sent == received
