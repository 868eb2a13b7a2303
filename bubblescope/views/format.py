"""Numbers, units, dates and foreign text, written the same way in every view."""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime

MISSING = "–"
MINUS = "\u2212"


def number(value: float | None, digits: int = 3) -> str:
    """With thousands separators and about `digits` significant digits.

    >>> number(1904.4), number(4.7612), number(0.0312), number(None)
    ('1,904', '4.76', '0.0312', '–')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{abs(value):,.{min(decimals, 9)}f}"
    return (MINUS if value < 0 else "") + text


def percent(value: float | None, digits: int = 1) -> str:
    """
    >>> percent(0.27272), percent(-0.001)
    ('27.3 %', '−0.1 %')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{abs(100 * value):.{digits}f} %"
    return MINUS + text if value < 0 and not text.startswith(f"{0:.{digits}f}") else text


def points(value: float | None) -> str:
    """A difference of shares, in percentage points.

    >>> points(0.0312), points(-0.5), points(0.0)
    ('+3.1 pp', '−50.0 pp', '0.0 pp')
    """
    text = percent(value).replace(" %", " pp")
    rounds_to_nothing = text in (MISSING, "0.0 pp")
    return text if rounds_to_nothing or text.startswith(MINUS) else f"+{text}"


def unit_of(value: float) -> tuple[str, float]:
    """The unit in which a time reads well, and how many of it make a second."""
    size = abs(value)
    if size >= 1:
        return "s", 1.0
    return ("ms", 1e3) if size >= 1e-3 else ("µs", 1e6)


def seconds(value: float | None, signed: bool = False) -> str:
    """
    >>> seconds(0.0091), seconds(12.5), seconds(-0.00004), seconds(0.5, signed=True)
    ('9.10 ms', '12.5 s', '−40.0 µs', '+500 ms')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) < 1e-9:
        return "0 s"
    unit, scale = unit_of(value)
    return ("+" if signed and value > 0 else "") + f"{number(value * scale)} {unit}"


def seconds_signed(value: float | None) -> str:
    """A difference of times.

    >>> seconds_signed(0.002), seconds_signed(-0.002)
    ('+2.00 ms', '−2.00 ms')
    """
    return seconds(value, signed=True)


def milliseconds(value: float | None) -> str:
    """In a column of one unit: always milliseconds, three decimals under 1 ms, else about four digits.

    >>> milliseconds(0.0091), milliseconds(1.25), milliseconds(0)
    ('9.100', '1,250', '0')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if abs(value) < 5e-7:
        return "0"
    size = abs(value) * 1e3
    text = f"{size:,.{3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0}f}"
    return MINUS + text if value < 0 else text


def gpu_hours(hours: float | None) -> str:
    """In GPU-hours, or smaller units where those would read as nothing.

    >>> gpu_hours(1904.2), gpu_hours(0.00258), gpu_hours(0.5)
    ('1,904 GPU-hours', '9.29 GPU-seconds', '0.500 GPU-hours')
    """
    if hours is None or not math.isfinite(hours):
        return MISSING
    if abs(hours) >= 0.1 or hours == 0:
        return f"{number(hours)} GPU-hours"
    minutes = hours * 60
    return f"{number(minutes)} GPU-minutes" if abs(minutes) >= 1 else f"{number(minutes * 60)} GPU-seconds"


def money(value: float | None, currency: str | None) -> str:
    """The currency's code before the amount, so that no reader has to guess which dollar.

    >>> money(4760.2, "USD"), money(0.5, "EUR"), money(None, "USD"), money(0.0036, "USD")
    ('USD 4,760', 'EUR 0.50', '–', 'under USD 0.01')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    unit = plain(currency) + " " if currency else ""
    if 0 < abs(value) < 0.005:
        return f"under {unit}0.01"
    amount = f"{abs(value):,.2f}" if abs(value) < 100 else f"{abs(value):,.0f}"
    return f"{MINUS if value < 0 else ''}{unit}{amount}"


def data_size(value: float | None) -> str:
    """
    >>> data_size(8388608)
    '8.00 MiB'
    """
    if value is None or not math.isfinite(value) or value < 0:
        return MISSING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{number(value)} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def moment(text: str | datetime | None) -> str:
    """
    >>> moment("2026-01-31T14:05:00Z")
    '2026-01-31 14:05 UTC'
    """
    if text is None:
        return MISSING
    if isinstance(text, str):
        try:
            text = datetime.fromisoformat(text)
        except ValueError:
            return plain(text)
    if text.tzinfo is not None:
        text = text.astimezone(UTC)
    return f"{text:%Y-%m-%d %H:%M} UTC"


def plain(text: object) -> str:
    """Foreign text without what acts on a terminal or reorders a line: control and format characters are shown
    as ``\\x1b``.

    >>> plain("a\\x1b[31m\\nb")
    'a\\\\x1b[31m\\\\x0ab'
    """
    return "".join(
        character if unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029"
        else _escaped(character)
        for character in str(text)
    )  # fmt: skip


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
