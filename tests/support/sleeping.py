"""Real pipelines of known speed: gloo processes on 127.0.0.1 whose stages sleep for set times.

Schedule, communication, autograd (with its split into input and weight gradients) and optimizer are real; only the
arithmetic is replaced by sleeping, so four stages on two cores do not disturb each other.

>>> run_pipeline(SleepRun("1F1B", stages=4, microbatches=8, out="runs/x"))  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MULTI = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
WIDTH = 8
MOMENT_S = 2.0
"""From the last whole step to a kill: steps take milliseconds here, and their lines are written beside them."""


@dataclass(frozen=True)
class SleepRun:
    """One run. stages: GPUs of one pipeline (p); the multi schedules put `chunks` virtual stages on each.

    forward_s, backward_s: per chunk operation; backward = input gradient + weight gradient, split by weight_split.
    On stage 0 torch does no I and the whole backward as W, in zero-bubble schedules. scale: {global stage: factor}.
    replicas: data-parallel pipelines. accumulate: schedule calls per optimizer step. optimizers: per step.
    out: recording folder, None = not recorded. profiler: folder for torch.profiler traces (``rank-0.json``).
    record_options: for `bubblescope.record`. fault: "raise-in-hook" or "other-optimizer" or "evaluate".
    layers: 0 = a stage is one module; else a stage of factor f is a Sequential of f × so many equal layers.
    ddp: the replicas reduce their gradients by DistributedDataParallel. slow: (rank, factor): it takes so many times as
    long. kill: (rank, step): that rank kills itself in mid-step. workers: DataLoader workers of the first stage.
    """

    schedule: str = "1F1B"
    stages: int = 4
    microbatches: int = 8
    forward_s: float = 0.002
    backward_s: float = 0.004
    weight_split: float = 0.5
    scale: dict[int, float] = field(default_factory=dict)
    chunks: int = 2
    steps: int = 3
    replicas: int = 1
    accumulate: int = 1
    optimizers: int = 1
    out: str | os.PathLike[str] | None = None
    profiler: str | os.PathLike[str] | None = None
    record_options: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    kill: tuple[int, int] | None = None
    workers: int = -1
    no_optimizer: bool = False
    layers: int = 0
    ddp: bool = False
    slow: tuple[int, float] | None = None

    @property
    def world(self) -> int:
        return self.stages * self.replicas

    @property
    def virtual_stages(self) -> int:
        return self.stages * (self.chunks if self.schedule in MULTI else 1)

    def stages_of(self, position: int) -> list[int]:
        """Global stages on the rank at that pipeline position."""
        if self.schedule in V_SHAPED:
            return [position, self.virtual_stages - 1 - position]
        return list(range(position, self.virtual_stages, self.stages))


@dataclass(frozen=True)
class RankResult:
    """What a rank said when it ended. losses: mean per step (last stage only, else empty). exitcode: of its process;
    negative = the signal. The other fields are empty when it did not end by itself."""

    rank: int
    exitcode: int
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    restored: bool = False
    log: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


def run_pipeline(run: SleepRun, timeout_s: float = 120.0) -> list[RankResult]:
    """Run it in processes of its own; one result per rank. Raises RuntimeError when a rank fails in a run where
    none was to be killed, with what it printed."""
    return run_pipelines([run], timeout_s)[0]


def run_pipelines(runs: Sequence[SleepRun], timeout_s: float = 300.0) -> list[list[RankResult]]:
    """Several, one after the other, at the price of importing torch once. Each in fresh processes."""
    with tempfile.TemporaryDirectory() as scratch:
        plans = []
        for number, run in enumerate(runs):
            plan = dataclasses.asdict(run) | {"scratch": f"{scratch}/{number}", "port": free_port()}
            Path(plan["scratch"]).mkdir()
            for name in ("out", "profiler"):
                plan[name] = None if plan[name] is None else str(plan[name])
            plans.append(plan)
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.sleeping", json.dumps(plans)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            timeout=timeout_s,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(f"sleeping pipeline failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        return [_results(Path(plan["scratch"])) for plan in plans]


def _results(scratch: Path) -> list[RankResult]:
    codes = json.loads((scratch / "exitcodes.json").read_text())
    return [_result(scratch, rank, code) for rank, code in enumerate(codes)]


def _result(scratch: Path, rank: int, exitcode: int) -> RankResult:
    path = scratch / f"result-{rank}.json"
    said = json.loads(path.read_text()) if path.exists() else {}
    return RankResult(rank, exitcode, **said)


def free_port() -> int:
    """A TCP port on 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- inside the processes; torch is imported here only


