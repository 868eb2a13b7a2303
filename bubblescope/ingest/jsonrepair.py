"""JSON that does not parse, made to parse: byte repairs, and the search for the next sound event.

Every function here is pure and bounded by its input; what was changed is counted, so that it can be said.
"""

from __future__ import annotations

import re
from collections import Counter

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[{}\[\]]', re.DOTALL)
_SCALAR = re.compile(_STRING.pattern + rb'|[^\s,"{}\[\]]+', re.DOTALL)
_BORDER = re.compile(rb"\s*(?:,\s*|\Z)")
_CONTROL = re.compile(rb"[\x00-\x1f]")
_ODD = re.compile(rb"[\x00-\x1f\\]")
_PERHAPS_BARE = re.compile(rb"nan|inf", re.IGNORECASE)
_BAD_ESCAPE = re.compile(rb'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt]|)')
_BARE = re.compile(rb"(?<![\w\"])[-+]?(?:nan|inf(?:inity)?)(?![\w\"])", re.IGNORECASE)
EVENT_KEYS = rb"(?:ph|name|cat|pid|tid|ts|dur|args|bp)"


def event_gap(first_event: bytes) -> re.Pattern[bytes]:
    """What stands between two events: ``}, {"<key>"``, with the key that this file's events begin with.

    >>> event_gap(b'{"ph": "X"}').pattern.decode()
    '\\\\}\\\\s*,\\\\s*(?=\\\\{\\\\s*"ph")'
    """
    found = re.match(rb'\s*\{\s*"([A-Za-z_ ]{1,32})"', first_event)
    key = re.escape(found[1]) if found else EVENT_KEYS
    return re.compile(rb'\}\s*,\s*(?=\{\s*"' + key + rb'")')


_NEXT_EVENT = re.compile(rb'\s*,\s*(?=\{\s*"' + EVENT_KEYS + rb'")')
ANY_GAP = re.compile(rb"\}" + _NEXT_EVENT.pattern)
"""As `event_gap`, for files whose events begin with different keys."""


_UNDECODED = re.compile("[\udc80-\udcff]+")
"""Bytes that are no UTF-8, decoded with `surrogateescape`."""


def clean(text: bytes, counts: Counter[str]) -> bytes:
    """Repairs that cannot change the meaning; `counts` learns how many of each were made.

    Bad UTF-8 becomes U+FFFD, raw control characters inside strings are escaped, a backslash that starts no
    escape is doubled, bare NaN and infinities become null.

    >>> counts = Counter()
    >>> clean(b'{"name": "a\\tb", "dur": NaN, "file": "C:\\\\new_\\\\x"}', counts)
    b'{"name": "a\\\\u0009b", "dur": null, "file": "C:\\\\new_\\\\\\\\x"}'
    >>> sorted(counts.items())
    [('bad escape', 1), ('bare NaN or infinity', 1), ('control character', 1)]
    """
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        counts["bad UTF-8"] += len(_UNDECODED.findall(text.decode("utf-8", errors="surrogateescape")))
        text = text.decode("utf-8", errors="replace").encode("utf-8")
    bare = _PERHAPS_BARE.search(text) is not None
    if not bare and _ODD.search(text) is None:
        return text
    pieces: list[bytes] = []
    at = 0
    for match in _STRING.finditer(text):
        if not bare and _ODD.search(text, match.start(), match.end()) is None:
            continue
        between = text[at : match.start()]
        pieces.append(_clean_bare(between, counts) if bare else between)
        pieces.append(_clean_string(match[0], counts))
        at = match.end()
    pieces.append(_clean_bare(text[at:], counts))
    return b"".join(pieces)


def _clean_bare(text: bytes, counts: Counter[str]) -> bytes:
    changed, n = _BARE.subn(b"null", text)
    if n:
        counts["bare NaN or infinity"] += n
    return changed


def _clean_string(text: bytes, counts: Counter[str]) -> bytes:
    if b"\\" in text:
        text, n = _escape_backslashes(text)
        if n:
            counts["bad escape"] += n
    changed, n = _CONTROL.subn(lambda m: b"\\u%04x" % m[0][0], text)
    if n:
        counts["control character"] += n
    return changed


def _escape_backslashes(text: bytes) -> tuple[bytes, int]:
    bad = 0

    def fix(match: re.Match[bytes]) -> bytes:
        nonlocal bad
        if len(match[0]) > 1:
            return match[0]
        bad += 1
        return b"\\\\"

    return _BAD_ESCAPE.sub(fix, text), bad


def value_end(text: bytes, start: int) -> int | None:
    """Where the object or array that opens at `start` ends (just after its last bracket); None if it does not.

    >>> value_end(b'[{"a": "]"}] tail', 0)
    12
    """
    depth = 0
    for match in re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]', re.DOTALL).finditer(text, start):
        token = match[0]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                return match.end()
    return None


def depth(text: bytes | bytearray, start: int, end: int) -> int:
    """How many more brackets open than close from `start` to `end`, which both stand outside of strings.

    >>> depth(b'{"a]": [1, {"b": 2}, ', 0, 21)
    2
    """
    tokens = [match[0] for match in _TOKEN.finditer(text, start, end)]
    return sum(token in (b"{", b"[") for token in tokens) - sum(token in (b"}", b"]") for token in tokens)


def values(text: bytes) -> list[bytes]:
    """The values of ``{…}, 5, {…}``, whatever they are; one that cannot be taken apart reaches to the next event.

    >>> values(b'{"a": [1]}, 5, null, {"b": [}, 7, {"ph": "X"}')
    [b'{"a": [1]}', b'5', b'null', b'{"b": [}, 7', b'{"ph": "X"}']
    """
    out: list[bytes] = []
    at = 0
    while at < len(text):
        end = value_end(text, at) if text[at : at + 1] in (b"{", b"[") else _end_of(_SCALAR.match(text, at))
        border = None if end is None else _BORDER.match(text, end)
        border = border or _NEXT_EVENT.search(text, at)
        out.append(text[at : border.start() if border else len(text)])
        at = border.end() if border else len(text)
    return out


def _end_of(match: re.Match[bytes] | None) -> int | None:
    return None if match is None else match.end()


def split_events(text: bytes, gap: re.Pattern[bytes]) -> list[bytes]:
    """The events of ``{…}, {…}, …`` by their textual borders, whatever is wrong inside them."""
    out: list[bytes] = []
    at = 0
    for match in gap.finditer(text):
        out.append(text[at : match.start() + 1])
        at = match.end()
    out.append(text[at:])
    return out
