"""The live page in a real browser, over real and generated runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live import jobs
from tests.live.processes import Watching, training, wait_for, watching
from tests.support.page_checks import draw_charts, is_quiet, is_quiet_in, passes_axe, suits_both_themes, until
from tests.support.pages import SIZES, Open, Visit

pytestmark = [pytest.mark.browser, pytest.mark.real]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    """A watcher over a real training that goes on as long as the tests do."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "run").mkdir()
    price = ("--price-per-gpu-hour", "2.5", "--steps", "5")
    shape = ("--stages", "3", "--microbatches", "4", "--steps", "4000")
    with training(folder / "run", *shape), watching(folder / "run", folder / "watch.log", *price) as made:
        wait_for("a first step", lambda: any((folder / "run").glob("recording/rank-*.jsonl")), 60)
        yield made


@contextlib.contextmanager
def _generated(tmp_path: Path, job: jobs.Recorded, steps: int, *more: str) -> Iterator[Watching]:
    job.write(tmp_path / "run", range(steps))
    with watching(tmp_path / "run", tmp_path / "watch.log", *more) as made:
        yield made


def test_the_fraction_changes_while_the_job_trains(live: Watching, visit: Open, screenshot: Any) -> None:
    found = visit(live.page)
    page, heads, steps = found.page, set(), set()
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and (len(heads) < 3 or len(steps) < 3):
        heads.add(page.inner_text(".figures .value >> nth=0"))
        steps.add(page.get_attribute("#lanes", "data-step"))
        page.wait_for_timeout(200)
    assert len(heads) >= 3 and len(steps) >= 3
    assert re.fullmatch(r"\d+\.\d %", heads.pop())
    assert re.search(r"pipeline bubbles: USD \d+\.\d\d an hour", page.inner_text("#headline"))
    assert "Being lost now" in page.inner_text("dl.figures") and "Lost so far" in page.inner_text("dl.figures")
    assert page.inner_text("#state").startswith("training")
    draw_charts(page)
    screenshot(page, "watch-live")
    is_quiet(found)


def drawn_and_changed(live: Watching, visit: Open, size: str) -> Visit:
    found = visit(live.page, size)
    draw_charts(found.page)
    found.page.click("[data-do=next]")
    head = found.page.inner_text("#state")
    until(found.page, "(head) => document.getElementById('state').innerText !== head", arg=head)
    return found


def test_it_is_quiet_and_passes_axe_in_both_themes_with_a_story_open(
    live: Watching, visit: Open, screenshot: Any
) -> None:
    suits_both_themes(drawn_and_changed(live, visit, "desktop"), screenshot, "watch-desktop")


def test_it_is_quiet_and_fits_on_a_phone(live: Watching, visit: Open, screenshot: Any) -> None:
    found = drawn_and_changed(live, visit, "phone")
    for theme in ("light", "dark"):
        is_quiet_in(theme, found, screenshot, "watch-phone")


def test_the_keyboard_alone_pauses_and_goes_on(live: Watching, visit: Open) -> None:
    page = visit(live.page).page
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "pause":
            break
    page.keyboard.press("Enter")
    assert page.get_attribute("#pause", "aria-pressed") == "true"
    page.wait_for_timeout(300)
    before = page.inner_text("#state"), page.get_attribute("#lanes", "data-step")
    page.wait_for_timeout(1000)
    assert (page.inner_text("#state"), page.get_attribute("#lanes", "data-step")) == before
    page.keyboard.press("Space")
    until(page, "(step) => document.getElementById('lanes').dataset.step !== step", arg=before[1])
    assert page.evaluate("document.activeElement.id") == "pause"


def test_what_a_reader_opened_and_focused_stays_while_figures_change(live: Watching, visit: Open) -> None:
    page = visit(live.page).page
    page.locator("#causes summary >> nth=0").click()
    region = page.locator("#causes details[open] .scroll")
    region.focus()
    step = page.get_attribute("#lanes", "data-step")
    until(page, "(step) => document.getElementById('lanes').dataset.step !== step", arg=step)
    assert region.is_visible()
    assert page.evaluate("document.activeElement.className") == "scroll"
    assert 0 <= region.bounding_box()["y"] < SIZES["desktop"]["height"]


def test_what_a_reader_opened_and_focused_is_so_again_after_the_page_is_loaded_anew(
    live: Watching, visit: Open
) -> None:
    """As it is when its layout changes: with its first chart, or another job."""
    page = visit(live.page).page
    page.locator("#causes summary >> nth=0").click()
    page.locator("#causes details[open] .scroll").focus()
    with page.expect_navigation():
        page.evaluate("document.getElementById('connection').dataset.layout = 'another'")
    until(page, "document.activeElement.className === 'scroll'")
    assert page.locator("#causes details[open] .scroll").is_visible()


def test_a_story_is_told_to_its_end_and_then_the_timeline_follows_again(live: Watching, visit: Open) -> None:
    page = visit(live.page).page
    page.focus("#lanes")
    page.keyboard.press("Enter")
    step, story = page.get_attribute("#lanes", "data-step"), page.inner_text("#story h3")
    head = page.inner_text("#state")
    until(page, "(head) => document.getElementById('state').innerText !== head", arg=head)
    page.wait_for_timeout(700)
    assert (page.get_attribute("#lanes", "data-step"), page.inner_text("#story h3")) == (step, story)
    assert "stays at this step" in page.inner_text("#connection")
    page.keyboard.press("Escape")
    until(page, "(step) => document.getElementById('lanes').dataset.step !== step", arg=step)
    assert page.inner_text("#connection") == ""


