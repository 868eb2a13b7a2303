"""Straggler traces: the reader loses nothing, and the OSDI'25 figures are those that the paper's artifact prints."""

from __future__ import annotations

import builtins
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bubblescope.analysis import osdi
from bubblescope.errors import InputError
from bubblescope.ingest import straggler
from bubblescope.model import Kind, Lane, Run
from bubblescope.replay.engine import simulate
from bubblescope.replay.schedules import make

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
parquet = pytest.importorskip("pyarrow.parquet")

DATA = Path(__file__).parents[2] / ".." / "shared" / "data" / "straggler"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"the traces are not at {DATA}")

OPTIMIZER_S = 0.5


def rows_of(
    p: int, m: int, scale: list[float], dp: int = 2, steps: tuple[int, ...] = (7, 9)
) -> list[dict[str, Any]]:
    """A trace made from a replay of 1F1B: messages take no time, the tail is one optimizer of `OPTIMIZER_S`."""
    sim = simulate(make("1F1B", p, m), 1, 1, 1, scale_per_stage=scale)
    rows: list[dict[str, Any]] = []
    ends = {str(a): float(e) for a, e in zip(sim.actions, sim.end, strict=True)}
    for step in steps:
        for dp_rank in range(dp):
            for a, start, end in zip(sim.actions, sim.start, sim.end, strict=True):
                name = "forward" if a.kind == Kind.FORWARD else "backward"
                peer = a.stage + (1 if name == "forward" else -1)
                common = {"dp_rank": dp_rank, "stage": a.stage, "rank": dp_rank + dp * a.stage, "step": step}
                common |= {"seq_id": a.microbatch}
                own = {"mc": 0, "mb_id": a.microbatch, "gmc": a.stage}
                rows.append(
                    {**common, **own, "optype": f"{name}-compute", "start_ts": start, "duration": end - start}
                )
                none = {"mc": -1, "mb_id": -1, "gmc": -1}
                if 0 <= peer < p:
                    rows.append({**common, **none, "optype": f"{name}-send", "start_ts": end, "duration": 0.0})
                before = f"{a.stage - 1}F{a.microbatch}" if name == "forward" else f"{a.stage + 1}B{a.microbatch}"
                if before in ends:
                    rows.append(
                        {**common, **none, "optype": f"{name}-recv", "start_ts": ends[before], "duration": 0.0}
                    )
            for stage in range(p):
                common = {
                    "dp_rank": dp_rank,
                    "stage": stage,
                    "rank": dp_rank + dp * stage,
                    "step": step,
                    "seq_id": 0,
                }
                common |= {"mc": -1, "mb_id": -1, "gmc": -1, "start_ts": sim.makespan}
                tail = ["gc", "layernorm-grads-all-reduce", "grads-reduce-scatter", "optimizer-clip-main-grad"]
                if stage in (0, p - 1):
                    tail.append("embedding-grads-all-reduce")
                rows += [{**common, "optype": name, "duration": 0.0} for name in tail]
                rows.append({**common, "optype": "optimizer", "duration": OPTIMIZER_S})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def messages(run: Run) -> list[tuple[str, int, int, int]]:
    """(what, from rank, to rank, micro-batch) of every message."""
    s = run.spans
    return [
        (run.names[int(s.name[a])], int(s.rank[a]), int(s.rank[b]), int(s.microbatch[b])) for a, b in run.links.p2p
    ]


def test_a_trace_becomes_spans_messages_collectives_and_a_layout(tmp_path: Path) -> None:
    run = straggler.read([write(tmp_path / "trace-x.parquet", rows_of(3, 4, [1, 1, 1]))])
    layout, spans = run.layout, run.spans
    assert (layout.stages, layout.chunks, layout.microbatches, layout.data_parallel) == (3, 1, 4, 2)
    assert (layout.pp.tolist(), layout.replica.tolist()) == ([0, 0, 1, 1, 2, 2], [0, 1] * 3)
    assert layout.stage_rank[1, 2] == 5
    found = messages(run)
    assert len(found) == 2 * 2 * 2 * 2 * 4  # steps, replicas, directions, hops, micro-batches
    assert ("forward-send", 0, 2, 3) in found
    assert ("backward-send", 4, 2, 0) in found
    assert (spans.peer[run.links.p2p[:, 0]] == spans.rank[run.links.p2p[:, 1]]).all()
    instances, sizes = np.unique(run.links.collective[:, 0], return_counts=True)
    assert sorted(sizes.tolist()) == [2] * 6 + [2] * 4 + [6] * 2  # reduce-scatter, embedding, clip; in two steps
    assert len(instances) == 12


