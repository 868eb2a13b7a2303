"""What `bubblescope diff` writes says the same in every view, and names of runs stay text."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bubblescope.cli import diff
from bubblescope.cli.output import stdout_owner
from bubblescope.errors import ThresholdExceeded, UsageError
from bubblescope.report.compare import Comparison, compare
from bubblescope.views import comparison, markdown
from bubblescope.views.html import comparison as page
from tests.support.cases import MS, noisy, report
from tests.support.synthetic import Job

NOW = datetime(2026, 2, 1, 9, 30, tzinfo=UTC)
HOSTILE = "</script><script>alert(1)</script>\x1b[31m"


@pytest.fixture(scope="module")
def slower() -> Comparison:
    return compare(report(duration=noisy({}, 1)), report(duration=noisy({3: 1.5}, 2)))


@pytest.fixture(scope="module")
def same() -> Comparison:
    return compare(report(duration=noisy({}, 1)), report(duration=noisy({}, 1)))


def test_the_sentence_says_how_much_longer_and_why(slower: Comparison) -> None:
    said = comparison.verdict(slower)
    assert re.fullmatch(r"A step takes \d\d\.\d % longer", said.change)
    assert "the largest part is stage imbalance (+" in said.reason
    assert said.worse is True


def test_a_run_beside_itself_has_not_changed(same: Comparison) -> None:
    said = comparison.verdict(same)
    assert said.sentence.startswith("No change of the step time beyond the noise (")
    assert said.worse is None
    assert not any(row.sure for row in comparison.rows(same))


def test_a_shorter_step_is_no_loss(slower: Comparison) -> None:
    said = comparison.verdict(compare(report(), report(duration=noisy({}, 1))))
    assert "less time" in said.change and said.worse is False


def test_other_numbers_of_microbatches_are_compared_per_microbatch_in_every_view() -> None:
    found = compare(report(Job(microbatches=16, steps=6, optimizer=1 * MS)), report())
    # Steps of 1051 and 571 ms: 65.69 and 71.38 ms per micro-batch, 8.7 % longer.
    said = comparison.verdict(found)
    assert said.change == "A micro-batch takes 8.7 % longer" and said.worse is True
    assert "(65.7 ms → 71.4 ms; steps of 16 → 8 micro-batches, 1.05 s → 571 ms)" in said.reason
    assert [row.name for row in comparison.rows(found)[:2]] == ["micro-batch time", "whole step"]
    assert "Seconds per GPU and micro-batch." in markdown.render_comparison(found)
    text = page.render(found, ("a", "b"))
    assert "Largest change first, per GPU and micro-batch." in text and "per GPU and step" not in text
    widths = [sum(float(part.share) for part in parts) for _, _, parts in page._run_bars(found)]
    assert widths == [pytest.approx(100 * (1051 / 16) / (571 / 8), abs=0.01), pytest.approx(100, abs=0.01)]


def test_rows_of_causes_are_those_that_a_run_has(slower: Comparison) -> None:
    names = [row.cause for row in comparison.rows(slower) if row.cause]
    assert names == comparison.changed_causes(slower)
    assert "stage_imbalance" in names and "data_loading" not in names


def test_markdown_is_one_table_with_the_sure_changes_bold(slower: Comparison) -> None:
    lines = markdown.render_comparison(slower).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == len(comparison.rows(slower)) + 2
    assert {line.count("|") for line in table} == {6}
    assert any("stage imbalance" in line and "**+" in line for line in table)


def test_markdown_of_other_shapes_warns() -> None:
    found = compare(report(), report(Job(microbatches=16, steps=6, optimizer=1 * MS)))
    assert "- ⚠ microbatches: 8 before, 16 after" in markdown.render_comparison(found)


def test_the_page_is_small_repeats_itself_and_names_no_other_place(slower: Comparison) -> None:
    text = page.render(slower, ("main", "branch"), NOW)
    assert text == page.render(slower, ("main", "branch"), NOW)
    assert len(text.encode()) < 150_000
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "") and "https:" not in text
    assert "written 2026-02-01 09:30 UTC" in text


def test_names_of_runs_stay_text(slower: Comparison) -> None:
    text = page.render(slower, (HOSTILE, "b"))
    assert "<script>alert(1)" not in text and "\x1b" not in text


def test_the_two_bars_share_one_scale(slower: Comparison) -> None:
    text = page.render(slower, ("a", "b"))
    before, after = (re.findall(r'aria-label="(before|after): ', text).index(word) for word in ("before", "after"))
    assert (before, after) == (0, 1)
    bars = page._run_bars(slower)
    widths = [sum(float(part.share) for part in parts) for _, _, parts in bars]
    ratio = slower.step_seconds.before / slower.step_seconds.after
    assert widths[1] == pytest.approx(100, abs=0.01)
    assert widths[0] == pytest.approx(100 * ratio, abs=0.01)


def test_the_limit_is_exceeded_only_beyond_limit_and_noise(slower: Comparison, same: Comparison) -> None:
    diff.check(slower, None)
    diff.check(slower, 5.0)
    diff.check(same, 0.0)
    with pytest.raises(ThresholdExceeded, match="longer than before"):
        diff.check(slower, 0.0)


def test_the_limit_is_of_a_microbatch_where_their_number_differs() -> None:
    few, many = report(), report(Job(microbatches=16, steps=6, optimizer=1 * MS))
    diff.check(compare(few, many), 0.0)
    with pytest.raises(ThresholdExceeded, match=r"a micro-batch takes 8\.66% longer than before"):
        diff.check(compare(many, few), 0.05)


def test_everything_asked_for_is_written(slower: Comparison, tmp_path: Path) -> None:
    made = {"html": tmp_path / "a" / "d.html", "markdown_to": str(tmp_path / "b" / "d.md")}
    diff.deliver(slower, ("x", "y"), json_to=str(tmp_path / "c" / "d.json"), **made)
    assert {p.name for p in tmp_path.rglob("*.*")} == {"d.html", "d.md", "d.json"}


def test_only_one_output_can_own_stdout() -> None:
    assert stdout_owner(json=None, markdown="-") == "-"
    with pytest.raises(UsageError, match="--json - and --markdown - both want stdout"):
        stdout_owner(json="-", markdown="-")