def test_a_page_that_waits_fills_itself(tmp_path: Path, visit: Open, screenshot: Any) -> None:
    job = jobs.steady()
    (tmp_path / "run").mkdir()
    with watching(tmp_path / "run", tmp_path / "watch.log") as made:
        found = visit(made.page, ready="#headline")
        assert found.page.inner_text("#headline") == "Waiting for the first finished step"
        passes_axe(found.page)
        screenshot(found.page, "watch-waiting")
        job.write(tmp_path / "run", [0])
        found.page.wait_for_selector("#table-ranks")
        job.write(tmp_path / "run", range(1, 6))
        found.page.wait_for_selector("#lanes[data-step='5']", timeout=30_000)
        assert "lost to pipeline bubbles" in found.page.inner_text("#headline")
        assert found.all_complaints() == []


def test_a_rank_that_falls_silent_stands_first(tmp_path: Path, visit: Open, screenshot: Any) -> None:
    job = jobs.steady(steps=40)
    with _generated(tmp_path, job, 4, "--patience", "1.5") as made:
        found = visit(made.page)
        for step in range(4, 40):
            job.write(tmp_path / "run", [step], [0, 1, 3])
            found.page.wait_for_timeout(250)
            first, second = found.page.locator("#table-ranks tbody tr").all_inner_texts()[:2]
            if first.startswith("GPU 2") and "training" in second:
                break
        assert first.startswith("GPU 2") and "silent since" in first and "training" in second
        assert "doubt" in found.page.get_attribute("#state", "class")
        screenshot(found.page, "watch-silent")
        passes_axe(found.page)


def test_an_open_page_survives_a_restart_of_the_watcher(tmp_path: Path, visit: Open) -> None:
    job = jobs.steady()
    with _generated(tmp_path, job, 4) as made:
        found = visit(made.page)
        port = made.page.rsplit(":", 1)[1].strip("/")
    until(found.page, "document.getElementById('connection').innerText.includes('is lost')")
    job.write(tmp_path / "run", range(4, 8))
    with watching(tmp_path / "run", tmp_path / "again.log", "--port", port):
        found.page.wait_for_selector("#lanes[data-step='7']", timeout=30_000)
        assert found.page.inner_text("#connection") == ""


def test_a_token_is_asked_for_once(tmp_path: Path, visit: Open, screenshot: Any) -> None:
    token = "correct-horse-battery-staple"
    with _generated(tmp_path, jobs.steady(), 4, "--token", token) as made:
        found = visit(made.page, ready="input[name=token]")
        passes_axe(found.page)
        screenshot(found.page, "watch-login")
        found.page.keyboard.type("not the token at all")
        found.page.keyboard.press("Enter")
        found.page.wait_for_selector("input[name=token]")
        found.page.fill("input[name=token]", token)
        found.page.keyboard.press("Enter")
        found.page.wait_for_selector("#lanes[data-step]")
        assert token not in found.page.url and token not in found.page.content()
        assert found.page.evaluate("document.cookie") == ""
        assert token not in made.said and "a wrong token" in made.said


def test_hundreds_of_ranks_are_drawn_by_stage(tmp_path: Path, visit: Open, screenshot: Any) -> None:
    job = jobs.steady(steps=4, replicas=64)
    with _generated(tmp_path, job, 3, "--steps", "2") as made:
        found = visit(made.page)
        assert "4 rows" in found.page.get_attribute("#lanes", "aria-label")
        job.write(tmp_path / "run", [3])
        found.page.wait_for_selector("#lanes[data-step='3']", timeout=60_000)
        assert "256 ranks training" in found.page.inner_text("#state")
        screenshot(found.page, "watch-256")
        assert found.page.locator("#table-ranks tbody tr").count() == 200
        assert found.all_complaints() == []


def test_hostile_names_stay_text(tmp_path: Path, visit: Open) -> None:
    hostile = jobs.steady(host="<img src=x onerror=alert(1)>\u202e", framework="</script><script>alert(1)</script>")
    with _generated(tmp_path, hostile, 4) as made:
        found = visit(made.page)
        hostile.write(tmp_path / "run", [4])
        found.page.wait_for_selector("#lanes[data-step='4']")
        assert found.page.locator("img").count() == 0
        assert "<img src=x" in found.page.inner_text("#table-ranks")
        assert found.all_complaints() == []


def test_the_watch_ends_at_once_with_pages_open(tmp_path: Path) -> None:
    import httpx

    with _generated(tmp_path, jobs.steady(), 4) as made:
        threading.Thread(target=lambda: _read(httpx.Client(timeout=30), made.page + "events"), daemon=True).start()
        wait_for("the stream", lambda: "watching" in made.said)
        time.sleep(1)
        os.kill(made.process.pid, signal.SIGTERM)
        assert made.process.wait(timeout=25) == 0  # its reader would have stayed for 30 s


def _read(client: Any, url: str) -> None:
    with contextlib.suppress(Exception), client.stream("GET", url) as stream:
        for _ in stream.iter_raw():
            pass
