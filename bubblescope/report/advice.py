"""What to change, best first: each row predicted by a replay, never promised when the replay is not trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bubblescope.cost import prices
from bubblescope.errors import UsageError
from bubblescope.model import Notice
from bubblescope.model.layers import LayerTime
from bubblescope.replay.attribution import Attribution
from bubblescope.replay.savings import Saving
from bubblescope.replay.schedules import FAMILIES
from bubblescope.report import facts, ideas
from bubblescope.report.facts import Shape
from bubblescope.report.ideas import Basis, Idea, Refusal

if TYPE_CHECKING:
    from bubblescope.report.build import Report

WORTH_TELLING = 0.005
"""Actions that save less than this share of the step are left out, unless they were asked for."""

BOUNDS = ("communication",)
"""Kinds that say how much there is to gain, not how to gain it."""


@dataclass(frozen=True)
class Advice:
    rows: list[dict[str, Any]]
    notices: tuple[Notice, ...] = ()


def suggest(a: Attribution, shape: Shape, found: dict[str, Saving], cost: dict[str, Any], *, trusted: bool) -> Advice:
    """Ideas that save at least `WORTH_TELLING` of the step, ranked by what they save."""
    if not a.programs or a.bases is None:
        return Advice([])
    if not trusted:
        return Advice([], (Notice("no-advice", NOT_TRUSTED),))
    b = ideas.basis(a, shape, {cause: saving.first_in for cause, saving in found.items()})
    worth = _ranked(_everything(b), WORTH_TELLING * b.measured)
    notices = () if worth else (Notice("bubble-not-the-limit", nothing_to_gain(b.measured)),)
    return Advice([row(i, cost, b) for i in worth], notices)


NOT_TRUSTED = "the replay does not reproduce the measurement well enough, so no saving is predicted"


def nothing_to_gain(measured: float) -> str:
    return (
        f"no change to the pipeline is predicted to save more than {WORTH_TELLING:.1%} of the {measured:.3g} s step: "
        "the bubble is not what holds this run back"
    )


def _everything(b: Basis) -> list[Idea]:
    doubled = [b.model.microbatches * factor for factor in (2, 4)] if b.model is not None else []
    return [
        *ideas.rebalance(b),
        *ideas.replace_node(b),
        *ideas.fix_input(b),
        *ideas.faster_transfers(b),
        *(ideas.one_pass(b) if b.shape.passes > 1 else ideas.more_microbatches(b, doubled)),
        *(() if b.shape.passes > 1 else [*ideas.other_schedules(b), *_together(b, tuple(FAMILIES), 3)]),
    ]


def _ranked(found: Sequence[Idea], least: float) -> list[Idea]:
    worth = [i for i in found if i.saved_seconds >= least]
    return sorted(worth, key=lambda i: (-i.saved_seconds, i.action))


def row(idea: Idea, cost: dict[str, Any], b: Basis) -> dict[str, Any]:
    """As in report.json. Hours and money are signed: a change may cost time."""
    saved = abs(idea.saved_seconds) * b.step_share
    hours = prices.gpu_hours(saved, steps=cost["total_steps"], gpus=cost["gpus"])
    hours = hours if idea.saved_seconds >= 0 else -hours
    return {
        "action": idea.action,
        "kind": idea.kind,
        "detail": idea.detail,
        "step_seconds": idea.step_seconds,
        "saved_seconds": idea.saved_seconds,
        "now_seconds": b.measured,
        "step_share": b.step_share,
        "saved_gpu_hours": hours,
        "saved_money": prices.money(hours, cost["price_per_gpu_hour"]),
        "memory_note": idea.memory_note,
        "assumptions": list(idea.assumptions),
    }


# --- bubblescope whatif -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """Which changes to predict; none chosen means all of them. layers: of the whole model, from a file.
    memory_limit: bytes that the layers of a (virtual) stage may take."""

    microbatches: tuple[int, ...] = ()
    schedules: tuple[str, ...] = ()
    rebalance: bool = False
    replace_node: bool = False
    fix_input: bool = False
    layers: tuple[LayerTime, ...] | None = None
    memory_limit: float | None = None

    @property
    def all(self) -> bool:
        return not (self.microbatches or self.schedules or self.rebalance or self.replace_node or self.fix_input)


def explore(report: Report, wanted: Wanted) -> dict[str, Any]:
    """The document of `bubblescope whatif`: every wanted change with its prediction, best first.

    Keys: step_seconds (measured), microbatches, replay (as in report.json), verdict (one sentence), changes (rows
    as in report.json's advice, and saved_fraction), refused [{action, why}], layer_times ("measured", "file" or
    null). Without trust in the replay there are no changes. Raises UsageError for a memory limit without layers.
    """
    a, data = report.attribution, report.data
    pipeline = data["pipeline"]
    out: dict[str, Any] = {
        "step_seconds": None,
        "microbatches": pipeline["overruled"].get("microbatches", pipeline["microbatches"]),
        "replay": data["replay"],
        "verdict": "",
        "layer_times": None,
        "changes": [],
        "refused": [],
    }
    if not a.programs or a.bases is None:
        why = a.replay_refused or "no whole pipeline was seen"
        return {**out, "verdict": f"Nothing can be predicted, because {why}."}
    first_in = {cause: c["first_in"] for cause, c in data["causes"].items() if c["first_in"] is not None}
    b = ideas.basis(a, facts.pipeline_shape(a), first_in, wanted.layers, wanted.memory_limit)
    out["step_seconds"] = b.measured
    out["layer_times"] = "file" if wanted.layers else "measured" if b.layers else None
    if not data["replay"]["trusted"]:
        return {**out, "verdict": NOT_TRUSTED[0].upper() + NOT_TRUSTED[1:] + "."}
    if wanted.memory_limit is not None and not b.layers:
        raise UsageError(
            "a memory limit needs the layers and their bytes", hint="give --layer-times FILE with a bytes column"
        )
    found = _wanted(b, wanted)
    least = WORTH_TELLING * b.measured if wanted.all else float("-inf")
    rows = [{**row(i, data["cost"], b), "saved_fraction": i.saved_seconds / b.measured} for i in _ranked(found, least)]
    refused = [] if wanted.all else [{"action": r.action, "why": r.why} for r in dict.fromkeys(b.found)]
    verdict = _verdict(found, b.measured, all=wanted.all)
    if refused and not rows:
        verdict = f"Nothing that was asked for can be predicted, because {refused[0]['why']}."
    return {**out, "verdict": verdict, "changes": rows, "refused": refused}


def _wanted(b: Basis, wanted: Wanted) -> list[Idea]:
    if wanted.all:
        return _everything(b)
    asked = {
        "Move layers between stages": (wanted.rebalance, ideas.rebalance, "the stages take equally long already"),
        "Replace a slow node": (wanted.replace_node, ideas.replace_node, _no_slow_node(b)),
        "Load data ahead": (wanted.fix_input, ideas.fix_input, "no GPU was seen waiting for its input"),
    }
    found: list[Idea] = []
    for action, (chosen, make_ideas, otherwise) in asked.items():
        known = len(b.found)
        made = list(make_ideas(b)) if chosen else []
        found += made
        if chosen and not made and len(b.found) == known:
            b.found.append(Refusal(action, otherwise))
    if b.shape.passes > 1 and (wanted.microbatches or wanted.schedules):
        why = f"a step makes {b.shape.passes} passes through the pipeline (gradient accumulation): only merging them is"
        b.found.append(Refusal("Another schedule or number of micro-batches", why + " predicted"))
        found += ideas.one_pass(b)
    else:
        found += ideas.more_microbatches(b, wanted.microbatches)
        found += ideas.other_schedules(b, wanted.schedules)
    if wanted.rebalance and wanted.schedules:
        found += _together(b, wanted.schedules, len(wanted.schedules))
    return found


def _no_slow_node(b: Basis) -> str:
    if b.attribution.replicas < 2:
        return "a slow GPU can only be told from a heavy stage by its replicas, and one pipeline was replayed"
    return "no worker is slower than the other replicas of its stage in a way that costs time"


def _together(b: Basis, names: Sequence[str], most: int) -> list[Idea]:
    """Layers moved and another schedule, where that beats each alone: the best few."""
    if b.first_in.get("stage_imbalance", 0.0) < WORTH_TELLING * b.measured:
        return []
    alone = max((i.saved_seconds for i in ideas.rebalance(b)), default=0.0)
    both = [i for i in ideas.other_schedules(b, names, balanced=True) if i.saved_seconds > alone]
    return _ranked(both, WORTH_TELLING * b.measured)[:most]


def _verdict(found: Sequence[Idea], measured: float, *, all: bool) -> str:
    real = [i for i in found if i.kind not in BOUNDS]
    best = max(real, key=lambda i: i.saved_seconds, default=None)
    if best is None or best.saved_seconds < WORTH_TELLING * measured:
        none = f"none of the changes asked for saves more than {WORTH_TELLING:.1%} of the {measured:.3g} s step"
        sentence = nothing_to_gain(measured) if all else none
        return sentence[0].upper() + sentence[1:] + "."
    return f"{best.action}: saves {best.saved_seconds / measured:.1%} of the {measured:.3g} s step, the most of these."
