"""The replay reproduces closed forms, published numbers and an independent longest path."""

from __future__ import annotations

import random
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bubblescope.errors import ScheduleError, UsageError
from bubblescope.model import Action
from bubblescope.replay import engine
from bubblescope.replay.closed_form import closed_form, latency_hops, stage_idle_1f1b
from bubblescope.replay.dag import build_dag
from bubblescope.replay.engine import simulate
from bubblescope.replay.schedules import NAMES, default_chunks, make

TABLE = [  # ATTRIBUTION.md §10: p=4 m=8, F=I=W=1: makespan and fraction at c=0, makespan at c=0.1
    ("GPipe", 33, 0.272727, 33.6),
    ("1F1B", 33, 0.272727, 34.6),
    ("LoopedBFS", 57, 0.157895, 57.6),
    ("Interleaved1F1B", 57, 0.157895, 58.4),
    ("InterleavedZeroBubble", 51, 0.058824, 52.6),
    ("ZBVZeroBubble", 51, 0.058824, 52.3),
    ("DualPipeV", 54, 0.111111, 55.6),
]


def parse(**orders: str) -> dict[int, list[Action]]:
    """``parse(r0="0F0 0B0")``."""
    return {int(rank[1:]): [Action.parse(a) for a in text.split()] for rank, text in orders.items()}


@pytest.mark.parametrize(("name", "makespan", "fraction", "with_latency"), TABLE)
def test_the_worked_table_of_makespans_holds_to_its_last_digit(
    name: str, makespan: int, fraction: float, with_latency: float
) -> None:
    sim = simulate(make(name, 4, 8), 1, 1, 1)
    assert sim.makespan == makespan
    assert round(sim.fraction, 6) == fraction
    assert round(simulate(make(name, 4, 8), 1, 1, 1, comm=0.1).makespan, 9) == with_latency


def test_the_four_ratios_of_1f1b_and_the_own_span_of_zbv() -> None:
    sim = simulate(make("1F1B", 4, 8), 1, 1, 1)
    assert [round(x, 4) for x in (sim.over_ideal, sim.fraction, sim.own_span_rate)] == [0.375, 0.2727, 0.2727]
    assert sim.straggler_waste == 0
    assert simulate(make("ZBVZeroBubble", 4, 8), 1, 1, 1).own_span_rate == 0


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
@pytest.mark.parametrize("stage", range(4))
def test_idle_by_stage_and_phase_follows_the_formula(name: str, stage: int) -> None:
    phases = simulate(make(name, 4, 8), 3, 2, 5).phases[stage]
    warmup, cooldown = stage_idle_1f1b(4, stage, 3, 7)
    assert phases.tolist() == [warmup, 0, cooldown]


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("m", [8, 16, 32, 64])
@pytest.mark.parametrize("c", [0.125, 0.5, 4.0])
def test_the_latency_law_of_1f1b(p: int, m: int, c: float) -> None:
    law = (m + p - 1) * 3 + c * (2 * (p - 1) * m / p + 2 * (p - 2))
    assert simulate(make("1F1B", p, m), 1, 1, 1, comm=c).makespan == law
    assert latency_hops(p, m) * c == law - (m + p - 1) * 3


@pytest.mark.parametrize("p", [2, 4, 8])
def test_gpipe_pays_the_latency_of_its_fill_and_drain_only(p: int) -> None:
    assert simulate(make("GPipe", p, 16), 1, 1, 1, comm=0.25).makespan == (16 + p - 1) * 3 + 2 * (p - 1) * 0.25


def random_cases(count: int) -> list[tuple[str, int, int, int, int, int, int]]:
    """Cases in which a formula is known; the seed is fixed."""
    rng = random.Random(20240)
    cases: list[tuple[str, int, int, int, int, int, int]] = []
    while len(cases) < count:
        name = rng.choice([n for n in NAMES if n not in ("InterleavedZeroBubble", "DualPipeV")])
        p, m, (f, i, w) = rng.randint(1, 7), rng.randint(1, 28), (rng.randint(1, 20) for _ in range(3))
        v = (
            default_chunks(name)
            if name in ("ZBVZeroBubble", "GPipe", "1F1B", "ZB-H1", "ZB-H2")
            else rng.randint(2, 4)
        )
        if name == "ZBVZeroBubble":
            i = w = f
        if closed_form(name, p, m, v, forward=f, input_grad=i, weight_grad=w) is not None:
            cases.append((name, p, m, v, f, i, w))
    return cases


def test_the_closed_forms_hold_for_200_random_pipelines() -> None:
    cases = random_cases(200)
    assert {name for name, *_ in cases} == set(NAMES) - {"InterleavedZeroBubble", "DualPipeV"}
    for name, p, m, v, f, i, w in cases:
        form = closed_form(name, p, m, v, forward=f, input_grad=i, weight_grad=w)
        assert form is not None
        sim = simulate(make(name, p, m, v), f, i, w)
        assert sim.makespan == form.makespan, (name, p, m, v, f, i, w)
        assert np.isclose(sim.fraction, form.fraction)
        assert np.isclose(sim.over_ideal, form.over_ideal)
        assert form.own_span_rate is not None
        assert np.isclose(sim.own_span_rate, form.own_span_rate), (name, p, m, v, f, i, w)


