"""Longest paths: equal to networkx on random graphs, monotone, and honest about cycles."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bubblescope.algebra import maxplus
from bubblescope.algebra.maxplus import CycleError, build_graph, deciding_edges, ends_at, longest_path, weigh

Edges = list[tuple[int, int]]


@st.composite
def dags(draw: st.DrawFn) -> tuple[int, Edges]:
    n = draw(st.integers(1, 30))
    names = draw(st.permutations(range(n)))
    pairs = draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=90))
    return n, [(names[min(a, b)], names[max(a, b)]) for a, b in pairs if a != b]


def split(edges: Edges) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def by_networkx(n: int, edges: Edges, duration: np.ndarray, delay: np.ndarray, release: np.ndarray) -> np.ndarray:
    """Start times as longest paths from one source whose edges carry the releases."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    for i in range(n):
        graph.add_edge(
            "source", i, weight=max(release[i], graph.get_edge_data("source", i, {"weight": -np.inf})["weight"])
        )
    for (a, b), wait in zip(edges, delay, strict=True):
        weight = duration[a] + wait
        if graph.has_edge(a, b):
            weight = max(weight, graph[a][b]["weight"])
        graph.add_edge(a, b, weight=weight)
    best = {}
    for node in nx.topological_sort(graph):
        arrivals = [best[p] + graph[p][node]["weight"] for p in graph.predecessors(node)]
        best[node] = max(arrivals, default=0.0)
    start = np.array([best[i] for i in range(n)])
    longest = nx.dag_longest_path_length(
        nx.DiGraph([(a, b, {"weight": d["weight"]}) for a, b, d in graph.edges(data=True)])
    )
    assert longest == max(start.max(), 0.0)
    return start


@given(dags(), st.data())
def test_it_equals_networkx_on_random_graphs_in_every_column(dag: tuple[int, Edges], data: st.DataObject) -> None:
    n, edges = dag
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    duration = rng.integers(0, 2**50, (n, 3)).astype(float)
    delay = rng.integers(0, 2**40, (len(edges), 3)).astype(float)
    release = rng.integers(0, 2**51, (n, 3)).astype(float)
    start, end = longest_path(build_graph(n, *split(edges)), duration, delay, release)
    for k in range(3):
        assert start[:, k].tolist() == by_networkx(n, edges, duration[:, k], delay[:, k], release[:, k]).tolist()
    assert np.array_equal(end, start + duration)


@given(dags(), st.integers(0, 2**32))
def test_chosen_ends_are_those_of_the_whole_evaluation(dag: tuple[int, Edges], seed: int) -> None:
    n, edges = dag
    rng = np.random.default_rng(seed)
    graph = build_graph(n, *split(edges))
    delay, release = rng.random((len(edges), 2)), rng.random((n, 2))
    weights = weigh(graph, (n, 2), delay, release)
    nodes = rng.integers(0, n, 5)
    for _ in range(2):
        duration = rng.random((n, 2))
        _, end = longest_path(graph, duration, delay, release)
        assert np.array_equal(ends_at(weights, duration, nodes), end[nodes])


@given(dags(), st.integers(0, 2**32))
def test_slower_work_or_a_later_message_never_ends_anything_sooner(dag: tuple[int, Edges], seed: int) -> None:
    n, edges = dag
    rng = np.random.default_rng(seed)
    graph = build_graph(n, *split(edges))
    duration, delay = rng.random(n), rng.random(len(edges))
    _, end = longest_path(graph, duration, delay)
    _, later = longest_path(graph, duration + rng.random(n), delay + rng.random(len(edges)))
    assert (later >= end).all()


@given(dags(), st.integers(0, 2**32))
def test_back_along_the_deciding_edges_everything_adds_up_to_the_end(dag: tuple[int, Edges], seed: int) -> None:
    n, edges = dag
    rng = np.random.default_rng(seed)
    graph = build_graph(n, *split(edges))
    duration, delay = rng.integers(0, 9, n).astype(float), rng.integers(0, 9, len(edges)).astype(float)
    _, end = longest_path(graph, duration, delay)
    decides = deciding_edges(graph, end, delay)
    node = int(end.argmax())
    total = duration[node]
    while decides[node] >= 0:
        source, target = edges[decides[node]]
        assert target == node
        node = source
        total += duration[node] + delay[decides[target]]
    assert total == end.max()
    assert (deciding_edges(graph, end, np.full(len(edges), -np.inf)) == -1).all()


@given(dags(), st.data())
def test_a_cycle_is_named_by_nodes_that_really_form_one(dag: tuple[int, Edges], data: st.DataObject) -> None:
    n, edges = dag
    ring = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=5, unique=True))
    edges = [*edges, *zip(ring, [*ring[1:], ring[0]], strict=True)]
    with pytest.raises(CycleError) as caught:
        build_graph(n, *split(edges))
    cycle = caught.value.cycle
    assert len(set(cycle)) == len(cycle) > 0
    assert set(zip(cycle, [*cycle[1:], cycle[0]], strict=True)) <= set(edges)


@pytest.mark.parametrize("fan_in", [2, maxplus._WIDE, maxplus._WIDE + 1, 200])
def test_nodes_of_any_in_degree_take_their_latest_edge(fan_in: int) -> None:
    sources = [*range(fan_in), 0, 1]
    targets = [fan_in] * fan_in + [fan_in + 1] * 2
    duration = np.arange(fan_in + 2, dtype=float)
    start, _ = longest_path(build_graph(fan_in + 2, sources, targets), duration)
    assert start[fan_in:].tolist() == [fan_in - 1, 1]


def test_minus_infinity_switches_an_edge_off_and_release_holds_a_node_back() -> None:
    graph = build_graph(3, [0, 1], [1, 2])
    start, _ = longest_path(graph, [5.0, 5.0, 5.0], [-np.inf, 1.0], [0.0, 2.0, 0.0])
    assert start.tolist() == [0, 2, 8]


def test_delays_may_be_one_column_for_all_scenarios_on_any_number_of_axes() -> None:
    graph = build_graph(2, [0], [1])
    start, _ = longest_path(graph, np.ones((2, 3, 4)), [2.0])
    assert start.shape == (2, 3, 4)
    assert (start[1] == 3).all()


def test_a_graph_of_nothing_is_no_error() -> None:
    start, end = longest_path(build_graph(0, [], []), np.empty((0, 2)))
    assert start.shape == end.shape == (0, 2)


@pytest.mark.parametrize(
    ("src", "dst", "says"), [([0], [5], "outside"), ([-1], [0], "outside"), ([0, 1], [1], "equal")]
)
def test_edges_that_make_no_sense_are_refused(src: list[int], dst: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_graph(2, src, dst)
