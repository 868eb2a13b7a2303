"""The partition equals the best of all cuts, tried one by one."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bubblescope.errors import InputError, UsageError
from bubblescope.replay.partition import best_partition

TIMES = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def all_cuts(n: int, stages: int) -> list[tuple[int, ...]]:
    """Every way to give n layers to the stages, as counts."""
    return [
        tuple(b - a for a, b in pairwise((0, *cuts, n)))
        for cuts in combinations_with_replacement(range(n + 1), stages - 1)
    ]


def stage_sums(values: list[int], layers: tuple[int, ...], first: int, last: int) -> list[int]:
    edges = np.concatenate(([0], np.cumsum(layers)))
    sums = [sum(values[a:b]) for a, b in pairwise(edges.tolist())]
    sums[0] += first
    sums[-1] += last
    return sums


@given(TIMES, st.integers(1, 4), st.integers(0, 9), st.integers(0, 9), st.data())
def test_no_cut_is_faster_and_none_as_fast_is_more_even(
    times: list[int], stages: int, embedding: int, head: int, data: st.DataObject
) -> None:
    limited = data.draw(st.booleans())
    memory = data.draw(st.lists(st.integers(0, 5), min_size=len(times), max_size=len(times)))
    limit = data.draw(st.integers(0, 20)) if limited else 10**9
    least = data.draw(st.integers(0, 2))
    allowed = [
        cut
        for cut in all_cuts(len(times), stages)
        if min(cut) >= least and max(stage_sums(memory, cut, 0, 0)) <= limit
    ]
    options = {"layer_memory": memory, "memory_limit": limit} if limited else {}
    if not allowed:
        with pytest.raises(InputError, match="no cut"):
            best_partition(times, stages, embedding=embedding, head=head, least_layers=least, **options)
        return
    best = min((max(s), sum(x * x for x in s)) for s in (stage_sums(times, c, embedding, head) for c in allowed))
    got = best_partition(times, stages, embedding=embedding, head=head, least_layers=least, **options)
    assert (got.slowest, sum(x * x for x in got.stage_times)) == best
    assert got.layers in allowed
    assert list(got.stage_times) == stage_sums(times, got.layers, embedding, head)
    assert got.bound <= got.slowest + 1e-9


def test_a_heavy_head_gets_fewer_layers_and_the_bound_is_printed_beside() -> None:
    got = best_partition([1.0] * 24, 4, embedding=0.5, head=3.0)
    assert got.layers == (6, 7, 7, 4)
    assert got.slowest == 7
    assert got.bound == pytest.approx(27.5 / 4)
    assert got.cuts == (6, 13, 20)


def test_a_pinned_part_may_be_the_bound() -> None:
    assert best_partition([1.0, 1.0], 2, head=50).bound == 50


def test_memory_limits_per_stage_move_layers_away() -> None:
    got = best_partition([1.0] * 8, 2, layer_memory=[1.0] * 8, memory_limit=[3, 8])
    assert (got.layers, got.memory) == ((3, 5), (3.0, 5.0))


@pytest.mark.parametrize(
    ("times", "stages", "options", "says"),
    [
        ([], 2, {}, "at least one"),
        ([1, -1], 2, {}, "negative"),
        ([1], 0, {}, "0 stages"),
        ([1], 1, {"head": float("inf")}, "head"),
        ([1], 1, {"memory_limit": 3}, "memory of each layer"),
        ([1], 1, {"memory_limit": 3, "layer_memory": [1, 2]}, "memory of 1 layers"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(times: list, stages: int, options: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        best_partition(times, stages, **options)


def test_a_large_model_is_cut_in_no_time() -> None:
    times = np.random.default_rng(0).random(400)
    got = best_partition(times, 64)
    assert sum(got.layers) == 400
    assert got.slowest >= got.bound
