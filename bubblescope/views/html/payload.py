"""The timeline's data inside report.html: integer columns, one compressed block a step.

A number of microseconds as text costs four times its four bytes, and a job of 1,024 ranks has 130,000 of them
a step. Blocks are zlib streams in base64; the page unpacks one only when its step is picked.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bubblescope.views.figures.timeline import typical_step
from bubblescope.views.format import plain
from bubblescope.views.summary import value
from bubblescope.views.words import CAUSES, OPERATIONS, RUNGS

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

Array = NDArray[Any]

BUDGET = 1_700_000
"""Characters of all blocks together: what 7 MB leave beside plotly.js (4.8 MB)."""
MOST_STEPS = 40
PHASES = ("warmup", "steady", "cooldown")
KINDS = tuple(OPERATIONS)
_LETTERS = {np.dtype("<i4"): "i32", np.dtype("<i2"): "i16", np.dtype("u1"): "u8"}


@dataclass
class Timeline:
    """`content` goes into the page as JSON; `notices` say what was left out, with numbers."""

    content: dict[str, Any] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


class _Texts:
    """Interned strings: columns hold their index."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {"": 0}

    def of(self, column: pd.Series[Any]) -> Array:
        codes, distinct = column.factorize()
        known = np.array([self.index.setdefault(plain(text), len(self.index)) for text in distinct], dtype="<i2")
        numbers: Array = known[codes]
        return numbers


@dataclass(frozen=True)
class _Scale:
    """Seconds become integers of `unit_s`, chosen so that a step fits into 31 bits."""

    unit_s: float

    def to_int(self, seconds: Array) -> Array:
        return np.rint(seconds / self.unit_s).astype("<i4")

    def parts(self, seconds: Array) -> Array:
        """Rows of parts, rounded so that each row still sums to its rounded total.

        >>> _Scale(1.0).parts(np.array([[0.4, 0.4, 0.0, 0.7]])).tolist()
        [[0, 1, 0, 1]]
        """
        reached = np.rint(np.cumsum(seconds, axis=1) / self.unit_s)
        return np.diff(reached, axis=1, prepend=0.0).astype("<i4")


def timeline(report: ReportLike, only: Sequence[int] | None = None) -> Timeline:
    """Steps of the timeline in order, as many as fit `BUDGET`: the typical step first, then the outliers.

    only: steps to choose from, without the ideal one; None = all and the ideal.
    """
    gpus = sorted((-1 if g["stage"] is None else g["stage"], g["rank"]) for g in report.data.get("gpus") or [])
    made = Timeline()
    scale = _Scale(_unit(report.steps))
    texts = _Texts()
    kept, blocks = _fit(report, _by_priority(report) if only is None else list(only), gpus, scale, texts, made.notices)
    made.content = {
        "unit": scale.unit_s,
        "rows": [[rank, stage] for stage, rank in kept],
        "kinds": list(KINDS),
        "phases": list(PHASES),
        "rungs": list(RUNGS),
        "typical": typical_step(report),
        "steps": [blocks[step] for step in sorted(blocks)],
        "ideal": _ideal(report, scale, texts) if only is None else None,
        "texts": list(texts.index),
        "causes": [{"name": c.name, "label": c.label, "colour": c.colour, "pattern": c.pattern} for c in CAUSES],
    }
    return made


def _unit(steps: pd.DataFrame) -> float:
    longest = float(steps["seconds"].max()) if len(steps) else 1.0
    unit = 1e-9
    while longest * 2 / unit >= 2**31:
        unit *= 10
    return unit


