"""How both ends of a message write down the same number, so that the reader can bring them together."""

from __future__ import annotations

from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind

_TENSORS_PER_MESSAGE = 64
_STAGES = 1 << 12
"""For pipelines whose number of stages nobody said: more than any has."""

KINDS: dict[str, tuple[Kind, str, int]] = {
    # what `bubblescope.span` takes: (end, what it carries, from the own stage to the one that uses it)
    "send_forward": (Kind.SEND, "act", 1),
    "recv_forward": (Kind.RECV, "act", 0),
    "send_backward": (Kind.SEND, "grad", -1),
    "recv_backward": (Kind.RECV, "grad", 0),
}


def message_number(microbatch: int, consumer: int, stages: int, is_grad: bool, index: int = 0) -> int:
    """The number by which the reader knows both ends of a message (`Spans.seq`), as torch's hooks make it.

    consumer: global stage that uses the message. index: of the tensor within the message.

    >>> message_number(1, 2, 4, False), message_number(1, 2, 4, True)
    (768, 832)
    """
    number = ((microbatch * stages + consumer) * 2 + is_grad) * _TENSORS_PER_MESSAGE
    return number + index % _TENSORS_PER_MESSAGE


def label(kind: Kind | str, stage: int, microbatch: int) -> Label | None:
    """The label of a marked send or receive; None for other kinds. The reader finds the peer by the stages.

    >>> label("send_forward", 0, 3).seq == label("recv_forward", 1, 3).seq
    True
    """
    found = KINDS.get(kind) if isinstance(kind, str) else None
    if found is None:
        return None
    end, direction, hop = found
    number = message_number(microbatch, stage + hop, _STAGES, direction == "grad")
    return Label(end, stage, microbatch, direction, seq=number)
