"""The training that `bubblescope demo` runs: a real pipeline-parallel job, one process per stage.

A classifier of residual blocks is split into equal stages and trained on data of known classes from a DataLoader;
the loss falls. Schedule, communication, autograd and optimizer are torch's. On CPU each operation is padded to a
set time by sleeping, because several stages share a few cores and would otherwise measure each other (`pace_note`
says so to the user); on CUDA nothing is padded, and an imbalanced stage has more blocks.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bubblescope.errors import BubblescopeError, UsageError

MULTI = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_PR_SET_PDEATHSIG = 1
BLOCKS = 5
"""Blocks per (virtual) stage; an imbalance of 1.6 makes them 8."""


class DemoFailed(BubblescopeError):
    """A process of the demo training ended with an error (exit 6)."""

    exit_code = 6


@dataclass(frozen=True)
class DemoOptions:
    """stages: processes of the pipeline. imbalance: {pipeline position: factor on its compute}. out: recording folder.
    device: "auto", "cpu", "cuda". forward_ms: padded time of a forward on CPU; a backward takes twice that."""

    out: str
    stages: int = 4
    microbatches: int = 8
    schedule: str = "1F1B"
    imbalance: dict[int, float] = field(default_factory=dict)
    steps: int = 12
    device: str = "auto"
    forward_ms: float = 12.0
    width: int = 64
    rows_per_microbatch: int = 32

    def __post_init__(self) -> None:
        if self.stages < 1 or self.microbatches < 1 or self.steps < 1:
            raise UsageError("stages, microbatches and steps must each be at least 1")
        if self.schedule == "1F1B" and self.microbatches < self.stages:
            raise UsageError(
                f"1F1B needs at least as many micro-batches as stages, not {self.microbatches} for {self.stages}",
                hint=f"--microbatches {2 * self.stages}",
            )
        for stage, factor in self.imbalance.items():
            if not 0 <= stage < self.stages:
                raise UsageError(f"imbalance names stage {stage}, there are stages 0 to {self.stages - 1}")
            if not 0 < factor <= 100:
                raise UsageError(f"imbalance factor {factor} is not between 0 and 100")

    @property
    def chunks(self) -> int:
        """Virtual stages per process."""
        return 2 if self.schedule in MULTI else 1

    def stages_of(self, position: int) -> list[int]:
        """Virtual stages of the process at that pipeline position."""
        if self.schedule in V_SHAPED:
            return [position, self.stages * 2 - 1 - position]
        return list(range(position, self.stages * self.chunks, self.stages))


def pick_device(wanted: str, stages: int) -> str:
    """ "cuda" when asked for or when there is a GPU for each stage, else "cpu". Raises UsageError."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "auto":
        return "cuda" if gpus >= stages else "cpu"
    if wanted == "cuda" and gpus < stages:
        raise UsageError(
            f"--device cuda needs one GPU per stage: {stages} stages, {gpus} GPUs here",
            hint="--device cpu, or fewer stages",
        )
    return wanted


def pace_note(options: DemoOptions, device: str) -> str:
    """What is real and what is not, in one sentence for the user; "" on GPUs, where all is."""
    if device != "cpu":
        return ""
    return (
        f"CPU: each stage operation is padded by sleeping ({options.forward_ms:g} ms forward, "
        f"{2 * options.forward_ms:g} ms backward), because {options.stages} stages share "
        f"{os.cpu_count()} cores; schedule, communication and training are real"
    )


def launch(options: DemoOptions, timeout_s: float = 300.0) -> list[float]:
    """Train in processes of their own, recorded into ``options.out``; return the mean loss of each step.

    Raises DemoFailed with the last words of the first process that failed.
    """
    device = pick_device(options.device, options.stages)
    with tempfile.TemporaryDirectory() as scratch:
        plan = dataclasses.asdict(options) | {"device": device}
        port = _free_port()
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(options.stages):
                ranks.append(_start(plan, rank, port, Path(scratch)))
            _wait(ranks, Path(scratch), time.monotonic() + timeout_s)
        finally:
            _end(ranks)
        losses = json.loads((Path(scratch) / "losses.json").read_text())
        return [float(loss) for loss in losses]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(plan: dict[str, Any], rank: int, port: int, scratch: Path) -> subprocess.Popen[bytes]:
    env = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan["stages"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    with (scratch / f"output-{rank}").open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "bubblescope.cli.demo_worker", json.dumps(plan), str(scratch), str(os.getpid())],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], scratch: Path, deadline: float) -> None:
    """Until all ended well. Raises DemoFailed at the first that fails, or at the deadline."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(code, rank) for rank, code in enumerate(codes) if code]
        if failed:
            code, rank = min(failed)  # a signal (below 0) first: those that lose their peer fail because of it
            raise _failure(rank, code, (scratch / f"output-{rank}").read_text(errors="replace"))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise DemoFailed("the demo training took too long and was ended", hint="--steps 5, or fewer stages")
        time.sleep(0.05)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    running = [process for process in ranks if process.poll() is None]
    for process in running:
        process.kill()
    for process in running:
        process.wait()


def _failure(rank: int, code: int, said: str) -> DemoFailed:
    """The last line it wrote; all of it is a note on the error, which --debug shows."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")
    error = DemoFailed(
        f"rank {rank} of the demo {_ending(code)}: {last.strip()[:300]}",
        hint="--debug shows all it said; `bubblescope doctor` tells what this machine can train with",
    )
    if code == -signal.SIGKILL:
        error.hint = "somebody killed it, or the machine ran out of memory (dmesg says so): fewer --stages need less"
    error.add_note(said[-3000:])
    return error


