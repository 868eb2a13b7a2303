"""report.json, schema_version 1 (CONTRACT.md): times in seconds, per step unless named otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bubblescope._version import __version__
from bubblescope.align.match import one_sided_transfer
from bubblescope.analysis import osdi
from bubblescope.analysis.contention import contention
from bubblescope.analysis.operations import PHASES, is_pipeline
from bubblescope.cost import prices
from bubblescope.errors import InputError
from bubblescope.model import Notice, Run
from bubblescope.model.notice import some
from bubblescope.model.units import NS
from bubblescope.replay.attribution import Attribution, has_phases, impossible_starts
from bubblescope.replay.causes import CAUSES, INTRINSIC_CAUSES
from bubblescope.replay.program import Edge
from bubblescope.replay.savings import Saving, savings
from bubblescope.replay.scenario import Fix, replay
from bubblescope.report import advice, facts, tables

if TYPE_CHECKING:
    from bubblescope.report.build import ReportOptions

Float = NDArray[np.float64]
SCHEMA_VERSION = 1
TRUST_GATE = 0.05
"""Above this share of the step, unexplained time or replay error means: do not trust the attribution (§6)."""


def report_json(a: Attribution, options: ReportOptions) -> dict[str, Any]:
    """The whole document, as plain Python values; None where a figure is unavailable (with a warning)."""
    shape = facts.pipeline_shape(a).as_given(
        schedule=options.schedule, microbatches=options.microbatches, stages=options.stages
    )
    notices = [*a.run.notices, *a.notices, *shape.notices, *shape.no_theory]
    found = savings(a.programs, a.bases) if a.bases is not None else {}
    gpus = _gpus(a)
    # What is said of all GPUs is the mean of those whose causes are known.
    told = [g for g in gpus if g["rank"] in a.windows.rank[a.main]]
    replay_block, replay_notices = _replay(a, told)
    causes = _causes(a, told, found)
    bubble = _bubble(a, told, shape)
    cost = _cost(a, options, told, causes)
    notices += replay_notices
    notices += _unavailable(a, bubble, told)
    actions = advice.suggest(a, shape.seen(), found, cost, trusted=bool(replay_block["trusted"]))
    notices += actions.notices
    extra, straggler_notices = _straggler(a.run)
    notices += straggler_notices
    return {
        "schema_version": SCHEMA_VERSION,
        "bubblescope_version": __version__,
        "created": options.now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "source": _source(a, notices),
        "pipeline": shape.document(),
        "steps": _steps(a),
        "gpus": gpus,
        "bubble": bubble,
        "causes": causes,
        "p2p": _p2p(a),
        "replay": replay_block,
        "clock": _clock(a),
        "cost": cost,
        "advice": actions.rows,
        **extra,
    }


def _source(a: Attribution, notices: list[Notice]) -> dict[str, Any]:
    run = a.run
    unique = list(dict.fromkeys(notices))
    return {
        "format": run.source.format,
        "files": list(run.source.files),
        "timing": run.source.timing or None,
        "ranks": [int(r) for r in run.layout.ranks] or run.ranks,
        "world_size": run.layout.world_size,
        "missing_ranks": run.layout.missing_ranks,
        "framework": run.layout.framework,
        "warnings": [{"code": n.code, "message": n.message, "file": n.where or None} for n in unique],
    }


def _steps(a: Attribution) -> dict[str, Any]:
    number, length = tables.step_seconds(a)
    low, middle, high = np.quantile(length, [0.05, 0.5, 0.95])
    return {
        "analysed": len(number),
        "skipped": [{"index": s.index, "why": s.why} for s in a.windows.skipped]
        + [
            {"index": int(i), "why": a.left_out.get(int(i), "not there for every rank")}
            for i in np.setdiff1d(a.windows.steps, number)
        ],
        "seconds_median": float(middle),
        "seconds_p05": float(low),
        "seconds_p95": float(high),
    }


# --- GPUs and causes ------------------------------------------------------------------------------------------


def _gpus(a: Attribution) -> list[dict[str, Any]]:
    """One row per rank: means over its windows of the analysed steps, so that all sums hold as they do per window.
    A rank that could not be replayed where others were has the causes that it tells by itself.

    Steps that some rank lacks cannot be attributed: they are left out of these means wherever others remain, and
    stand in `all_steps` (every finished step of the rank, busy and idle only).
    """
    main = a.shown
    ranks, where = np.unique(a.windows.rank[main], return_inverse=True)
    count = np.bincount(where).astype(np.float64)
    replayed = np.isin(ranks, a.windows.rank[a.replayed])

    def mean(per_window: Float) -> Float:
        out = np.zeros((len(ranks), *per_window.shape[1:]))
        np.add.at(out, where, per_window[main])
        result: Float = out * NS / count.reshape(-1, *[1] * (out.ndim - 1))
        return result

    causes = mean(a.per_window(a.gaps.causes))
    by_phase = np.zeros((len(a.windows), len(PHASES)))
    np.add.at(by_phase, (a.gaps.window, a.gaps.phase), a.gaps.idle_ns.astype(np.float64))
    phases = mean(by_phase)
    phased = mean(has_phases(a.operations, len(a.windows)).astype(np.float64)) > 0
    t = a.idle
    columns = {
        name: mean(values.astype(np.float64))
        for name, values in {
            "window": t.window_ns,
            "busy": t.busy_ns,
            "idle": t.idle_ns,
            "exposed_comm": t.exposed_ns,
            "copies": t.copies_ns,
            "empty": t.empty_ns,
        }.items()
    }
    known = {whole: [_sure(name, a, whole) != "unavailable" for name in CAUSES] for whole in set(replayed.tolist())}
    excess = mean(_excess(a)) if a.bases is not None else None
    slowed = contention(a.run, a.windows)
    beside = None if slowed is None else mean(slowed)
    return [
        {
            "rank": int(rank),
            "stage": facts.stage_of(a.run.layout, int(rank)),
            "steps": int(count[i]),
            "all_steps": _all_steps(a, int(rank)),
            **{name: float(column[i]) for name, column in columns.items()},
            "phases": {name: float(phases[i, j]) if phased[i] else None for j, name in enumerate(PHASES)},
            "causes": {
                name: float(causes[i, j]) if known[bool(replayed[i])][j] else None for j, name in enumerate(CAUSES)
            },
            "excess_compute": None if excess is None or not replayed[i] else float(excess[i]),
            "contention": None if beside is None or np.isnan(beside[i]) else float(beside[i]),
        }
        for i, rank in enumerate(ranks)
    ]


def _all_steps(a: Attribution, rank: int) -> dict[str, Any]:
    """Means over every finished step of a rank."""
    rows = a.windows.of_rank(rank)
    means = {"window": a.idle.window_ns, "busy": a.idle.busy_ns, "idle": a.idle.idle_ns}
    steps = int(rows.stop - rows.start)
    return {"steps": steps, **{name: float(column[rows].mean()) * NS for name, column in means.items()}}


def _excess(a: Attribution) -> Float:
    """Per window, ns: compute beyond the worker's own base; a busy-side loss, never idle."""
    out = np.zeros(len(a.windows))
    for p in a.programs:
        assert a.bases is not None
        row = a.bases.lookup(p)
        nodes = np.flatnonzero(row >= 0)
        over = p.duration[nodes] - a.bases.worker[row[nodes]][:, None]
        np.add.at(out, p.window[nodes].reshape(-1), over.reshape(-1))
    return out


