"""Real jobs of each framework, launched by `bubblescope run` without a change to their scripts, and analysed."""

from __future__ import annotations

import itertools
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
from tests.frameworks.jobs import BIN, ROOT, TORCHRUN, Ended, job, tasks

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
    same_as: tuple[str, ...] = ()
    """Arguments of the job without us that must come to the same losses; (): the same arguments."""

    def __str__(self) -> str:
        return f"{Path(self.script).stem} {' '.join(self.arguments)}"


MEGATRON, DEEPSPEED, TITAN = "megatron_gpt.py", "deepspeed_pipe.py", "torchtitan_llama3.py"
COMBINED, SCHEDULES = "megatron_combined.py", "torch_schedules.py"
ALL_OF_TORCH = tuple(argument for name in TORCH for argument in ("--schedule", name))
PAD_S = 0.005
EVALUATED = Case(
    "megatron", MEGATRON, ("--evaluate", "--recompute", "--pad-ms", "5"), "1F1B", 1, 4, 5, same_as=("--steps", "5")
)
CHECKPOINTED = Case(
    "deepspeed", DEEPSPEED, ("--evaluate", "--recompute", "--pad-ms", "5"), "1F1B", 1, 8, 5, same_as=("--evaluate",)
)
VALIDATED = Case(
    "torchtitan", TITAN, ("--schedule", "1F1B", "--evaluate"), "1F1B", 1, 4, 4,
    same_as=("--schedule", "1F1B", "Interleaved1F1B"),
)  # fmt: skip
CASES = [
    EVALUATED,
    Case("megatron", MEGATRON, ("--chunks", "2"), "Interleaved1F1B", 2, 4, 5),
    Case("megatron", MEGATRON, ("--chunks", "2", "--overlap"), "Interleaved1F1B", 2, 4, 5, same_as=("--chunks", "2")),
    Case("megatron", COMBINED, ("--chunks", "2", "--overlap"), "Interleaved1F1B", 2, 4, 5),
    CHECKPOINTED,
    Case("deepspeed", DEEPSPEED, ("--engine", "dualpipev"), "DualPipeV", 2, 8, 5),
    VALIDATED,
    Case("torchtitan", TITAN, ("--schedule", "Interleaved1F1B"), "Interleaved1F1B", 2, 4, 4, same_as=VALIDATED.same_as),
    *(
        Case("torch", SCHEDULES, ("--schedule", name), name, 1 if name in TORCH[:2] else 2, 4, 6, same_as=ALL_OF_TORCH)
        for name in TORCH
    ),
]
ONE_F_ONE_B = next(case for case in CASES if (case.framework, case.schedule) == ("torch", "1F1B"))