def test_steps_stand_one_after_the_other_with_a_marker_each(tmp_path: Path) -> None:
    run = straggler.read([write(tmp_path / "trace-x.parquet", rows_of(2, 2, [1, 1]))])
    spans = run.spans
    marks = spans.take(spans.where(kind=Kind.STEP))
    length = round((9 + OPTIMIZER_S) * 1e9)
    assert {
        (int(s), int(a), int(b)) for s, a, b in zip(marks.step, marks.start_ns, marks.end_ns, strict=True)
    } == {
        (7, 0, length),
        (9, length, 2 * length),
    }
    compute = spans.take(spans.where(lane=Lane.COMPUTE))
    assert set(compute.kind.tolist()) == {Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER}
    assert int(compute.duration_ns[compute.kind == Kind.FORWARD].sum()) == 2 * 2 * 2 * 2 * 10**9
    assert {n.code for n in run.notices} == {"steps-joined"}


def test_the_osdi_slowdown_of_a_slow_stage_is_the_one_the_replay_gives(tmp_path: Path) -> None:
    run = straggler.read([write(tmp_path / "trace-x.parquet", rows_of(4, 8, [1, 1, 1, 2]))])
    got = osdi.figures(run)
    assert got.measured_s == pytest.approx(57 + OPTIMIZER_S)
    assert got.replayed_s == pytest.approx(57 + OPTIMIZER_S)
    assert got.ideal_s == pytest.approx(33 * 1.25 + OPTIMIZER_S)
    assert got.waste == pytest.approx(1 - got.ideal_s / got.replayed_s)
    cured = simulate(make("1F1B", 4, 8), 1, 1, 1, scale_per_stage=[1, 1, 1, 1.25]).makespan
    assert got.stage_share == pytest.approx((57 - cured) / (57 - 33 * 1.25))
    assert next(iter(got.by_stage)) == 3
    assert set(got.by_worker) == set(range(8))


def test_a_step_that_lacks_an_operation_is_left_out_and_named(tmp_path: Path) -> None:
    rows = rows_of(2, 2, [1, 1])
    last = max(i for i, r in enumerate(rows) if r["step"] == 9 and r["optype"] == "gc")
    got = osdi.figures(straggler.read([write(tmp_path / "trace-x.parquet", rows[:last] + rows[last + 1 :])]))
    assert (got.steps, got.skipped) == (1, (9,))


def test_it_is_told_from_other_parquet_files_and_folders(tmp_path: Path) -> None:
    mine = write(tmp_path / "trace-x.parquet", rows_of(2, 2, [1, 1]))
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "y.parquet"
    parquet.write_table(pa.table({"a": [1]}), other)
    text = tmp_path / "other" / "z.parquet"
    text.write_text("no parquet")
    assert straggler.can_read(mine)
    assert straggler.can_read(tmp_path)
    assert not any(map(straggler.can_read, (other, text, tmp_path / "other", tmp_path / "missing.parquet")))


def test_unknown_operations_and_absent_peers_are_said(tmp_path: Path) -> None:
    rows = rows_of(2, 2, [1, 1])
    rows.append({**rows[0], "optype": "new-thing"})
    dropped = next(r for r in rows if r["optype"] == "forward-recv" and r["seq_id"] == 1)
    rows.remove(dropped)
    codes = {n.code for n in straggler.read([write(tmp_path / "trace-x.parquet", rows)]).notices}
    assert {"unknown-optype", "p2p-unmatched"} <= codes


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"duration": -1.0}, "negative"),
        ({"start_ts": float("nan")}, "no time"),
    ],
)
def test_times_that_cannot_be_are_refused_with_their_row(
    tmp_path: Path, change: dict[str, float], says: str
) -> None:
    rows = rows_of(2, 2, [1, 1])
    rows[3] |= change
    with pytest.raises(InputError, match=says) as caught:
        straggler.read([write(tmp_path / "trace-x.parquet", rows)])
    assert "row 3" in caught.value.what


