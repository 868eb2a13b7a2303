"""A pipeline of DeepSpeed trained on CPU over gloo: PipelineEngine (1F1B) or DualPipeVEngine.

Knows nothing of bubblescope.

    torchrun --nproc-per-node 2 deepspeed_pipe.py --engine dualpipev --losses out.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WIDTH, ROWS = 64, 4


class Layer(torch.nn.Module):
    def __init__(self, pad_s: float) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.pad_s = pad_s

    def forward(self, x: Any) -> Any:
        time.sleep(self.pad_s)
        return torch.nn.functional.gelu(self.inner(x))


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=["pipeline", "dualpipev"], default="pipeline")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="run the layers again in the backward")
    parser.add_argument("--pad-ms", type=float, default=0.0)
    parser.add_argument("--losses", required=True)
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed launcher")
    return parser.parse_args(arguments)


def make_step(options: argparse.Namespace) -> Callable[..., float]:
    """What trains one step and gives its loss; with ``forward_only=True`` it evaluates."""
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("WORLD_SIZE", "1"))
    import deepspeed
    import deepspeed.comm.torch
    from deepspeed.pipe import LayerSpec, PipelineModule

    # Its own shared memory collectives would be compiled first, for minutes; gloo serves as well.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    kind: Any = PipelineModule
    if options.engine == "dualpipev":
        from deepspeed.pipe import DualPipeVModule as kind  # type: ignore[no-redef]
    recompute = {"activation_checkpoint_interval": 1} if options.recompute else {}
    layers = [LayerSpec(Layer, options.pad_ms / 1e3) for _ in range(8)]
    net = kind(layers=layers, num_stages=2, loss_fn=torch.nn.MSELoss(), partition_method="uniform", **recompute)
    engine, _, _, _ = deepspeed.initialize(
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": options.microbatches,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "steps_per_print": 10**9,
        },
    )

    def batches() -> Any:
        generator = torch.Generator().manual_seed(1)
        while True:
            x = torch.randn(ROWS, WIDTH, generator=generator)
            yield x, x * 0.5

    data = batches()

    def step(forward_only: bool = False) -> float:
        return float(engine.eval_batch(data) if forward_only else engine.train_batch(data_iter=data))

    return step


def main() -> None:
    options = parse()
    step = make_step(options)
    losses = []
    for number in range(options.steps):
        losses.append(step())
        if options.evaluate and number % 2:
            step(forward_only=True)
    if torch.distributed.get_rank() == 0:
        Path(options.losses).write_text(json.dumps(losses))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
