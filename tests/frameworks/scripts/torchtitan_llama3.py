"""torchtitan's llama3 debug model, cut and scheduled by torchtitan itself, trained on CPU over gloo.

Knows nothing of bubblescope. torchtitan's Trainer needs an accelerator; this is what it does around the schedule.

    torchrun --nproc-per-node 2 torchtitan_llama3.py --schedule 1F1B --losses out.json
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed as dist

WORDS, LENGTH = 2048, 64


class PlainAttention(torch.nn.Module):
    """Stands in for flex attention, which needs CUDA."""

    def forward(self, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)


def build(name: str, options: argparse.Namespace, world: int) -> tuple[Any, list[Any], bool, bool]:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import model_registry

    config = model_registry("debugmodel").model
    with torch.device("meta"):
        model = config.build()
    schedule, parts, first, last = pipeline_llm(
        model,
        parallel_dims=ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=world, ep=1, world_size=world),
        training=TrainingConfig(local_batch_size=options.microbatches, seq_len=LENGTH),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=world,
            pipeline_parallel_schedule=name,
            pipeline_parallel_microbatch_size=1,
        ),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config,
        parallelize_fn=lambda part, **_: part,
        loss_fn=CrossEntropyLoss.Config().build(),
    )
    for number, part in enumerate(parts):
        torch.manual_seed(number)
        part.to_empty(device="cpu")
        with torch.no_grad():
            part.init_weights(buffer_device=torch.device("cpu"))
        part.train()
        for module in part.modules():
            if "inner_attention" in module._modules:
                module._modules["inner_attention"] = PlainAttention()
    return schedule, parts, first, last


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", nargs="+", default=["1F1B"])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--evaluate", action="store_true", help="validate after each second step")
    parser.add_argument("--losses", required=True)
    return parser.parse_args(arguments)


def set_up(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan.tools.utils asks at import
    torch.set_num_threads(1)
    dist.init_process_group("gloo")


def make_step(options: argparse.Namespace) -> Callable[[], float | None]:
    """What trains one step and gives its loss on the last stage."""
    set_up(options)
    return steps_of(options.schedule[0], options)[0]


def steps_of(name: str, options: argparse.Namespace) -> tuple[Callable[[], float | None], Callable[[], None]]:
    """What trains one step and gives its loss on the last stage; and what validates, as torchtitan's Validator does."""
    schedule, parts, first, last = build(name, options, dist.get_world_size())
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, WORDS, (options.microbatches, LENGTH + 1), generator=generator)
    valid = {"global_valid_tokens": torch.tensor(float(options.microbatches * LENGTH))}

    def step() -> float | None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        said: list[Any] = []
        schedule.step(
            *((tokens[:, :-1],) if first else ()),
            return_outputs=False,
            loss_kwargs=valid,
            **({"target": tokens[:, 1:], "losses": said} if last else {}),
        )
        for optimizer in optimizers:
            optimizer.step()
        return float(sum(loss.detach() for loss in said)) if said else None

    @torch.no_grad()
    def validate() -> None:
        loss = torch.zeros(1)
        for batch in torch.utils.data.DataLoader(tokens.repeat(2, 1), batch_size=options.microbatches):
            said: list[Any] = []
            schedule.eval(
                *((batch[:, :-1],) if first else ()),
                loss_kwargs=valid,
                **({"target": batch[:, 1:], "losses": said} if last else {}),
            )
            loss += sum(said) if said else -1.0
        dist.all_reduce(loss, op=dist.ReduceOp.MAX)

    return step, validate


def main() -> None:
    options = parse()
    set_up(options)
    losses: dict[str, list[float | None]] = {}
    for name in options.schedule:
        step, validate = steps_of(name, options)
        losses[name] = []
        for number in range(options.steps):
            losses[name].append(step())
            if options.evaluate and number % 2:
                validate()
    if losses[name][0] is not None:
        Path(options.losses).write_text(json.dumps(losses if len(losses) > 1 else losses[name]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