def sleeping_stage(forward_s: float, input_s: float, weight_s: float, first: bool) -> Any:
    """A module that sleeps in forward, in the gradient of its input, and in the gradient of its weight.

    The two gradients hang on separate autograd nodes, so that torch's own split of the backward into I and W
    calls the right one. The first stage's input needs no gradient; a spare parameter puts its node into the
    graph, as the whole backward of a first stage costs I + W too.
    """
    import torch

    class OnInputPath(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, spare: Any) -> Any:
            time.sleep(forward_s)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(input_s)
            return grad, (torch.zeros(1) if first else None)

    class OnWeightPath(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Any) -> Any:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(weight_s)
            return grad

    class SleepingStage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))
            self.spare = torch.nn.Parameter(torch.zeros(1)) if first else None

        def forward(self, x: Any) -> Any:
            return OnInputPath.apply(x, self.spare) @ OnWeightPath.apply(self.weight)

    return SleepingStage()


def _worker(rank: int, plan: dict[str, Any]) -> None:
    scratch, port = Path(plan.pop("scratch")), plan.pop("port")
    plan["scale"] = {int(stage): factor for stage, factor in plan["scale"].items()}
    run = SleepRun(**plan)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(run.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=run.world)
    said = _train(run, rank)
    dist.destroy_process_group()
    (scratch / f"result-{rank}.json").write_text(json.dumps(said))


