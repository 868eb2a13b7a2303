"""A `Report` computed from a small replay of our own, so that the views can be tested without the analysis.

Nothing here is drawn by hand: every operation, gap, cause and saving follows from replaying 1F1B with the
durations of a `Job`. Causes come from nested replays in the order of ATTRIBUTION.md §6, gap by gap: the gap
before the same operation is compared between two replays, so the causes of a gap sum to it exactly.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

CAUSES = (
    "warmup", "cooldown", "schedule_steady", "stage_imbalance", "slow_worker", "transient",
    "microbatch_imbalance", "p2p_transfer", "exposed_collective", "optimizer", "host_launch",
    "data_loading", "unexplained",
)  # fmt: skip
LEVELS = (
    ("noise", "unexplained"),
    ("data", "data_loading"),
    ("host", "host_launch"),
    ("p2p", "p2p_transfer"),
    ("collective", "exposed_collective"),
    ("transient", "transient"),
    ("worker", "slow_worker"),
    ("imbalance", "stage_imbalance"),
)
OUTSIDE_PIPELINE = ("exposed_collective", "optimizer", "host_launch", "data_loading")
GAME = ("p2p", "collective", "transient", "worker", "imbalance")
RUNGS = ("upstream_s", "peer_host_s", "late_recv_s", "transfer_s", "own_host_s")
PHASES = ("warmup", "steady", "cooldown")
END = "step end"


@dataclass(frozen=True)
class Job:
    """One training job, times in seconds. Factors multiply F and B of a stage, worker or single operation."""

    stages: int = 4
    microbatches: int = 8
    replicas: int = 1
    steps: int = 12
    forward: float = 0.010
    backward: float = 0.020
    hop: float = 0.0004
    host: float = 0.00008
    data: float = 0.0009
    collective: float = 0.0015
    optimizer: float = 0.004
    noise: float = 0.00005
    stage_factor: dict[int, float] = field(default_factory=lambda: {3: 1.6})
    worker_factor: dict[tuple[int, int], float] = field(default_factory=dict)
    spikes: dict[tuple[int, int, int, str], float] = field(default_factory=lambda: {(7, 0, 1, "B4"): 4.0})
    price: float | None = 2.5
    total_steps: int | None = 2_000_000
    missing: tuple[int, ...] = ()
    files: tuple[str, ...] = ("recording/",)
    warnings: tuple[tuple[str, str], ...] = ()

    def order(self, stage: int) -> list[str]:
        """1F1B of one stage: p-1-s forwards, then alternating, then the remaining backwards."""
        m, ahead = self.microbatches, min(self.stages - 1 - stage, self.microbatches)
        ops = [f"F{i}" for i in range(ahead)]
        for i in range(m):
            ops += [f"F{i + ahead}"] * (i + ahead < m) + [f"B{i}"]
        return ops

    def duration(self, step: int, replica: int, stage: int, op: str, fixed: frozenset[str]) -> float:
        base = self.forward if op[0] == "F" else self.backward
        stages = [self.stage_factor.get(s, 1.0) for s in range(self.stages)]
        base *= sum(stages) / len(stages) if "imbalance" in fixed else stages[stage]
        if "worker" not in fixed:
            base *= self.worker_factor.get((replica, stage), 1.0)
        if "transient" not in fixed:
            base *= self.spikes.get((step, replica, stage, op), 1.0)
        return base

    def delay(self, step: int, stage: int, op: str, fixed: frozenset[str]) -> float:
        """Host time before an operation: launch, the loader of stage 0, and noise that no replay knows."""
        late = 0.0 if "host" in fixed else self.host
        if stage == 0 and op[0] == "F" and "data" not in fixed:
            late += self.data
        if "noise" not in fixed:
            late += random.Random(f"{step} {stage} {op}").random() * self.noise
        return late


@dataclass(frozen=True)
class Op:
    name: str
    start: float
    end: float
    ready: float
    """End of the producing computation elsewhere, 0 when none."""
    hop: float
    producer: int
    """Producing stage, -1 when none."""

    @property
    def arrived(self) -> float:
        return self.ready + self.hop


class Replay:
    """All replicas of one step, from 0 to the end of the optimizer."""

    def __init__(self, job: Job, step: int, fixed: frozenset[str] = frozenset()) -> None:
        self.job, self.step, self.fixed = job, step, fixed
        self.replicas = self._replicas()
        last = max(ops[-1].end for stages in self.replicas for ops in stages)
        self.barrier = last + (0.0 if "collective" in fixed else job.collective)
        self.window = self.barrier + job.optimizer

    def _replicas(self) -> list[list[list[Op]]]:
        """Replicas without a slow worker or a spike of their own are the same, and replayed once."""
        special = {r for r, _ in self.job.worker_factor} | {r for s, r, _, _ in self.job.spikes if s == self.step}
        ordinary = next((r for r in range(self.job.replicas) if r not in special), None)
        shared = [] if ordinary is None else self._pipeline(ordinary)
        return [self._pipeline(r) if r in special else shared for r in range(self.job.replicas)]

    def _pipeline(self, replica: int) -> list[list[Op]]:
        job, fixed = self.job, self.fixed
        hop = 0.0 if "p2p" in fixed else job.hop
        todo = [job.order(s) for s in range(job.stages)]
        done: list[list[Op]] = [[] for _ in todo]
        ends: dict[tuple[int, str], float] = {}
        while any(len(d) < len(t) for d, t in zip(done, todo, strict=True)):
            for s, ops in enumerate(todo):
                while len(done[s]) < len(ops):
                    name = ops[len(done[s])]
                    peer = s - 1 if name[0] == "F" else s + 1
                    remote = 0 <= peer < job.stages
                    if remote and (peer, name) not in ends:
                        break
                    ready = ends[peer, name] if remote else 0.0
                    free = done[s][-1].end if done[s] else 0.0
                    start = max(free, ready + hop if remote else 0.0) + job.delay(self.step, s, name, fixed)
                    end = start + job.duration(self.step, replica, s, name, fixed)
                    ends[s, name] = end
                    done[s].append(Op(name, start, end, ready, hop if remote else 0.0, peer if remote else -1))
        return done

    def gaps(self, replica: int, stage: int) -> Iterator[tuple[str, float, float, Op | None]]:
        """(operation that ended it, start, end, that operation or None at the end of the step)."""
        free = 0.0
        for op in self.replicas[replica][stage]:
            yield op.name, free, op.start, op
            free = op.end
        yield END, free, self.barrier, None


def _rungs(job: Job, u: float, v: float, op: Op | None, barrier_last: float) -> dict[str, float]:
    """The readiness ladder of ATTRIBUTION.md §5 on one gap."""
    ready = barrier_last if op is None else op.ready
    arrived = barrier_last + job.collective if op is None else op.arrived
    t1 = min(max(u, ready), v)
    t4 = min(max(t1, arrived), v)
    return dict(zip(RUNGS, (t1 - u, 0.0, 0.0, t4 - t1, v - t4), strict=True))


@dataclass(frozen=True, eq=False)
class FakeReport:
    """The part of `Report` that views read."""

    data: dict[str, Any]
    ops: pd.DataFrame
    gaps: pd.DataFrame
    steps: pd.DataFrame
    gpus: pd.DataFrame
    causes: pd.DataFrame
    p2p: pd.DataFrame
    advice: pd.DataFrame
    messages: pd.DataFrame
    ideal: pd.DataFrame
    stage_balance: pd.DataFrame
    slowdowns: dict[int, float]
    device: pd.DataFrame = field(default_factory=pd.DataFrame)


class _Builder:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.cache: dict[tuple[int, frozenset[str]], Replay] = {}

    def replay(self, step: int, fixed: frozenset[str] = frozenset()) -> Replay:
        spiked = any(s == step for s, *_ in self.job.spikes)
        key = (step if "noise" not in fixed or spiked else -1, fixed)
        if key not in self.cache:
            self.cache[key] = Replay(self.job, step, fixed)
        return self.cache[key]

    @cached_property
    def levels(self) -> list[frozenset[str]]:
        names = [name for name, _ in LEVELS]
        return [frozenset(names[:n]) for n in range(len(names) + 1)]

    @cached_property
    def ranks(self) -> list[tuple[int, int, int]]:
        """(rank, replica, stage) of every rank that was seen."""
        job = self.job
        every = [(r * job.stages + s, r, s) for r in range(job.replicas) for s in range(job.stages)]
        return [x for x in every if x[0] not in job.missing]

    def rank_of(self, replica: int, stage: int) -> int:
        return replica * self.job.stages + stage

    @cached_property
    def starts(self) -> list[float]:
        windows = [self.replay(k).window for k in range(self.job.steps)]
        return [0.0, *itertools.accumulate(windows)]

    def ops(self) -> pd.DataFrame:
        rows = []
        for step, (rank, replica, stage) in itertools.product(range(self.job.steps), self.ranks):
            one, t = self.replay(step), self.starts[step]
            for op in one.replicas[replica][stage]:
                rows.append((rank, step, stage, 0, int(op.name[1:]), op.name[0], t + op.start, t + op.end))
            rows.append((rank, step, stage, 0, -1, "optimizer", t + one.barrier, t + one.window))
        columns = ["rank", "step", "stage", "chunk", "microbatch", "kind", "start_s", "end_s"]
        return pd.DataFrame(rows, columns=columns)

    def gaps(self) -> pd.DataFrame:
        rows: list[dict[str, Any]] = []
        for step, (rank, replica, stage) in itertools.product(range(self.job.steps), self.ranks):
            rows += self._gaps_of(step, rank, replica, stage)
        return pd.DataFrame(rows)

    def _gaps_of(self, step: int, rank: int, replica: int, stage: int) -> Iterator[dict[str, Any]]:
        job, t = self.job, self.starts[step]
        replays = [self.replay(step, fixed) for fixed in self.levels]
        lengths = [[v - u for _, u, v, _ in one.gaps(replica, stage)] for one in replays]
        order = job.order(stage)
        first_backward, last_forward = order.index("B0"), order.index(f"F{job.microbatches - 1}")
        for i, (before, u, v, op) in enumerate(replays[0].gaps(replica, stage)):
            if v - u <= 0:
                continue
            phase = "warmup" if i <= first_backward else "cooldown" if i > last_forward else "steady"
            causes = dict.fromkeys(CAUSES, 0.0)
            for level, (_, cause) in enumerate(LEVELS):
                causes[cause] = lengths[level][i] - lengths[level + 1][i]
            causes["schedule_steady" if phase == "steady" else phase] = lengths[-1][i]
            producer = op.producer if op is not None else -1
            yield {
                "rank": rank, "step": step, "start_s": t + u, "end_s": t + v, "phase": phase,
                "cause": max(CAUSES, key=lambda c: causes[c]), "before": "" if op is None else before,
                "stage": stage, "microbatch": -1 if op is None else int(before[1:]), **causes,
                **_rungs(job, u, v, op, replays[0].barrier - job.collective),
                "producer_rank": self.rank_of(replica, producer) if producer >= 0 else -1,
                "producer_stage": producer, "producer_op": before if producer >= 0 else "",
            }  # fmt: skip

    def messages(self) -> pd.DataFrame:
        rows = []
        for step, (rank, replica, stage) in itertools.product(range(self.job.steps), self.ranks):
            t = self.starts[step]
            free = 0.0
            for op in self.replay(step).replicas[replica][stage]:
                if op.producer >= 0:
                    source = self.rank_of(replica, op.producer)
                    direction = "act" if op.name[0] == "F" else "grad"
                    send, recv, done = op.ready, free, max(op.arrived, free)
                    rows.append((source, rank, direction, step, int(op.name[1:]), t + send, t + recv, t + done))
                free = op.end
        columns = ["src", "dst", "direction", "step", "microbatch", "send_s", "recv_s", "done_s"]
        return pd.DataFrame(rows, columns=columns)

    def ideal(self) -> pd.DataFrame:
        one = self.replay(0, self.levels[-1])
        rows = [
            (self.rank_of(0, s), 0, s, 0, int(op.name[1:]), op.name[0], op.start, op.end)
            for s, ops in enumerate(one.replicas[0])
            for op in ops
        ]
        columns = ["rank", "step", "stage", "chunk", "microbatch", "kind", "start_s", "end_s"]
        return pd.DataFrame(rows, columns=columns)


def _gpus(gaps: pd.DataFrame, windows: dict[int, float], steps: int) -> list[dict[str, Any]]:
    gpus = []
    for rank, mine in gaps.groupby("rank"):
        length = mine["end_s"] - mine["start_s"]
        window, idle = sum(windows.values()) / steps, float(length.sum()) / steps
        comm = float(mine[list(RUNGS[:4])].sum().sum()) / steps
        gpus.append({
            "rank": int(rank), "stage": int(mine["stage"].iloc[0]), "window": window, "busy": window - idle,
            "idle": idle, "exposed_comm": comm, "copies": 0.0, "empty": idle - comm,
            "phases": {p: float(length[mine["phase"] == p].sum()) / steps for p in PHASES},
            "causes": {c: float(mine[c].sum()) / steps for c in CAUSES},
            "excess_compute": 0.0, "contention": 0.0,
        })  # fmt: skip
    return gpus


def _shapley(build: _Builder, step: int) -> dict[str, tuple[float, float, float]]:
    """Value, least and most over all orders of fixing the causes of the game (host delays already removed)."""
    ground = frozenset(("noise", "data", "host"))
    seen: dict[str, list[float]] = {name: [] for name in GAME}
    for order in itertools.permutations(GAME):
        fixed = ground
        for name in order:
            gain = build.replay(step, fixed).window - build.replay(step, fixed | {name}).window
            seen[name].append(gain)
            fixed = fixed | {name}
    return {name: (sum(v) / len(v), min(v), max(v)) for name, v in seen.items()}


def _causes(build: _Builder, gpus: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    mean = {c: sum(g["causes"][c] for g in gpus) / len(gpus) for c in CAUSES}
    idle = sum(mean.values())
    level = {cause: name for name, cause in LEVELS}
    game = _shapley(build, 0) if build.job.replicas == 1 else {}
    base = build.replay(0).window
    out = {}
    for cause in CAUSES:
        name = level.get(cause, "")
        value, low, high = game.get(name, (None, None, None))
        fixed = build.replay(0, frozenset((name,))).window if name and name != "noise" else None
        out[cause] = {
            "seconds": mean[cause], "share_of_idle": mean[cause] / idle,
            "first_in": None if fixed is None else base - fixed,
            "shapley": value, "order_min": low, "order_max": high, "sure": "exact",
        }  # fmt: skip
    return out


def _advice(build: _Builder, gpus: int) -> list[dict[str, Any]]:
    job, now = build.job, build.replay(0).window
    every_fix = build.replay(0, frozenset(("imbalance",))).window
    more = Replay(
        Job(**{**job.__dict__, "microbatches": 2 * job.microbatches, "steps": 1}), 0, frozenset(("noise",))
    ).window
    rows = [
        (f"Run {2 * job.microbatches} micro-batches per step instead of {job.microbatches}", "microbatches",
         {"microbatches": 2 * job.microbatches}, more / 2, "activations: unchanged, 1F1B keeps at most "
         f"{job.stages} micro-batches alive", ["same micro-batch size", "the step handles twice the tokens; "
         "the time is given per today's step"]),
        ("Move layers so that all stages take equal time", "partition", {"stages": "equal"}, every_fix,
         "weights move with their layers", ["layers can be split evenly (continuous bound)"]),
    ]  # fmt: skip
    if job.worker_factor:
        t = build.replay(0, frozenset(("worker",))).window
        names = ", ".join(f"rank {build.rank_of(*w)}" for w in sorted(job.worker_factor))
        rows.append((f"Replace the slow GPUs: {names}", "node", {}, t, "none", ["the GPU, not its data, is slow"]))
    t = build.replay(0, frozenset(("p2p",))).window
    rows.append(("Overlap or speed up stage-to-stage transfers", "communication", {}, t, "none",
                 ["transfers become free: an upper bound"]))  # fmt: skip
    t = build.replay(0, frozenset(("data",))).window
    rows.append(("Prefetch the input of stage 0", "input", {}, t, "a few batches of host memory",
                 ["loading is hidden completely"]))  # fmt: skip
    total = job.total_steps or job.steps
    out = []
    for action, kind, detail, seconds, memory, assumed in rows:
        saved = now - seconds
        hours = saved * gpus * total / 3600
        out.append({
            "action": action, "kind": kind, "detail": detail, "step_seconds": seconds, "saved_seconds": saved,
            "now_seconds": now, "step_share": 1.0,
            "saved_gpu_hours": hours, "saved_money": None if job.price is None else hours * job.price,
            "memory_note": memory, "assumptions": assumed,
        })  # fmt: skip
    return sorted(out, key=lambda a: -float(a["saved_seconds"]))


def _p2p(messages: pd.DataFrame, size: int, steps: int) -> list[dict[str, Any]]:
    """Sums per step, as report.json has them."""
    rows = []
    for (src, dst, direction), mine in messages.groupby(["src", "dst", "direction"]):
        ready = mine[["send_s", "recv_s"]].max(axis=1)
        transfer = float((mine["done_s"] - ready).sum()) / steps
        rows.append({
            "src": int(src), "dst": int(dst), "direction": str(direction), "count": len(mine) // steps,
            "wait": float((ready - mine["recv_s"]).sum()) / steps, "transfer": transfer, "bytes": size,
            "gbps": None if transfer <= 0 else size * 8e-9 * (len(mine) // steps) / transfer,
        })  # fmt: skip
    return rows


def _ratios(build: _Builder, gpus: list[dict[str, Any]]) -> dict[str, Any]:
    job, one = build.job, build.replay(0)
    window = sum(g["window"] for g in gpus) / len(gpus)
    idle = sum(g["idle"] for g in gpus) / len(gpus)
    bubble = sum(g["causes"][c] for g in gpus for c in CAUSES if c not in OUTSIDE_PIPELINE) / len(gpus)
    p, m = job.stages, job.microbatches
    spans = [ops[-1].end - ops[0].start for ops in one.replicas[0]]
    work = [sum(op.end - op.start for op in ops) for ops in one.replicas[0]]
    longest = max(range(len(spans)), key=lambda s: spans[s])
    return {
        "fraction": bubble / window,
        "over_ideal": bubble / (job.microbatches * (job.forward + job.backward)),
        "own_span_rate": (spans[longest] - work[longest]) / spans[longest],
        "straggler_waste": 1 - build.replay(0, build.levels[-1]).window / one.window,
        "gpu_idle_fraction": idle / window,
        "theory": {
            "makespan": (m + p - 1) * (job.forward + job.backward), "fraction": (p - 1) / (m + p - 1),
            "over_ideal": (p - 1) / m, "own_span_rate": (p - 1) / (m + p - 1), "source": "Megatron-LM SC'21 §2.2",
        },
    }  # fmt: skip


def _cost(job: Job, data: dict[str, Any], world: int) -> dict[str, Any]:
    total = job.total_steps or job.steps
    idle = sum(g["idle"] for g in data["gpus"]) / len(data["gpus"])
    hours = idle * world * total / 3600
    price = job.price
    return {
        "gpus": world, "total_steps": total, "price_per_gpu_hour": price,
        "currency": None if price is None else "USD", "idle_gpu_hours": hours,
        "idle_money": None if price is None else hours * price,
        "per_cause": {
            c: {"gpu_hours": v["share_of_idle"] * hours,
                "money": None if price is None else v["share_of_idle"] * hours * price}
            for c, v in data["causes"].items()
        },
        "excess_compute_gpu_hours": 0.0,
    }  # fmt: skip


def _steps(build: _Builder, gaps: pd.DataFrame, ranks: int) -> pd.DataFrame:
    idle = (gaps["end_s"] - gaps["start_s"]).groupby(gaps["step"]).sum()
    windows = [build.replay(k).window for k in range(build.job.steps)]
    middle = sorted(windows)[len(windows) // 2]
    rows = [
        (k, build.starts[k], build.starts[k + 1], w, float(idle[k]) / ranks / w, w > 1.05 * middle)
        for k, w in enumerate(windows)
    ]
    return pd.DataFrame(rows, columns=["step", "start_s", "end_s", "seconds", "idle_fraction", "outlier"])


def _balance(job: Job) -> pd.DataFrame:
    factor = [job.stage_factor.get(s, 1.0) for s in range(job.stages)]
    return pd.DataFrame({
        "stage": range(job.stages), "position": range(job.stages), "loss_s": [math.nan] * job.stages,
        "F_s": [job.forward * f for f in factor],
        "B_s": [job.backward * f for f in factor], "I_s": [math.nan] * job.stages, "W_s": [math.nan] * job.stages,
    })  # fmt: skip


def _slowdowns(build: _Builder) -> dict[int, float]:
    """Beside other replicas, all of which take the same."""
    if build.job.replicas < 2:
        return {}
    return {rank: build.job.worker_factor.get((replica, stage), 1.0) for rank, replica, stage in build.ranks}


def _quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def build(job: Job | None = None) -> FakeReport:
    """The report of one job."""
    job = job or Job()
    made = _Builder(job)
    gaps, messages, ops = made.gaps(), made.messages(), made.ops()
    world = job.stages * job.replicas
    steps = _steps(made, gaps, len(made.ranks))
    gpus = _gpus(gaps, dict(zip(steps["step"], steps["seconds"], strict=True)), job.steps)
    seconds = [float(s) for s in steps["seconds"]]
    replay_error = abs(made.replay(0, frozenset(("noise",))).window / made.replay(0).window - 1)
    data: dict[str, Any] = {
        "schema_version": 1, "bubblescope_version": "0.1.0", "created": "2026-01-31T14:05:00Z",
        "source": {"format": "recording", "files": list(job.files), "ranks": [r for r, _, _ in made.ranks],
                   "world_size": world, "missing_ranks": list(job.missing), "framework": "torch",
                   "warnings": [{"code": c, "message": m, "file": None} for c, m in job.warnings]},
        "pipeline": {"stages": job.stages, "chunks_per_gpu": 1, "microbatches": job.microbatches,
                     "schedule": "1F1B", "data_parallel": job.replicas,
                     "inferred": {"schedule": "from the order"}},
        "steps": {"analysed": job.steps, "skipped": [{"index": -1, "why": "cut at the start"}],
                  "seconds_median": _quantile(seconds, 0.5), "seconds_p05": _quantile(seconds, 0.05),
                  "seconds_p95": _quantile(seconds, 0.95)},
        "gpus": gpus, "bubble": _ratios(made, gpus), "causes": _causes(made, gpus),
        "p2p": _p2p(messages, 8 << 20, job.steps),
        "replay": {"step_seconds": made.replay(0, frozenset(("noise",))).window, "error_fraction": replay_error,
                   "trusted": True},
        "clock": {"hosts": [{"host": "node-0", "offset": 0.0, "drift": 0.0, "low": -0.00001, "high": 0.00001}],
                  "aligned": True},
    }  # fmt: skip
    data["cost"] = _cost(job, data, world)
    data["advice"] = _advice(made, world)
    causes = pd.DataFrame([{"cause": c, **v} for c, v in data["causes"].items()])
    return FakeReport(
        data, ops, gaps, steps, pd.json_normalize(gpus), causes, pd.DataFrame(data["p2p"]),
        pd.DataFrame(data["advice"]), messages, made.ideal(), _balance(job), _slowdowns(made),
    )  # fmt: skip


HOSTILE = "</script><script>alert(1)</script>"
TERMINAL = "\x1b]0;owned\x07\x1b[31mred\u202e"
FORMULA = '=cmd|" /C calc"!A0'


def hostile() -> FakeReport:
    """Every text that comes from outside tries to be code for a browser, a terminal or a spreadsheet."""
    bad = HOSTILE + TERMINAL + "<img src=x onerror=alert(1)>"
    report = build(Job(steps=2, files=(bad, FORMULA), warnings=(("rank-missing", bad), (FORMULA, "{{7*7}}"))))
    report.data["advice"][0]["action"] = FORMULA + bad
    report.data["advice"][0]["assumptions"] = [bad]
    report.data["clock"]["hosts"][0]["host"] = bad
    report.data["cost"]["currency"] = "=X"
    report.data["pipeline"]["schedule"] = bad
    advice = pd.DataFrame(report.data["advice"])
    gaps = report.gaps.assign(before=[FORMULA if i == 0 else b for i, b in enumerate(report.gaps["before"])])
    return FakeReport(**{**report.__dict__, "advice": advice, "gaps": gaps})


def large(replicas: int = 128, stages: int = 8) -> FakeReport:
    """1,024 ranks: two slow workers among 128 replicas of an 8-stage pipeline."""
    return build(
        Job(stages=stages, microbatches=16, replicas=replicas, steps=3, stage_factor={7: 1.25}, noise=0.0,
            worker_factor={(17, 2): 1.3, (90, 5): 1.15}, spikes={}, total_steps=200_000)
    )  # fmt: skip


def _book_as_unexplained(report: FakeReport) -> None:
    """What only a replay of the whole pipeline tells apart stands under unexplained where there is none."""
    local = (*OUTSIDE_PIPELINE, "unexplained")
    for gpu in report.data["gpus"]:
        for cause in CAUSES:
            if cause not in local:
                gpu["causes"]["unexplained"] += gpu["causes"][cause]
                gpu["causes"][cause] = 0.0
    rest = [c for c in CAUSES if c not in local]
    report.gaps["unexplained"] += report.gaps[rest].sum(axis=1)
    report.gaps[rest] = 0.0
    report.gaps["cause"] = report.gaps[list(CAUSES)].idxmax(axis=1)


def one_rank_missing() -> FakeReport:
    """Rank 2 of 4 was not seen, so what needs both ends is not known."""
    report = build(Job(missing=(2,), price=None, total_steps=None, warnings=(
        ("rank-missing", "rank 2 of 4 was not seen: waits for it cannot be split"),
        ("fraction-unavailable", "bubble fraction and savings need every stage, and stage 2 is missing"),
    )))  # fmt: skip
    report.data["bubble"]["straggler_waste"] = None
    _book_as_unexplained(report)
    report.data["replay"] = {"step_seconds": None, "error_fraction": None, "trusted": False}
    report.data["clock"] = {"hosts": [], "aligned": False}
    for cause, line in report.data["causes"].items():
        if cause not in (*OUTSIDE_PIPELINE, "unexplained"):
            line.update(dict.fromkeys(line), sure="unavailable")
    report.data["bubble"].update(fraction=None, over_ideal=None, own_span_rate=None, theory=None)
    report.data["advice"] = []
    return FakeReport(**{**report.__dict__, "advice": pd.DataFrame(report.data["advice"])})
