"""What the hooks know of the schedule call that runs: the pipeline, who made which output, which message is next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.shared import device_of
from bubblescope.capture.hooks.torch_common import group_name
from bubblescope.capture.messages import message_number
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

SCHEDULES = {
    "forward_backward_no_pipelining": "custom",
    "forward_backward_pipelining_without_interleaving": "1F1B",
    "forward_backward_pipelining_with_interleaving": "Interleaved1F1B",
}


@dataclass
class Shape:
    """The pipeline of one schedule call, as seen from this rank. ranks: global, by position."""

    ranks: list[int]
    position: int
    chunks: int
    microbatches: int
    group: str
    orders: dict[tuple[str, str], list[tuple[int, int, int]]] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return len(self.ranks) * self.chunks

    def stage(self, chunk: int) -> int:
        return chunk * len(self.ranks) + self.position


def schedule_order(microbatches: int, chunks: int, group: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of the forwards of any rank, in order; backwards go through the chunks the other way.

    >>> schedule_order(4, 2, 2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    """
    return [
        (microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    ]


def message_orders(
    position: int, ranks: int, chunks: int, order: list[tuple[int, int]]
) -> dict[tuple[str, str], list[tuple[int, int, int]]]:
    """{("send" | "recv", "act" | "grad"): [(micro-batch, own stage, consuming stage)] in the order of the messages}.

    Messages of a pair of ranks come in the order in which the sender made them, which is the schedule's order less
    what is not sent; so both ends can number them alike.

    >>> message_orders(1, 2, 1, [(0, 0), (1, 0)])["recv", "act"]
    [(0, 1, 1), (1, 1, 1)]
    """
    last = ranks - 1
    made: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for direction, hop in (("act", 1), ("grad", -1)):
        edge = last if hop == 1 else 0  # the position whose output goes round to the other end
        sent: list[tuple[int, int, int]] = []
        received: list[tuple[int, int, int]] = []
        for microbatch, forward_chunk in order:
            chunk = forward_chunk if hop == 1 else chunks - 1 - forward_chunk
            own = chunk * ranks + position
            if 0 <= own + hop < ranks * chunks:
                sent.append((microbatch, own, own + hop))
            if position != last - edge:
                received.append((microbatch, own, own))
            elif 0 <= own + hop * ranks < ranks * chunks:
                # The far end of the ring sends what its chunk made to our next chunk.
                received.append((microbatch, own + hop * ranks, own + hop * ranks))
        made["send", direction], made["recv", direction] = sent, received
    return made


@dataclass(slots=True)
class Forward:
    """A forward that runs. loss_from: mark of the moment from which it is the loss."""

    microbatch: int
    chunk: int
    start: Any
    loss_from: Any = None


Message = tuple[str, str, int, int]
"""("send" | "recv", "act" | "grad", its number among those, bytes)."""


class Job:
    """What the hooks of one recorder know of the running schedule call."""

    def __init__(self, recorder: Recorder, schedules: Any) -> None:
        self.recorder = recorder
        self.schedules = schedules
        self.shape: Shape | None = None
        self.running: list[Forward] = []
        self._outputs: dict[int, tuple[Any, int, int]] = {}
        self._sent: dict[tuple[str, str], int] = {}
        self._shapes: dict[tuple[Any, ...], tuple[Shape, dict[str, Any]]] = {}
        self._counted: dict[tuple[str, int], int] = {}

    def begin(self, model: Any, microbatches: int, name: str, communicator: Any) -> tuple[dict[str, Any], bool]:
        """A schedule call begins; gives its layout, and whether no call before was of this pipeline."""
        modules = list(model) if isinstance(model, list) else [model]
        group = None if name == "forward_backward_no_pipelining" else _pipeline_group(communicator)
        key = (microbatches, name, len(modules), group)
        known = self._shapes.get(key)
        new = known is None and all(other[1:] != key[1:] for other in self._shapes)
        if known is None:
            known = self._shapes[key] = self._describe(modules, microbatches, name, group)
        self.shape, layout = known
        self._sent.clear()
        self._counted.clear()
        self._outputs.clear()
        return layout, new

    def end(self) -> None:
        """The schedule call is over: nothing of it is kept alive."""
        self._outputs.clear()

    def _describe(self, modules: list[Any], microbatches: int, name: str, group: Any) -> tuple[Shape, dict[str, Any]]:
        import torch.distributed as dist

        me = dist.get_rank()
        ranks = [me] if group is None else list(dist.get_process_group_ranks(group))
        text = "" if group is None else group_name(group, ranks)
        shape = Shape(ranks, ranks.index(me), len(modules), microbatches, text)
        config = self.schedules.get_model_config(modules[0])
        per_chunk = getattr(config, "microbatch_group_size_per_vp_stage", None) or len(ranks)
        order = schedule_order(microbatches, len(modules), per_chunk if len(modules) > 1 else max(microbatches, 1))
        shape.orders = message_orders(shape.position, len(ranks), len(modules), order)
        return shape, {
            "stages": [shape.stage(chunk) for chunk in range(shape.chunks)],
            "num_stages": shape.stages,
            "microbatches": microbatches,
            "schedule": SCHEDULES[name],
            "schedule_class": name,
            "pp_ranks": ranks,
            "stage_ranks": [ranks[stage % len(ranks)] for stage in range(shape.stages)],
            "device": device_of(modules[0]),
        }

    # forward outputs lead their backward to (micro-batch, chunk)

    def made(self, output: Any, microbatch: int, chunk: int) -> None:
        self._outputs[id(output)] = (output, microbatch, chunk)  # the reference keeps the id from being used again

    def maker(self, output: Any) -> tuple[int, int]:
        found = self._outputs.pop(id(output), None)
        if found is not None:
            return found[1], found[2]
        return self.count("B", 0), 0

    def count(self, what: str, chunk: int) -> int:
        number = self._counted[what, chunk] = self._counted.get((what, chunk), -1) + 1
        return number

    def stage(self, chunk: int) -> int:
        return -1 if self.shape is None else self.shape.stage(chunk)

    def message(self, end: str, direction: str, tensor: Any) -> Message | None:
        """The next message of that end and direction; None when there should be none by the schedule."""
        if self.shape is None:
            return None
        number = self._sent[end, direction] = self._sent.get((end, direction), -1) + 1
        if number >= len(self.shape.orders[end, direction]):
            return None
        return end, direction, number, getattr(tensor, "nbytes", -1)

    def labels(self, *messages: Message) -> tuple[Label, ...]:
        """Of messages of the running schedule call."""
        return () if self.shape is None else tuple(_label(self.shape, *message) for message in messages)


def _label(shape: Shape, end: str, direction: str, number: int, size: int) -> Label:
    microbatch, stage, consumer = shape.orders[end, direction][number]
    onward = (direction == "act") == (end == "send")
    return Label(
        Kind.SEND if end == "send" else Kind.RECV,
        stage,
        microbatch,
        direction,
        shape.ranks[(shape.position + (1 if onward else -1)) % len(shape.ranks)],
        size,
        shape.group,
        message_number(microbatch, consumer, shape.stages, direction == "grad"),
    )


def _pipeline_group(communicator: Any) -> Any:
    group = getattr(communicator, "pp_group", None)
    if group is not None:
        return group
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_group()
