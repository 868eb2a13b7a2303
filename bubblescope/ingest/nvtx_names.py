"""What the text of an NVTX range says before anybody interprets it: torch's own operators, and NVTX domains."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPERATOR = re.compile(r"(?P<name>.*?), (?:op_id = \d+|seq = (?P<seq>\d{1,15}))(?:, seq = (?P<later>\d{1,15}))?")


def split_operator(text: str) -> tuple[str, int, bool]:
    """Name, autograd sequence number (-1 none), and whether it is an operator of ``emit_nvtx``.

    >>> split_operator("aten::mul, op_id = 7, seq = 12"), split_operator("MulBackward0, seq = 12")
    (('aten::mul', 12, True), ('MulBackward0', 12, True))
    >>> split_operator("PP:0F3")
    ('PP:0F3', -1, False)
    """
    found = _OPERATOR.match(text)
    if found is None:
        return text, -1, text.startswith("autograd::engine")
    sequence = found["seq"] or found["later"]
    return found["name"], int(sequence) if sequence else -1, True


@dataclass(frozen=True)
class Domains:
    """Names of NVTX domains by (process, id)."""

    names: dict[tuple[int, int], str]

    def is_nccl(self, process: int, domain: int) -> bool:
        return self.names.get((process, domain), "").upper() == "NCCL"
