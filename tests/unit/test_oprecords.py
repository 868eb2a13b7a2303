"""Records of operations: MegatronApp, ndtimeline and Megatron's timer logs, the real files and generated ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bubblescope.align import prepare
from bubblescope.errors import InputError
from bubblescope.ingest import read
from bubblescope.model import Kind, Lane
from bubblescope.report.build import build
from tests.support.kineto_gen import Shape, Truth, simulate

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "megatronapp"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not beside this checkout")
TRUTH = simulate(Shape(steps=3))


def report(path: Path) -> dict[str, Any]:
    return build(prepare(read(path))).data


def test_records_of_another_tracer_are_not_called_events_of_another_kind(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "mine", "name": "F", "pid": 0, "tid": 0, "ts": 0, "dur": 1, "args": {"pp_rank": 0}}
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": [event]}))
    with pytest.raises(InputError, match=r"none of the events is one that torch\.profiler writes"):
        read(tmp_path / "rank0.json", format="kineto")


# --- MegatronApp ---------------------------------------------------------------------------------------------


@needs_data
def test_the_gaps_of_the_interleaved_trace_are_the_published_ones() -> None:
    data = report(DATA / "pp4_vpp4_iter10.json")
    assert data["steps"]["seconds_median"] == pytest.approx(0.7129, abs=1e-4)
    assert [g["idle"] / g["window"] for g in data["gpus"]] == pytest.approx([0.529, 0.549, 0.542, 0.247], abs=6e-4)
    assert data["pipeline"] | {"inferred": 0} == {
        "stages": 4, "chunks_per_gpu": 4, "microbatches": 8, "schedule": "Interleaved1F1B", "data_parallel": 1,
        "passes_per_step": 1, "inferred": 0, "overruled": {},
    }  # fmt: skip
    codes = {w["code"] for w in data["source"]["warnings"]}
    assert {"messages-derived", "tail-unmarked"} <= codes
    assert data["causes"]["p2p_transfer"]["sure"] == "estimated"


@needs_data
def test_ranks_that_count_from_their_own_start_are_bounded_by_what_they_need_of_each_other() -> None:
    data = report(DATA / "merged_trace.json")
    assert data["steps"]["analysed"] == 2
    assert "steps-joined" in {w["code"] for w in data["source"]["warnings"]}
    assert data["clock"]["aligned"]
    for host in data["clock"]["hosts"][1:]:
        assert host["low"] < host["offset"] < host["high"]
        assert host["high"] - host["low"] < 0.01
    for gpu in data["gpus"]:
        assert sum(gpu["causes"].values()) == pytest.approx(gpu["idle"], abs=1e-6)


def marks(truth: Truth) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for (rank, step), (begin, end) in truth.step_ranges.items():
        origin = truth.windows[0][0]
        common = {"pid": rank, "tid": 0, "args": {"iteration": step}}
        out.append({"name": "iteration begin", "ph": "i", "ts": (begin - origin) // 1000, **common})
        out.append({"name": "iteration end", "ph": "i", "ts": (end - origin) // 1000, **common})
    for op in truth.ops:
        name = "forward" if op.kind == "F" else "backward"
        args = {"iteration": op.step, "microbatch": op.microbatch, "model_chunk": 0, "pp_rank": op.rank}
        origin = truth.windows[0][0]
        common = {"name": name, "pid": op.rank, "tid": 0}
        out.append({**common, "ph": "B", "ts": (op.start_ns - origin) // 1000, "args": {"iteration": op.step}})
        out.append({**common, "ph": "E", "ts": (op.end_ns - origin) // 1000, "args": args})
    return out


def test_a_generated_trace_has_the_causes_of_the_truth(tmp_path: Path) -> None:
    """Last stage 1.5×: stage imbalance; what is 50 us of transfer here may be late launches, and is said to."""
    (tmp_path / "x.json").write_text(json.dumps(marks(TRUTH)))
    data = report(tmp_path / "x.json")
    window = sum(g["window"] for g in data["gpus"])
    assert data["replay"]["trusted"]
    assert data["causes"]["stage_imbalance"]["seconds"] / window == pytest.approx(0.043, abs=0.002)
    assert data["causes"]["p2p_transfer"]["seconds"] / window == pytest.approx(0.0036, abs=0.001)
    assert data["pipeline"]["schedule"] == "1F1B"


def test_microbatches_counted_from_one_are_as_many_as_there_are_numbers(tmp_path: Path) -> None:
    events = marks(TRUTH)
    for event in events:
        if "microbatch" in event["args"]:
            event["args"]["microbatch"] += 1
    (tmp_path / "x.json").write_text(json.dumps(events))
    assert read(tmp_path / "x.json").layout.microbatches == TRUTH.shape.microbatches


def test_tracks_that_run_alike_are_tensor_parallel_ranks(tmp_path: Path) -> None:
    events = marks(TRUTH)
    (tmp_path / "x.json").write_text(json.dumps([{**e, "tid": t} for e in events for t in (0, 1)]))
    run = prepare(read(tmp_path / "x.json"))
    assert run.ranks == list(range(8))
    assert run.layout.tp.tolist() == [0, 1] * 4
    assert run.layout.pp.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert run.layout.data_parallel == 2


@pytest.mark.parametrize("damage", [{"pid": 2**40}, {"pid": -1}, {"pid": 1 << 20}, {"ts": "soon"}, {"args": {}}])
def test_marks_that_cannot_be_are_the_reason_where_none_is_left(tmp_path: Path, damage: dict[str, Any]) -> None:
    events = [{**e, "args": {**e["args"], "pp_rank": 0}} | damage for e in marks(TRUTH)]
    (tmp_path / "x.json").write_text(json.dumps(events))
    with pytest.raises(InputError, match=r"\(\d+ × no usable pid, time or iteration\)"):
        read(tmp_path / "x.json", format="megatronapp")


@pytest.mark.parametrize("key", ["model_chunk", "microbatch", "pp_rank"])
def test_places_that_cannot_be_are_unknown(tmp_path: Path, key: str) -> None:
    events = marks(TRUTH)
    for event in events:
        if key in event["args"]:
            event["args"][key] = 2**40
    (tmp_path / "x.json").write_text(json.dumps([*events, None, 5]))
    run = read(tmp_path / "x.json")
    spans = run.spans
    assert max(spans.stage.max(), spans.chunk.max(), spans.microbatch.max(), run.layout.pp.max()) < 1 << 15
    assert [n.message for n in run.notices if n.code == "events-skipped"] == ["2 entries that are no events"]


@pytest.mark.parametrize("share", [0.3, 0.95])
def test_a_trace_cut_short_gives_what_is_whole(tmp_path: Path, share: float) -> None:
    text = json.dumps(sorted(marks(TRUTH), key=lambda e: e["ts"]))
    (tmp_path / "x.json").write_text(text[: int(len(text) * share)])
    run = read(tmp_path / "x.json")
    assert "trace-truncated" in [n.code for n in run.notices]
    assert 0 < int((run.spans.kind == Kind.FORWARD).sum()) < len(TRUTH.ops)


@pytest.mark.parametrize("cut", ["end", "begin"])
def test_an_iteration_that_is_cut_is_in_no_figure(tmp_path: Path, cut: str) -> None:
    """Of one rank the last, or the first, events of one iteration are lost."""
    step = 2 if cut == "end" else 0
    mine = [e for e in marks(TRUTH) if (e["pid"], e["args"]["iteration"]) == (1, step)]
    gone = sorted(mine, key=lambda e: e["ts"])[-4:] if cut == "end" else sorted(mine, key=lambda e: e["ts"])[:4]
    (tmp_path / "x.json").write_text(json.dumps([e for e in marks(TRUTH) if e not in gone]))
    (tmp_path / "whole.json").write_text(json.dumps(marks(TRUTH)))
    data, whole = report(tmp_path / "x.json"), report(tmp_path / "whole.json")
    (said,) = [w["message"] for w in data["source"]["warnings"] if w["code"] == "step-cut"]
    assert said.startswith(f"step {step} is in no figure: iteration {step} is cut")
    assert data["steps"]["analysed"] == 2
    assert [s["index"] for s in data["steps"]["skipped"]] == [step]
    assert data["steps"]["seconds_median"] == pytest.approx(whole["steps"]["seconds_median"], rel=0.01)
    assert data["bubble"]["fraction"] == pytest.approx(whole["bubble"]["fraction"], abs=0.005)


def test_a_cut_recording_of_several_costs_only_itself(tmp_path: Path) -> None:
    """Tracks of a rank that do not run alike are recordings of their own."""
    slower = [{**e, "tid": 1, "ts": e["ts"] * 2} for e in marks(TRUTH)]
    ends = [e for e in slower if e["name"] != "iteration end"]
    (tmp_path / "x.json").write_text(json.dumps([*marks(TRUTH), *ends]))
    data = report(tmp_path / "x.json")
    assert data["steps"]["analysed"] == 3
    assert data["steps"]["seconds_median"] == pytest.approx(
        TRUTH.windows[1][1] / 1e9 - TRUTH.windows[0][1] / 1e9, rel=0.02
    )
    assert [s["index"] for s in data["steps"]["skipped"]] == [3, 4, 5]


def test_a_trace_of_cut_iterations_alone_is_refused_for_that(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([e for e in marks(TRUTH) if e["name"] != "iteration end"]))
    with pytest.raises(InputError, match=r"no finished training step.*: iteration 0 is cut"):
        report(tmp_path / "x.json")


def test_a_rank_without_a_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([e for e in marks(TRUTH) if e["pid"] != 1]))
    data = report(tmp_path / "x.json")
    assert data["source"]["missing_ranks"] == [1]
    assert data["bubble"]["fraction"] is None
    codes = {w["code"] for w in data["source"]["warnings"]}
    assert {"rank-missing", "stage-missing"} <= codes


def test_which_pipeline_a_rank_is_of_is_not_guessed_where_one_is_missing(tmp_path: Path) -> None:
    """Ranks 0 and 1 are stage 0 of two pipelines, 2 and 3 stage 1, and so on; 2 has no trace."""
    double = [{**e, "pid": 2 * e["pid"] + replica} for e in marks(TRUTH) for replica in (0, 1)]
    (tmp_path / "x.json").write_text(json.dumps([e for e in double if e["pid"] != 2]))
    run = prepare(read(tmp_path / "x.json"))
    assert not run.layout.stage_rank
    (said,) = [n.message for n in run.notices if n.code == "stages-unclear"]
    assert said.startswith("ranks have no trace (2 of position 0, 1 of position 1, 2 of position 2")
    assert build(run).data["bubble"]["fraction"] is None


@pytest.mark.parametrize(
    "bad",
    ['[{"pp_rank": 0}]', '["pp_rank"]', '[{"name": "iteration begin", "ph": "i", "pid": "x", "ts": 1}]',
     '[{"name": "forward", "ph": "E", "pid": 0, "ts": 1, "args": {"iteration": 0, "pp_rank": 0}}]'],
)  # fmt: skip
def test_a_list_without_whole_operations_is_refused(tmp_path: Path, bad: str) -> None:
    (tmp_path / "x.json").write_text(bad)
    with pytest.raises(InputError) as caught:
        read(tmp_path / "x.json")
    assert caught.value.hint


# --- ndtimeline ----------------------------------------------------------------------------------------------


def metrics(truth: Truth, *, messages: bool = True) -> list[tuple[int, int, str, int, int]]:
    """(rank, step, metric, start, end)."""
    out = [
        (o.rank, o.step, "forward-compute" if o.kind == "F" else "backward-compute", o.start_ns, o.end_ns)
        for o in truth.ops
    ]
    for m in truth.messages if messages else ():
        name = "forward" if m.forward else "backward"
        out.append((m.source, m.step, f"{name}-send", *m.send))
        out.append((m.destination, m.step, f"{name}-recv", *m.receive))
    return sorted(out, key=lambda r: r[3])


def as_chrome(rows: list[tuple[int, int, str, int, int]]) -> str:
    return json.dumps([
        {"name": metric, "cat": metric, "pid": 0, "tid": rank * 10, "ph": "X", "ts": start / 1000,
         "dur": (end - start) / 1000, "args": {"rank": rank, "step": step, "tp": 0, "pp": rank}}
        for rank, step, metric, start, end in rows
    ])  # fmt: skip


def as_lines(rows: list[tuple[int, int, str, int, int]]) -> str:
    grouped: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    for rank, step, metric, start, end in rows:
        grouped.setdefault((rank, step, metric), []).append((start, end))
    return "\n".join(
        json.dumps({
            "rank": rank, "step": step, "metric": metric, "stage": rank, "dp_rank": 0, "tp_rank": 0, "ip": "10.0.0.1",
            "start_ts": [s / 1e9 for s, _ in times], "duration": [(e - s) / 1e9 for s, e in times], "model_chunk": 0,
        })
        for (rank, step, metric), times in grouped.items()
    )  # fmt: skip


@pytest.mark.parametrize("write", [as_chrome, as_lines], ids=["chrome", "lines"])
def test_ndtimeline_records_have_the_causes_of_the_truth(tmp_path: Path, write: Any) -> None:
    (tmp_path / "trace_step0_2.json").write_text(write(metrics(TRUTH)))
    run = prepare(read(tmp_path / "trace_step0_2.json"))
    assert run.source.format == "ndtimeline"
    assert len(run.links.p2p) == len(TRUTH.messages)
    data = build(run).data
    window = sum(g["window"] for g in data["gpus"])
    assert data["causes"]["stage_imbalance"]["seconds"] / window == pytest.approx(0.043, abs=0.002)
    assert data["pipeline"]["schedule"] == "1F1B"
    assert data["pipeline"]["inferred"]["microbatch"] == "operations counted per step"


def test_ndtimeline_without_messages_derives_them_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(as_chrome(metrics(TRUTH, messages=False)))
    run = prepare(read(tmp_path / "x.json"))
    assert "messages-derived" in [n.code for n in run.notices]
    assert len(run.links.p2p) == len(TRUTH.messages)


def test_ndtimeline_of_an_interleaved_schedule_does_not_guess_chunks(tmp_path: Path) -> None:
    rows = metrics(simulate(Shape(schedule="Interleaved1F1B", chunks=2)))
    (tmp_path / "x.json").write_text(as_chrome(rows))
    run = prepare(read(tmp_path / "x.json"))
    assert "chunks-unknown" in [n.code for n in run.notices]
    assert set(run.spans.microbatch[run.spans.lane == Lane.COMPUTE].tolist()) == {-1}


# --- Megatron's log ------------------------------------------------------------------------------------------

ITERATION = " iteration {n:8d}/     100 | consumed samples: 80 | elapsed time per iteration (ms): {ms:.1f} | loss: 6 |"


def log_of_all_ranks() -> str:
    lines = ["> building model ..."]
    for n in (5, 6):
        lines += [ITERATION.format(n=n, ms=100.0), "times across ranks (ms):"]
        for timer, times in {"forward-compute": (20, 30), "backward-compute": (40, 60), "optimizer": (5, 5)}.items():
            lines += [f"  {timer}:", *(f"     rank {r:2d}: {ms:.2f}" for r, ms in enumerate(times))]
    return "\n".join(lines)


def test_a_log_per_rank_gives_totals_and_no_bubble(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(log_of_all_ranks())
    data = report(tmp_path / "train.log")
    assert [(g["busy"], g["idle"]) for g in data["gpus"]] == [
        (pytest.approx(0.065), pytest.approx(0.035)), (pytest.approx(0.095), pytest.approx(0.005)),
    ]  # fmt: skip
    assert data["bubble"]["fraction"] is None
    assert data["pipeline"]["stages"] is None
    assert "totals-only" in [w["code"] for w in data["source"]["warnings"]]
    for gpu in data["gpus"]:
        assert {c for c, v in gpu["causes"].items() if v} <= {"unexplained"}


@pytest.mark.parametrize("time", ["-20.00", "nan", "1e400", ""])
def test_a_rank_whose_time_cannot_be_read_is_left_out_and_said(tmp_path: Path, time: str) -> None:
    """Without its forward it would seem idle."""
    (tmp_path / "train.log").write_text(log_of_all_ranks().replace("20.00", time, 1))
    run = read(tmp_path / "train.log")
    assert run.ranks == [1]
    assert [n.code for n in run.notices if n.code != "totals-only"] == ["line-skipped", "rank-incomplete"]


@pytest.mark.parametrize(
    ("timers", "said"),
    [
        ("(min, max) time across ranks (ms):\n    forward-compute .....: (20.00, 30.00)", "forward-compute 20.0-30.0"),
        ("max time across ranks (ms):\n    forward-backward ......: 91.20", "forward-backward up to 91.2"),
        ("", "iteration times only"),
    ],
)
def test_a_log_of_extremes_is_refused_with_the_totals_it_has(tmp_path: Path, timers: str, said: str) -> None:
    (tmp_path / "train.log").write_text(ITERATION.format(n=7, ms=99.9) + "\n" + timers + "\n")
    with pytest.raises(InputError, match=said) as caught:
        read(tmp_path / "train.log")
    assert "--timing-log-option all" in caught.value.hint
