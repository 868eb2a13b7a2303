"""Recording that `bubblescope run` asked for: begins by itself when the job imports a framework with a pipeline."""

from __future__ import annotations

from functools import partial

from bubblescope.capture import environment, hooks, notes
from bubblescope.capture.environment import Settings
from bubblescope.capture.imports import when_imported

_begun = False


def prepare(settings: Settings) -> None:
    """Wait for the job to import what can run a pipeline. Cheap: nearly every process of a job never does."""
    rank = environment.rank_of_launcher()
    if environment.owned_by_another(rank):
        return  # a helper of a rank: DataLoader worker, resource tracker
    notes.leave(notes.LOADED)
    if rank is not None and settings.ranks is not None and rank not in settings.ranks:
        notes.leave(notes.UNCHOSEN, str(environment.world_of_launcher() or ""))
        return
    for trigger in hooks.triggers(settings.framework):
        when_imported(trigger, partial(begin, settings))
    # bubblescope.span and step, in a training loop that no hook knows
    when_imported("bubblescope.capture.recorder", partial(_begin_for_spans, settings))


def _begin_for_spans(settings: Settings) -> None:
    when_imported("torch", partial(begin, settings))


def begin(settings: Settings) -> None:
    """Start the one recorder of this process; later calls do nothing."""
    global _begun
    if _begun:
        return
    _begun = True
    notes.leave(notes.IMPORTED)
    from bubblescope.capture.recorder import Options, Recorder, active

    own = active()
    if own is not None:  # the script's own bubblescope.record came first
        notes.leave(notes.INNER, str(own.folder))
        return
    options = Options(
        every=settings.every,
        warmup=settings.warmup,
        max_steps=settings.steps,
        framework=settings.framework,
        ranks=settings.ranks,
        launched=True,
    )
    Recorder(settings.out, options).start()
