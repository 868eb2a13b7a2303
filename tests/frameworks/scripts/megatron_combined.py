"""As `megatron_gpt.py`, by Megatron-Core's combined schedule: the forward of one micro-batch and the backward of
another layer by layer in turn, the gradients of the weights later. Knows nothing of bubblescope.

    torchrun --nproc-per-node 2 megatron_combined.py --chunks 2 --losses out.json
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from megatron_gpt import main

WEIGHT_GRADIENT_S = 0.001


class Beside:
    """Stands in for a CUDA stream, and for an event on one: on the CPU everything happens in its order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass


def without_streams() -> None:
    torch.cuda.Stream = torch.cuda.Event = Beside  # type: ignore[assignment, misc]
    torch.cuda.current_stream = Beside  # type: ignore[assignment]
    torch.cuda.stream = torch.cuda.nvtx.range = lambda *_: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign, assignment]


def weight_gradients_take_time() -> None:
    """Only TransformerEngine's layers, which need CUDA, compute them later; these do it at once, and wait later."""
    from megatron.core.tensor_parallel import layers

    for owner in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        owner.backward_dw = lambda _: time.sleep(WEIGHT_GRADIENT_S)


if __name__ == "__main__":
    without_streams()
    weight_gradients_take_time()
    # Experts in parallel are asked for, and not needed: the schedule is the same without.
    main(
        {
            "overlap_moe_expert_parallel_comm": True,
            "delay_wgrad_compute": True,
            "expert_model_parallel_size": 2,
            "num_moe_experts": 2,
            "moe_token_dispatcher_type": "alltoall",
            "bf16": True,
            "add_bias_linear": False,  # 0.14 has none with experts
        }
    )
