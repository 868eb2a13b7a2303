"""What a process of a launched job does at its start (called by ``site/sitecustomize.py``), or with
``BUBBLESCOPE=standby`` when it imports bubblescope.
"""

from __future__ import annotations

import sys
from pathlib import Path

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


def install_or_say() -> None:
    """The same, where the job must go on as it would without us."""
    try:
        install()
    except Exception as error:  # ours, or of the variables
        print(f"bubblescope: nothing is recorded: {type(error).__name__}: {error}", file=sys.stderr)


def _stand_by(settings: Settings) -> None:
    if environment.owned_by_another(environment.rank_of_launcher()):
        return
    from bubblescope.capture import hooks
    from bubblescope.capture.imports import when_imported

    for trigger in hooks.triggers(settings.framework):
        when_imported(trigger, _start_agent)


def _start_agent() -> None:
    if _is_our_command():
        return
    from bubblescope.attach import agent

    agent.start()


def _is_our_command() -> bool:
    """`bubblescope doctor` imports torch too, and trains nothing."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    script = getattr(sys, "argv", [""])[0]
    return getattr(spec, "name", "") == "bubblescope.__main__" or Path(script).name == "bubblescope"
