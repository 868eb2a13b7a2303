"""Logs a recording's results to the experiment that is active in this process: W&B, MLflow, TensorBoard."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

log = logging.getLogger("bubblescope")


def log_metrics(found: Mapping[str, float], step: int | None = None, tensorboard: Any = None) -> list[str]:
    """Log to every tracker with an active run; names of those that took them. Opens no run of its own.

    tensorboard: a SummaryWriter, as TensorBoard has no notion of an active one. A tracker that fails is a warning.
    """
    if not found:
        return []
    targets: dict[str, Callable[[], bool]] = {
        "wandb": partial(_wandb, found, step),
        "mlflow": partial(_mlflow, found, step),
        "tensorboard": partial(_tensorboard, found, step, tensorboard),
    }
    taken = []
    for name, send in targets.items():
        try:
            if send():
                taken.append(name)
        except Exception as error:  # a tracker that is down must not end a training run
            log.warning("bubblescope: %s did not take the results: %s: %s", name, type(error).__name__, error)
    return taken


def _wandb(found: Mapping[str, float], step: int | None) -> bool:
    """W&B's steps must not go back, so results of the whole run belong into its summary."""
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None:
        return False
    run.summary.update(dict(found))
    if step is not None and step >= int(getattr(run, "step", 0) or 0):
        run.log(dict(found), step=step)
    return True


def _mlflow(found: Mapping[str, float], step: int | None) -> bool:
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or mlflow.active_run() is None:
        return False
    mlflow.log_metrics(dict(found), step=step)
    return True


def _tensorboard(found: Mapping[str, float], step: int | None, writer: Any) -> bool:
    if writer is None:
        return False
    for name, value in found.items():
        writer.add_scalar(name, value, step)
    writer.flush()
    return True
