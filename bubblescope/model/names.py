"""Interned strings: a span stores an index, the text stands here once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_MEMBERS = re.compile(r"(.*)\[(\d+(?:,\d+)*)\]")


def communicator(text: str) -> tuple[str, tuple[int, ...]]:
    """Name and member ranks of a communicator as readers write it; no members where they are not known.

    >>> communicator("7[0,4]"), communicator("7")
    (('7', (0, 4)), ('7', ()))
    """
    found = _MEMBERS.fullmatch(text)
    return (found[1], tuple(map(int, found[2].split(",")))) if found else (text, ())


@dataclass
class Names:
    """An append-only table of distinct strings. Index 0 is always the empty string.

    >>> names = Names()
    >>> names.intern("F0"), names.intern("F1"), names.intern("F0"), names[1]
    (1, 2, 1, 'F0')
    """

    texts: list[str] = field(default_factory=lambda: [""])
    _index: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._index = {text: i for i, text in enumerate(self.texts)}

    def intern(self, text: str) -> int:
        """The index of `text`, adding it when new."""
        found = self._index.get(text)
        if found is None:
            found = len(self.texts)
            self.texts.append(text)
            self._index[text] = found
        return found

    def __getitem__(self, index: int) -> str:
        return self.texts[index]

    def __len__(self) -> int:
        return len(self.texts)

    def mapping_to(self, other: Names) -> NDArray[np.int32]:
        """For merging tables: `result[i]` is the index in `other` of this table's i-th text."""
        return np.array([other.intern(text) for text in self.texts], dtype=np.int32)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Names:
        names = cls()
        for text in texts:
            names.intern(text)
        return names

    def lookup(self, indices: Sequence[int] | NDArray[np.int32]) -> list[str]:
        return [self.texts[int(i)] for i in indices]
