"""`record`, `instrument`, `span` and `step`, in a process of one rank."""

from __future__ import annotations

import gc
import json
import logging
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

import bubblescope.capture as capture
from bubblescope.capture import recorder as module
from bubblescope.errors import UsageError
from bubblescope.ingest import recording
from bubblescope.model import Kind, Lane

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.real


@pytest.fixture
def schedule(tmp_path: Path) -> Iterator[Any]:
    """A real one-stage GPipe schedule over a process group of one."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    yield ScheduleGPipe(stage, 2, loss_fn=torch.nn.MSELoss())
    dist.destroy_process_group()


def train(schedule: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(schedule._stage.submod.parameters(), lr=0.1)
    x = torch.ones(4, 4)
    for _ in range(steps):
        schedule.step(x, target=x, losses=[])
        optimizer.step()


def test_instrument_records_from_when_it_is_called_until_stop(tmp_path: Path, schedule: Any) -> None:
    train(schedule, 1)
    handle = capture.instrument(schedule, out=tmp_path / "run")
    train(schedule, 3)
    handle.stop()
    train(schedule, 1)
    handle.stop()
    run = recording.read(tmp_path / "run")
    assert set(run.spans.step.tolist()) == {0, 1, 2} and run.notices == ()
    assert run.spans.where(kind=Kind.FORWARD).sum() == 6


def test_instrument_refuses_what_is_no_schedule(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        capture.instrument(object(), out=tmp_path)
    assert "bubblescope.span" in caught.value.hint and not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"every": 0}, {"warmup": -1}, {"max_steps": 0}])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        capture.record(tmp_path, **options)
    assert module.active() is None


def test_a_second_recording_in_a_process_leaves_the_first_alone(
    tmp_path: Path, schedule: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with capture.record(tmp_path / "outer"):
        with caplog.at_level(logging.WARNING, "bubblescope"), capture.record(tmp_path / "inner"):
            train(schedule, 2)
        train(schedule, 1)
    assert "already records" in caplog.text and not (tmp_path / "inner").exists()
    assert set(recording.read(tmp_path / "outer").spans.step.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("warmup", [1, 0])
def test_a_layout_stands_before_its_first_step_and_that_step_is_a_warm_up(
    tmp_path: Path, schedule: Any, warmup: int
) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    with capture.record(tmp_path / "run", warmup=warmup):
        train(schedule, 2)
        for microbatches in (2, 4):
            stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
            train(ScheduleGPipe(stage, microbatches, loss_fn=torch.nn.MSELoss()), 2)
    lines = [json.loads(line) for line in (tmp_path / "run" / "rank-00000.jsonl").read_text().splitlines()]
    told = [line.get("microbatches", line.get("step")) for line in lines if line["kind"] in ("layout", "step")]
    assert told == [2, 0, 1, 2, 3, 4, 4, 5]
    warm = [line["step"] for line in lines if line.get("warmup")]
    assert warm == ([0, 2, 4] if warmup else [])


def test_a_step_of_several_pipelines_says_so(tmp_path: Path, schedule: Any, caplog: pytest.LogCaptureFixture) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(torch.nn.Linear(4, 4), 0, 1, torch.device("cpu"))
    other = Schedule1F1B(stage, 4, loss_fn=torch.nn.MSELoss())
    x = torch.ones(4, 4)
    with capture.record(tmp_path / "run", warmup=0):
        for _ in range(2):
            other.step(x, target=x, losses=[])
            train(schedule, 1)
    run = recording.read(tmp_path / "run")
    assert set(run.spans.step.tolist()) == {0, 1} and run.layout.microbatches == 6
    assert [n.code for n in run.notices] == ["recorder-warning"]
    assert caplog.text.count("a step runs several pipelines") == 1


def test_an_exception_of_the_job_passes_and_what_was_complete_is_kept(tmp_path: Path, schedule: Any) -> None:
    with pytest.raises(ValueError, match="theirs"), capture.record(tmp_path / "run"):
        train(schedule, 2)
        raise ValueError("theirs")
    run = recording.read(tmp_path / "run")
    assert set(run.spans.step.tolist()) == {0, 1}


class Slow(torch.optim.SGD):
    """What it does beside its base class takes 5 ms; it fails where it is told to."""

    failing = ""

    def step(self, closure: Any = None) -> None:
        time.sleep(0.005)
        if self.failing == "inner":
            with suppress(TypeError):
                super().step(closure=3)
        else:
            super().step(closure)
        if self.failing == "outer":
            raise ValueError("overflow")


@pytest.mark.parametrize("failing", ["", "inner", "outer"])
def test_an_optimizer_that_steps_its_base_class_counts_once_and_whole(
    tmp_path: Path, schedule: Any, failing: str
) -> None:
    parameters = list(schedule._stage.submod.parameters())
    torch.optim.SGD(parameters, lr=0.1)  # from now on torch runs its hooks in the step of the base class too
    optimizer = Slow(parameters, lr=0.1)
    x = torch.ones(4, 4)
    with capture.record(tmp_path / "run", warmup=0):
        for number in range(3):
            optimizer.failing = failing if number == 1 else ""
            schedule.step(x, target=x, losses=[])
            with suppress(ValueError):
                optimizer.step()
    spans = recording.read(tmp_path / "run").spans
    rows = spans.where(kind=Kind.OPTIMIZER)
    assert len(set(spans.step[rows].tolist())) == int(rows.sum()) == (2 if failing == "outer" else 3)
    assert (spans.end_ns - spans.start_ns)[rows].min() >= 5_000_000


def test_collectives_are_numbered_and_linked(tmp_path: Path, schedule: Any) -> None:
    import torch.distributed as dist

    original = dist.all_reduce
    with capture.record(tmp_path / "run"):
        for _ in range(2):
            train(schedule, 1)
            dist.all_reduce(torch.ones(8))
            dist.all_reduce(torch.ones(8), async_op=True).wait()
    assert dist.all_reduce is original is dist.distributed_c10d.all_reduce
    run = recording.read(tmp_path / "run")
    rows = run.spans.take(run.spans.where(kind=Kind.COLLECTIVE))
    assert [run.names[i] for i in rows.name] == ["all_reduce"] * 4
    assert rows.lane.tolist() == [Lane.WAIT, Lane.POST] * 2
    assert rows.seq.tolist() == [0, 1, 2, 3] and rows.bytes.tolist() == [32] * 4
    assert sorted(run.links.collective[:, 0].tolist()) == [0, 1, 2, 3]


def test_a_collective_of_a_sparse_tensor_has_no_size_and_the_hook_stays_on(tmp_path: Path, schedule: Any) -> None:
    import torch.distributed as dist

    with capture.record(tmp_path / "run"):
        train(schedule, 1)
        dist.all_reduce(torch.eye(3).to_sparse())
        dist.all_reduce(torch.ones(8))
    run = recording.read(tmp_path / "run")
    assert run.spans.bytes[run.spans.kind == Kind.COLLECTIVE].tolist() == [-1, 32]
    assert "recorder-warning" not in {notice.code for notice in run.notices}


def test_a_compiled_function_with_a_collective_still_compiles_whole(tmp_path: Path, schedule: Any) -> None:
    import torch.distributed as dist

    def work(x: Any) -> Any:
        dist.all_reduce(x)
        return x + 1

    with capture.record(tmp_path / "run"):
        compiled = torch.compile(work, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_pipeline_of_ones_own_is_recorded_with_span_and_step(tmp_path: Path) -> None:
    with capture.record(tmp_path / "run", warmup=0):
        for _ in range(2):
            for microbatch in range(3):
                with capture.span("F", stage=1, microbatch=microbatch):
                    pass
            with capture.span("data"):
                pass
            capture.step()
    run = recording.read(tmp_path / "run")
    assert set(run.spans.step.tolist()) == {0, 1} and run.source.details["steps_marked"]
    rows = run.spans.take(run.spans.where(step=1))
    assert sorted(rows.microbatch[rows.kind == Kind.FORWARD].tolist()) == [0, 1, 2]
    assert rows.device[rows.kind == Kind.DATA].tolist() == [-1]


@pytest.mark.parametrize("recorded", [False, True])
def test_span_refuses_unknown_kinds_and_numbers_whether_recorded_or_not(tmp_path: Path, recorded: bool) -> None:
    with capture.record(tmp_path) if recorded else nullcontext():
        for kind, stage, microbatch in (("Q", 0, 0), ("F", "0", 0), ("F", 0, "1"), ("F", -4, 0), ("F", 0, -3)):
            with pytest.raises(UsageError), capture.span(kind, stage, microbatch):  # type: ignore[arg-type]
                pass


def test_a_span_whose_body_raises_passes_it_and_is_recorded_up_to_then(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), capture.span("F"):
        raise ZeroDivisionError
    with capture.record(tmp_path / "run", warmup=0):
        for kind in ("F", "send_forward"):
            with pytest.raises(ZeroDivisionError), capture.span(kind, stage=0, microbatch=0):
                raise ZeroDivisionError
        capture.step()
    run = recording.read(tmp_path / "run")
    rows = run.spans
    assert [run.names[i] for i in rows.name[rows.kind == Kind.FORWARD]] == ["ended by ZeroDivisionError"]
    assert sorted(rows.lane[rows.kind == Kind.SEND].tolist()) == sorted([Lane.POST, Lane.WAIT])


def test_a_span_that_is_never_left_is_counted_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with capture.record(tmp_path / "run", warmup=0):
        capture.span("F", stage=0, microbatch=0).__enter__()
        gc.collect()
        with capture.span("B", stage=0, microbatch=0):
            pass
        capture.step()
    run = recording.read(tmp_path / "run")
    assert not run.spans.where(kind=Kind.FORWARD).any() and run.spans.where(kind=Kind.BACKWARD).any()
    assert {n.code for n in run.notices} == {"recorder-warning", "rows-dropped"}
    assert "a span 'F' was entered and not left" in caplog.text
    capture.step()


def test_memory_does_not_grow_with_steps(tmp_path: Path, schedule: Any) -> None:
    with capture.record(tmp_path / "run"):
        train(schedule, 300)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        train(schedule, 1500)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 8 * 1024  # KiB; 50 MB over 10,000 steps is 7.5 over 1,500
    assert max(recording.read(tmp_path / "run").spans.step) == 1799


def test_a_training_process_needs_no_stop(tmp_path: Path) -> None:
    """Without `with` and without stop, the end of the process writes the end of the recording."""
    script = (
        "import bubblescope.capture as c, sys\n"
        "c.record(sys.argv[1])\n"
        "for _ in range(2):\n"
        "    with c.span('F', 0, 0): pass\n"
        "    c.step()\n"
        "assert not {'pandas', 'plotly'} & set(sys.modules)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "RANK"} | {"RANK": "5", "WORLD_SIZE": "8"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=True, env=env, timeout=60)
    run = recording.read(tmp_path / "run")
    assert run.ranks == [5] and run.layout.world_size == 8
    assert run.source.details["complete"]


def test_importing_the_recorder_does_not_import_torch() -> None:
    script = "import sys, bubblescope.capture; assert not {'torch', 'pandas', 'plotly'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
