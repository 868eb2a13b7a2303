"""DataFrames of a report. Columns and units are those of `Report`'s docstrings."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bubblescope.algebra.intervals import rows_by
from bubblescope.align.match import same_clock, wait_transfer
from bubblescope.analysis.operations import PHASES
from bubblescope.model import Kind, Lane
from bubblescope.model.kinds import SHORT
from bubblescope.model.units import NS
from bubblescope.replay.attribution import Attribution
from bubblescope.replay.causes import CAUSES
from bubblescope.replay.ladder import RUNGS
from bubblescope.replay.nodes import is_grad
from bubblescope.replay.program import Node

if TYPE_CHECKING:
    import pandas as pd

Int = NDArray[np.int64]

LABELS = {
    **{int(k): v for k, v in SHORT.items()},
    int(Kind.LOSS): "loss",
    int(Kind.OPTIMIZER): "optimizer",
    int(Kind.RECOMPUTE): "recompute",
}


def frame(columns: dict[str, Any]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(columns)


def flat(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """JSON rows as a table; nested objects become dotted columns."""
    import pandas as pd

    return pd.json_normalize(rows) if rows else pd.DataFrame()


def origin_ns(a: Attribution) -> int:
    return int(a.windows.start_ns.min())


def seconds(a: Attribution, time_ns: Int) -> NDArray[np.float64]:
    return (time_ns - origin_ns(a)).astype(np.float64) * NS


def kind_labels(kind: Int) -> NDArray[np.object_]:
    table = np.array([LABELS.get(k, "other") for k in range(max(Kind) + 1)], dtype=object)
    return table[kind]


def operation_labels(a: Attribution, rows: Int) -> NDArray[np.object_]:
    """``B5`` for the backward of micro-batch 5, ``optimizer``; "" for row -1."""
    out = np.full(len(rows), "", dtype=object)
    known = rows >= 0
    ops = a.operations
    kind = kind_labels(ops.kind[rows[known]])
    microbatch = ops.microbatch[rows[known]]
    out[known] = [f"{k}{m}" if m >= 0 and len(k) == 1 else k for k, m in zip(kind, microbatch, strict=True)]
    return out


def ops(a: Attribution) -> pd.DataFrame:
    o, w = a.operations, a.windows
    main: dict[str, NDArray[Any]] = {
        "rank": w.rank[o.window],
        "step": w.step[o.window],
        "stage": o.stage,
        "chunk": o.chunk,
        "microbatch": o.microbatch,
        "kind": kind_labels(o.kind),
        "start_s": seconds(a, o.start_ns),
        "end_s": seconds(a, o.end_ns),
    }
    side = _side_rows(a)
    table = {name: np.concatenate([main.pop(name), side.pop(name)]) for name in list(main)}  # millions of rows, once
    order = np.lexsort((table["end_s"], table["start_s"], table["step"], table["rank"]))
    for name in table:
        table[name] = table[name][order]
    return frame(table)


def _side_rows(a: Attribution) -> dict[str, NDArray[Any]]:
    """Communication and data loading inside the windows."""
    s = a.run.spans
    label = np.full(len(s), "", dtype=object)
    label[(s.lane == Lane.POST) & (s.kind == Kind.SEND)] = "send"
    label[(s.lane == Lane.POST) & (s.kind == Kind.RECV)] = "recv"
    label[(s.lane == Lane.COMM) & (s.kind == Kind.SEND)] = "send"
    label[(s.lane == Lane.COMM) & (s.kind == Kind.RECV)] = "recv"
    label[s.lane == Lane.WAIT] = "wait"
    label[s.kind == Kind.DATA] = "data"
    rows = np.flatnonzero(label != "")
    window = a.windows.locate(s.rank[rows].astype(np.int64), s.start_ns[rows])
    rows, window = rows[window >= 0], window[window >= 0]
    return {
        "rank": s.rank[rows].astype(np.int64),
        "step": a.windows.step[window],
        "stage": s.stage[rows].astype(np.int64),
        "chunk": s.chunk[rows].astype(np.int64),
        "microbatch": s.microbatch[rows].astype(np.int64),
        "kind": label[rows],
        "start_s": seconds(a, s.start_ns[rows]),
        "end_s": seconds(a, s.end_ns[rows]),
    }


def gaps(a: Attribution) -> pd.DataFrame:
    g, w, o = a.gaps, a.windows, a.operations
    keep = np.flatnonzero((g.idle_ns > 0) | (np.abs(g.causes).max(axis=1, initial=0.0) > 0))
    before, culprit = g.before[keep], g.culprit[keep]
    window = g.window[keep]
    causes = g.causes[keep] * NS
    columns: dict[str, Any] = {
        "rank": w.rank[window],
        "step": w.step[window],
        "start_s": seconds(a, g.start_ns[keep]),
        "end_s": seconds(a, g.end_ns[keep]),
        "idle_s": g.idle_ns[keep] * NS,
        "phase": np.array(PHASES, dtype=object)[g.phase[keep]],
        "cause": np.array(CAUSES, dtype=object)[causes.argmax(axis=1)] if len(keep) else [],
        "before": operation_labels(a, before),
        "inside": g.inside[keep],
        "stage": _of(o.stage, before),
        "microbatch": _of(o.microbatch, before),
    }
    columns |= {name: causes[:, i] for i, name in enumerate(CAUSES)}
    columns |= {f"{name}_s": g.rungs[keep, i] * NS for i, name in enumerate(RUNGS)}
    columns |= {
        "producer_rank": _of(w.rank, _of(o.window, culprit)),
        "producer_stage": _of(o.stage, culprit),
        "producer_op": operation_labels(a, culprit),
        "taken": g.taken[keep],
    }
    return frame(columns)


def _of(column: Int, rows: Int) -> Int:
    """column[rows], -1 where the row is -1."""
    if not len(column):
        return np.full(len(rows), -1, dtype=np.int64)
    return np.where(rows >= 0, column[rows], -1)


OUTLIER_MADS = 5.0


def step_seconds(a: Attribution) -> tuple[Int, NDArray[np.float64]]:
    """The steps that figures are means over (see `Attribution.main`) and their seconds: mean over ranks' windows."""
    return _step_seconds(a, a.main)


