"""Which frameworks have hooks. A new framework is one file here and one line in `REGISTRY`.

A hook module defines ``install(recorder)``, which patches through ``recorder.patches`` (reversible, guarded), and
``knows(thing)``, whether an object given to `bubblescope.instrument` is that framework's. It is called when the
module named beside it has been imported by the job, be that before or after recording started.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from bubblescope.capture.imports import when_imported
from bubblescope.errors import UsageError

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

REGISTRY: dict[str, tuple[str, str]] = {
    # name: (module whose import brings what is patched, our hook module)
    "torch-common": ("torch", "bubblescope.capture.hooks.torch_common"),
    "torch": ("torch.distributed.pipelining", "bubblescope.capture.hooks.torch_pipelining"),
    "torchtitan": ("torchtitan", "bubblescope.capture.hooks.torchtitan"),
    "megatron": ("megatron.core.pipeline_parallel.schedules", "bubblescope.capture.hooks.megatron"),
    "deepspeed": ("deepspeed.runtime.pipe.engine", "bubblescope.capture.hooks.deepspeed"),
}

CHOICES: dict[str, tuple[str, ...]] = {
    # what `bubblescope run --framework` takes: entries of REGISTRY beside torch-common
    "auto": ("torch", "torchtitan", "megatron", "deepspeed"),
    "torch": ("torch", "torchtitan"),
    "megatron": ("megatron",),
    "deepspeed": ("deepspeed",),
}


def triggers(choice: str) -> list[str]:
    """Modules whose import tells that this process may run a pipeline (torchtitan runs torch's)."""
    return [REGISTRY[name][0] for name in CHOICES[choice] if name != "torchtitan"]


def install(recorder: Recorder) -> None:
    """Install the hooks of what is imported already; those of the rest follow when the job imports it."""
    for name in ("torch-common", *CHOICES[recorder.options.framework]):
        trigger, module = REGISTRY[name]
        cancel = when_imported(trigger, partial(_install_one, recorder, module))
        recorder.patches.on_restore(cancel)


def _install_one(recorder: Recorder, module: str) -> None:
    importlib.import_module(module).install(recorder)


def require_torch() -> None:
    """Raises UsageError where there is no torch: then nothing can ever be recorded."""
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        raise UsageError(
            "there is no training framework to record in this Python environment",
            hint="pip install 'bubblescope[torch]'",
        )


def framework_of(thing: Any) -> str | None:
    """Name in `REGISTRY` of the framework whose schedule or engine this is; None when unknown."""
    for name, (trigger, module) in REGISTRY.items():
        if trigger in sys.modules and importlib.import_module(module).knows(thing):
            return name
    return None


def default_device() -> tuple[str, int]:
    """(type, index) of the device that work without a stated one runs on."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return "cuda", int(torch.cuda.current_device())
    return "cpu", 0
