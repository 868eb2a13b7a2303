"""The pages of real analyses: training processes with a slow stage, GPipe, 1,024 GPUs, a lost rank, other people's
traces."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from typing import Any

import numpy as np
import pytest

import bubblescope as bs
from bubblescope.model import Action
from bubblescope.report.build import Report, build
from bubblescope.views import html
from tests.support import kineto_gen, page_checks, synthetic

pytestmark = [pytest.mark.browser, pytest.mark.real]

OUTPUT = Path(__file__).parents[2] / "test-output"
MOST_BYTES = 7_000_000


def _trained(folder: Path, *options: str) -> Report:
    """Really trains, one process a stage, as `bubblescope demo` does for everybody."""
    command = [sys.executable, "-m", "bubblescope", "demo", "--steps", "5", "--out", str(folder), *options]
    done = run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return bs.analyze(bs.load(folder / "recording"), price_per_gpu_hour=2.5, gpus=256, total_steps=500_000)


def _demo(folder: Path) -> Report:
    return _trained(folder / "demo", "--imbalance", "2=2")


def _gpipe(folder: Path) -> Report:
    return _trained(folder / "gpipe", "--schedule", "GPipe", "--stages", "3", "--imbalance", "0=1.5")


def _broken(folder: Path) -> Report:
    """The demo's recording after rank 1's disk was lost."""
    kept = folder / "broken"
    shutil.copytree(folder / "demo" / "recording", kept)
    (kept / "rank-00001.jsonl").unlink()
    return bs.analyze(bs.load(kept), price_per_gpu_hour=2.5)


def _thousand(_: Path) -> Report:
    """16 stages × 64 replicas. Every operation has its own length, so that nothing repeats and compresses away."""
    random = np.random.default_rng(3)
    base = synthetic.constant(10_000_000, 20_000_000, {15: 1.3})

    def duration(step: int, replica: int, rank: int, action: Action) -> int:
        slow = 1.15 if (replica, rank) == (7, 3) else 1.0
        return round(base(step, replica, rank, action) * slow * (1 + 0.02 * float(random.standard_normal())))

    job = synthetic.Job(
        stages=16, microbatches=32, replicas=64, steps=3, comm=300_000, optimizer=2_000_000, sync=1_500_000, host=50_000
    )
    return build(synthetic.make_run(job, duration))


def _kineto(folder: Path) -> Report:
    """What torch.profiler would have written of a 1F1B pipeline, read as any other trace."""
    shape = kineto_gen.Shape(steps=4, optimizer_ns=500_000)
    style = kineto_gen.Style(ranges="runtime", launches=True, profiler_step=True)
    kineto_gen.write(folder / "kineto", kineto_gen.traces(kineto_gen.simulate(shape), style))
    return bs.analyze(bs.load(folder / "kineto"))


REPORTS: dict[str, Callable[[Path], Report]] = {
    "demo": _demo, "gpipe": _gpipe, "broken": _broken, "thousand": _thousand, "kineto": _kineto,
}  # fmt: skip
WITH_BUBBLES = [name for name in REPORTS if name != "broken"]


@pytest.fixture(scope="module")
def path_of() -> Callable[[str], Path]:
    """Reports, made once in this order and kept under test-output/reports."""
    folder = OUTPUT / "reports"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = {name: html.write(make(folder), folder / f"{name}.html") for name, make in REPORTS.items()}
    return paths.__getitem__


@pytest.mark.timeout(600)  # the first one trains two pipelines
@pytest.mark.parametrize("name", REPORTS)
def test_a_page_stays_small(path_of: Any, name: str) -> None:
    assert path_of(name).stat().st_size < MOST_BYTES


@pytest.mark.parametrize("name", REPORTS)
def test_it_is_quiet_and_passes_axe_in_both_themes(visit: Any, path_of: Any, screenshot: Any, name: str) -> None:
    found = visit(path_of(name))
    page_checks.draw_everything(found.page)
    found.page.click("[data-do=next]")
    page_checks.suits_both_themes(found, screenshot, f"real-{name}")


@pytest.mark.parametrize("name", REPORTS)
def test_it_fits_a_phone(visit: Any, path_of: Any, screenshot: Any, name: str) -> None:
    found = visit(path_of(name), "phone")
    page_checks.draw_everything(found.page)
    screenshot(found.page, f"real-{name}-phone")
    page_checks.is_quiet(found)


@pytest.mark.parametrize("name", REPORTS)
def test_its_stories_add_up_and_its_keyboard_and_sliders_work(visit: Any, path_of: Any, name: str) -> None:
    page = visit(path_of(name)).page
    page_checks.stories_add_up(page)
    page_checks.keyboard_tells_a_story(page)
    page_checks.sliders_recompute(page)


def test_a_thousand_ranks_are_drawn_by_stage_and_open_on_demand(visit: Any, path_of: Any, screenshot: Any) -> None:
    page = visit(path_of("thousand")).page
    assert page.get_attribute("#lanes", "aria-label").count("33 rows") == 1  # 16 stages, a title, 16 ideal rows
    screenshot(page, "thousand-by-stage")
    page.focus("#lanes")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert "stage 1 opened" in page.inner_text("#lanes-status")


def test_the_first_screen_of_the_demo_is_drawn_within_two_seconds(visit: Any, path_of: Any) -> None:
    """By the browser's own clock; the best of three, since other processes share the machine."""
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    times = [visit(path_of("demo")).page.evaluate(paint) for _ in range(3)]
    assert min(times) < 2000, times


@pytest.mark.parametrize("name", WITH_BUBBLES)
def test_the_headline_speaks_of_pipeline_bubbles(visit: Any, path_of: Any, name: str) -> None:
    assert "is lost to pipeline bubbles" in visit(path_of(name)).page.inner_text("#headline")


def test_a_lost_rank_is_named_and_nothing_is_guessed(visit: Any, path_of: Any) -> None:
    page = visit(path_of("broken")).page
    assert "missing 1" in page.inner_text(".trust")
    assert "is idle" in page.inner_text("#headline")


def test_the_slow_stage_of_the_demo_is_named_with_what_to_do(visit: Any, path_of: Any) -> None:
    """Not in the headline: on a busy machine other programs may cost this run more than its slow stage does."""
    assert "stage 2" in visit(path_of("demo")).page.inner_text("#table-actions")