@pytest.mark.parametrize("name", NAMES)
def test_ops_start_where_an_independent_longest_path_puts_them(name: str) -> None:
    made = make(name, 4, 8)
    rng = np.random.default_rng(5)
    dag = build_dag(made.orders)
    duration = rng.integers(1, 100, len(dag.actions)).astype(float)
    start, end = engine.run(dag, duration, 7.0)
    graph = nx.DiGraph()
    at = {(a.stage, str(a)[len(str(a.stage))], a.microbatch): op for op, a in enumerate(dag.actions)}
    for order in made.orders.values():
        ops = [at[a.stage, str(a)[len(str(a.stage))], a.microbatch] for a in order]
        graph.add_edges_from((x, y, {"weight": duration[x]}) for x, y in pairwise(ops))
    for (stage, letter, i), op in at.items():
        before = stage - 1 if letter == "F" else stage + 1
        for other in {"F": "F", "B": "BI", "I": "BI", "W": ""}[letter]:
            producer = at.get((before, other, i))
            if producer is not None:
                hop = 7.0 * (dag.rank[producer] != dag.rank[op])
                weight = max(duration[producer] + hop, graph.get_edge_data(producer, op, {"weight": 0})["weight"])
                graph.add_edge(producer, op, weight=weight)
    for node in nx.topological_sort(graph):
        assert start[node] == max(
            (start[a] + graph[a][node]["weight"] for a in graph.predecessors(node)), default=0
        )
    assert np.array_equal(end, start + duration)


def test_slow_stages_and_single_slow_ops_give_the_worked_step_times() -> None:
    made = make("1F1B", 4, 8)
    slow = simulate(made, 1, 1, 1, scale_per_stage=[1, 1, 1, 2])
    assert slow.makespan == 57
    assert slow.straggler_waste == 1 - 33 * 1.25 / 57
    dag = build_dag(made.orders)
    duration = engine.op_durations(dag, 1, 1, 1, np.ones(4))
    spikes = [op for op, a in enumerate(dag.actions) if str(a) in ("1F4", "1B4")]
    duration[spikes] *= 3
    assert engine.run(dag, duration)[1].max() == 39


def test_many_scenarios_replay_at_once_and_equal_one_by_one() -> None:
    made = make("Interleaved1F1B", 4, 8)
    dag = build_dag(made.orders)
    columns = np.stack([engine.op_durations(dag, f, 1, 2, np.ones(8)) for f in (1, 2, 3)], axis=1)
    together = engine.run(dag, columns, 0.5)[1].max(axis=0)
    assert together.tolist() == [simulate(made, f, 1, 2, comm=0.5).makespan for f in (1, 2, 3)]


@given(
    st.sampled_from(NAMES),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(1, 9), min_size=8, max_size=8),
)
def test_phases_share_out_the_idle_time_and_idle_and_busy_the_makespan(
    name: str, p: int, rounds: int, scale: list[int]
) -> None:
    sim = simulate(make(name, p, 2 * p * rounds), 2, 3, 1, 0.5, scale_per_stage=scale[:p])
    assert np.allclose(sim.phases.sum(axis=1), sim.idle, rtol=0, atol=1e-9)
    assert np.allclose(sim.busy + sim.idle, sim.makespan, rtol=0, atol=1e-9)
    assert (sim.phases >= 0).all()


@given(st.sampled_from(NAMES), st.data())
def test_speeding_up_a_stage_or_a_link_never_lengthens_the_step(name: str, data: st.DataObject) -> None:
    made = make(name, 3, 6)
    scale = data.draw(st.lists(st.integers(1, 9), min_size=3, max_size=3))
    faster = [data.draw(st.integers(1, s)) for s in scale]
    c = data.draw(st.integers(0, 5))
    before = simulate(made, 1, 2, 3, c, scale_per_stage=scale).makespan
    assert simulate(made, 1, 2, 3, data.draw(st.integers(0, c)), scale_per_stage=faster).makespan <= before


def test_a_factor_per_gpu_is_the_same_as_that_factor_on_each_of_its_chunks() -> None:
    made = make("ZBVZeroBubble", 2, 4)
    by_gpu = simulate(made, 1, 1, 1, scale_per_stage=[1, 3])
    by_chunk = simulate(made, 1, 1, 1, scale_per_stage=[1, 3, 3, 1])
    assert np.array_equal(by_gpu.end, by_chunk.end)


def test_a_deadlock_is_refused_with_its_cycle_named() -> None:
    with pytest.raises(ScheduleError) as caught:
        simulate(parse(r0="0F0 0B0 0F1 0B1", r1="1F0 1F1 1B0 1B1"), 1, 1, 1)
    cycle = caught.value.what.split(": ")[1].split(" (")[0].split(" → ")
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"0F1", "1F1", "1B0", "0B0"}


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        (parse(r0="0F0 0B0", r1="1F0 1F1 1B0"), "1F1 on position 1 needs F of stage 0, micro-batch 1"),
        (parse(r0="0F0 0B0 0F0"), "0F0 on position 0 repeats what 0F0 does"),
        (parse(r0="0F0 0B0 0W0"), "0W0 on position 0 repeats what 0B0 does"),
        (parse(r0="0F0 0W0"), "needs B"),
        (parse(r0="0F0", r1="0B0"), "stage 0 runs on positions 0 and 1"),
        (parse(r0="0B0 0F0"), "deadlocks"),
    ],
)
def test_orders_that_cannot_run_are_refused_with_the_rule(orders: dict[int, list[Action]], says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        simulate(orders, 1, 1, 1)


@pytest.mark.parametrize(
    ("times", "says"),
    [((-1, 1, 1, 0), "forward time is -1"), ((1, 1, 1, float("nan")), "comm"), ((0, 0, 0, 0), "all 0")],
)
def test_times_that_make_no_sense_are_refused(times: tuple[float, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        simulate(make("1F1B", 2, 2), *times)


@pytest.mark.parametrize("factors", [[1.0], [1.0, 0.0], [1.0] * 3])
def test_factors_of_the_wrong_number_or_sign_are_refused(factors: list[float]) -> None:
    with pytest.raises(UsageError, match="scale-per-stage"):
        simulate(make("1F1B", 2, 2), 1, 1, 1, scale_per_stage=factors)
