"""Lightning: ``Trainer(callbacks=[BubblescopeCallback("runs/x")])``, with ``BubblescopeCallback`` from here."""

from __future__ import annotations

import functools
import importlib
import os
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

    class BubblescopeCallback(_base()):  # type: ignore[misc]
        """Records `trainer.fit` and logs what was found to the trainer's loggers and to the active run.

        Arguments as for `bubblescope.record`; log: whether rank 0 analyses the recording when training has ended.
        """

        def __init__(
            self,
            folder: str | os.PathLike[str] = "runs/bubblescope",
            *,
            every: int | None = None,
            warmup: int = 1,
            max_steps: int | None = None,
            log: bool = True,
        ) -> None:
            super().__init__()
            self.session = Session(folder, every=every, warmup=warmup, max_steps=max_steps, log=log)
            self.results: dict[str, float] = {}

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.session.begin()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.results = self.session.end(int(trainer.global_step))
            for logger in getattr(trainer, "loggers", ()) if self.results else ():
                logger.log_metrics(self.results, step=int(trainer.global_step))

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.session.stop()

    return BubblescopeCallback
