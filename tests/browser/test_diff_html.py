"""The page of `bubblescope diff` in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bubblescope.report.compare import Comparison, compare
from bubblescope.views.html import comparison
from tests.support import page_checks
from tests.support.cases import noisy, report

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(report(duration=noisy({3: 1.5}, 1)), report(duration=noisy({3: 1.1}, 2)))


@pytest.fixture(scope="module")
def page_path(found: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return comparison.write(found, ("runs/monday", HOSTILE), tmp_path_factory.mktemp("diff") / "diff.html")


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_it_complains_of_nothing_loads_nothing_and_passes_axe_in_both_themes(
    visit: Callable[..., Any], page_path: Path, screenshot: Callable[[Any, str], None], size: str
) -> None:
    seen = visit(page_path, size, ready="#table-changes")
    assert HOSTILE in seen.page.inner_text(".facts")
    page_checks.suits_both_themes(seen, screenshot, f"diff-{size}")


def test_what_is_printed_fits_a4_upright(
    visit: Callable[..., Any], page_path: Path, screenshot: Callable[[Any, str], None]
) -> None:
    page = visit(page_path, "desktop", "dark", ready="#table-changes").page
    page_checks.prints_within_a4(page)
    screenshot(page, "print-diff")


def test_the_theme_button_works_without_charts(visit: Callable[..., Any], page_path: Path) -> None:
    page = visit(page_path, ready="#table-changes").page
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: light"


def test_bars_and_numbers_of_the_changes_agree(visit: Callable[..., Any], page_path: Path, found: Comparison) -> None:
    page = visit(page_path, ready="#table-changes").page
    row = page.locator("#table-changes tbody tr", has_text="stage imbalance")
    bar = row.locator("td.drawing rect").bounding_box()
    cell = row.locator("td.drawing svg").bounding_box()
    assert found.causes["stage_imbalance"].difference < 0
    assert bar["x"] + bar["width"] == pytest.approx(cell["x"] + cell["width"] / 2, abs=1)
