"""What pages are made of: assets, templates, data for scripts, and the policy that lets only these run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from bubblescope.views.format import plain
from bubblescope.views.json import strict

TEMPLATES = ("report.html.j2", "parts.html.j2", "diff.html.j2", "notebook.html.j2")
_INJECTED_STYLE = re.compile(r'if\(!document\.getElementById\("([0-9a-f]{64})"\)\)')
"""plotly.js adds the style sheet of its maps, which no figure here needs, unless an element has this id already."""


@cache
def digest(text: str) -> str:
    """The source expression that allows an inline script or style of this text."""
    # The parser of HTML turns every line end into \n before the browser hashes an element's text.
    normal = text.replace("\r\n", "\n").replace("\r", "\n")
    return f"'sha256-{base64.b64encode(hashlib.sha256(normal.encode()).digest()).decode()}'"


@cache
def plotly() -> str:
    """The text of plotly.js, fit to stand inside a script element."""
    from plotly.offline import get_plotlyjs  # 4.8 MB: only when a page is written

    text = str(get_plotlyjs())
    if "</script" in text.lower() or "<!--" in text:
        raise RuntimeError("this plotly.js cannot stand inside a script element; use a plotly >= 6.1,<8")
    return text


def unwanted_styles() -> list[str]:
    """Ids that must be on the page, so that plotly.js adds no style sheet of its own."""
    return sorted(_INJECTED_STYLE.findall(plotly()))


@cache
def asset(name: str, package: str = "bubblescope.views.html") -> str:
    """A file of that package's ``assets``."""
    return files(package).joinpath("assets", name).read_text(encoding="utf-8")


@cache
def environment(*more: tuple[str, str]) -> jinja2.Environment:
    """The report's templates, and those of other packages as (package, file name)."""
    own = [("bubblescope.views.html", name) for name in TEMPLATES]
    source = {
        name: files(package).joinpath("templates", name).read_text(encoding="utf-8") for package, name in (*own, *more)
    }
    made = jinja2.Environment(
        loader=jinja2.DictLoader(source), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters["plain"] = plain
    return made


def trusted(texts: Iterable[str]) -> list[Markup]:
    """Our own scripts and styles, to be written into the page as they are."""
    return [Markup(text) for text in texts]


def json_for_script(data: dict[str, Any]) -> Markup:
    """JSON that no HTML parser can leave: every <, > and & is written as \\u003c …"""
    text = json.dumps(strict(data), sort_keys=True, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def policy(scripts: Iterable[str], styles: Iterable[str]) -> str:
    """The page may run exactly these scripts and styles, and may load, send and embed nothing.

    A nonce would not be the same twice; hashes are. No 'unsafe-inline': plotly.js leaves a style sheet alone
    that is marked ``no-inline-styles``, and ours holds the rules that it would have added (plotly.css).
    """
    return "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(digest(text) for text in scripts),
            "style-src " + " ".join(digest(text) for text in styles),
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