def _fit(
    report: ReportLike, steps: list[int], gpus: list[tuple[int, int]], scale: _Scale, texts: _Texts, notices: list[str]
) -> tuple[list[tuple[int, int]], dict[int, dict[str, Any]]]:
    blocks: dict[int, dict[str, Any]] = {}
    kept, used = gpus, 0
    for step in steps[:MOST_STEPS]:
        block = _block(report, step, kept, scale, texts)
        while not blocks and len(block["data"]) > BUDGET:
            fewer = _fewer(report, kept, BUDGET / len(block["data"]) * 0.9)
            if len(fewer) == len(kept):
                break
            kept = fewer
            block = _block(report, step, kept, scale, texts)
        if used + len(block["data"]) > BUDGET:
            break
        blocks[step] = block
        used += len(block["data"])
    if len(kept) < len(gpus):
        notices.append(
            f"The timeline shows {len(kept):,} of {len(gpus):,} GPUs: of each stage the busiest ones and an even "
            "choice of the others. All figures and tables use every GPU."
        )
    if not blocks and steps:
        notices.append("There is no timeline: one GPU of each stage for one step is already more than fits this file.")
    elif len(blocks) < len(steps):
        notices.append(
            f"The timeline shows {len(blocks):,} of {len(steps):,} steps, to keep this file small: the typical "
            "step, then outliers. All figures and tables use every step."
        )
    return kept, blocks


def _by_priority(report: ReportLike) -> list[int]:
    steps = report.steps
    typical = typical_step(report)
    odd = steps[steps["outlier"].astype(bool)].sort_values("seconds", ascending=False)["step"]
    return list(dict.fromkeys([typical, *map(int, odd), *map(int, steps["step"])])) if len(steps) else []


def _fewer(report: ReportLike, gpus: list[tuple[int, int]], share: float) -> list[tuple[int, int]]:
    """About `share` of the GPUs of each stage: the two busiest, then evenly spaced by busy time."""
    busy = {g["rank"]: value(g, "busy") or 0.0 for g in report.data["gpus"]}
    kept: list[tuple[int, int]] = []
    for stage in sorted({s for s, _ in gpus}):
        mine = sorted((g for g in gpus if g[0] == stage), key=lambda g: -busy[g[1]])
        count = max(1, int(len(mine) * share))
        spaced = [mine[int(i)] for i in np.linspace(0, len(mine) - 1, count)]
        kept += list(dict.fromkeys([*mine[:2], *spaced]))[:count]
    return sorted(kept)


def _block(report: ReportLike, step: int, gpus: list[tuple[int, int]], scale: _Scale, texts: _Texts) -> dict[str, Any]:
    row_of = {rank: row for row, (_, rank) in enumerate(gpus)}
    line = report.steps[report.steps["step"] == step].iloc[0]
    origin = float(line["start_s"])
    columns: dict[str, Array] = {}
    for whole, encode in ((report.ops, _ops), (report.gaps, _gaps), (report.messages, _messages)):
        table = whole[whole["step"] == step]
        if len(table):
            columns |= encode(table, row_of, origin, scale, texts)
    packed = _pack(columns)
    return {
        "step": step, "seconds": float(line["seconds"]), "idle": float(line["idle_fraction"]),
        "outlier": bool(line["outlier"]), **packed,
    }  # fmt: skip


def _rows(table: pd.DataFrame, column: str, row_of: dict[int, int]) -> Array:
    return table[column].map(row_of).fillna(-1).to_numpy().astype("<i4")


def _ops(table: pd.DataFrame, row_of: dict[int, int], origin: float, scale: _Scale, _: _Texts) -> dict[str, Array]:
    table = table[table["kind"].isin(KINDS) & table["rank"].isin(row_of)]
    row, start = _rows(table, "rank", row_of), table["start_s"].to_numpy() - origin
    order = np.lexsort((start, row))
    end = table["end_s"].to_numpy() - origin
    kind = table["kind"].map({name: i for i, name in enumerate(KINDS)}).to_numpy()
    found = {
        "op_row": row, "op_start": scale.to_int(start), "op_end": scale.to_int(end), "op_kind": kind.astype("u1"),
        "op_microbatch": table["microbatch"].to_numpy().astype("<i2"),
    }  # fmt: skip
    return {name: column[order] for name, column in found.items()}


