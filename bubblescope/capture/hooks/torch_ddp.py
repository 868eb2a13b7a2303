"""The wait for other replicas' gradients inside a stage's last backward, where the stage's module is DDP.

DDP reduces gradients from C++, which no function of torch.distributed shows, and waits for that at the end of the last
backward of a step: the backward of a fast replica would be as long as that of the slowest one. Autograd calls what was
queued at the end of a backward in the order of queueing, and DDP queues its wait when the last gradient is there. What
is queued at the very beginning therefore runs when all is computed, and before the wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bubblescope.capture.hooks.torch_common import group_name
from bubblescope.capture.steps import Label
from bubblescope.model.kinds import Kind, Lane

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

BACKWARDS = ("backward_one_chunk", "backward_weight_one_chunk")


def install(recorder: Recorder, base: Any) -> None:
    """base: torch's `_PipelineStageBase`, whose backwards are recorded already."""
    from torch.nn.parallel import DistributedDataParallel

    wait = _Wait(recorder, DistributedDataParallel)
    installed = recorder.patches.around(
        base,
        "backward_maybe_with_nosync",
        "ddp",
        needs=("self", "bwd_kwargs"),
        optional={"last_backward": False},
        before=wait.begins,
        after=wait.ends,
        abort=lambda handle: handle.remove(),
    )
    for name in BACKWARDS if installed else ():
        recorder.patches.around(base, name, f"ddp {name}", needs=("self",), before=wait.clear, after=wait.cut)


class _Wait:
    """ready: when the gradients of the running backward were computed; at most one mark."""

    def __init__(self, recorder: Recorder, ddp: type) -> None:
        self.recorder = recorder
        self.ddp = ddp
        self.ready: list[Any] = []

    def begins(self, stage: Any, kwargs: dict[str, Any], last: bool) -> Any:
        if not last or not isinstance(stage.submod, self.ddp) or not self.recorder.rule.current.sampled:
            return None
        output = kwargs["stage_output"]
        tensors = output if isinstance(output, tuple | list) else (output,)
        first = next((t for t in tensors if getattr(t, "requires_grad", False)), None)
        return None if first is None else first.register_hook(self._queue)

    def _queue(self, grad: Any) -> None:
        from torch.autograd import Variable

        try:
            Variable._execution_engine.queue_callback(self._computed)
        except Exception as error:  # ours; autograd would raise it into the job's backward
            self._fault(error)

    def _computed(self) -> None:
        try:
            self.ready.append(self.recorder.mark())
        except Exception as error:  # as above
            self._fault(error)

    def _fault(self, error: Exception) -> None:
        message = f"the wait of DDP for other replicas counts as work of a backward: {type(error).__name__}: {error}"
        self.recorder.patches.fault(message, "ddp")

    def ends(self, handle: Any, result: Any) -> None:
        handle.remove()

    def clear(self, stage: Any) -> Any:
        self.ready.clear()
        return stage if isinstance(stage.submod, self.ddp) else None

    def cut(self, stage: Any, result: Any) -> None:
        """The backward that was just recorded ends where its gradients were there; the rest is a collective."""
        events = self.recorder.rule.current.events
        if not self.ready or not events or events[-1][0] != Lane.COMPUTE:
            return
        mark = self.ready.pop()
        lane, start, end, *rest = events[-1]
        if mark is not None:
            events[-1] = (lane, start, mark, *rest)
            self.recorder.add(Lane.WAIT, mark, end, self._labels(stage.submod.process_group))

    def _labels(self, group: Any) -> tuple[Label, ...]:
        from torch.distributed import get_process_group_ranks

        members = group_name(group, get_process_group_ranks(group))
        return (Label(Kind.COLLECTIVE, name="DDP gradients", group=f"gradients {members}", seq=0),)
