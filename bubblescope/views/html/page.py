"""What stands on the page: `words` for the template, `data` for the scripts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from bubblescope.views import format as fmt
from bubblescope.views.figures import balance_figure, causes_figure, heatmap_figure, steps_figure
from bubblescope.views.html import tables
from bubblescope.views.html.bar import slices
from bubblescope.views.html.payload import timeline
from bubblescope.views.summary import (
    best_actions,
    first_screen,
    gpu_count,
    headline,
    mean_causes,
    mean_gpu,
    pipeline_seen,
    unavailable,
    value,
)
from bubblescope.views.words import CAUSES, NEGATIVE, OPERATIONS, PHASES, RATIOS, TERMS

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from bubblescope.views.source import ReportLike


@dataclass(frozen=True)
class Page:
    words: dict[str, Any]
    data: dict[str, Any]


def page(report: ReportLike, now: datetime | None, only: Sequence[int] | None = None) -> Page:
    """only: the steps that the timeline offers, None = as many as fit."""
    data = report.data
    drawn, figures = timeline(report, only), _figures(report)
    kinds, causes = set(report.ops["kind"].unique()), set(report.gaps["cause"].unique())
    return Page(
        {
            "screen": first_screen(report),
            "title": _title(data),
            "facts": _facts(data),
            "written": None if now is None else fmt.moment(now),
            "version": fmt.plain(data.get("bubblescope_version") or ""),
            "slices": slices(data),
            "shares_text": unavailable(data, "causes", "cause"),
            "causes": CAUSES,
            "operations": {k: v for k, v in OPERATIONS.items() if k in kinds},
            "drawn_causes": [c for c in CAUSES if c.name in causes],
            "phases": PHASES,
            "ratios": RATIOS,
            "terms": TERMS,
            "negative": NEGATIVE,
            "tables": tables.all_tables(report),
            "no_action": _no_action(data),
            "notices": _notices(data, drawn.notices),
            "actions": best_actions(data),
            "whatif": _whatif(data),
            "currency": fmt.plain(value(data, "cost", "currency") or ""),
            "charts": [name for name, made in figures.items() if made["data"]],
            "missing": capital(unavailable(data, "fraction")),
            "steps_shown": [(b["step"], b["outlier"]) for b in drawn.content["steps"]],
            "typical": drawn.content["typical"],
            "ideal": fmt.seconds(drawn.content["ideal"]["seconds"]) if drawn.content["ideal"] is not None else "",
        },
        {"timeline": drawn.content, "figures": figures, "whatif": _whatif(data)},
    )


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _figures(report: ReportLike) -> dict[str, Any]:
    made: dict[str, go.Figure] = {
        "causes": causes_figure(report),
        "heatmap": heatmap_figure(report),
        "steps": steps_figure(report),
        "balance": balance_figure(report),
    }
    return {name: json.loads(figure.to_json(engine="json")) for name, figure in made.items()}


def _title(data: dict[str, Any]) -> str:
    files = value(data, "source", "files") or []
    if len(files) == 1:
        return fmt.plain(files[0])
    return f"{len(files):,} files" if files else "report"


def _facts(data: dict[str, Any]) -> list[str]:
    """One line on what was analysed."""
    pipeline, found = pipeline_seen(data), []
    schedule = pipeline.get("schedule")
    found.append(fmt.plain(schedule) if schedule else "schedule not known")
    for key, word in (("stages", "stages"), ("microbatches", "micro-batches"), ("data_parallel", "replicas")):
        if pipeline.get(key) and (key, pipeline[key]) != ("data_parallel", 1):
            found.append(f"{pipeline[key]:,} {word if pipeline[key] != 1 else word.removesuffix('s')}")
    found.append(f"{gpu_count(data):,} GPUs")
    framework = value(data, "source", "framework")
    if framework:
        found.append(fmt.plain(framework))
    found.append(f"report of {fmt.moment(data.get('created'))}")
    return found


def _no_action(data: dict[str, Any]) -> str:
    if value(data, "bubble", "fraction") is None:
        return f"What a change would save is {unavailable(data, 'no-advice', 'fraction', 'saving')}."
    return "No change was found that would make a step noticeably shorter."


def _notices(data: dict[str, Any], own: list[str]) -> list[tuple[str, str, str]]:
    """(code, message, file): the analysis' own, then what this page left out."""
    found = [
        (fmt.plain(w.get("code") or ""), fmt.plain(w.get("message") or ""), fmt.plain(w.get("file") or ""))
        for w in value(data, "source", "warnings") or []
    ]
    for skipped in value(data, "steps", "skipped") or []:
        index = skipped.get("index")
        found.append(("step-skipped", f"Step {index} was not analysed: {fmt.plain(skipped.get('why'))}.", ""))
    return found + [("view-coarsened", message, "") for message in own]


def _whatif(data: dict[str, Any]) -> dict[str, Any]:
    """What the sliders start from. Seconds are per GPU and step, as in ATTRIBUTION.md §9."""
    causes, loss, idle = mean_causes(data), headline(data), mean_gpu(data, "idle")
    return {
        "lost_s": None if idle is None or loss is None else idle * loss.of_idle,
        "what": "bubbles" if loss is not None and loss.what == "bubbles" else "idle time",
        "step_s": mean_gpu(data, "window") or value(data, "steps", "seconds_median"),
        "gpus": gpu_count(data),
        "steps": int(value(data, "cost", "total_steps") or value(data, "steps", "analysed") or 1),
        "price": value(data, "cost", "price_per_gpu_hour"),
        "currency": fmt.plain(value(data, "cost", "currency") or ""),
        "actions": [
            {
                "text": fmt.plain(a["action"]), "saved_s": a["saved_seconds"],
                "now_s": a["now_seconds"], "share": a["step_share"],
                "memory": fmt.plain(a.get("memory_note") or ""),
                "assumptions": [fmt.plain(x) for x in a.get("assumptions") or ()],
            }
            for a in best_actions(data)
        ],
        "causes": [
            {"name": c.name, "label": c.label, "idle_s": causes[c.name]}
            for c in CAUSES
            if abs(causes[c.name] or 0.0) > 1e-9
        ],
    }  # fmt: skip
