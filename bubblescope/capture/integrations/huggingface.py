"""Hugging Face: ``Trainer(callbacks=[BubblescopeCallback("runs/x")])``, with ``BubblescopeCallback`` from here."""

from __future__ import annotations

import functools
import os
from typing import Any

from bubblescope.capture.integrations.session import Session


def __getattr__(name: str) -> Any:
    if name == "BubblescopeCallback":
        return _callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _callback() -> type[Any]:
    """The class; made when it is asked for, as its base is the one of transformers."""
    from transformers import TrainerCallback

    class BubblescopeCallback(TrainerCallback):  # type: ignore[misc]
        """Records `trainer.train` and logs what was found to the active run.

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
            self.session = Session(folder, every=every, warmup=warmup, max_steps=max_steps, log=log)
            self.results: dict[str, float] = {}

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.session.begin()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.results = self.session.end(int(state.global_step))

    return BubblescopeCallback
