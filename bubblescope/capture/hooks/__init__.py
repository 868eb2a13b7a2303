"""Which frameworks have hooks. A new framework is one file here and one line in `REGISTRY`.

A hook module defines ``install(recorder)``, which patches through ``recorder.patches`` (reversible, guarded), and
``knows(thing)``, whether an object given to `bubblescope.instrument` is that framework's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from bubblescope.errors import UsageError

if TYPE_CHECKING:
    from bubblescope.capture.recorder import Recorder

REGISTRY: dict[str, tuple[str, str]] = {
    # name: (module that must be importable, our hook module)
    "torch-common": ("torch", "bubblescope.capture.hooks.torch_common"),
    "torch": ("torch", "bubblescope.capture.hooks.torch_pipelining"),
}


def install(recorder: Recorder) -> None:
    """Install the hooks of every framework that is importable here. Raises UsageError when there is none."""
    installed = []
    for name, (needed, module) in REGISTRY.items():
        if needed in sys.modules or importlib.util.find_spec(needed) is not None:
            importlib.import_module(module).install(recorder)
            installed.append(name)
    if not installed:
        raise UsageError(
            "there is no training framework to record in this Python environment",
            hint="pip install 'bubblescope[torch]'",
        )
    recorder.framework = installed[-1]


def framework_of(thing: Any) -> str | None:
    """Name in `REGISTRY` of the framework whose schedule or engine this is; None when unknown."""
    for name, (needed, module) in REGISTRY.items():
        if needed in sys.modules and importlib.import_module(module).knows(thing):
            return name
    return None


def default_device() -> tuple[str, int]:
    """(type, index) of the device that work without a stated one runs on."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return "cuda", int(torch.cuda.current_device())
    return "cpu", 0
