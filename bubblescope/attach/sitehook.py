"""What a process of a launched job does at its start (called by ``site/sitecustomize.py``)."""

from __future__ import annotations

from bubblescope.capture import environment
from bubblescope.capture.environment import Settings


def install() -> None:
    """Prepare recording, or the attach agent, as the environment says. Raises UsageError on variables without sense."""
    settings = Settings.read()
    if settings.mode == "record":
        from bubblescope.capture import launched

        launched.prepare(settings)
    elif settings.mode == "standby":
        _stand_by(settings)


def _stand_by(settings: Settings) -> None:
    if environment.owned_by_another(environment.rank_of_launcher()):
        return
    from bubblescope.capture import hooks
    from bubblescope.capture.imports import when_imported

    for trigger in hooks.triggers(settings.framework):
        when_imported(trigger, _start_agent)


def _start_agent() -> None:
    from bubblescope.attach import agent

    agent.start()