def _step_seconds(a: Attribution, chosen: NDArray[np.bool_]) -> tuple[Int, NDArray[np.float64]]:
    steps, where = np.unique(a.windows.step[chosen], return_inverse=True)
    length = a.idle.window_ns[chosen] * NS
    mean = np.bincount(where, length, len(steps)) / np.bincount(where, minlength=len(steps))
    return steps, mean


def steps(a: Attribution) -> pd.DataFrame:
    """A step is an outlier when it lies more than five median deviations (and 5 %) off the median."""
    number, length = _step_seconds(a, np.ones(len(a.windows), dtype=np.bool_))
    where = np.searchsorted(number, a.windows.step)
    idle = np.bincount(where, a.idle.idle_ns, len(number)) / np.bincount(where, a.idle.window_ns, len(number))
    middle = float(np.median(length))
    spread = float(np.median(np.abs(length - middle)))
    start = np.full(len(number), np.iinfo(np.int64).max)
    np.minimum.at(start, where, a.windows.start_ns)
    end = np.full(len(number), np.iinfo(np.int64).min)
    np.maximum.at(end, where, a.windows.end_ns)
    return frame(
        {
            "step": number,
            "start_s": seconds(a, start),
            "end_s": seconds(a, end),
            "seconds": length,
            "idle_fraction": idle,
            "outlier": np.abs(length - middle) > np.maximum(OUTLIER_MADS * spread, 0.05 * middle),
        }
    )


MESSAGE_COLUMNS = ("src", "dst", "direction", "step", "microbatch", "send_s", "recv_s", "done_s", "wait_s",
                   "transfer_s", "exact", "bytes")  # fmt: skip


def device(a: Attribution) -> pd.DataFrame:
    """One kernel or copy a row, as it stood on its stream; empty where the input had operations and no kernels."""
    run, spans = a.run, a.run.spans
    shown = run.source.timing == "kernels"
    rows = np.flatnonzero((spans.device >= 0) & (spans.end_ns > spans.start_ns) & shown)
    window = a.windows.locate(spans.rank[rows].astype(np.int64), spans.start_ns[rows])
    rows = rows[window >= 0]
    lanes = np.array([lane.name.lower() for lane in Lane], dtype=object)
    return frame(
        {
            "rank": spans.rank[rows],
            "step": spans.step[rows],
            "device": spans.device[rows],
            "stream": spans.stream[rows],
            "lane": lanes[spans.lane[rows]],
            "name": np.array(run.names.texts, dtype=object)[spans.name[rows]],
            "start_s": seconds(a, spans.start_ns[rows]),
            "end_s": seconds(a, spans.end_ns[rows]),
        }
    )


