"""`report.html`: one file that needs nothing else, and asks nothing of the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from bubblescope.views.format import plain
from bubblescope.views.html.page import page
from bubblescope.views.json import strict

if TYPE_CHECKING:
    from bubblescope.views.source import ReportLike

SCRIPTS = ("text.js", "data.js", "timeline.js", "charts.js", "whatif.js", "page.js")
STYLES = ("report.css", "plotly.css")

_INJECTED_STYLE = re.compile(r'if\(!document\.getElementById\("([0-9a-f]{64})"\)\)')
"""plotly.js adds the style sheet of its maps, which no figure here needs, unless an element has this id already."""


def render(report: ReportLike, now: datetime | None = None) -> str:
    """The whole page. `now` is the time of writing printed on it; None prints only the report's own `created`.

    The same report and `now` give the same bytes.
    """
    content = page(report, now)
    scripts = [_plotly(), *[_asset(name) for name in SCRIPTS]]
    styles = [_asset(name) for name in STYLES]
    return _environment().get_template("report.html.j2").render(
        **content.words,
        data=_json_for_script(content.data),
        plotly=Markup(scripts[0]),
        scripts=[Markup(text) for text in scripts[1:]],
        styles=[Markup(text) for text in styles],
        policy=_policy(scripts, styles),
        unwanted=sorted(_INJECTED_STYLE.findall(scripts[0])),
    )  # fmt: skip


def write(report: ReportLike, path: str | Path, now: datetime | None = None) -> Path:
    """Write `render(report, now)` to `path`, UTF-8."""
    target = Path(path)
    target.write_text(render(report, now), encoding="utf-8", newline="\n")
    return target


def _policy(scripts: list[str], styles: list[str]) -> str:
    """The page may run exactly these scripts and styles, and may load, send and embed nothing.

    A nonce would not be the same twice; hashes are. No 'unsafe-inline': plotly.js leaves a style sheet alone
    that is marked ``no-inline-styles``, and ours holds the rules that it would have added (plotly.css).
    """
    return "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(_digest(text) for text in scripts),
            "style-src " + " ".join(_digest(text) for text in styles),
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


@cache
def _digest(text: str) -> str:
    # The parser of HTML turns every line end into \n before the browser hashes an element's text.
    normal = text.replace("\r\n", "\n").replace("\r", "\n")
    return f"'sha256-{base64.b64encode(hashlib.sha256(normal.encode()).digest()).decode()}'"


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs  # 4.8 MB: only when a page is written

    text = str(get_plotlyjs())
    if "</script" in text.lower() or "<!--" in text:
        raise RuntimeError("this plotly.js cannot stand inside a script element; use a plotly >= 6.1,<8")
    return text


@cache
def _asset(name: str) -> str:
    return files("bubblescope.views.html").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    source = {
        name: files("bubblescope.views.html").joinpath("templates", name).read_text(encoding="utf-8")
        for name in ("report.html.j2", "parts.html.j2")
    }
    made = jinja2.Environment(
        loader=jinja2.DictLoader(source), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters["plain"] = plain
    return made


def _json_for_script(data: dict[str, Any]) -> Markup:
    """JSON that no HTML parser can leave: every <, > and & is written as \\u003c …"""
    text = json.dumps(strict(data), sort_keys=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