def _causes(a: Attribution, gpus: list[dict[str, Any]], found: dict[str, Saving]) -> dict[str, Any]:
    idle = float(np.mean([g["idle"] for g in gpus]))
    replayed = bool(a.replayed.any())
    out: dict[str, Any] = {}
    for name in CAUSES:
        sure = _sure(name, a, replayed)
        known = sure != "unavailable"
        value = float(np.mean([g["causes"][name] for g in gpus])) if known else 0.0
        saving = found.get(name) if known else None
        out[name] = {
            "seconds": value if known else None,
            "share_of_idle": value / idle if idle > 0 and known else None,
            "first_in": saving.first_in if saving else None,
            "shapley": saving.shapley if saving else None,
            "order_min": saving.order_min if saving else None,
            "order_max": saving.order_max if saving else None,
            "sure": sure,
        }
        if name == "unexplained" and not replayed:
            out[name]["sure"] = "exact"
    return out


LOCAL_CAUSES = ("host_launch", "data_loading", "exposed_collective", "unexplained")


def _sure(name: str, a: Attribution, replayed: bool) -> str:
    """How well a cause is known: from the replay of whole pipelines, from one rank alone, or not at all."""
    if replayed:
        if name == "slow_worker" and _others_unseen(a):
            return "unavailable"
        inexact = name == "p2p_transfer" and any(not p.messages.exact.all() for p in a.programs)
        inexact |= name == "exposed_collective" and any((p.edge == Edge.AWAIT).any() for p in a.programs)
        return "estimated" if inexact or _clock_width(a) else "exact"
    if name == "p2p_transfer" and np.any(one_sided_transfer(a.run) >= 0):
        return "estimated"
    return "estimated" if name in LOCAL_CAUSES else "unavailable"