def _gaps(table: pd.DataFrame, row_of: dict[int, int], origin: float, scale: _Scale, texts: _Texts) -> dict[str, Array]:
    # A gap of no length holds causes that cancel out: it counts in every sum, but there is nothing to draw.
    table = table[table["rank"].isin(row_of) & (table["end_s"] > table["start_s"])]
    order = np.lexsort((table["start_s"].to_numpy(), _rows(table, "rank", row_of)))
    table = table.iloc[order]
    waited = table[list(RUNGS)].to_numpy(dtype=float)
    known = np.isfinite(waited).all(axis=1)
    rungs = scale.parts(np.where(known[:, None], waited, 0.0))
    start = scale.to_int(table["start_s"].to_numpy() - origin)
    length = scale.to_int((table["end_s"] - table["start_s"]).to_numpy())
    causes = scale.parts(np.nan_to_num(table[[c.name for c in CAUSES]].to_numpy(dtype=float)))
    which_gap, which_cause = np.nonzero(causes)
    code = {c.name: i for i, c in enumerate(CAUSES)}
    return {
        "gap_row": _rows(table, "rank", row_of), "gap_start": start,
        "gap_end": start + np.where(known, rungs.sum(axis=1, dtype=np.int32), length).astype("<i4"),
        "gap_known": known.astype("u1"),
        "gap_cause": table["cause"].map(code).fillna(len(CAUSES) - 1).to_numpy().astype("u1"),
        "gap_phase": table["phase"].map({p: i for i, p in enumerate(PHASES)}).fillna(1).to_numpy().astype("u1"),
        "gap_before": texts.of(table["before"]),
        "gap_producer": table["producer_rank"].fillna(-1).to_numpy().astype("<i4"),
        "gap_producer_stage": table["producer_stage"].fillna(-1).to_numpy().astype("<i2"),
        "gap_producer_op": texts.of(table["producer_op"].fillna("")),
        **{f"gap_{name}": np.ascontiguousarray(rungs[:, i]) for i, name in enumerate(RUNGS)},
        # Few of the thirteen causes touch a gap, so they are stored as (gap, cause, amount).
        "part_gap": which_gap.astype("<i4"), "part_cause": which_cause.astype("u1"),
        "part_amount": causes[which_gap, which_cause],
    }  # fmt: skip


def _messages(table: pd.DataFrame, row_of: dict[int, int], origin: float, scale: _Scale, _: _Texts) -> dict[str, Array]:
    table = table[table["src"].isin(row_of) & table["dst"].isin(row_of)].sort_values("send_s", kind="stable")
    return {
        "message_src": _rows(table, "src", row_of), "message_dst": _rows(table, "dst", row_of),
        "message_grad": (table["direction"] == "grad").to_numpy().astype("u1"),
        "message_microbatch": table["microbatch"].to_numpy().astype("<i2"),
        "message_send": scale.to_int(table["send_s"].to_numpy() - origin),
        "message_done": scale.to_int(table["done_s"].to_numpy() - origin),
    }  # fmt: skip


def _ideal(report: ReportLike, scale: _Scale, texts: _Texts) -> dict[str, Any] | None:
    """The replayed ideal step, its own rows: one a rank, of one replica, since ideal replicas are alike."""
    table = report.ideal
    if not len(table):
        return None
    pairs = table[["rank", "stage"]].drop_duplicates().sort_values(["rank", "stage"])
    stages_of: dict[int, tuple[int, ...]] = {}
    for rank, stage in pairs.to_numpy().tolist():
        stages_of[rank] = (*stages_of.get(rank, ()), stage)
    first = {stages: rank for rank, stages in sorted(stages_of.items(), reverse=True)}
    stage_of = {rank: stages[0] for stages, rank in sorted(first.items())}
    owner = {rank: row for row, rank in enumerate(stage_of)}
    table = table[table["rank"].isin(owner)]
    origin = float(table["start_s"].min())
    length = float(table["end_s"].max()) - origin
    return {
        "rows": [[rank, stage_of[rank]] for rank in owner], "seconds": length,
        **_pack(_ops(table, owner, origin, scale, texts)),
    }  # fmt: skip


def _pack(columns: dict[str, Array]) -> dict[str, Any]:
    """All columns in one compressed block, widest first so that each is aligned to its own size."""
    layout: dict[str, list[Any]] = {}
    parts, at = [], 0
    for name in sorted(columns, key=lambda n: (-columns[n].dtype.itemsize, n)):
        column = np.ascontiguousarray(columns[name]).astype(columns[name].dtype.newbyteorder("<"))
        layout[name] = [_LETTERS[column.dtype], at, len(column)]
        parts.append(column.tobytes())
        at += column.nbytes
    data = base64.b64encode(zlib.compress(b"".join(parts), 9)).decode("ascii")
    return {"columns": layout, "data": data}