def _ending(code: int) -> str:
    """
    >>> _ending(1), _ending(-9)
    ('ended with status 1', 'was ended by signal 9 (Killed)')
    """
    return f"ended with status {code}" if code > 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"


# ---- one rank; torch is imported here only


def _paced(forward_s: float, input_s: float, weight_s: float, first: bool) -> tuple[Any, Any]:
    """(on the input's path, on a weight's path): identity functions that sleep in forward and in their gradients.

    Two nodes, because zero-bubble schedules compute input and weight gradients at different times.
    """
    import torch

    class InputPace(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, x: Any, spare: Any) -> Any:
            time.sleep(forward_s)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(input_s)
            return grad, (torch.zeros_like(grad[0, :1]) if first else None)

    class WeightPace(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, weight: Any) -> Any:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(weight_s)
            return grad

    return InputPace, WeightPace


def _stage_module(options: DemoOptions, index: int, position: int, classes: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(index)
    first, last = index == 0, index == options.stages * options.chunks - 1
    factor = options.imbalance.get(position, 1.0)
    forward_s = options.forward_ms * 1e-3 * factor / options.chunks if options.device == "cpu" else 0.0
    on_input, on_weight = _paced(forward_s, forward_s, forward_s, first)
    width = options.width

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

        def forward(self, x: Any) -> Any:
            return x + 0.3 * self.inner(self.norm(x))

    class Stage(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(max(1, round(BLOCKS * factor)))))
            self.gain = nn.Parameter(torch.ones(width))
            # The first stage's input needs no gradient; through this its pace takes part in the backward.
            self.spare = nn.Parameter(torch.zeros(1)) if first else None
            self.head = nn.Linear(width, classes) if last else None

        def forward(self, x: Any) -> Any:
            if options.device == "cpu":
                x = on_input.apply(x, self.spare) * on_weight.apply(self.gain)
            x = self.blocks(x)
            return x if self.head is None else self.head(x)

    return Stage().to(options.device)


def _batches(options: DemoOptions, classes: int) -> Any:
    """Batches of points around class centres, from a DataLoader; the same on all ranks."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = options.microbatches * options.rows_per_microbatch
    make = torch.Generator().manual_seed(1)
    centres = torch.randn(classes, options.width, generator=make)
    labels = torch.randint(classes, (rows * options.steps,), generator=make)
    points = centres[labels] + torch.randn(len(labels), options.width, generator=make)
    return DataLoader(TensorDataset(points, labels), batch_size=rows)


def train(options: DemoOptions, rank: int) -> list[float]:
    """Run this rank's part of the training; mean loss per step on the rank of the last stage, else []."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    from bubblescope.capture import record

    torch.set_num_threads(1)
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(options.device, rank) if options.device == "cuda" else torch.device("cpu")
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    classes, mine = 10, options.stages_of(rank)
    total = options.stages * options.chunks
    modules = [_stage_module(options, index, rank, classes) for index in mine]
    stages = [PipelineStage(m, index, total, device) for m, index in zip(modules, mine, strict=True)]
    schedule = get_schedule_class(options.schedule)(
        stages if options.schedule in MULTI else stages[0],
        options.microbatches,
        loss_fn=torch.nn.functional.cross_entropy,
    )
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=3e-3)
    losses = []
    with record(options.out):
        for points, labels in _batches(options, classes):
            optimizer.zero_grad()
            found: list[Any] = []
            inputs = (points.to(device),) if 0 in mine else ()
            wanted = {"target": labels.to(device), "losses": found} if total - 1 in mine else {}
            schedule.step(*inputs, **wanted)
            optimizer.step()
            if found:
                losses.append(float(torch.stack([loss.detach() for loss in found]).mean()))
    dist.destroy_process_group()
    return losses


def die_with(parent: int) -> None:
    """Let the kernel end this process when `parent` ends, however it ends (Linux; elsewhere nothing happens)."""
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return  # a C library without prctl
    if os.getppid() != parent:
        raise SystemExit(1)  # it ended before it could be watched


def main(plan_text: str, scratch: str, parent: str) -> None:
    """Entry point of one rank's process."""
    die_with(int(parent))
    plan = json.loads(plan_text)
    plan["imbalance"] = {int(stage): factor for stage, factor in plan["imbalance"].items()}
    losses = train(DemoOptions(**plan), int(os.environ["RANK"]))
    if losses:
        (Path(scratch) / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3])