def _others_unseen(a: Attribution) -> bool:
    """Whether only one pipeline of several was replayed."""
    return bool(a.cut_off or a.run.layout.missing_ranks) and a.replicas < 2


def _clock_width(a: Attribution) -> bool:
    """Whether several hosts' clocks blur the split of a wait."""
    return len(a.run.clock.hosts) > 1


# --- ratios -----------------------------------------------------------------------------------------------------


def _bubble(a: Attribution, gpus: list[dict[str, Any]], shape: facts.Shape) -> dict[str, Any]:
    window = float(np.sum([g["window"] for g in gpus]))
    idle = float(np.sum([g["idle"] for g in gpus]))
    out: dict[str, Any] = {
        "fraction": None,
        "over_ideal": None,
        "own_span_rate": None,
        "straggler_waste": None,
        "gpu_idle_fraction": idle / window if window > 0 else None,
        "theory": shape.theory(),
    }
    if not a.replayed.any():
        return out
    work, bubble = _pipeline_work(a), float(a.bubble_ns[a.replayed].mean())
    out["fraction"] = bubble / float(a.idle.window_ns[a.replayed].mean())
    out["over_ideal"] = bubble * NS / work if work > 0 else None
    # The GPUs of one stage wait for slower replicas, and not for other stages.
    out["own_span_rate"] = 0.0 if a.run.layout.stages == 1 else _own_span_rate(a)
    out["straggler_waste"] = _straggler_waste(a)
    return out


def _pipeline_work(a: Attribution) -> float:
    """Seconds of F, B, I and W per GPU and step, mean over the replayed windows."""
    o = a.operations
    rows = is_pipeline(o.kind) & a.replayed[o.window]
    return float((o.end_ns - o.start_ns)[rows].sum()) * NS / max(int(a.replayed.sum()), 1)


def _own_span_rate(a: Attribution) -> float | None:
    """(cost - work) / cost, cost = the longest own first start to last end over the stages (Zero Bubble §5.3);
    work is the mean over the stages, as the paper's m(F + I + W) is for equal ones."""
    o = a.operations
    rows = np.flatnonzero(is_pipeline(o.kind))
    first = np.full(len(a.windows), np.iinfo(np.int64).max)
    last = np.full(len(a.windows), np.iinfo(np.int64).min)
    np.minimum.at(first, o.window[rows], o.start_ns[rows])
    np.maximum.at(last, o.window[rows], o.end_ns[rows])
    work = np.bincount(o.window[rows], (o.end_ns - o.start_ns)[rows], len(a.windows))
    chosen = np.flatnonzero(a.replayed & (last > first))
    if not len(chosen):
        return None
    steps, where = np.unique(a.windows.step[chosen], return_inverse=True)
    cost = np.zeros(len(steps))
    np.maximum.at(cost, where, (last - first)[chosen].astype(np.float64))
    mean = np.bincount(where, work[chosen]) / np.bincount(where)
    return float((1.0 - mean / cost).mean())


def _straggler_waste(a: Attribution) -> float | None:
    """1 - T_ideal / T (OSDI'25 eq. 3): T_ideal replays with every operation at the mean of its kind."""
    if a.bases is None:
        return None
    even = (Fix.SPREAD, Fix.WORKER, Fix.STAGE)
    ideal = sum(float(replay(p, a.bases, even).makespan.sum()) for p in a.programs)
    real = sum(float(d.makespans["measured"].sum()) for d in a.decompositions)
    return 1.0 - ideal / real if real > 0 else None


# --- the rest ---------------------------------------------------------------------------------------------------


