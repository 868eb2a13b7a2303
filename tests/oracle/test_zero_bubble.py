"""Zero Bubble (ICLR'24): the times of its table 9, replayed, give the bubble rates of its table 5."""

from __future__ import annotations

import pytest

from bubblescope.replay.engine import simulate
from bubblescope.replay.schedules import make

TABLE_9 = {  # model: p, m, and the milliseconds F, I (their B), W, communication
    "1.5B": (8, 24, 18.522, 18.086, 9.337, 0.601),
    "14.6B": (16, 48, 11.347, 11.248, 8.132, 0.377),
}
TABLE_5 = [
    ("1.5B", "1F1B", 0.2431),
    ("1.5B", "ZB-H1", 0.1585),
    ("1.5B", "ZB-H2", 0.1083),
    ("14.6B", "1F1B", 0.2552),
    ("14.6B", "ZB-H1", 0.1397),
    ("14.6B", "ZB-H2", 0.0672),
]


@pytest.mark.parametrize(("model", "name", "rate"), TABLE_5)
def test_bubble_rates_equal_the_published_ones(model: str, name: str, rate: float) -> None:
    p, m, f, i, w, c = TABLE_9[model]
    assert round(simulate(make(name, p, m), f, i, w, c).own_span_rate, 4) == rate


@pytest.mark.parametrize(("model", "rate"), [("1.5B", 0.1090), ("14.6B", 0.1136)])
def test_interleaved_with_its_wrap_around_dependency_costs_more_than_the_paper_prints(
    model: str, rate: float
) -> None:
    p, m, f, i, w, c = TABLE_9[model]
    sim = simulate(make("Interleaved1F1B", p, m, 3), f / 3, i / 3, w / 3, c)
    assert round(sim.own_span_rate, 4) == rate


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 12), (8, 24)])
def test_h1_and_h2_leave_the_bubbles_of_table_1(p: int, m: int) -> None:
    f, i, w = 7.0, 6.0, 3.0
    h1, h2 = simulate(make("ZB-H1", p, m), f, i, w), simulate(make("ZB-H2", p, m), f, i, w)
    assert h1.own_span.max() - h1.busy[0] == (p - 1) * (f + i - w)
    assert h2.own_span.max() - h2.busy[0] == (p - 1) * (f + i - 2 * w)


def test_h2_buys_its_smaller_bubble_with_twice_the_activations() -> None:
    h1, h2 = simulate(make("ZB-H1", 8, 24), 1, 1, 1), simulate(make("ZB-H2", 8, 24), 1, 1, 1)
    assert (max(h1.peak_activations), max(h2.peak_activations)) == (8, 15)
