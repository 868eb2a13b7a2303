"""Lightning: ``Trainer(callbacks=[BubblescopeCallback("runs/x")])``, with ``BubblescopeCallback`` from here."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from bubblescope.capture.integrations.session import Session


def __getattr__(name: str) -> Any:
    if name == "BubblescopeCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _base() -> type[Any]:
    """`Callback` of the package that is installed: lightning, or pytorch_lightning."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found: type[Any] = importlib.import_module(name).Callback
        except ImportError:
            continue
        return found
    raise ImportError("Lightning is not installed: pip install lightning")


@functools.cache
def _callback() -> type[Any]:
    """The class; made when it is asked for, as its base is Lightning's."""

    class BubblescopeCallback(Session, _base()):  # type: ignore[misc]
        """Records `trainer.fit` and logs what was found to the trainer's loggers and to the active run. Arguments as
        for `Session`."""

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.begin()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found = self.end(int(trainer.global_step))
            for logger in getattr(trainer, "loggers", ()) if found else ():
                logger.log_metrics(found, step=int(trainer.global_step))

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.stop()

    return BubblescopeCallback