def _replay(a: Attribution, gpus: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Notice]]:
    """How far the replay of the measured run is from the measurement, and whether that is near enough (§6)."""
    if not a.programs:
        return {"step_seconds": None, "error_fraction": None, "trusted": False}, []
    steps = sum(len(p.steps) for p in a.programs)
    modelled = sum(float(d.makespans["measured"].sum()) for d in a.decompositions) * NS / steps
    real = _measured_seconds(a)
    unexplained = np.mean([abs(g["causes"]["unexplained"]) for g in gpus])
    window = np.mean([g["window"] for g in gpus])
    error = abs(modelled - real) / real if real > 0 else 0.0
    share = float(unexplained / window) if window > 0 else 0.0
    impossible = len({step for step, _, _ in impossible_starts(a.run, a.programs)}) / steps
    trusted = bool(max(error, share, impossible) <= TRUST_GATE)
    notices = []
    if impossible > TRUST_GATE:
        text = (
            f"in {impossible:.0%} of the steps operations began before their input was made; above {TRUST_GATE:.0%} "
            "the attribution is not to be trusted"
        )
        notices.append(Notice("attribution-not-trusted", text))
    if max(error, share) > TRUST_GATE:
        notices.append(
            Notice(
                "attribution-not-trusted",
                f"the replay differs from the measured step by {error:.1%} and {share:.1%} of the step is "
                f"unexplained; above {TRUST_GATE:.0%} the attribution is not to be trusted",
            )
        )
    if a.cut_off:
        text = (
            f"rank {some(sorted(a.cut_off))}: the pipeline goes on at a rank without a trace "
            f"({some(sorted(set(a.cut_off.values())))}), so it has the causes that it tells by itself; all means are "
            "those of the other ranks"
        )
        notices.append(Notice("ranks-not-replayed", text))
    cut = np.isin(a.windows.rank, list(a.cut_off))
    if not (a.replayed | cut).all():
        left = np.unique(a.windows.step[~a.replayed & ~cut])
        listed = some(left.tolist())
        text = f"{len(left)} steps are not there for every rank, or not in one piece ({listed}): they are left out "
        notices.append(Notice("windows-not-replayed", text + "of all means, and count in each GPU's `all_steps` only"))
    return {"step_seconds": modelled, "error_fraction": error, "trusted": trusted}, notices


def _measured_seconds(a: Attribution) -> float:
    """Mean over the replayed steps of T_k - T_{k-1}."""
    total, count = 0.0, 0
    for p in a.programs:
        for step in p.steps:
            rows = a.windows.step == step
            total += float(a.windows.close_ns[rows].max() - a.windows.base_ns[rows].min()) * NS
            count += 1
    return total / count


def _clock(a: Attribution) -> dict[str, Any]:
    c = a.run.clock
    return {
        "hosts": [
            {
                "host": h.host,
                "offset": h.offset_ns * NS,
                "drift": h.drift,
                "low": None if h.low_ns is None else h.low_ns * NS,
                "high": None if h.high_ns is None else h.high_ns * NS,
                "part": part,
            }
            for h, part in zip(c.hosts, c.parts, strict=True)
        ],
        "aligned": c.aligned,
        "how": c.how,
    }


