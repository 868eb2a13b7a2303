"""A GPTModel of Megatron-Core trained on CPU over gloo: 1F1B, or interleaved with two chunks on each rank.

Knows nothing of bubblescope. Megatron-Core is written for CUDA; `on_cpu` sends it to the CPU.

    torchrun --nproc-per-node 2 megatron_gpt.py --chunks 2 --losses out.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SEQUENCE, ROWS, WORDS = 16, 2, 128


def on_cpu() -> None:
    """Not by a mode of torch: each access to a tensor would pass through it, which no job on a GPU has to pay."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    zeros = torch.zeros

    def zeros_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return zeros(*args, **kwargs)

    torch.zeros = zeros_on_cpu


def build(options: argparse.Namespace, rank: int, world: int, more: dict[str, Any]) -> list[Any]:
    """The model's chunks. more: further fields of the configuration."""
    import megatron.core.tensor_parallel.random as random
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    chunks = options.chunks
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=world, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
    )
    random.initialize_rng_tracker()
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    if options.recompute:
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    dtype = torch.bfloat16 if more.get("bf16") else torch.float32
    config = TransformerConfig(
        num_layers=world * chunks, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
        pipeline_model_parallel_size=world, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        params_dtype=dtype, pipeline_dtype=dtype, batch_p2p_comm=False, overlap_p2p_comm=options.overlap,
        deallocate_pipeline_outputs=not options.overlap,  # gloo reads from a tensor while it sends it
        attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False, bias_dropout_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, bias_activation_fusion=False, **more,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(normalization="LayerNorm")
    made = []
    for chunk in range(chunks):
        torch.manual_seed(chunk * world + rank)
        made.append(
            GPTModel(
                config,
                spec,
                WORDS,
                SEQUENCE,
                pre_process=rank == 0 and chunk == 0,
                post_process=rank == world - 1 and chunk == chunks - 1,
                share_embeddings_and_output_weights=False,
                vp_stage=chunk if chunks > 1 else None,
            ).to(dtype)
        )
    return made


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--overlap", action="store_true", help="isend and irecv, waited for later")
    parser.add_argument("--recompute", action="store_true", help="run the layers again in the backward")
    parser.add_argument("--evaluate", action="store_true", help="a forward-only call after each second step")
    parser.add_argument("--pad-ms", type=float, default=0.0, help="sleep so long in each forward")
    parser.add_argument("--losses", required=True)
    return parser.parse_args(arguments)


def make_step(options: argparse.Namespace, more: dict[str, Any] | None = None) -> Callable[..., float | None]:
    """What trains one step and gives its loss on the last stage; with ``forward_only=True`` it evaluates."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    on_cpu()
    models = build(options, rank, world, more or {})
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    optimizer = torch.optim.AdamW([p for m in models for p in m.parameters()], lr=1e-2)
    tokens = torch.arange(SEQUENCE + 1).repeat(ROWS, 1)
    places = torch.arange(SEQUENCE).repeat(ROWS, 1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE), 1).bool()

    def batches() -> Any:
        while True:
            yield tokens

    def forward_step(data: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        batch = next(data)
        run_it = model.build_schedule_plan if return_schedule_plan else model
        out = run_it(batch[:, :-1], places, mask, labels=batch[:, 1:])
        time.sleep(options.pad_ms / 1e3)

        def loss(value: Any) -> Any:
            mean = value.mean()
            return mean, {"loss": mean.detach()}

        return out, loss

    run = get_forward_backward_func()

    def step(forward_only: bool = False) -> float | None:
        optimizer.zero_grad()
        said = run(
            forward_step_func=forward_step,
            data_iterator=[batches() for _ in models] if len(models) > 1 else batches(),
            model=models if len(models) > 1 else models[0],
            num_microbatches=options.microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
            forward_only=forward_only,
        )
        if not forward_only:
            optimizer.step()
        return float(sum(x["loss"] for x in said) / len(said)) if said else None

    return step


def main(more: dict[str, Any] | None = None) -> None:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    options = parse()
    step = make_step(options, more)
    losses = []
    for number in range(options.steps):
        losses.append(step())
        if options.evaluate and number % 2:
            step(forward_only=True)
    if losses[0] is not None:
        Path(options.losses).write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
