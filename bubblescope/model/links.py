"""Which spans belong together: messages, collectives, launches."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


def _pairs() -> Int:
    return np.empty((0, 2), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Links:
    """Row indices into `Run.spans`; -1 where an end is not known.

    p2p: shape (n, 2), one message a row: the SEND span and the RECV span of the matched operation. The spans
        are those that show when the operation *began*: POST rows where there are any, else COMM (kernel) rows.
    p2p_wait: shape (n, 2), beside `p2p`: the WAIT row on the sender and on the receiver, -1 when none.
        For COMM rows the kernel itself is the wait, and this is -1.
    collective: shape (n, 2), (instance number, span row); rows of one instance form one collective operation.
    launch: shape (n, 2), (host launch row, device row).
    """

    p2p: Int = field(default_factory=_pairs)
    p2p_wait: Int = field(default_factory=_pairs)
    collective: Int = field(default_factory=_pairs)
    launch: Int = field(default_factory=_pairs)
