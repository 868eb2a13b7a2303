"""The HTML report in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bubblescope as bs
from bubblescope.report.build import build
from tests.support import fake_report, page_checks, synthetic
from tests.support.page_checks import until

pytestmark = pytest.mark.browser

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "before"

REPORTS: dict[str, Callable[[], Any]] = {
    "imbalance": fake_report.build,
    "missing": fake_report.one_rank_missing,
    "hostile": fake_report.hostile,
}


@pytest.fixture(scope="session")
def path_of(page_file: Callable[[str, Any], Path]) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def path(name: str) -> Path:
        if name not in made:
            made[name] = page_file(name, REPORTS[name]())
        return made[name]

    return path


@pytest.mark.parametrize("size", ["desktop", "phone"])
@pytest.mark.parametrize("name", REPORTS)
def test_quiet_and_clean_by_axe_in_both_themes(visit: Any, path_of: Any, screenshot: Any, name: str, size: str) -> None:
    found = visit(path_of(name), size)
    page_checks.draw_everything(found.page)
    found.page.click("[data-do=next]")
    found.page.wait_for_selector("#story:not([hidden])")
    page_checks.suits_both_themes(found, screenshot, f"{name}-{size}")


def test_the_keyboard_alone_moves_zooms_and_tells(visit: Any, path_of: Any) -> None:
    page = visit(path_of("imbalance")).page
    page.focus("#lanes")

    def view() -> list[float]:
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return [float(x) for x in page.get_attribute("#lanes", "data-view").split()]

    whole = view()
    page.keyboard.press("+")
    closer = view()
    assert closer[1] - closer[0] < whole[1] - whole[0]
    page.keyboard.press("ArrowRight")
    assert view()[0] > closer[0]
    page.keyboard.press("0")
    assert view() == whole
    page.keyboard.press("ArrowDown")
    assert "GPU 1" in page.inner_text("#lanes-status")
    page.keyboard.press("Enter")
    first = page.inner_text("#story h3")
    assert first.startswith("Stage 1 (GPU 1) waited")
    page.keyboard.press("n")
    assert page.inner_text("#story h3") != first
    page.keyboard.press("]")
    assert page.is_hidden("#story")
    until(page, "document.getElementById('lanes').dataset.step === '3'")
    page.keyboard.press("Enter")
    assert page.is_visible("#story")
    page.keyboard.press("Escape")
    assert page.is_hidden("#story")


@pytest.mark.parametrize("name", ["imbalance", "missing"])
def test_every_story_adds_up_to_its_gap(visit: Any, path_of: Any, name: str) -> None:
    page_checks.stories_add_up(visit(path_of(name)).page)


def test_the_longest_bubble_of_the_example_is_a_wait_for_the_others(visit: Any, page_file: Any) -> None:
    """Stage 3 is the first to be done with its step; its own host has nothing to do with what it waits then."""
    page = visit(page_file("example", bs.analyze(bs.load(EXAMPLE)))).page
    page.click("[data-do=next]")
    story = page.inner_text("#story h3")
    assert story.startswith("Stage 3 (GPU 3) waited ") and " at the end of the step: " in story
    assert story.endswith(" ms stage 0 (GPU 0) had not finished the step.")


def test_a_wait_in_a_collective_names_what_the_last_member_was_doing(visit: Any, page_file: Any) -> None:
    run = synthetic.make_run(synthetic.Job(sync=1_000_000), synthetic.constant(1_000_000, 2_000_000))
    page = visit(page_file("norm", build(run))).page
    page.evaluate("document.querySelector('#bubbles').closest('details').open = true")
    page.locator("#bubbles tr", has_text="stage 3, GPU 3").filter(has_text="optimizer").get_by_role("button").click()
    story = page.inner_text("#story h3")
    assert " waited 7.00 ms before optimizer: 6.00 ms stage 0 (GPU 0) had not finished B7, 1.00 ms messages" in story


def test_a_click_on_a_bubble_tells_its_story_and_a_drag_moves(visit: Any, path_of: Any) -> None:
    page = visit(path_of("imbalance")).page
    page.locator("#lanes").scroll_into_view_if_needed()
    box = page.locator("#lanes").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.25, box["y"] + 26 + 15)
    assert "Stage 0 (GPU 0) waited" in page.inner_text("#story h3")
    page.click("[data-do=in]")
    before = page.get_attribute("#lanes", "data-view")
    page.mouse.move(box["x"] + 600, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 40, steps=4)
    page.mouse.up()
    until(page, "(v) => document.getElementById('lanes').dataset.view !== v", arg=before)


def test_sliders_recompute_hours_and_money(visit: Any, path_of: Any) -> None:
    page = visit(path_of("imbalance")).page
    base = page.evaluate("bubblescope.data.whatif")
    page_checks.sliders_recompute(page, price=4, gpus=512, steps=1_000_000)
    hours = 512 * 1_000_000 * base["lost_s"] / 3600
    days = 1_000_000 * base["step_s"] / 86400
    assert float(page.input_value("#days")) == pytest.approx(days, rel=1e-5)
    assert page_checks.number(page.inner_text("#out-day")) == pytest.approx(4 * hours / days, rel=5e-3)
    first = page.locator("#table-actions tbody tr").first.locator("td").all_inner_texts()
    assert page_checks.number(first[2]) == pytest.approx(512 * 1e6 * base["actions"][0]["saved_s"] / 3600, rel=5e-3)
    page.fill("#days", str(days * 2))
    assert float(page.input_value("#total")) == pytest.approx(2_000_000, rel=1e-4)


def test_steps_and_days_never_contradict_each_other(visit: Any, path_of: Any) -> None:
    page = visit(path_of("imbalance")).page

    def both() -> tuple[str, str]:
        return page.input_value("#total"), page.input_value("#days")

    page.fill("#days", "-1")
    assert (page.input_value("#total"), page.inner_text("#out-hours")) == ("", "–")
    page.locator("#days").blur()
    assert both() == ("", "")
    page.fill("#days", "0")
    page.locator("#days").blur()
    total, days = both()
    step = page.evaluate("bubblescope.data.whatif.step_s")
    assert total == "1" and float(days) == pytest.approx(step / 86400, rel=1e-5)
    page.fill("#total", "-5")
    page.locator("#total").blur()
    assert both() == ("", "")
    page.fill("#total", "123456789")
    page.locator("#total").blur()
    assert both()[0] == "123456789"


def test_a_slider_moves_by_the_keyboard(visit: Any, path_of: Any) -> None:
    page = visit(path_of("imbalance")).page
    before = page.inner_text("#out-hours")
    page.focus("#gpus-slider")
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#out-hours") != before
    assert float(page.input_value("#gpus")) > 4


def test_the_theme_button_overrules_the_system(visit: Any, path_of: Any) -> None:
    page = visit(path_of("imbalance"), "desktop", "dark").page
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: light"
    assert page.evaluate(paper) != dark


def test_hostile_names_stay_text(visit: Any, path_of: Any) -> None:
    found = visit(path_of("hostile"))
    page_checks.draw_everything(found.page)
    found.page.click("[data-do=next]")
    assert found.page.locator("img").count() == 0
    assert "<script>alert(1)</script>" in found.page.inner_text("#headline")
    assert found.all_complaints() == []


def every_cause() -> Any:
    """Its tables of causes are as wide as such a table can be."""
    report = fake_report.build()
    for gpu in report.data["gpus"]:
        gpu["causes"] = {cause: seconds or -0.1234 for cause, seconds in gpu["causes"].items()}
    return report


@pytest.mark.parametrize("made", [*REPORTS.values(), every_cause])
def test_everything_printed_fits_a4_upright(visit: Any, page_file: Any, made: Any, screenshot: Any) -> None:
    page = visit(page_file(f"print-{made.__name__}", made()), "desktop", "dark").page
    page_checks.draw_everything(page)
    page_checks.prints_within_a4(page)
    screenshot(page, f"print-{made.__name__}")


def test_charts_are_drawn_as_narrow_as_paper_before_they_are_printed(visit: Any, path_of: Any) -> None:
    page = visit(path_of("imbalance"), "desktop").page
    page_checks.draw_charts(page)
    widest = "Math.max(...[...document.querySelectorAll('.main-svg')].map((e) => e.getBoundingClientRect().width))"
    assert page.evaluate(widest) > 1000
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    until(page, f"{widest} <= {page_checks.A4['width']}")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    until(page, f"{widest} > 1000")


def test_printing_shows_the_charts_on_white(visit: Any, path_of: Any, screenshot: Any) -> None:
    found = visit(path_of("imbalance"), "desktop", "dark")
    page_checks.draw_everything(found.page)
    found.page.emulate_media(media="print", color_scheme="dark")
    assert found.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert found.page.is_hidden("nav")
    ink = "document.querySelector('#chart-causes .ytick text').style.fill"
    until(found.page, f"{ink} === 'rgb(17, 17, 17)'")
    screenshot(found.page, "print")