def messages(a: Attribution) -> pd.DataFrame:
    """One matched message a row: when both ends were posted and when the receiver had it.

    wait_s: the receiver waited for the sender. transfer_s: from both posted to done; exact: seen, not bounded.
    """
    return frame(message_columns(a))


def message_columns(a: Attribution) -> dict[str, NDArray[Any]]:
    """`messages` as plain arrays, by step, source, destination and time of sending."""
    base = origin_ns(a)
    parts = []
    for p in a.programs:
        m, k = p.messages, len(p.steps)
        zero = np.array([int(a.windows.base_ns[a.windows.step == s].min()) - base for s in p.steps]) * NS
        send, recv = p.start[m.send], p.start[m.recv]
        begun, done = p.start[m.wait], p.end[m.wait]
        consumer = np.where(m.consumer >= 0, p.microbatch[m.consumer], -1)
        parts.append(
            {
                "src": np.repeat(p.rank[m.send], k),
                "dst": np.repeat(p.rank[m.recv], k),
                "direction": np.repeat(np.where(m.is_grad, "grad", "act"), k),
                "step": np.tile(p.steps, len(m.send)),
                "microbatch": np.repeat(consumer, k),
                "send_s": (send * NS + zero).reshape(-1),
                "recv_s": (recv * NS + zero).reshape(-1),
                "done_s": (done * NS + zero).reshape(-1),
                "wait_s": (np.clip(np.maximum(send, recv) - begun, 0, np.maximum(done - begun, 0)) * NS).reshape(-1),
                "transfer_s": (m.transfer * NS).reshape(-1),
                "exact": m.exact.reshape(-1),
                "bytes": np.repeat(m.bytes, k),
            }
        )
    if not parts:
        parts.append(_matched_columns(a))
    table = {name: np.concatenate([part[name] for part in parts]) for name in MESSAGE_COLUMNS}
    order = np.lexsort((table["send_s"], table["dst"], table["src"], table["step"]))
    return {name: column[order] for name, column in table.items()}


def _matched_columns(a: Attribution) -> dict[str, NDArray[Any]]:
    """Without a replay: the messages between stages that are known, in windows of one step, both ends on one clock."""
    run, p2p = a.run, a.run.links.p2p
    send, recv = p2p[:, 0], p2p[:, 1]
    windows = a.windows.of_spans(run.spans)
    ws, wr = windows[send], windows[recv]
    keep = (ws >= 0) & (wr >= 0) & (run.spans.stage[send] >= 0) & (run.spans.stage[recv] >= 0)
    keep &= (a.windows.step[ws] == a.windows.step[wr]) & same_clock(run, send, recv)
    m = wait_transfer(run)
    return {
        "src": run.spans.rank[send][keep],
        "dst": run.spans.rank[recv][keep],
        "direction": np.where(is_grad(run, send), "grad", "act")[keep],
        "step": a.windows.step[ws][keep],
        "microbatch": run.spans.microbatch[recv][keep],
        "send_s": seconds(a, m.sent)[keep],
        "recv_s": seconds(a, m.posted)[keep],
        "done_s": seconds(a, m.arrived)[keep],
        "wait_s": (m.wait * NS)[keep],
        "transfer_s": (m.transfer * NS)[keep],
        "exact": (m.sent >= m.posted)[keep],
        "bytes": np.maximum(run.spans.bytes[send], run.spans.bytes[recv])[keep],
    }


def ideal(a: Attribution) -> pd.DataFrame:
    """Starts at 0 with the step."""
    if not a.programs:
        return frame({c: [] for c in ("rank", "step", "stage", "chunk", "microbatch", "kind", "start_s", "end_s")})
    p, r = a.programs[0], a.decompositions[0].ideal
    nodes = np.flatnonzero((p.node == Node.OP) & (r.duration[:, 0] > 0))
    return frame(
        {
            "rank": p.rank[nodes],
            "step": np.full(len(nodes), p.steps[0]),
            "stage": p.stage[nodes],
            "chunk": p.chunk[nodes],
            "microbatch": p.microbatch[nodes],
            "kind": kind_labels(p.kind[nodes]),
            "start_s": r.start[nodes, 0] * NS,
            "end_s": r.end[nodes, 0] * NS,
        }
    )


