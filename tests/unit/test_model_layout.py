"""Layout, clock and run answer plain questions, and know what they do not know."""

from __future__ import annotations

import numpy as np
import pytest

from bubblescope.model import Clock, HostClock, Layout, Notice, Run, Spans


def test_the_row_of_a_rank_is_found_and_an_unseen_rank_is_a_key_error() -> None:
    layout = Layout(ranks=np.array([1, 3, 8]))
    assert [layout.index_of(r) for r in (1, 3, 8)] == [0, 1, 2]
    for unseen in (0, 2, 9):
        with pytest.raises(KeyError):
            layout.index_of(unseen)


def test_missing_ranks_are_those_the_world_size_promises() -> None:
    assert Layout(ranks=np.array([0, 2]), world_size=4).missing_ranks == [1, 3]


def test_without_a_world_size_only_ranks_between_those_seen_are_missing() -> None:
    """A job numbers its ranks without holes; how many come after the last one, nobody says."""
    assert Layout(ranks=np.array([0, 2])).missing_ranks == [1]
    assert Layout(ranks=np.array([2, 3])).missing_ranks == []
    assert Layout().missing_ranks == []


def test_the_error_bar_is_the_widest_half_width() -> None:
    clock = Clock(hosts=(HostClock("a", low_ns=-5, high_ns=5), HostClock("b", low_ns=0, high_ns=31)))
    assert clock.half_width_ns == 16


def test_one_unbounded_host_leaves_no_error_bar() -> None:
    assert Clock(hosts=(HostClock("a", low_ns=0, high_ns=2), HostClock("b"))).half_width_ns is None


def test_a_single_clock_has_no_error() -> None:
    assert Clock().half_width_ns == 0


def test_notices_are_added_to_a_copy_of_the_run() -> None:
    run = Run.empty()
    noted = run.with_notices(Notice("tail-cut", "the last line is cut"), Notice("rank-missing", "rank 3"))
    assert [n.code for n in noted.notices] == ["tail-cut", "rank-missing"]
    assert run.notices == ()


def test_the_ranks_of_a_run_are_those_with_spans_ascending_and_once() -> None:
    run = Run(spans=Spans.from_columns(4, rank=np.array([7, 0, 7, 3])), names=Run.empty().names)
    assert run.ranks == [0, 3, 7]
    assert Run.empty().ranks == []
