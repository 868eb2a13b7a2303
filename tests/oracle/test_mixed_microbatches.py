"""A run whose number of micro-batches changes, as it does while the batch size grows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bubblescope.model import Links, Run, Spans
from bubblescope.report import advice, compare
from bubblescope.report.build import Report, ReportOptions, build
from bubblescope.views.summary import first_screen
from tests.support.synthetic import Job, constant, make_run

MS = 1_000_000


def run_of(microbatches: int, steps: int) -> Run:
    return make_run(Job(microbatches=microbatches, steps=steps), constant(20 * MS, 40 * MS, {3: 1.5}))


def then(first: Run, second: Run) -> Run:
    """Both, one after the other, as one run."""
    a, b = first.spans, second.spans
    later = int(a.end_ns.max() - b.start_ns.min())
    moved = b.with_columns(
        step=b.step + a.step.max() + 1, start_ns=b.start_ns + later, end_ns=b.end_ns + later
    )  # fmt: skip
    links = Links(
        p2p=np.concatenate([first.links.p2p, second.links.p2p + len(a)]),
        p2p_wait=np.concatenate([first.links.p2p_wait, second.links.p2p_wait + len(a) * (second.links.p2p_wait >= 0)]),
    )
    layout = replace(first.layout, microbatches=None)
    return replace(first, spans=Spans.concat([a, moved]), links=links, layout=layout)


@pytest.fixture(scope="module")
def growing() -> Report:
    """Three steps of 4 micro-batches, then three of 8."""
    return build(then(run_of(4, 3), run_of(8, 3)), ReportOptions())


def test_it_is_said_and_the_larger_of_equally_frequent_numbers_is_the_base(growing: Report) -> None:
    (said,) = [w["message"] for w in growing.data["source"]["warnings"] if w["code"] == "microbatches-differ"]
    assert "3 with 4, 3 with 8" in said
    assert growing.data["pipeline"]["microbatches"] == 8
    assert growing.data["steps"]["analysed"] == 6


def test_savings_are_those_of_the_steps_with_that_number(growing: Report) -> None:
    """As of a run that had such steps only; in hours they count for these steps alone."""
    alone = build(run_of(8, 3), ReportOptions())
    wanted = {row["action"]: row for row in alone.data["advice"]}
    assert wanted and {row["action"] for row in growing.data["advice"]} == set(wanted)
    for row in growing.data["advice"]:
        for field in ("step_seconds", "saved_seconds", "now_seconds", "saved_gpu_hours"):
            assert row[field] == pytest.approx(wanted[row["action"]][field], rel=1e-6), (row["action"], field)
        assert row["step_share"] == 0.5
    changes = advice.explore(growing, advice.Wanted(microbatches=(16,)))["changes"]
    assert changes[0]["action"].startswith("Run 16 micro-batches per step instead of 8")
    assert [a.saving for a in first_screen(growing).actions] == [a.saving for a in first_screen(alone).actions]


def test_the_most_frequent_number_is_the_base() -> None:
    data = build(then(run_of(4, 3), run_of(8, 2)), ReportOptions()).data
    assert (data["pipeline"]["microbatches"], data["bubble"]["theory"]["fraction"]) == (4, pytest.approx(3 / 7))


def test_steps_of_several_numbers_are_not_compared_per_microbatch(growing: Report) -> None:
    alone = build(run_of(4, 6), ReportOptions())
    assert compare.compare(alone, build(run_of(8, 6), ReportOptions())).per_microbatch is not None
    mixed = compare.compare(alone, growing)
    assert (mixed.per_microbatch, mixed.unit) == (None, "step")
    assert any(n.code == "microbatches-differ" and "of unlike work" in n.message for n in mixed.notices)
