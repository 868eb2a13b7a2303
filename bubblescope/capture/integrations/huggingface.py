"""Hugging Face: ``Trainer(callbacks=[BubblescopeCallback("runs/x")])``, with ``BubblescopeCallback`` from here."""

from __future__ import annotations

import functools
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

    class BubblescopeCallback(Session, TrainerCallback):  # type: ignore[misc]
        """Records `trainer.train` and logs what was found to the active run. Arguments as for `Session`."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.begin()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.end(int(state.global_step))

    return BubblescopeCallback
