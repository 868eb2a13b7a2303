"""Shapley values equal the mean over all orders, played through one by one."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bubblescope.replay.shapley import coalitions, credits


@given(st.integers(1, 5), st.data())
def test_values_and_ranges_equal_all_orders_played_through(n: int, data: st.DataObject) -> None:
    players = "abcde"[:n]
    drawn = data.draw(st.lists(st.integers(-50, 50), min_size=2**n, max_size=2**n))
    value = dict(zip(coalitions(players), map(float, drawn), strict=True))
    found = credits(players, value)
    orders = list(permutations(players))
    for name in players:
        gains = []
        for order in orders:
            before = frozenset(order[: order.index(name)])
            gains.append(value[before | {name}] - value[before])
        got = found[name]
        assert got.shapley == pytest.approx(sum(gains) / len(orders))
        assert (got.low, got.high) == (min(gains), max(gains))
        assert got.first_in == value[frozenset({name})] - value[frozenset()]
        assert got.last_in == value[frozenset(players)] - value[frozenset(players) - {name}]
    total = sum(credit.shapley for credit in found.values())
    assert total == pytest.approx(value[frozenset(players)] - value[frozenset()])


def test_no_players_have_no_credits_and_a_missing_coalition_is_named() -> None:
    assert credits([], {frozenset(): 0.0}) == {}
    with pytest.raises(ValueError, match=r"\['a'\] is missing"):
        credits("a", {frozenset(): 0.0})
    with pytest.raises(ValueError, match="too many"):
        credits(range(11), {})
