"""Megatron-Core's NVTX ranges (``--nvtx-ranges``): they name messages, not micro-batches.

``megatron.core.pipeline_parallel.p2p_communication.recv_forward`` stands around the post of a receive whose payload is
an activation from the stage before.
"""

from __future__ import annotations

import re

from bubblescope.label.actions import RangeAction
from bubblescope.model import Kind

_NAME = re.compile(r"megatron\.core\.pipeline_parallel\.p2p_communication\.(?:\w+\.)?(send|recv)_(forward|backward)\Z")


def parse(text: str) -> tuple[RangeAction, ...]:
    """The message a range stands for, or none (also for the combined calls, which hold one of each direction).

    >>> parse("megatron.core.pipeline_parallel.p2p_communication.recv_forward")[0].neighbour
    -1
    >>> parse("megatron.core.pipeline_parallel.p2p_communication.send_forward_recv_backward")
    ()
    """
    found = _NAME.match(text)
    if found is None:
        return ()
    sends, forward = found[1] == "send", found[2] == "forward"
    return (RangeAction(Kind.SEND if sends else Kind.RECV, neighbour=1 if sends == forward else -1),)
