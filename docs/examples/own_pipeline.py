"""A pipeline of one's own, as nanotron's: `forward` and `backward` of an engine, sends and receives around them.

No hook knows it, so the training loop marks what it does with two functions, `bubblescope.span` and
`bubblescope.step`. They cost nothing when nothing is recorded. Two ways to record:

    bubblescope run --out runs/own -- torchrun --standalone --nproc-per-node 2 docs/examples/own_pipeline.py
    bubblescope analyze runs/own

or ``with bubblescope.record("runs/own"):`` around the loop.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import bubblescope

WIDTH, ROWS = 32, 8


@dataclass
class PipelineEngine:
    """One-forward-one-backward, one stage on each rank: sends are posted, receives block."""

    stage: int
    stages: int
    part: torch.nn.Module
    pad_s: float
    held: list[tuple[Any, Any]] = field(default_factory=list)
    posted: list[tuple[Any, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def forward(self, microbatch: int, batch: Any) -> None:
        if self.stage > 0:
            batch = torch.empty(ROWS, WIDTH)
            with bubblescope.span("recv_forward", self.stage, microbatch):
                dist.recv(batch, self.stage - 1)
            batch.requires_grad_()
        with bubblescope.span("F", self.stage, microbatch):
            out = self.part(batch)
            time.sleep(self.pad_s)
        if self.stage == self.stages - 1:
            with bubblescope.span("loss", self.stage, microbatch):
                out = (out**2).mean()
                self.losses.append(float(out.detach()))
        else:
            with bubblescope.span("send_forward", self.stage, microbatch):
                self.posted.append((dist.isend(out.detach(), self.stage + 1), out))
        self.held.append((batch, out))

    def backward(self, microbatch: int) -> None:
        batch, out = self.held.pop(0)
        grad = None
        if self.stage < self.stages - 1:
            grad = torch.empty(ROWS, WIDTH)
            with bubblescope.span("recv_backward", self.stage, microbatch):
                dist.recv(grad, self.stage + 1)
        with bubblescope.span("B", self.stage, microbatch):
            torch.autograd.backward(out, grad)
            time.sleep(2 * self.pad_s)
        if self.stage > 0:
            with bubblescope.span("send_backward", self.stage, microbatch):
                self.posted.append((dist.isend(batch.grad, self.stage - 1), batch))

    def train_batch(self, batches: list[Any]) -> float:
        """One step; the mean loss on the last stage."""
        self.losses.clear()
        ahead = min(self.stages - 1 - self.stage, len(batches))
        for i in range(ahead):
            self.forward(i, batches[i])
        for i in range(ahead, len(batches)):
            self.forward(i, batches[i])
            self.backward(i - ahead)
        for i in range(len(batches) - ahead, len(batches)):
            self.backward(i)
        for work, _ in self.posted:
            work.wait()
        self.posted.clear()
        return sum(self.losses) / max(len(self.losses), 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--pad-ms", type=float, default=2.0, help="sleep so long in each forward")
    parser.add_argument("--losses", help="write the loss of each step to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    part = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, WIDTH))
    engine = PipelineEngine(rank, world, part, options.pad_ms / 1e3)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    batches = [torch.randn(ROWS, WIDTH) for _ in range(options.microbatches)]
    losses = []
    for _ in range(options.steps):
        losses.append(engine.train_batch(batches))
        optimizer.step()
        optimizer.zero_grad()
        bubblescope.step()
    if rank == world - 1:
        print("losses", [round(loss, 4) for loss in losses])
        if options.losses:
            Path(options.losses).write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
