"""One entry of a pipeline schedule, in torch's own notation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bubblescope.errors import ScheduleError
from bubblescope.model.kinds import FROM_SHORT, SHORT, Kind

_TEXT = re.compile(r"(\d+)([FBIW])(\d+)\Z")


@dataclass(frozen=True, order=True)
class Action:
    """Operation `kind` of `microbatch` on (virtual) `stage`; prints and parses torch's ``2F0``.

    >>> str(Action(2, Kind.FORWARD, 0)), Action.parse("1W7").kind.name
    ('2F0', 'BACKWARD_WEIGHT')
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{SHORT[self.kind]}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse ``<stage><F|B|I|W><microbatch>``. Raises ScheduleError on anything else."""
        match = _TEXT.match(text.strip())
        if match is None:
            raise ScheduleError(
                f"'{text}' is not a schedule action",
                hint="an action is <stage><F|B|I|W><microbatch>, for example 2F0",
            )
        return cls(int(match[1]), FROM_SHORT[match[2]], int(match[3]))
