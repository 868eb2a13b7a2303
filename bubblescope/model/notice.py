"""A finding that does not stop the work, but must be seen in every view."""

from __future__ import annotations

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
