"""Real jobs of each framework, launched by `bubblescope run` without a change to their scripts, and analysed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bubblescope.align import prepare
from bubblescope.ingest import read
from bubblescope.model import BACKWARD_KINDS, Kind, Lane, Run
from bubblescope.report.build import build
from tests.frameworks.jobs import ROOT, Ended, job

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

STAGES = 2
TORCH = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@dataclass(frozen=True)
class Case:
    """A job, and what its framework was asked for."""

    framework: str
    script: str
    arguments: tuple[str, ...]
    schedule: str
    chunks: int
    microbatches: int
    steps: int

    def __str__(self) -> str:
        return f"{self.framework} {' '.join(self.arguments)}"


MEGATRON, DEEPSPEED, TITAN = "megatron_gpt.py", "deepspeed_pipe.py", "torchtitan_llama3.py"
CASES = [
    Case("megatron", MEGATRON, ("--evaluate",), "1F1B", 1, 4, 5),
    Case("megatron", MEGATRON, ("--chunks", "2"), "Interleaved1F1B", 2, 4, 5),
    Case("megatron", MEGATRON, ("--chunks", "2", "--overlap"), "Interleaved1F1B", 2, 4, 5),
    Case("deepspeed", DEEPSPEED, ("--evaluate",), "1F1B", 1, 8, 5),
    Case("deepspeed", DEEPSPEED, ("--engine", "dualpipev"), "DualPipeV", 2, 8, 5),
    Case("torchtitan", TITAN, ("--schedule", "1F1B"), "1F1B", 1, 4, 4),
    Case("torchtitan", TITAN, ("--schedule", "Interleaved1F1B"), "Interleaved1F1B", 2, 4, 4),
    *(
        Case("torch", "torch_schedules.py", ("--schedule", name), name, 1 if name in TORCH[:2] else 2, 4, 4)
        for name in TORCH
    ),
]


@pytest.fixture(scope="module")
def torch_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of all of torch's schedules, without us, from one job."""
    names = [argument for name in TORCH for argument in ("--schedule", name)]
    ended = job(tmp_path_factory.mktemp("torch"), "torch_schedules.py", *names)
    assert ended.status == 0, ended.output
    return dict(ended.losses)