def stage_positions(a: Attribution) -> dict[int, int]:
    """{virtual stage: position of its GPU in the pipeline}."""
    layout = a.run.layout
    pp = {int(r): int(p) for r, p in zip(layout.ranks, layout.pp, strict=True)} if len(layout.pp) else {}
    found = {stage: pp.get(rank, -1) for (_, stage), rank in sorted(layout.stage_rank.items(), reverse=True)}
    return {stage: position for stage, position in found.items() if position >= 0}


def stage_balance(a: Attribution) -> pd.DataFrame:
    """Base times; without a replay the medians of what was seen. A stage that never splits B has no I and W."""
    position = stage_positions(a)
    columns: dict[str, Any] = {"stage": [], "position": [], "F_s": [], "B_s": [], "I_s": [], "W_s": [], "loss_s": []}
    names = {Kind.FORWARD: "F_s", Kind.BACKWARD: "B_s", Kind.BACKWARD_INPUT: "I_s", Kind.BACKWARD_WEIGHT: "W_s",
             Kind.LOSS: "loss_s"}  # fmt: skip
    o = a.operations
    length = (o.end_ns - o.start_ns) * NS
    for stage in np.unique(o.stage[o.stage >= 0]):
        columns["stage"].append(int(stage))
        columns["position"].append(position.get(int(stage), int(stage)))
        for kind, name in names.items():
            rows = (o.stage == stage) & (o.kind == kind)
            value = float(np.median(length[rows])) if rows.any() else float("nan")
            if a.bases is not None:
                mine = (a.bases.stage == stage) & (a.bases.kind == kind)
                value = float(a.bases.by_stage[mine][0]) * NS if mine.any() else float("nan")
            columns[name].append(value)
    return frame(columns)


UNEVEN = 1.005
"""What takes less than so many times the mean of the others takes as long as they do: "1.00×"."""


def stage_work(balance: pd.DataFrame) -> dict[int, float]:
    """Base seconds per micro-batch of each virtual stage of `stage_balance`: forward, loss and backward. The backward
    is B, or I and W together; of a stage that runs some of its micro-batches either way it is the mean of the two.
    """
    import pandas as pd

    split = balance[["I_s", "W_s"]].sum(axis=1, min_count=1)
    backward = pd.concat([balance["B_s"], split], axis=1).mean(axis=1)
    work = pd.concat([balance[["F_s", "loss_s"]], backward], axis=1).sum(axis=1, min_count=1).dropna()
    return dict(zip(balance["stage"].loc[work.index].astype(int).tolist(), work.tolist(), strict=True))


def position_work(balance: pd.DataFrame) -> dict[int, float]:
    """`stage_work` of each GPU of the pipeline, its chunks together."""
    position = dict(zip(balance["stage"], balance["position"], strict=True))
    work: dict[int, float] = {}
    for stage, seconds in stage_work(balance).items():
        work[int(position[stage])] = work.get(int(position[stage]), 0.0) + seconds
    return dict(sorted(work.items()))


def slowest_stage(balance: pd.DataFrame) -> tuple[int, float] | None:
    """The GPU of the pipeline with most work per micro-batch, and how many times the mean of the others it takes; None
    with fewer than two."""
    work = position_work(balance)
    if len(work) < 2:
        return None
    slowest = max(work, key=lambda position: work[position])
    others = float(np.mean([w for position, w in work.items() if position != slowest]))
    return (slowest, work[slowest] / others) if others > 0 else None


def slowdowns(a: Attribution) -> dict[int, float]:
    """{rank: how many times the other replicas of its stages it takes}, of every rank that has replicas.

    By base times per micro-batch: those of single operations that take long, or hold a wait for other replicas (a
    gradient reduction within the last backward), count for nothing. Worked example: of two replicas one takes 15 ms
    for F and 30 ms for B, the other 30 and 60: 0.5 and 2.
    """
    if a.bases is None:
        return {}
    own, others = defaultdict[int, float](float), defaultdict[int, float](float)
    for _, rows in rows_by(a.bases.stage * (max(Kind) + 1) + a.bases.kind):
        for i, row in enumerate(rows) if len(rows) > 1 else ():
            rank = int(a.bases.rank[row])
            own[rank] += float(a.bases.worker[row])
            others[rank] += float(np.median(a.bases.worker[np.delete(rows, i)]))
    return {rank: own[rank] / others[rank] for rank in sorted(own) if others[rank] > 0}
