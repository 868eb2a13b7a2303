"""One chromium for all tests, and pages that note every complaint and every request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import program

OUTPUT = Path(__file__).parents[2] / "test-output" / "browser"
QUIET = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-sync")
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}

VIOLATIONS = """
  window.violations = [];
  addEventListener("securitypolicyviolation", (e) => violations.push(`${e.effectiveDirective} ${e.sample}`));
"""


@dataclass
class Visit:
    """An open page, and what went wrong on it so far. origin: all that it may load begins with this."""

    page: Any
    origin: str
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def all_complaints(self) -> list[str]:
        return [*self.complaints, *self.page.evaluate("window.violations")]

    def foreign_requests(self) -> list[str]:
        return [url for url in self.requests if not url.startswith((self.origin, "data:"))]


Open = Callable[..., Visit]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program("chromium"), args=list(QUIET))
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """``visit(path or url, size="phone", theme="dark")`` opens a page and waits until `ready` is there: its
    timeline."""
    contexts = []

    def opened(
        where: Path | str, size: str = "desktop", theme: str = "light", ready: str = "#lanes[data-step]"
    ) -> Visit:
        context = browser.new_context(viewport=SIZES[size], color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        found = Visit(page, "file:" if isinstance(where, Path) else where)
        page.add_init_script(VIOLATIONS)
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(where.as_uri() if isinstance(where, Path) else where)
        page.wait_for_selector(ready, timeout=60_000)
        return found

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def screenshot() -> Callable[[Any, str], None]:
    """Keeps a picture of a page under test-output/browser, for a person to look at."""

    def take(page: Any, name: str) -> None:
        OUTPUT.mkdir(parents=True, exist_ok=True)
        page.evaluate("scrollTo({top: 0, behavior: 'instant'})")  # or the bar at the top lands in the middle
        page.screenshot(path=str(OUTPUT / f"{name}.png"), full_page=True)

    return take
