"""torch's pipeline schedules trained on CPU over gloo, two processes. Knows nothing of bubblescope.

torchrun --nproc-per-node 2 torch_schedules.py --schedule GPipe --schedule 1F1B --losses out.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WIDTH = 64
MOMENT_S = 3.0
"""From the last whole step to the kill: no step of a real job is over in the 5 ms that one takes here."""
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def build(name: str, microbatches: int, rank: int, world: int) -> tuple[Any, list[Any], list[int], int]:
    from torch.distributed.pipelining import PipelineStage, schedules

    kind = schedules.get_schedule_class(name)
    multi = issubclass(kind, schedules.PipelineScheduleMulti)
    count = world * (2 if multi else 1)
    mine = [rank] if not multi else [rank, count - 1 - rank if name in V_SHAPED else rank + world]
    stages, parameters = [], []
    for index in mine:
        torch.manual_seed(index)
        part = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
        parameters += list(part.parameters())
        stages.append(PipelineStage(part, index, count, torch.device("cpu")))
    schedule = kind(stages if multi else stages[0], microbatches, loss_fn=torch.nn.MSELoss())  # type: ignore[arg-type]
    return schedule, parameters, mine, count


def train(name: str, options: argparse.Namespace) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    schedule, parameters, mine, count = build(name, options.microbatches, rank, world)
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    torch.manual_seed(7)
    rows = options.microbatches * 4
    data = torch.utils.data.TensorDataset(torch.randn(options.steps * rows, WIDTH))
    context = options.context if options.workers else None
    loader = torch.utils.data.DataLoader(
        data, batch_size=rows, num_workers=options.workers, multiprocessing_context=context
    )
    losses = []
    for step, (x,) in enumerate(loader):
        if options.kill == [rank, step]:
            time.sleep(MOMENT_S)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        said: list[Any] = []
        inputs = (x,) if 0 in mine else ()
        schedule.step(*inputs, **({"target": x * 0.5, "losses": said} if count - 1 in mine else {}))
        optimizer.step()
        if said:
            losses.append(float(sum(loss.detach() for loss in said) / len(said)))
    return losses


def join() -> None:
    """The process group, as torchrun, Slurm or Open MPI placed this process."""
    for rank, size in (
        ("RANK", "WORLD_SIZE"),
        ("SLURM_PROCID", "SLURM_NTASKS"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ):
        if rank in os.environ:
            dist.init_process_group("gloo", rank=int(os.environ[rank]), world_size=int(os.environ[size]))
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", action="append", required=True)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context", default="fork")
    parser.add_argument("--kill", type=int, nargs=2, metavar=("RANK", "STEP"))
    parser.add_argument("--losses", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    join()
    losses = {name: train(name, options) for name in options.schedule}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, losses)
    if dist.get_rank() == 0:
        found = {name: next(said[name] for said in everyones if said[name]) for name in options.schedule}
        Path(options.losses).write_text(json.dumps(found if len(found) > 1 else found[options.schedule[0]]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