def test_damaged_files_and_several_jobs_are_refused(tmp_path: Path) -> None:
    one = write(tmp_path / "trace-x.parquet", rows_of(2, 2, [1, 1]))
    write(tmp_path / "trace-y.parquet", rows_of(2, 2, [1, 1]))
    with pytest.raises(InputError, match="2 straggler traces"):
        straggler.read([tmp_path])
    one.write_bytes(one.read_bytes()[:-200])
    with pytest.raises(InputError, match="cannot be read"):
        straggler.read([one])
    parquet.write_table(pa.table({"optype": ["gc"]}), one)
    with pytest.raises(InputError, match="lacks the columns dp_rank"):
        straggler.read([one])


def test_without_pyarrow_the_hint_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "trace-x.parquet", rows_of(2, 2, [1, 1]))
    real = builtins.__import__

    def blocked(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", blocked)
    assert straggler.can_read(path)
    with pytest.raises(InputError) as caught:
        straggler.read([path])
    assert "pip install" in caught.value.hint


def test_the_figures_are_refused_for_any_other_format() -> None:
    with pytest.raises(InputError, match="OSDI"):
        osdi.figures(Run.empty())


PUBLISHED = {  # data/result-*.json, ms-*.json, mw-*.json of ByteDance-Seed/StragglerAnalysis
    "ST": {
        "slowdown": 1.1787021836556841,
        "waste": 0.1516,
        "by_type": {
            "forward-compute": 1.0874989663,
            "backward-compute": 1.0741564724,
            "forward-pp-comm": 0.9998586213,
        },
        "by_stage": {3: 1.2322559543, 0: 0.9980450635, 1: 0.9830562531, 2: 0.9824931310},
        "by_replica": {1: 1.1778704237, 0: 1.1730828198},
    },
    "SE": {
        "slowdown": 1.5373613711484118,
        "waste": 0.3495,
        "by_type": {"backward-compute": 1.4127706136, "forward-compute": 1.1459635073, "optimizer": 1.0000224828},
        "by_stage": {1: 1.4354480067, 0: 1.1678121027},
        "by_replica": {8: 1.2044798228, 27: 1.1900609937, 24: 1.1180441128},
    },
}


@needs_data
@pytest.mark.parametrize("job", ["ST", "SE"])
def test_the_papers_own_figures_come_out_to_1e_4_and_in_time(job: str) -> None:
    began = time.perf_counter()
    got = osdi.figures(straggler.read([DATA / f"trace-{job}.parquet"]))
    assert time.perf_counter() - began < 10
    wanted = PUBLISHED[job]
    assert got.slowdown == pytest.approx(wanted["slowdown"], rel=1e-4)
    assert round(got.waste, 4) == wanted["waste"]
    for table in ("by_type", "by_stage", "by_replica"):
        mine = getattr(got, table)
        assert {k: mine[k] for k in wanted[table]} == pytest.approx(wanted[table], rel=1e-4)
    ms = json.loads((DATA / f"ms-{job}.json").read_text())
    mw = json.loads((DATA / f"mw-{job}.json").read_text())
    assert (got.replayed_s, got.ideal_s) == pytest.approx((ms["tori"], ms["tideal"]), rel=1e-4)
    assert got.stage_share == pytest.approx(ms["Ms"], rel=1e-4)
    assert got.worker_share == pytest.approx(mw["Mw"], rel=1e-4)


@needs_data
@pytest.mark.parametrize(("job", "ranks", "sends"), [("ST", 8, 1536), ("SE", 64, 22016)])
def test_the_published_traces_are_read_whole(job: str, ranks: int, sends: int) -> None:
    run = straggler.read([DATA / f"trace-{job}.parquet"])
    table = parquet.read_table(DATA / f"trace-{job}.parquet")
    assert len(run.spans) == table.num_rows + ranks * len(set(table.column("step").to_pylist()))
    assert len(run.links.p2p) == sends
    assert len(run.ranks) == ranks
    assert not [n for n in run.notices if n.code in ("unknown-optype", "p2p-unmatched")]
    both = run.links.p2p
    assert (run.spans.microbatch[both[:, 0]] == run.spans.microbatch[both[:, 1]]).all()