def _p2p(a: Attribution) -> list[dict[str, Any]]:
    """Per route: sums per step, except bytes (per message) and gbps (10⁹ bit/s over the exact transfers)."""
    table = tables.message_columns(a)
    if not len(table["step"]):
        return []
    steps = len(np.unique(table["step"]))
    order = np.lexsort((table["bytes"], table["direction"], table["dst"], table["src"]))
    t = {name: column[order] for name, column in table.items()}
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = np.any([t[c][1:] != t[c][:-1] for c in ("src", "dst", "direction")], axis=0)
    first = np.flatnonzero(new)
    count = np.diff(np.append(first, len(order)))
    seen = t["exact"].astype(np.bool_) & (t["bytes"] > 0) & (t["transfer_s"] > 0)
    bits = np.add.reduceat(np.where(seen, t["bytes"], 0) * 8, first)
    seen_s = np.add.reduceat(np.where(seen, t["transfer_s"], 0.0), first)
    wait, transfer = np.add.reduceat(t["wait_s"], first), np.add.reduceat(t["transfer_s"], first)
    exact = np.add.reduceat(t["exact"].astype(np.int64), first)
    middle = (t["bytes"][first + (count - 1) // 2] + t["bytes"][first + count // 2]) / 2
    return [
        {
            "src": int(t["src"][row]),
            "dst": int(t["dst"][row]),
            "direction": str(t["direction"][row]),
            "count": round(int(count[i]) / steps),
            "wait": float(wait[i]) / steps,
            "transfer": float(transfer[i]) / steps,
            "bytes": int(middle[i]) if t["bytes"][row + count[i] - 1] >= 0 else None,
            "gbps": float(bits[i] / seen_s[i] / 1e9) if seen_s[i] > 0 else None,
            "exact_share": float(exact[i]) / int(count[i]),
        }
        for i, row in enumerate(first.tolist())
    ]


def _straggler(run: Run) -> tuple[dict[str, Any], list[Notice]]:
    """For traces of the OSDI'25 paper its own figures, by its own rules, under ``straggler``; nothing for others."""
    if run.source.format != "straggler":
        return {}, []
    try:
        f = osdi.figures(run)
    except InputError as error:
        return {"straggler": None}, [Notice("straggler-unavailable", f"the OSDI'25 figures are unavailable: {error}")]
    by_number = {"by_stage": f.by_stage, "by_replica": f.by_replica, "by_worker": f.by_worker}
    figures = {
        "slowdown": f.slowdown,
        "waste": f.waste,
        "stage_share": f.stage_share,
        "worker_share": f.worker_share,
        "measured_seconds": f.measured_s,
        "replayed_seconds": f.replayed_s,
        "ideal_seconds": f.ideal_s,
        "by_type": f.by_type,
        **{name: {str(key): value for key, value in scores.items()} for name, scores in by_number.items()},
        "steps": f.steps,
        "skipped_steps": list(f.skipped),
    }
    return {"straggler": figures}, []


def _cost(a: Attribution, options: ReportOptions, gpus: list[dict[str, Any]], causes: dict[str, Any]) -> dict[str, Any]:
    """GPU-hours and money (§9): the mean idle of the GPUs seen, times all GPUs, times all steps."""
    count = options.gpus or a.run.layout.world_size or len(gpus)
    steps = options.total_steps or len(tables.step_seconds(a)[0])
    price = options.price_per_gpu_hour

    def hours(seconds: float) -> float:
        # Signed: equalising a pipe can lengthen it, and a cause may then be negative.
        return seconds * count * steps / prices.SECONDS_PER_HOUR

    idle = hours(float(np.mean([g["idle"] for g in gpus])))
    excess = [g["excess_compute"] for g in gpus]
    per_cause = {}
    for name, row in causes.items():
        own = None if row["seconds"] is None else hours(row["seconds"])
        per_cause[name] = {"gpu_hours": own, "money": prices.money(own, price)}
    intrinsic = [causes[c]["seconds"] for c in INTRINSIC_CAUSES]
    return {
        "gpus": count,
        "total_steps": steps,
        "price_per_gpu_hour": price,
        "currency": options.currency,
        "idle_gpu_hours": idle,
        "idle_money": prices.money(idle, price),
        "intrinsic_gpu_hours": None if None in intrinsic else hours(float(sum(intrinsic))),
        "per_cause": per_cause,
        "excess_compute_gpu_hours": None if None in excess else hours(float(np.mean(excess))),
    }


def _unavailable(a: Attribution, bubble: dict[str, Any], gpus: list[dict[str, Any]]) -> list[Notice]:
    """One notice per kind of figure that is null, saying why."""
    out = []
    if bubble["fraction"] is None:
        why = a.replay_refused or "no whole pipeline was seen"
        out.append(
            Notice(
                "fraction-unavailable",
                f"{why}; so bubble fraction, causes of waiting and savings (and phases, without micro-batches) are not "
                "known; busy and idle per GPU are found without them",
            )
        )
    elif _others_unseen(a):
        why = "of the pipelines of this job one was replayed, and nothing tells a slow GPU from a heavy stage"
        out.append(Notice("slow-worker-unavailable", f"slow_worker is unavailable, because {why}"))
    if any(g["contention"] is None for g in gpus):
        why = "kernels were not seen both alone and beside communication"
        out.append(Notice("contention-unavailable", f"contention is unavailable, because {why}"))
    if any(g["excess_compute"] is None for g in gpus):
        out.append(Notice("excess-unavailable", "excess compute is unavailable, because operations have no base times"))
    return out
