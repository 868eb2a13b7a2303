"""A user's own naming of ranges: a small TOML file of regular expressions.

```toml
[[range]]
name = 'fwd_s(?P<stage>\\d+)_mb(?P<microbatch>\\d+)'
kind = "forward"
```

`name`, in RE2's syntax, is searched for in the names of ranges (profiler annotations, NVTX). Groups called stage,
microbatch and chunk give these numbers; ``stage = 3`` and the like give them for what has no group. The first rule that
fits decides.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from bubblescope.errors import UsageError
from bubblescope.ingest import handwritten
from bubblescope.ingest.options import NameRule, linear_pattern
from bubblescope.model import Kind

KINDS: dict[str, Kind | None] = {
    "forward": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "backward_input": Kind.BACKWARD_INPUT,
    "backward_weight": Kind.BACKWARD_WEIGHT,
    "recompute": Kind.RECOMPUTE,
    "loss": Kind.LOSS,
    "optimizer": Kind.OPTIMIZER,
    "step": None,
}
_NUMBERS = ("stage", "microbatch", "chunk")
_KEYS = ("name", "kind", *_NUMBERS)
_LARGEST = 1 << 20


def load(path: str | Path) -> tuple[NameRule, ...]:
    """The rules in the file. Raises UsageError that names the line and the key of what is wrong."""
    where = str(path)
    try:
        return parse(handwritten.text(path), where)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"the names file is not UTF-8 text in line {line}", hint=_HINT, where=where) from error
    except OSError as error:
        raise UsageError(f"the names file cannot be read: {error.strerror}", hint=_HINT, where=where) from error


def parse(text: str, where: str = "") -> tuple[NameRule, ...]:
    r"""As `load`, for the text itself.

    >>> rule, = parse("[[range]]\nname = 'fwd(?P<microbatch>[0-9]+)'\nkind = 'forward'")
    >>> rule.kind.name, rule.search("fwd12")["microbatch"]
    ('FORWARD', '12')
    """
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # of its own kinds, and for numbers and nesting beyond all measure
        raise UsageError(f"the names file is not TOML: {error}", hint=_HINT, where=where) from error
    for key in document:
        if key != "range":
            raise UsageError(f"unknown key '{key}' in line {_line(text, key)}", hint=_HINT, where=where)
    tables = document.get("range")
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise UsageError("the names file has no [[range]] tables", hint=_HINT, where=where)
    lines = [i for i, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*range\s*\]\]", line)]
    lines += [1] * (len(tables) - len(lines))
    return tuple(_rule(table, _Place(text, where, line)) for table, line in zip(tables, lines, strict=False))


_HINT = "[[range]] tables with name = 'regular expression' and kind = \"forward\", see docs/traces.md"
_RE2 = "Python's syntax without look-around and back-references, so that every search takes linear time"


class _Place:
    """Where a table stands in the file, to say so."""

    def __init__(self, text: str, where: str, line: int) -> None:
        self.text, self.where, self.line = text, where, line

    def wrong(self, key: str, why: str, hint: str = _HINT) -> UsageError:
        line = _line(self.text, key, self.line)
        return UsageError(f"line {line}, key '{key}': {why}", hint=hint, where=self.where)


def _line(text: str, key: str, since: int = 1) -> int:
    """The line of `key` from line `since` on; `since` where it is not found."""
    for i, line in enumerate(text.splitlines(), 1):
        if i >= since and re.match(rf"\s*[\[\"']*{re.escape(key)}\b", line):
            return i
    return since


def _rule(table: dict[str, Any], place: _Place) -> NameRule:
    for key in table:
        if key not in _KEYS:
            raise place.wrong(key, "no such key", hint=f"the keys are {', '.join(_KEYS)}")
    pattern = _pattern(table, place)
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        said = "is missing" if kind is None else f"'{kind}' is no kind"
        raise place.wrong("kind", said, hint=f"one of {', '.join(KINDS)}")
    numbers = {}
    for key in _NUMBERS:
        value = table.get(key, -1)
        if isinstance(value, bool) or not isinstance(value, int) or not (key not in table or 0 <= value < _LARGEST):
            raise place.wrong(key, f"{value!r} is no number from 0 on")
        numbers[key] = value
    return NameRule(pattern, KINDS[kind], **numbers)


def _pattern(table: dict[str, Any], place: _Place) -> str:
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise place.wrong("name", "a regular expression is missing")
    try:
        groups = linear_pattern(name).groupindex
    except ValueError as error:
        why = f"'{name}' is not a regular expression that RE2 takes ({error})"
        raise place.wrong("name", why, hint=_RE2) from error
    unknown = sorted(set(groups) - set(_NUMBERS))
    if unknown:
        raise place.wrong("name", f"unknown group '{unknown[0]}'", hint=f"the groups are {', '.join(_NUMBERS)}")
    return name
