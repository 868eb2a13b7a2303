"""What every page must do, whatever it shows."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

WCAG_AA = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
EVERY_RULE = {"type": "tag", "values": WCAG_AA}
COLOUR_RULES = {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}


def until(page: Any, expression: str, arg: object = None, timeout_s: float = 30.0) -> None:
    """Wait until `expression` holds in the page. Not playwright's wait_for_function: its polling evaluates text inside
    the page, which the page's own policy forbids as soon as the first look was too early."""
    end = time.monotonic() + timeout_s
    while not page.evaluate(expression, arg):
        if time.monotonic() > end:
            raise AssertionError(f"did not come true within {timeout_s:g} s: {expression}")
        page.wait_for_timeout(50)


def draw_charts(page: Any) -> None:
    """Charts are drawn when they come into view; here all at once."""
    page.evaluate("bubblescope.drawAllCharts()")
    until(page, "!document.querySelector('[data-figure]:not([data-drawn])')")


def draw_everything(page: Any) -> None:
    """All charts, and every table opened."""
    draw_charts(page)
    page.locator("details").evaluate_all("all => all.forEach(d => { d.open = true; })")


def is_quiet(visit: Any) -> None:
    """No console message, no error, no request to elsewhere, no sideways scrolling."""
    assert visit.all_complaints() == []
    assert visit.foreign_requests() == []
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


A4 = {"width": 718, "height": 1047}
"""Pixels between margins of 10 mm, at 96 a inch."""

RIGHT_EDGES = """
  [...document.querySelectorAll("h1, h2, h3, p, dl, ul, table, canvas, .main-svg")].filter((e) => e.checkVisibility())
    .map((e) => [e.id || e.className.baseVal || e.tagName, Math.ceil(e.getBoundingClientRect().right)])
"""


def prints_within_a4(page: Any) -> None:
    """What lies beyond the edge of the paper is lost: nothing can be scrolled there."""
    page.emulate_media(media="print")
    page.set_viewport_size(A4)
    until(page, "document.documentElement.hasAttribute('data-paper')")
    edges = page.evaluate(RIGHT_EDGES)
    assert "table-stages" in dict(edges)
    assert [(name, right) for name, right in edges if right > A4["width"]] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= A4["width"]


def passes_axe(page: Any, only: dict[str, Any] = EVERY_RULE) -> None:
    result = Axe().run(page, options={"runOnly": only})
    assert [(v["id"], [n["target"] for n in v["nodes"]][:3]) for v in result.response["violations"]] == []


def suits_both_themes(visit: Any, screenshot: Any, name: str) -> None:
    """Quiet and clean by axe in light and in dark; in dark only what colours decide is looked at again."""
    for theme, rules in (("light", EVERY_RULE), ("dark", COLOUR_RULES)):
        is_quiet_in(theme, visit, screenshot, name)
        passes_axe(visit.page, rules)


def is_quiet_in(theme: str, visit: Any, screenshot: Any, name: str) -> None:
    visit.page.emulate_media(color_scheme=theme)
    until(visit.page, f"getComputedStyle(document.documentElement).colorScheme === '{theme}'")
    screenshot(visit.page, f"{name}-{theme}")
    is_quiet(visit)


def amounts(page: Any, table: str) -> tuple[list[float], float]:
    """The printed parts and the printed total, in the table's own unit."""
    cells = page.locator(f"{table} td.n").all_inner_texts()
    numbers = [float(re.sub(r"[^\d.\u2212]", "", c).replace("\u2212", "-")) for c in cells]
    return numbers[:-1], numbers[-1]


def stories_add_up(page: Any, count: int = 25) -> None:
    """The printed parts of the next `count` bubbles sum to the printed bubble, and so do the exact ones. What a
    bubble waited for is either told in full or called unavailable."""
    for _ in range(count):
        page.click("[data-do=next]")
        told = page.locator("#story-rungs").count() > 0
        assert told or "What it waited for is unavailable" in page.inner_text("#story")
        for table in ("#story-rungs", "#story-causes") if told else ("#story-causes",):
            parts, total = amounts(page, table)
            assert sum(parts) == pytest.approx(total, abs=1e-6), page.inner_text("#story")
        if told:
            rungs = [int(x) for x in page.get_attribute("#story", "data-rungs").split()]
            assert sum(rungs) == int(page.get_attribute("#story", "data-units"))


def keyboard_tells_a_story(page: Any) -> None:
    page.focus("#lanes")
    whole = page.get_attribute("#lanes", "data-view")
    page.keyboard.press("+")
    until(page, "(v) => document.getElementById('lanes').dataset.view !== v", arg=whole)
    page.keyboard.press("0")
    until(page, "(v) => document.getElementById('lanes').dataset.view === v", arg=whole)
    page.keyboard.press("n")
    assert " waited " in page.inner_text("#story h3")
    page.keyboard.press("Escape")
    assert page.is_hidden("#story")


def sliders_recompute(page: Any, price: float = 4, gpus: int = 512, steps: int = 1_000_000) -> None:
    """Hours and money by the one formula: GPUs × steps × seconds / 3600, × price."""
    base = page.evaluate("bubblescope.data.whatif")
    for field, value in {"price": price, "gpus": gpus, "total": steps}.items():
        page.fill(f"#{field}", str(value))
    hours = gpus * steps * base["lost_s"] / 3600
    assert number(page.inner_text("#out-hours")) == pytest.approx(hours, rel=5e-3)
    assert number(page.inner_text("#out-money")) == pytest.approx(price * hours, rel=5e-3)


def number(text: str) -> float:
    return float(re.sub(r"[^\d.]", "", text))
