"""How much of a gain each of a few causes brings, when the gain depends on the order in which they are fixed."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import factorial
from typing import TypeVar

Player = TypeVar("Player", bound=Hashable)
MOST_PLAYERS = 10


@dataclass(frozen=True)
class Credit:
    """One player's share. shapley: mean of its gain over all orders. first_in: gain when it comes first, last_in:
    last. low, high: least and most gain over all orders."""

    shapley: float
    first_in: float
    last_in: float
    low: float
    high: float


def credits(players: Iterable[Player], value: Mapping[frozenset[Player], float]) -> dict[Player, Credit]:
    """Exact Shapley values (Shapley 1953) with their range, from the value of every coalition.

    value: {coalition: what is gained when just its members act}, for all 2^n coalitions, the empty one included.
    Shapley values add up to value(all) - value(none). Raises ValueError when a coalition is missing.

    >>> gains = {frozenset(): 0.0, frozenset("a"): 4.0, frozenset("b"): 1.0, frozenset("ab"): 9.0}
    >>> credits("ab", gains)["a"]
    Credit(shapley=6.0, first_in=4.0, last_in=8.0, low=4.0, high=8.0)
    """
    names = tuple(dict.fromkeys(players))
    if len(names) > MOST_PLAYERS:
        raise ValueError(f"{len(names)} players have too many coalitions; at most {MOST_PLAYERS}")
    for coalition in coalitions(names):
        if coalition not in value:
            raise ValueError(f"the value of coalition {sorted(map(str, coalition))} is missing")
    return {name: _credit(name, names, value) for name in names}


def coalitions(players: Iterable[Player]) -> list[frozenset[Player]]:
    """All subsets, the smaller ones first: what `credits` needs values for.

    >>> [sorted(c) for c in coalitions("ab")]
    [[], ['a'], ['b'], ['a', 'b']]
    """
    names = tuple(dict.fromkeys(players))
    return [frozenset(chosen) for size in range(len(names) + 1) for chosen in combinations(names, size)]


def _credit(name: Player, names: tuple[Player, ...], value: Mapping[frozenset[Player], float]) -> Credit:
    others = [other for other in names if other != name]
    gains = {before: value[before | {name}] - value[before] for before in coalitions(others)}
    n = len(names)
    # A coalition of s others comes just before `name` in s!(n-1-s)! of the n! orders.
    orders = sum(factorial(len(c)) * factorial(n - 1 - len(c)) * gain for c, gain in gains.items())
    return Credit(
        shapley=orders / factorial(n),
        first_in=gains[frozenset()],
        last_in=gains[frozenset(others)],
        low=min(gains.values()),
        high=max(gains.values()),
    )
