"""Single JSON values of a trace -> integers: times to the nanosecond, ids of any spelling, NCCL metadata."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from typing import Any

from bubblescope.ingest.events import CommArgs

EXACT_US = float(1 << 42)
"""From this many microseconds on, a float64 is not trusted to hold the nearest nanosecond."""
INT64 = 1 << 62
MAX_NS = 1 << 61
"""Times, and a base that is added to them, lie below it (the year 2043), so that no sum or difference leaves int64."""


def integer(value: Any, otherwise: int = -1) -> int:
    """`value` as an int64, `otherwise` when it is none. Unsigned 64-bit ids are folded, not lost."""
    kind = type(value)
    if kind is int and -(1 << 63) <= value < 1 << 63:
        return int(value)
    try:
        if kind is int:
            number: int = value
        elif kind is str:
            text = value.strip()
            number = int(text, 16) if text[:2].lower() == "0x" else int(text)
        elif kind is float and value == value and abs(value) < 2**63:
            number = int(value)
        else:
            return otherwise
    except ValueError:
        return otherwise
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >= 1 << 63 else number


def nanoseconds(us: Any) -> int | None:
    """Microseconds as written -> integer nanoseconds; None when it is no finite number.

    >>> nanoseconds(4458676416788.066), nanoseconds("1712195495502094.531"), nanoseconds(float("nan"))
    (4458676416788066, 1712195495502094531, None)
    """
    kind = type(us)
    if kind is int:
        ns = us * 1000
    elif kind is float:
        if us != us or abs(us) > MAX_NS / 1000:
            return None
        whole = us // 1.0
        ns = int(whole) * 1000 + round((us - whole) * 1000)
    elif kind is str or kind is Decimal:
        try:
            number = Decimal(us.strip()) if kind is str else us
            if not number.is_finite() or number.adjusted() > 20:
                return None
            ns = int((number * 1000).to_integral_value())
        except (InvalidOperation, ValueError):
            return None
    else:
        return None
    return ns if -MAX_NS < ns < MAX_NS else None


_DTYPE_BYTES = {
    "double": 8, "long": 8, "float64": 8, "int64": 8, "float": 4, "int": 4, "float32": 4, "int32": 4,
    "half": 2, "bfloat16": 2, "float16": 2, "short": 2, "int16": 2, "byte": 1, "char": 1, "bool": 1,
    "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def comm_args(args: Any) -> CommArgs:
    """The NCCL metadata in the arguments of an event (`kineto_structs.Args`, strict or not)."""
    ranks = members(args.members)
    size = integer(args.bytes)
    if size < 0:
        elements = max(integer(args.elements_in), integer(args.elements_out))
        width = _DTYPE_BYTES.get(str(args.dtype or "").lower(), 0)
        size = elements * width if elements >= 0 and width else -1
    return CommArgs(
        collective=str(args.collective or "").lower(),
        group=str(args.group if args.group is not None else ""),
        description=args.description if isinstance(args.description, str) else "",
        group_text=str(args.members) if not ranks and args.members else "",
        members=ranks,
        rank=integer(args.rank),
        src=integer(args.src),
        dst=integer(args.dst),
        seq=integer(args.seq),
        bytes=size if size < INT64 else -1,
    )


def members(value: Any) -> tuple[int, ...]:
    """``"[0, 1, 2]"`` or a list -> ranks. Kineto shortens long lists with "..."; those are not usable.

    >>> members("[0, 8]"), members([3]), members("[0, 1, ...]")
    ((0, 8), (3,), ())
    """
    if isinstance(value, str):
        return _listed(value)
    return _ranks(value) if isinstance(value, list) else ()


@functools.lru_cache(1024)
def _listed(text: str) -> tuple[int, ...]:
    """A trace names few groups, each of them thousands of times."""
    return _ranks(p for p in text.strip().strip("[]()").split(",") if p.strip())


def _ranks(parts: Iterable[Any]) -> tuple[int, ...]:
    ranks = tuple(integer(p, -1) for p in parts)
    return ranks if all(0 <= r < 1 << 31 for r in ranks) else ()
