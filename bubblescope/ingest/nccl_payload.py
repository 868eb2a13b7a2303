"""NCCL's NVTX ranges: which call, and what its payload says where blobs were exported (``--include-blobs=true``)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_HEADER = struct.Struct("<4Q")
"""Domain, schema, size of the payload, and its offset; the payload follows."""

# NVTX_PAYLOAD_ENTRY_TYPE_… -> struct letter.
_TYPES = {1: "b", 2: "B", 3: "h", 4: "H", 5: "i", 6: "I", 7: "q", 8: "Q", 9: "q", 10: "Q", 11: "b", 12: "B", 13: "h",
          14: "H", 15: "i", 16: "I", 17: "q", 18: "Q", 22: "Q", 23: "Q"}  # fmt: skip

_CALL = re.compile(r"nccl([A-Z]\w*)\Z")
_OPERATIONS = {
    "send", "recv", "allreduce", "allgather", "reducescatter", "broadcast", "bcast", "reduce", "alltoall", "gather",
    "scatter",
}  # fmt: skip
_NONE: dict[str, int] = {}


@dataclass(frozen=True)
class Call:
    """One NCCL call. what: "send", "allreduce", …, or "" for a call that moves nothing (group, communicator).
    communicator: its id, "" unknown. peer: local to the communicator. rank, size: of a communicator that is made."""

    what: str
    communicator: str = ""
    peer: int = -1
    bytes: int = -1
    rank: int = -1
    size: int = -1


def call_of(text: str, in_nccl_domain: bool, payload: dict[str, int]) -> Call | None:
    """The call that a range named `text` stands for; None when it is none of NCCL's.

    >>> call_of("ncclSend", False, {"Peer rank": 1, "Message size [bytes]": 64}).peer
    1
    >>> call_of("AllReduce", True, {}).what, call_of("AllReduce", False, {}), call_of("ncclGroupEnd", False, {}).what
    ('allreduce', None, '')
    """
    found = _CALL.match(text)
    if found is None and not in_nccl_domain:
        return None
    what = (found[1] if found else text).lower()
    identity = payload.get("NCCL communicator ID")
    return Call(
        what if what in _OPERATIONS else "",
        "" if identity is None else f"{identity & (1 << 64) - 1:#x}",
        payload.get("Peer rank", -1),
        payload.get("Message size [bytes]", -1),
        payload.get("Rank", -1),
        payload.get("No. of ranks", -1),
    )


@dataclass(frozen=True)
class Payloads:
    """Fields by (domain, schema): name -> (offset, struct letter)."""

    schemas: dict[tuple[int, int], dict[str, tuple[int, str]]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[tuple[Any, ...]]) -> Payloads:
        schemas: dict[tuple[int, int], dict[str, tuple[int, str]]] = {}
        for domain, schema, kind, name, offset in rows:
            letter = _TYPES.get(kind)
            if letter and isinstance(name, str) and isinstance(domain, int) and isinstance(schema, int):
                place = offset if isinstance(offset, int) and 0 <= offset < 1 << 16 else 0
                schemas.setdefault((domain, schema), {})[name] = (place, letter)
        return cls(schemas)

    def read(self, domain: int, blob: Any) -> dict[str, int]:
        """Field values of one range; empty without a blob, or with one that is not as its schema says."""
        if isinstance(blob, str):
            blob = blob.encode("latin-1", "replace")
        if not isinstance(blob, bytes) or len(blob) < _HEADER.size:
            return _NONE
        _, schema, _, _ = _HEADER.unpack_from(blob)
        body = blob[_HEADER.size :]
        out = {}
        for name, (offset, letter) in self.schemas.get((domain, schema), {}).items():
            if offset + struct.calcsize("<" + letter) <= len(body):
                out[name] = int(struct.unpack_from("<" + letter, body, offset)[0])
        return out
