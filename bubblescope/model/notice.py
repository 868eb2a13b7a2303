"""A finding that does not stop the work, but must be seen in every view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Notice:
    """One finding.

    code: a stable kebab-case word (``rank-missing``, ``tail-cut``), for tests and filters.
    message: one sentence with the numbers in it.
    where: the file it was found in, or "".
    """

    code: str
    message: str
    where: str = ""


def some(values: Sequence[object], most: int = 8, *, count_rest: bool = False) -> str:
    """The first values, for a message.

    >>> some([1, 2]), some([1, 2, 3], 2), some([1, 2, 3], 2, count_rest=True)
    ('1, 2', '1, 2 …', '1, 2 and 1 more')
    """
    rest = len(values) - most
    more = "" if rest <= 0 else f" and {rest} more" if count_rest else " …"
    return ", ".join(map(str, values[:most])) + more


def some_of_all(values: Sequence[object], most: int = 8) -> str:
    """As `some`, with how many there are.

    >>> some_of_all([1, 2]), some_of_all([1, 2, 3], 2)
    ('1, 2', '1, 2, … (3 in all)')
    """
    rest = f", … ({len(values)} in all)" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + rest


def counted(count: int, one: str, many: str = "") -> str:
    """
    >>> counted(1, "GPU"), counted(1200, "rank"), counted(2, "micro-batch", "micro-batches")
    ('1 GPU', '1,200 ranks', '2 micro-batches')
    """
    return f"{count:,} {one if count == 1 else many or one + 's'}"
