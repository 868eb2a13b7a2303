"""The live page: the report's own page, over the last steps, and what changes of it while it is open."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2

from bubblescope._version import __version__
from bubblescope.live import screen
from bubblescope.live.watcher import EXPECTED_CODES, Snapshot
from bubblescope.report.build import Report
from bubblescope.views import format as fmt
from bubblescope.views.html import parts
from bubblescope.views.html.page import Page, page

PACKAGE = "bubblescope.live"
SCRIPTS = ("text.js", "data.js", "timeline.js", "charts.js", "page.js", "live.js")
WAITING_SCRIPTS = ("text.js", "data.js", "charts.js", "page.js", "live.js")
STYLES = ("report.css", "live.css", "plotly.css")
_OWN = {"live.js", "live.css"}


@cache
def asset(name: str) -> str:
    """The text of a script or style of the page. Raises KeyError for any other name."""
    if name == "plotly.js":
        return parts.plotly()
    if name not in {*SCRIPTS, *STYLES}:
        raise KeyError(name)
    return parts.asset(name, PACKAGE) if name in _OWN else parts.asset(name)


@cache
def _url(name: str) -> str:
    """With what is in it as part of the address, so that browsers may keep it for good."""
    digest = hashlib.sha256(asset(name).encode()).hexdigest()[:12]
    return f"assets/{name}?v={digest}"


@dataclass(frozen=True)
class View:
    """One state of the page. version: differs from that of any other content, also of another watcher. layout: a page
    of another layout must be loaded anew. event: what is sent to open pages, as JSON."""

    version: str
    layout: str
    html: str
    event: str


class Pages:
    """Renders the newest snapshot, when somebody looks, once for all who do. Safe to call from several threads."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot
        self._lock = threading.Lock()
        self._session = secrets.token_hex(4)
        self._seen = -1
        self._view: View | None = None

    @property
    def stale(self) -> bool:
        """Whether `view` has something to do. Costs nothing."""
        return self._snapshot().version != self._seen

    def view(self) -> View:
        with self._lock:
            snapshot = self._snapshot()
            if self._view is None or snapshot.version != self._seen:
                self._view, self._seen = _view(snapshot, self._session, self._view), snapshot.version
            return self._view


def _view(snapshot: Snapshot, session: str, before: View | None) -> View:
    content = _waiting(snapshot) if snapshot.report is None else _content(snapshot, snapshot.report)
    rows = content.data.get("timeline", {}).get("rows", [])
    layout = _digest([session, rows, bool(snapshot.ranks), content.words.get("charts", []), sorted(content.data)])
    body = _render(content, layout, version="")
    version = _digest([layout, body, content.data])
    if before is not None and before.version == version:
        return before
    event = {"version": version, "layout": layout, "page": body, **content.data}
    return View(version, layout, _render(content, layout, version, data=True), json.dumps(event, sort_keys=True))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _content(snapshot: Snapshot, report: Report) -> Page:
    last = int(report.attribution.windows.steps.max())
    made = page(report, None, [last])
    words = made.words | {
        "screen": screen.screen(snapshot, report),
        "title": fmt.plain(snapshot.path),
        "status": screen.status(snapshot),
        "ranks": screen.ranks_table(snapshot),
        "rank_counts": screen.rank_counts(snapshot),
        "notices": screen.notices(snapshot, made.words["notices"], EXPECTED_CODES),
        "typical": -1,
        "last": last,
        "looked_at": int(report.data["steps"]["analysed"]),
    }
    words["facts"] = [fact for fact in words["facts"] if not fact.startswith("recorded ")]
    return Page(words, {"timeline": made.data["timeline"], "figures": made.data["figures"]})


def _waiting(snapshot: Snapshot) -> Page:
    words = {
        "title": fmt.plain(snapshot.path),
        "version": __version__,
        "written": None,
        "status": screen.status(snapshot),
        "ranks": screen.ranks_table(snapshot),
        "notices": screen.notices(snapshot, [], EXPECTED_CODES),
    }
    return Page(words, {"figures": {}})


def login_page() -> str:
    """Asks for the token; says nothing of the run."""
    words: dict[str, Any] = {
        "version": __version__,
        "written": None,
        "data": parts.json_for_script({"figures": {}}),
        "unwanted": [],
    }
    own = {"style_urls": [_url(style) for style in STYLES], "script_urls": [_url(s) for s in WAITING_SCRIPTS[:-1]]}
    return _environment().get_template("login.html.j2").render(**words, **own)


def _environment() -> jinja2.Environment:
    names = ("live.html.j2", "waiting.html.j2", "login.html.j2", "shared.html.j2")
    return parts.environment(*((PACKAGE, name) for name in names))


def _render(content: Page, layout: str, version: str, *, data: bool = False) -> str:
    waiting = "timeline" not in content.data
    name = "waiting.html.j2" if waiting else "live.html.j2"
    names = WAITING_SCRIPTS if waiting else ("plotly.js", *SCRIPTS)
    return (
        _environment()
        .get_template(name)
        .render(
            **content.words,
            layout=layout,
            content_version=version,
            data=parts.json_for_script(content.data if data else {}),
            script_urls=[_url(script) for script in names],
            style_urls=[_url(style) for style in STYLES],
            unwanted=[] if waiting else parts.unwanted_styles(),
        )
    )