def plain(case: Case, folder: Path, request: pytest.FixtureRequest) -> list[float]:
    """The job's losses without us."""
    if case.framework == "torch":
        known: dict[str, list[float]] = request.getfixturevalue("torch_losses")
        return known[case.schedule]
    ended = job(folder, case.script, *case.arguments)
    assert ended.status == 0, ended.output
    return list(ended.losses)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_launched_job_is_recorded_whole_and_trains_as_without_us(
    case: Case, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ended = job(tmp_path, case.script, *case.arguments, run=("--out", "out"))
    assert ended.status == 0, ended.output
    assert ended.losses == plain(case, tmp_path, request) and len(ended.losses) == case.steps
    said = [line for line in ended.output.splitlines() if line.startswith("bubblescope")]
    assert said == ["bubblescope: 2 ranks recorded; see: bubblescope analyze out"]
    run = prepare(read([str(tmp_path / "out")]))
    assert [notice.message for notice in run.notices] == []
    check_shape(run, case)
    check_operations(run, case)
    check_report(build(run).data, case)


def check_shape(run: Run, case: Case) -> None:
    layout = run.layout
    assert (layout.framework, layout.schedule) == (case.framework, case.schedule)
    assert (layout.stages, layout.chunks, layout.microbatches) == (STAGES, case.chunks, case.microbatches)
    assert (layout.world_size, layout.missing_ranks) == (STAGES, [])


def check_operations(run: Run, case: Case) -> None:
    """Each stage ran each micro-batch forward and backward, once in each step."""
    spans = run.spans
    compute = (spans.lane == Lane.COMPUTE) & (spans.device >= 0)
    everything = sorted((s, m) for s in range(STAGES * case.chunks) for m in range(case.microbatches))
    for step in range(case.steps):
        forward = compute & spans.where(step=step, kind=Kind.FORWARD)
        assert sorted(zip(spans.stage[forward], spans.microbatch[forward], strict=True)) == everything
        backward = compute & spans.where(step=step, kind=BACKWARD_KINDS)
        assert sorted(set(zip(spans.stage[backward], spans.microbatch[backward], strict=True))) == everything
        losses = compute & spans.where(step=step, kind=Kind.LOSS)
        assert sorted(spans.microbatch[losses]) == list(range(case.microbatches))
        assert set(spans.stage[losses]) == {STAGES * case.chunks - 1}
    assert set(np.unique(spans.step)) - {-1} == set(range(case.steps))


def check_report(data: dict[str, Any], case: Case) -> None:
    assert data["pipeline"]["microbatches"] == case.microbatches and data["pipeline"]["stages"] == STAGES
    assert data["replay"]["trusted"] and data["steps"]["analysed"] == case.steps - 1
    assert data["bubble"]["fraction"] is not None and 0 < data["bubble"]["fraction"] < 1
    for gpu in data["gpus"]:
        assert sum(gpu["causes"].values()) == pytest.approx(gpu["idle"], abs=1e-6)
        assert gpu["busy"] + gpu["idle"] == pytest.approx(gpu["window"], abs=1e-6)


def recorded(tmp_path: Path, ended: Ended) -> Run:
    return prepare(read([str(tmp_path / "out")]))


def test_evaluation_is_busy_time_of_its_own_and_never_a_bubble(tmp_path: Path) -> None:
    ended = job(tmp_path, MEGATRON, "--evaluate", "--pad-ms", "5", run=("--out", "out"))
    run = recorded(tmp_path, ended)
    covers = [i for i in np.flatnonzero(run.spans.step == -1) if run.spans.device[i] >= 0]
    assert len(covers) == 2 * STAGES and {run.names[run.spans.name[i]] for i in covers} == {"evaluation"}
    report = build(run).data
    assert report["replay"]["trusted"] and report["pipeline"]["microbatches"] == 4


def test_steps_every_warmup_and_ranks_choose_what_is_recorded(tmp_path: Path) -> None:
    options = ("--out", "out", "--every", "2", "--steps", "2", "--warmup", "0", "--ranks", "1")
    ended = job(tmp_path, "torch_schedules.py", "--schedule", "1F1B", "--steps", "7", run=options)
    assert ended.status == 0 and "1 rank recorded" in ended.output
    assert [p.name for p in sorted((tmp_path / "out").glob("rank*"))] == ["rank-00001.jsonl"]
    run = read([str(tmp_path / "out")])
    assert sorted(set(run.spans.step.tolist())) == [0, 2] and run.source.details["warmup_steps"] == []


def test_a_pipeline_of_ones_own_is_marked_with_two_functions(tmp_path: Path) -> None:
    """The example of the documentation: no hook knows it, and it costs nothing where nothing records."""
    example = str(ROOT / "docs" / "examples" / "own_pipeline.py")
    ended, without = job(tmp_path, example, run=("--out", "out")), job(tmp_path, example)
    assert ended.status == 0 and ended.losses == without.losses and len(ended.losses) == 5
    run = recorded(tmp_path, ended)
    assert run.notices == () and len(run.links.p2p) == 5 * 4 * 2
    data = build(run).data
    assert data["replay"]["trusted"] and data["pipeline"]["schedule"] == "1F1B"
    assert (data["pipeline"]["stages"], data["pipeline"]["microbatches"]) == (2, 4)


# ---- faults: the training goes on to the same loss, with one warning, and what was recorded is readable


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    ended = job(tmp_path_factory.mktemp("plain"), "torch_schedules.py", "--schedule", "1F1B", "--steps", "6")
    return list(ended.losses)


def faulty(tmp_path: Path, *arguments: str, out: str = "out", **options: Any) -> Ended:
    steps = () if "--steps" in arguments else ("--steps", "6")
    return job(tmp_path, "torch_schedules.py", "--schedule", "1F1B", *steps, *arguments, run=("--out", out), **options)


def warnings_of(ended: Ended) -> list[str]:
    return [
        line
        for line in ended.output.splitlines()
        if line.startswith("bubblescope: ") and " recorded" not in line and "analyze" not in line
    ]


BREAKING = """
import bubblescope.capture.hooks.torch_pipelining as hooks

def broken(*args):
    raise ZeroDivisionError("made to raise")

hooks._Guard.leave = broken
"""


def test_a_hook_that_raises_costs_a_warning_on_each_rank(tmp_path: Path, undisturbed: list[float]) -> None:
    """Broken by the user's own sitecustomize, which runs behind ours."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BREAKING)
    ended = faulty(tmp_path, environment={"PYTHONPATH": str(tmp_path / "site")})
    assert ended.status == 0 and ended.losses == undisturbed
    told = warnings_of(ended)
    assert told and all("made to raise" in line for line in told)
    assert max(Counter(told).values()) == 2  # each broken hook once on each rank
    run = recorded(tmp_path, ended)
    assert "recorder-warning" in {notice.code for notice in run.notices}
    assert run.spans.where(kind=Kind.OPTIMIZER).sum() == 2 * 6


def test_a_disk_that_takes_no_more_costs_one_warning(tmp_path: Path, undisturbed: list[float]) -> None:
    ended = faulty(tmp_path, file_bytes=9_000)
    assert ended.status == 0 and ended.losses == undisturbed
    told = warnings_of(ended)
    assert len(told) == 2 and all("training goes on without it" in line for line in told)
    run = recorded(tmp_path, ended)
    assert 0 in run.spans.step and len(run.ranks) == 2


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, undisturbed: list[float]) -> None:
    (tmp_path / "file").write_text("")
    ended = faulty(tmp_path, out="file/out")
    assert ended.status == 0 and ended.losses == undisturbed
    assert len([line for line in warnings_of(ended) if "cannot write" in line]) == 2


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loading_workers_write_nothing(tmp_path: Path, undisturbed: list[float], context: str) -> None:
    ended = faulty(tmp_path, "--workers", "2", "--context", context)
    assert ended.status == 0 and ended.losses == undisturbed and warnings_of(ended) == []
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "job.json",
        "rank-00000.jsonl",
        "rank-00001.jsonl",
    ]
    run = recorded(tmp_path, ended)
    assert run.notices == () and run.spans.where(kind=Kind.DATA).any()


def test_of_a_killed_rank_every_finished_step_is_there(tmp_path: Path) -> None:
    ended = faulty(tmp_path, "--kill", "1", "3")
    assert ended.status == 1
    run = recorded(tmp_path, ended)
    assert "rank-ended-early" in {notice.code for notice in run.notices} or "recording-open" in {
        notice.code for notice in run.notices
    }
    for rank in range(2):
        rows = run.spans.where(rank=rank, kind=Kind.FORWARD)
        assert {0, 1} <= set(run.spans.step[rows].tolist())
