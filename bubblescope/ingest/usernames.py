"""A user's own naming of ranges and kernels: a small TOML file of regular expressions.

```toml
[[range]]
name = 'fwd_s(?P<stage>\\d+)_mb(?P<microbatch>\\d+)'
kind = "forward"

[[kernel]]
name = '^my_ring_'
kind = "communication"
```

`name`, in RE2's syntax, is searched for in the names of ranges (profiler annotations, NVTX). Groups called stage,
microbatch and chunk give these numbers; ``stage = 3`` and the like give them for what has no group. The first rule that
fits decides. A kernel is communication or compute, and has no numbers.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bubblescope.errors import UsageError
from bubblescope.ingest import handwritten
from bubblescope.ingest.options import KernelRule, NameRule, linear_pattern
from bubblescope.model import Kind, Lane, Notice, Run, checks
from bubblescope.model.notice import some

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
KERNEL_KINDS = {"communication": True, "compute": False}
_NUMBERS = ("stage", "microbatch", "chunk")
_TABLES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {"range": (KINDS, _NUMBERS), "kernel": (KERNEL_KINDS, ())}
"""The tables of a file: which kinds they have, and which numbers."""
Rule = NameRule | KernelRule
_LARGEST = 1 << 20
USER_STEPS = "the user's names"
"""`Layout.inferred["steps"]` where a rule named the steps."""


def load(path: str | Path) -> tuple[Rule, ...]:
    """The rules in the file. Raises UsageError that names the line and the key of what is wrong."""
    where = str(path)
    try:
        return parse(handwritten.text(path), where)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UsageError(f"the names file is not UTF-8 text in line {line}", hint=_HINT, where=where) from error
    except OSError as error:
        raise UsageError(f"the names file cannot be read: {error.strerror}", hint=_HINT, where=where) from error


def parse(text: str, where: str = "") -> tuple[Rule, ...]:
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
        if key not in _TABLES:
            raise UsageError(f"unknown key '{key}' in line {_line(text, key)}", hint=_HINT, where=where)
    tables = {key: document.get(key, []) for key in _TABLES}
    if not any(tables.values()) or not all(
        isinstance(of, list) and all(isinstance(t, dict) for t in of) for of in tables.values()
    ):
        raise UsageError("the names file has no [[range]] tables", hint=_HINT, where=where)
    return tuple(rule for key, of in tables.items() for rule in _rules(key, of, text, where))


def _rules(key: str, tables: list[dict[str, Any]], text: str, where: str) -> Iterator[Rule]:
    lines = [i for i, line in enumerate(text.splitlines(), 1) if re.match(rf"\s*\[\[\s*{key}\s*\]\]", line)]
    lines += [1] * (len(tables) - len(lines))
    for table, line in zip(tables, lines, strict=False):
        yield _rule(key, table, _Place(text, where, line))


_HINT = (
    "[[range]] tables with name = 'regular expression' and kind = \"forward\", or [[kernel]] tables with kind = "
    '"communication", see docs/traces.md'
)
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


def _rule(of: str, table: dict[str, Any], place: _Place) -> Rule:
    kinds, numbered = _TABLES[of]
    keys = ("name", "kind", *numbered)
    for key in table:
        if key not in keys:
            raise place.wrong(key, "no such key", hint=f"the keys are {', '.join(keys)}")
    pattern = _pattern(table, numbered, place)
    kind = table.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        said = "is missing" if kind is None else f"'{kind}' is no kind"
        raise place.wrong("kind", said, hint=f"one of {', '.join(kinds)}")
    if of == "kernel":
        return KernelRule(pattern, KERNEL_KINDS[kind])
    numbers = {}
    for key in _NUMBERS:
        value = table.get(key, -1)
        if isinstance(value, bool) or not isinstance(value, int) or not (key not in table or 0 <= value < _LARGEST):
            raise place.wrong(key, f"{value!r} is no number from 0 on")
        numbers[key] = value
    return NameRule(pattern, KINDS[kind], **numbers)


def _pattern(table: dict[str, Any], numbered: tuple[str, ...], place: _Place) -> str:
    name = table.get("name")
    if not isinstance(name, str) or not name:
        raise place.wrong("name", "a regular expression is missing")
    try:
        groups = linear_pattern(name).groupindex
    except ValueError as error:
        why = f"'{name}' is not a regular expression that RE2 takes ({error})"
        raise place.wrong("name", why, hint=_RE2) from error
    unknown = sorted(set(groups) - set(numbered))
    if unknown:
        allowed = f"the groups are {', '.join(numbered)}" if numbered else "rules for kernels have no groups"
        raise place.wrong("name", f"unknown group '{unknown[0]}'", hint=allowed)
    return name


def number(captured: str) -> int | None:
    """The number that a group captured; None where it captured something else.

    >>> number("12"), number("mb"), number(""), number("²")
    (12, None, None, None)
    """
    return int(captured) if captured.isdecimal() and len(captured) < 10 else None


def notices(rules: tuple[Rule, ...], run: Run) -> list[Notice]:
    """About rules that fit no range, or no kernel, of the run, and about groups that captured no number."""
    ranges = _names_of(run, Lane.RANGE)
    kernels = _names_of(run, Lane.COMPUTE, Lane.COMM)
    said = []
    for what, kind, texts in (("range", NameRule, ranges), ("kernel", KernelRule, kernels)):
        mine = [rule for rule in rules if isinstance(rule, kind)]
        unused = [_unused(rule, run) for rule in mine if not _is_used(rule, run, texts)]
        if unused:
            listed = some(unused, 4)
            message = f"{len(unused)} of {len(mine)} rules of the names file fit no {what} in the input: {listed}"
            said.append(Notice("names-unused", message))
    return [*said, *_without_number([rule for rule in rules if isinstance(rule, NameRule)], ranges)]


def _names_of(run: Run, *lanes: Lane) -> list[str]:
    spans = run.spans
    return [run.names[i] for i in np.unique(spans.name[np.isin(spans.lane, lanes)]).tolist()]


def _is_used(rule: Rule, run: Run, texts: list[str]) -> bool:
    if isinstance(rule, NameRule) and rule.kind is None:  # the reader has made steps of these
        return USER_STEPS in run.layout.inferred.get("steps", "") and _fits(rule, run.names.texts)
    return _fits(rule, texts)


def _unused(rule: Rule, run: Run) -> str:
    others = "kernels" if isinstance(rule, NameRule) else "ranges"
    elsewhere = f" (fits other things, such as {others}, which are not named so)"
    return f"'{rule.pattern}'{elsewhere if _fits(rule, run.names.texts) else ''}"


def _fits(rule: Rule, texts: Iterable[str]) -> bool:
    return any(rule.search(text) for text in texts)


def _without_number(rules: list[NameRule], ranges: list[str]) -> Iterator[Notice]:
    """One for each group that captures no number in a name of which its rule decides."""
    decided: dict[NameRule, list[tuple[str, dict[str, str | None]]]] = {}
    for text in ranges:
        fits = ((rule, found) for rule in rules if rule.kind is not None and (found := rule.search(text)))
        for rule, found in itertools.islice(fits, 1):
            decided.setdefault(rule, []).append((text, found.groupdict()))
    for rule, names in decided.items():
        for group in _NUMBERS:
            wrong = [(text, got) for text, of in names if (got := of.get(group)) is not None and number(got) is None]
            if wrong:
                text, got = wrong[0]
                yield Notice(
                    "names-no-number",
                    f"the group {group} of the rule '{rule.pattern}' of the names file captures no number in "
                    f"{len(wrong)} of the {len(names)} names that the rule fits, such as {checks.shown(got)} of "
                    f"{checks.shown(text)}; there the {group} is not known",
                )