class Jobs:
    """Jobs of this module that have ended; each is run once, by the first test that asks for it."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._recorded: dict[Case, tuple[Ended, Path]] = {}
        self._plain: dict[tuple[str, ...], Any] = {}

    def recorded(self, case: Case) -> tuple[Ended, Path]:
        """The job, launched by `bubblescope run`, and the folder that it recorded into."""
        if case not in self._recorded:
            folder = self._folders.mktemp("recorded")
            launcher = tasks("torchrun") if case.framework == "torch" and case != ONE_F_ONE_B else TORCHRUN
            ended = job(folder, case.script, *case.arguments, run=("--out", "out"), launcher=launcher)
            self._recorded[case] = ended, folder / "out"
        return self._recorded[case]

    def losses(self, case: Case) -> list[float]:
        """Without us."""
        key = (case.script, *(case.same_as or case.arguments))
        if key not in self._plain:
            ended = job(self._folders.mktemp("plain"), *key, launcher=tasks("torchrun"))
            assert ended.status == 0, ended.output
            self._plain[key] = ended.losses
        found = self._plain[key]
        return list(found[case.schedule] if isinstance(found, dict) else found)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_launched_job_is_recorded_whole_and_trains_as_without_us(case: Case, jobs: Jobs) -> None:
    ended, out = jobs.recorded(case)
    assert ended.status == 0, ended.output
    assert ended.losses == jobs.losses(case) and len(ended.losses) == case.steps
    said = [line for line in ended.output.splitlines() if line.startswith("bubblescope")]
    assert said == ["bubblescope: 2 ranks recorded; see: bubblescope analyze out"]
    run = prepare(read([str(out)]))
    assumed = ["combined-split"] * 2 if case.script == COMBINED else []
    assert [notice.code for notice in run.notices] == assumed
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
    evaluated = range(2, case.steps, 2) if "--evaluate" in case.arguments else ()  # after each second step
    assert data["replay"]["trusted"] and [step["index"] for step in data["steps"]["skipped"]] == [0, *evaluated]
    assert data["steps"]["analysed"] == case.steps - 1 - len(evaluated)
    assert data["bubble"]["fraction"] is not None and 0 < data["bubble"]["fraction"] < 1
    for gpu in data["gpus"]:
        assert sum(gpu["causes"].values()) == pytest.approx(gpu["idle"], abs=1e-6)
        assert gpu["busy"] + gpu["idle"] == pytest.approx(gpu["window"], abs=1e-6)


# ---- what is not a bubble


@pytest.mark.parametrize("case", [EVALUATED, CHECKPOINTED, VALIDATED], ids=str)
def test_evaluation_is_busy_time_of_its_own_and_never_a_bubble(case: Case, jobs: Jobs) -> None:
    _, out = jobs.recorded(case)
    run = prepare(read([str(out)]))
    covers = [i for i in np.flatnonzero(run.spans.step == -1) if run.spans.device[i] >= 0]
    assert len(covers) == 2 * STAGES and {run.names[run.spans.name[i]] for i in covers} == {"evaluation"}
    report = build(run).data
    assert report["replay"]["trusted"] and report["pipeline"]["microbatches"] == case.microbatches


def test_recomputation_is_work_of_the_backward(jobs: Jobs) -> None:
    """The layers of a stage are padded: what runs again in the backward takes at least as long as in the forward."""
    _, out = jobs.recorded(CHECKPOINTED)
    spans = prepare(read([str(out)])).spans
    back = spans.where(kind=Kind.BACKWARD, lane=Lane.COMPUTE) & (spans.step > 0)
    assert (spans.end_ns - spans.start_ns)[back].min() > 4 * PAD_S * 1e9


def test_put_off_weight_gradients_are_work_of_their_own(jobs: Jobs) -> None:
    """Each of the four matrices of a layer takes a millisecond: two before the gradient is sent, two after it."""
    _, out = jobs.recorded(CASES[3])
    spans = read([str(out)]).spans
    weights = spans.where(kind=Kind.BACKWARD_WEIGHT, step=range(1, 5))
    for step, rank in itertools.product(range(1, 5), range(STAGES)):
        mine = weights & spans.where(step=step, rank=rank)
        assert (spans.end_ns - spans.start_ns)[mine].sum() > 2 * 4 * 4 * 1e6
    assert not spans.where(kind=Kind.BACKWARD).any()


def test_steps_every_warmup_and_ranks_choose_what_is_recorded(tmp_path: Path) -> None:
    options = ("--out", "out", "--every", "2", "--steps", "2", "--warmup", "0", "--ranks", "1")
    ended = job(tmp_path, SCHEDULES, "--schedule", "1F1B", "--steps", "7", run=options, launcher=tasks("torchrun"))
    assert ended.status == 0 and "1 rank recorded" in ended.output
    assert [p.name for p in sorted((tmp_path / "out").glob("rank*"))] == ["rank-00001.jsonl"]
    run = read([str(tmp_path / "out")])
    assert sorted(set(run.spans.step.tolist())) == [0, 2] and run.source.details["warmup_steps"] == []


def test_a_pipeline_of_ones_own_is_marked_with_two_functions(tmp_path: Path) -> None:
    """The example of the documentation: no hook knows it, and it costs nothing where nothing records."""
    example = str(ROOT / "docs" / "examples" / "own_pipeline.py")
    ended = job(tmp_path, example, run=("--out", "out"), launcher=tasks("torchrun"))
    without = job(tmp_path, example, launcher=tasks("torchrun"))
    assert ended.status == 0 and ended.losses == without.losses and len(ended.losses) == 5
    run = recorded(tmp_path)
    assert run.notices == () and len(run.links.p2p) == 5 * 4 * 2
    data = build(run).data
    assert data["replay"]["trusted"] and data["pipeline"]["schedule"] == "1F1B"
    assert (data["pipeline"]["stages"], data["pipeline"]["microbatches"]) == (2, 4)


@pytest.mark.parametrize(
    ("kind", "outside", "inside"),
    [
        ("slurm", ("--out", "out", "--ranks", "1"), ()),
        ("openmpi", None, (str(BIN / "bubblescope"), "run", "--out", "out", "--")),
    ],
)
def test_ranks_are_known_from_what_other_launchers_say(
    kind: str, outside: tuple[str, ...] | None, inside: tuple[str, ...], tmp_path: Path, jobs: Jobs
) -> None:
    """srun and mpirun set no RANK. `bubblescope run` stands before or behind them, and which ranks are to record is
    known before the job joins its process group."""
    ended = job(tmp_path, SCHEDULES, "--schedule", "1F1B", run=outside, launcher=tasks(kind, *inside))
    assert ended.status == 0 and ended.losses == jobs.losses(ONE_F_ONE_B), ended.output
    ranks = [1] if kind == "slurm" else [0, 1]
    assert sorted(path.name for path in (tmp_path / "out").glob("rank*")) == [f"rank-0000{n}.jsonl" for n in ranks]
    layout = read([str(tmp_path / "out")]).layout
    assert (layout.world_size, layout.stages) == (2, 2)


def test_the_launcher_of_deepspeed_starts_ranks_that_record(tmp_path: Path, jobs: Jobs) -> None:
    launcher = (str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", "29613")
    accelerator = {"DS_ACCELERATOR": "cpu"}
    ended = job(tmp_path, DEEPSPEED, "--evaluate", run=("--out", "out"), launcher=launcher, environment=accelerator)
    assert ended.status == 0 and ended.losses == jobs.losses(CHECKPOINTED), ended.output
    assert prepare(read([str(tmp_path / "out")])).notices == ()


# ---- faults: the training goes on to the same loss, with one warning, and what was recorded is readable


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs) -> list[float]:
    return jobs.losses(ONE_F_ONE_B)


def recorded(tmp_path: Path) -> Run:
    return prepare(read([str(tmp_path / "out")]))


def faulty(
    tmp_path: Path, *arguments: str, out: str = "out", launcher: tuple[str, ...] | None = None, **options: Any
) -> Ended:
    launcher = launcher or tasks("torchrun")
    return job(tmp_path, SCHEDULES, "--schedule", "1F1B", *arguments, run=("--out", out), launcher=launcher, **options)


def warnings_of(ended: Ended) -> list[str]:
    return [
        line
        for line in ended.output.splitlines()
        if line.startswith("bubblescope: ") and " recorded" not in line and "analyze" not in line
    ]


BREAKING = """
import bubblescope.capture.steps as steps

