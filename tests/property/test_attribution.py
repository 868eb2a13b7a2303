"""What holds for every run, whatever its times, its schedule and its faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bubblescope.analysis.operations import _group
from bubblescope.model import Action, Kind, Run
from bubblescope.replay.attribution import attribute
from bubblescope.replay.bases import find_bases
from bubblescope.replay.program import Node
from bubblescope.replay.scenario import replay, replay_with
from bubblescope.report.build import ReportOptions, build
from tests.support.synthetic import Duration, Job, make_run

SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "ZB-H1")


def noisy(seed: int) -> Duration:
    """Any duration from 1 ns to 5 µs for any operation, the same for the same seed."""
    memo: dict[tuple[object, ...], int] = {}
    random = np.random.default_rng(seed)

    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        key = (step, replica, action)
        return memo.setdefault(key, int(random.integers(1, 5000)))

    return duration


jobs = st.builds(
    Job,
    schedule=st.sampled_from(SCHEDULES),
    stages=st.integers(2, 4),
    microbatches=st.sampled_from([4, 8, 12]),
    steps=st.integers(1, 3),
    replicas=st.integers(1, 2),
    comm=st.integers(0, 400),
    host=st.integers(0, 300),
    data=st.integers(0, 300),
    optimizer=st.integers(0, 500),
    sync=st.one_of(st.none(), st.integers(0, 300)),
)
runs = st.tuples(jobs.filter(lambda j: j.microbatches % j.stages == 0), st.integers(0, 10**6))


@settings(max_examples=60, deadline=None)
@given(runs)
def test_causes_sum_to_idle_and_busy_and_idle_to_the_window(made: tuple[Job, int]) -> None:
    a = attribute(make_run(made[0], noisy(made[1])))
    sums = a.per_window(a.gaps.causes).sum(axis=1)
    assert np.abs(sums - a.idle.idle_ns).max() <= 1
    gap_sums = a.per_window(a.gaps.idle_ns.astype(np.float64))
    assert (gap_sums == a.idle.idle_ns).all()
    assert (a.idle.busy_ns + a.idle.idle_ns == a.windows.end_ns - a.windows.start_ns).all()


@settings(max_examples=40, deadline=None)
@given(runs)
def test_with_nothing_changed_the_replay_is_the_measurement(made: tuple[Job, int]) -> None:
    a = attribute(make_run(made[0], noisy(made[1])))
    assert a.replayed.all()
    for program in a.programs:
        again = replay(program, find_bases(a.programs))
        node = np.isfinite(program.start[:, 0])
        assert np.abs(again.end[node] - program.end[node]).max() == 0
        operation = program.node == Node.OP
        assert np.abs(again.start[operation] - program.start[operation]).max() == 0
    report = build(a.run, ReportOptions())
    assert report.data["replay"]["error_fraction"] < 1e-9
    assert abs(report.data["causes"]["unexplained"]["seconds"]) < 1e-9


@settings(max_examples=30, deadline=None)
@given(runs, st.integers(-(10**15), 10**15))
def test_shifting_all_times_changes_nothing(made: tuple[Job, int], shift: int) -> None:
    run = make_run(made[0], noisy(made[1]))
    moved = replace(
        run, spans=run.spans.with_columns(start_ns=run.spans.start_ns + shift, end_ns=run.spans.end_ns + shift)
    )
    a, b = attribute(run), attribute(moved)
    assert (a.gaps.causes == b.gaps.causes).all()


@settings(max_examples=30, deadline=None)
@given(runs, st.randoms(use_true_random=False))
def test_relabelling_ranks_changes_no_gpu(made: tuple[Job, int], random: object) -> None:
    run = make_run(made[0], noisy(made[1]))
    world = len(run.layout.ranks)
    new = list(range(world))
    random.shuffle(new)  # type: ignore[attr-defined]
    renamed = relabel(run, np.array(new))
    a, b = attribute(run), attribute(renamed)
    first, second = (x.per_window(x.gaps.causes) for x in (a, b))
    for rank in range(world):
        left, right = first[a.windows.rank == rank], second[b.windows.rank == new[rank]]
        assert np.abs(left - right).max() < 1e-6


def relabel(run: Run, new: np.ndarray) -> Run:
    s = run.spans
    spans = s.with_columns(rank=new[s.rank], peer=np.where(s.peer >= 0, new[s.peer], -1))
    order = np.argsort(new)
    layout = replace(
        run.layout,
        pp=run.layout.pp[order],
        replica=run.layout.replica[order],
        stage_rank={key: int(new[rank]) for key, rank in run.layout.stage_rank.items()},
    )
    return replace(run, spans=spans, layout=layout)


@settings(max_examples=40, deadline=None)
@given(runs, st.floats(0, 1))
def test_speeding_up_an_operation_never_lengthens_the_replay(made: tuple[Job, int], factor: float) -> None:
    a = attribute(make_run(made[0], noisy(made[1])))
    program = a.programs[0]
    faster = program.duration.copy()
    ops = np.flatnonzero(np.isin(program.kind, (Kind.FORWARD, Kind.BACKWARD)))
    faster[ops[len(ops) // 2]] *= factor
    before = replay_with(program, program.duration, _measured_delay(program))
    after = replay_with(program, faster, _measured_delay(program))
    assert (after.makespan <= before.makespan).all()


def _measured_delay(program: object) -> np.ndarray:
    from bubblescope.replay.scenario import delays

    return delays(program, ())  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.integers(-1, 1)), max_size=30))
def test_kernels_share_an_operation_by_key_or_as_an_unbroken_run(rows: list[tuple[int, int, int]]) -> None:
    key = np.array(rows, dtype=np.int64).reshape(-1, 3)
    known = key[:, 2] >= 0
    runs = np.cumsum([i > 0 and rows[i] != rows[i - 1] for i in range(len(rows))]).tolist()
    wanted = [(*row, 0 if knows else 1 + run) for row, knows, run in zip(rows, known, runs, strict=True)]
    numbers = {tag: i for i, tag in enumerate(sorted(set(wanted)))}
    assert _group(key, known).tolist() == [numbers[tag] for tag in wanted]
