"""Runs one function on the training thread, between two of its operations, without stopping it.

Hooks must not go in or out while torch walks its lists of optimizer hooks (a changed list raises into the job),
nor in the middle of a schedule. So the agent asks for a moment: the next call of a schedule's ``step`` or of
``zero_grad`` runs the function first, then goes on to whatever that name means now.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

ENTRIES: tuple[tuple[str, str, str], ...] = (
    # (module, class or "", function): called by the thread that trains, once or more in each step, and looked up by
    # name each time. Not what loops keep a reference to, such as Megatron's forward_backward functions.
    ("torch.distributed.pipelining.schedules", "PipelineScheduleSingle", "step"),
    ("torch.distributed.pipelining.schedules", "PipelineScheduleMulti", "step"),
    ("torch.optim.optimizer", "Optimizer", "zero_grad"),
    ("megatron.core.pipeline_parallel.schedules", "", "forward_step"),
    ("deepspeed.runtime.pipe.engine", "PipelineEngine", "train_batch"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "zero_grad"),
)
_OPTIMIZER_FILE = "/torch/optim/optimizer.py"


class _Entry(NamedTuple):
    owner: Any
    name: str
    original: Any
    replacement: Any


class SafePoint:
    """One moment on the training thread. `arm` asks for it, `reached` tells that the function has run.

    action: what to run; an exception of it is kept in `error` and never reaches the job.
    """

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._pid = os.getpid()
        self._once = threading.Lock()
        self._reached = threading.Event()
        self._entries: list[_Entry] = []
        self.error: Exception | None = None

    def arm(self) -> bool:
        """Place the entries; False when this process has none of them (it imported no framework)."""
        for module, owner, name in ENTRIES:
            found = sys.modules.get(module)
            holder = getattr(found, owner, None) if owner and found is not None else found
            if holder is not None and name in vars(holder):
                original = vars(holder)[name]
                replacement = self._gate(holder, name, original)
                self._entries.append(_Entry(holder, name, original, replacement))
        for entry in self._entries:
            setattr(entry.owner, entry.name, entry.replacement)
        return bool(self._entries)

    def wait(self, timeout_s: float) -> bool:
        """Whether the function has run, within that time."""
        return self._reached.wait(timeout_s)

    def disarm(self) -> bool:
        """Put the entries back; False when the training thread was faster and the function runs, or ran."""
        if not self._once.acquire(blocking=False):
            return False
        self._restore()
        return True

    def _restore(self) -> None:
        for entry in self._entries:
            if vars(entry.owner).get(entry.name) is entry.replacement:
                setattr(entry.owner, entry.name, entry.original)

    def _pass(self) -> bool:
        """The training thread is here; True when this call ran the function."""
        if os.getpid() != self._pid:
            return False  # a forked child: the moment was asked for in its parent
        if self._once.locked() or in_optimizer_step() or not self._once.acquire(blocking=False):
            return False
        self._restore()
        try:
            self._action()
        except Exception as error:  # ours, whatever it is: the job must not see it
            self.error = error
        self._reached.set()
        return True

    def _gate(self, owner: Any, name: str, original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def gate(*args: Any, **kwargs: Any) -> Any:
            on_top = vars(owner).get(name) is gate
            if self._pass() and on_top:
                # The gate is gone from that name: what stands there now is the original, or a hook that went in
                # a moment ago and must see this call already.
                return vars(owner)[name](*args, **kwargs)
            return original(*args, **kwargs)

        return gate


def in_optimizer_step() -> bool:
    """Whether this thread is inside an optimizer's step, where its hooks may be being walked through."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith(_OPTIMIZER_FILE) and frame.f_code.co_name == "wrapper":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