def broken(*args):
    raise ZeroDivisionError("made to raise")

steps.StepRule.schedule_begins = broken
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
    run = recorded(tmp_path)
    assert "recorder-warning" in {notice.code for notice in run.notices}
    assert run.spans.where(kind=Kind.OPTIMIZER).sum() == 2 * 6


def test_a_disk_that_takes_no_more_costs_one_warning(tmp_path: Path, undisturbed: list[float]) -> None:
    ended = faulty(tmp_path, file_bytes=9_000)
    assert ended.status == 0 and ended.losses == undisturbed
    told = warnings_of(ended)
    assert len(told) == 2 and all("training goes on without it" in line for line in told)
    run = recorded(tmp_path)
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
    run = recorded(tmp_path)
    assert run.notices == () and run.spans.where(kind=Kind.DATA).any()


def test_of_a_killed_rank_every_finished_step_is_there(tmp_path: Path) -> None:
    ended = faulty(tmp_path, "--kill", "1", "3", launcher=TORCHRUN)  # which ends the other rank
    assert ended.status == 1
    run = recorded(tmp_path)
    assert "rank-ended-early" in {notice.code for notice in run.notices} or "recording-open" in {
        notice.code for notice in run.notices
    }
    for rank in range(2):
        rows = run.spans.where(rank=rank, kind=Kind.FORWARD)
        assert {0, 1} <= set(run.spans.step[rows].tolist())