def build(run: SleepRun, rank: int) -> tuple[Any, list[Any], Any, bool, bool]:
    """(schedule, parameters, pp group, has the first stage, has the last stage) of this rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    groups = [dist.new_group(list(range(r * run.stages, (r + 1) * run.stages))) for r in range(run.replicas)]
    group = groups[rank // run.stages]
    alike = [dist.new_group(list(range(s, run.world, run.stages))) for s in range(run.stages if run.ddp else 0)]
    mine = run.stages_of(rank % run.stages)
    stages, parameters = [], []
    for index in mine:
        torch.manual_seed(index)
        factor = run.scale.get(index, 1.0) * (run.slow[1] if run.slow and run.slow[0] == rank else 1.0)
        backward_s = run.backward_s * factor
        weight_s = backward_s * run.weight_split
        count = round(run.layers * factor)
        if count:
            each = (run.forward_s / run.layers, (backward_s - weight_s) / count, weight_s / count)
            parts = [sleeping_stage(*each, index == 0 and i == 0) for i in range(count)]
            module = torch.nn.Sequential(*parts)
        else:
            module = sleeping_stage(run.forward_s * factor, backward_s - weight_s, weight_s, index == 0)
        parameters += list(module.parameters())
        if run.ddp:
            module = torch.nn.parallel.DistributedDataParallel(module, process_group=alike[rank % run.stages])
        stages.append(PipelineStage(module, index, run.virtual_stages, torch.device("cpu"), group=group))
    multi = run.schedule in MULTI
    cls = get_schedule_class(run.schedule)
    schedule = cls(stages if multi else stages[0], run.microbatches, loss_fn=torch.nn.MSELoss())
    return schedule, parameters, group, 0 in mine, run.virtual_stages - 1 in mine


def _originals() -> list[Any]:
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules, stage
    from torch.utils.data import dataloader

    return [
        *(vars(stage._PipelineStageBase)[n] for n in vars(stage._PipelineStageBase) if n.endswith(("chunk", "ops"))),
        vars(stage._PipelineStageBase)["perform_reduce_grad"],
        vars(schedules._PipelineSchedule)["_maybe_compute_loss"],
        schedules._batch_p2p,
        schedules._wait_batch_p2p,
        vars(schedules.PipelineScheduleSingle)["step"],
        vars(schedules.PipelineScheduleMulti)["step"],
        vars(dataloader._BaseDataLoaderIter)["__next__"],
        dist.all_reduce,
        dist.distributed_c10d.all_reduce,
        dist.barrier,
    ]


def _train(run: SleepRun, rank: int) -> dict[str, Any]:
    import logging

    import torch

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bubblescope").addHandler(handler)
    schedule, parameters, _group, first, last = build(run, rank)
    before = _originals()
    rows = run.microbatches * run.accumulate
    torch.manual_seed(7)
    data = [(torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)) for _ in range(run.steps)]
    optimizers = [torch.optim.SGD(part, lr=0.05) for part in _split(parameters, run.optimizers)]
    losses: list[float] = []
    times: list[float] = []
    with contextlib.ExitStack() as stack:
        if run.out is not None:
            import bubblescope

            if run.fault == "raise-in-hook":
                _break_a_hook()
            stack.enter_context(bubblescope.record(run.out, **run.record_options))
        if run.profiler is not None:
            stack.enter_context(_profiled(Path(run.profiler), rank))
        loader = None
        if first and run.workers >= 0:
            loader = iter(torch.utils.data.DataLoader([x for x, _ in data], batch_size=None, num_workers=run.workers))
        for index in range(run.steps):
            began = time.perf_counter()
            _arm_kill(run, rank, index, schedule)
            x = next(loader) if loader is not None else data[index][0]
            losses += _one_step(run, schedule, optimizers, x, data[index][1], first, last)
            times.append(time.perf_counter() - began)
        if run.fault == "evaluate":
            chunk = data[0][0][: run.microbatches], data[0][1][: run.microbatches]
            schedule.eval(*((chunk[0],) if first else ()), **({"target": chunk[1], "losses": []} if last else {}))
    unchanged = all(a is b for a, b in zip(before, _originals(), strict=True))
    return {
        "losses": losses,
        "step_s": times,
        "modules": sorted(name for name in sys.modules if "." not in name),
        "restored": unchanged,
        "log": heard,
    }


def _split(parameters: list[Any], parts: int) -> list[list[Any]]:
    return [parameters[i::parts] or parameters[:1] for i in range(parts)]


def _one_step(
    run: SleepRun, schedule: Any, optimizers: list[Any], x: Any, y: Any, first: bool, last: bool
) -> list[float]:
    for optimizer in optimizers:
        optimizer.zero_grad()
    found: list[float] = []
    for part in range(run.accumulate):
        rows = slice(part * run.microbatches, (part + 1) * run.microbatches)
        said: list[Any] = []
        schedule.step(*((x[rows],) if first else ()), **({"target": y[rows], "losses": said} if last else {}))
        found += [float(loss.detach()) for loss in said]
    if not run.no_optimizer:
        for optimizer in optimizers:
            optimizer.step()
    return [sum(found) / len(found)] if found else []


def _arm_kill(run: SleepRun, rank: int, step: int, schedule: Any) -> None:
    """In the chosen step, the chosen rank's third forward is its last act."""
    if run.kill is None or tuple(run.kill) != (rank, step):
        return
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    for stage in stages:
        original = stage.submod.forward
        calls = iter(range(1_000_000))

        def forward(x: Any, original: Callable[..., Any] = original, calls: Any = calls) -> Any:
            if next(calls) == 2:
                time.sleep(MOMENT_S)
                os.kill(os.getpid(), signal.SIGKILL)
            return original(x)

        stage.submod.forward = forward


def _break_a_hook() -> None:
    """Make our own code raise in each wait, and for each forward when the schedule call has ended."""
    from bubblescope.capture.hooks import torch_pipelining

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("made to raise")

    torch_pipelining._forward = broken
    torch_pipelining._Messages.waited_for = broken  # type: ignore[method-assign]


@contextlib.contextmanager
def _profiled(folder: Path, rank: int) -> Any:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield
    profiler.export_chrome_trace(str(folder / f"rank-{rank}.json"))


def main(text: str) -> int:
    """Fork one process per rank from this one, which has imported torch once for all."""
    import torch.distributed.pipelining
    import torch.utils.data  # noqa: F401

    context = multiprocessing.get_context("fork")
    failed = False
    for plan in json.loads(text):
        world = plan["stages"] * plan["replicas"]
        ranks = [context.Process(target=_worker, args=(rank, dict(plan))) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        codes = [process.exitcode for process in ranks]
        (Path(plan["scratch"]) / "exitcodes.json").write_text(json.dumps(codes))
        failed |= any(codes) and plan["kill"] is None
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
