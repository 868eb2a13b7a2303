"""Which kernels are communication, by name: old and new NCCL, RCCL, DeepEP, Ascend HCCL, Intel oneCCL."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from bubblescope.errors import UsageError
from bubblescope.ingest.options import ReadOptions


class Comm(IntEnum):
    """What a kernel's name alone can say."""

    NONE = 0
    POINT_TO_POINT = 1
    COLLECTIVE = 2
    UNKNOWN = 3


# Spellings met in the wild. ncclKernel_ until NCCL 2.18, ncclDevKernel_ after; RCCL keeps both and adds a
# generic kernel that runs any operation; HCCL tasks carry the operation in lower case.
_COMM = re.compile(
    r"nccl(?:Dev)?Kernel|\bnccl:|rccl|mscclKernel|"
    r"\bhcom_|hccl|"
    r"deep_ep::|intranode::(?:dispatch|combine)|internode(?:_ll)?::(?:dispatch|combine)|"
    r"oneccl|ccl_kernel|"
    r"nvshmem\w*(?:put|get|barrier|alltoall|reduce|broadcast)|"
    r"(?:one|two)_shot_all_reduce|cross_device_reduce|multimem_all_reduce|"
    r"userbuffers_(?:fp16|push|pull)|kuserbuffers",
    re.IGNORECASE,
)
_P2P = re.compile(r"send_?recv|hcom_(?:batch)?(?:send|receive|recv)|\bnccl:(?:send|recv)", re.IGNORECASE)
_UNSURE = re.compile(r"Kernel_Generic|mscclKernel", re.IGNORECASE)


@dataclass(frozen=True)
class CommNames:
    """The built-in table with a user's own expressions before it.

    >>> CommNames.of(ReadOptions()).what("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)").name
    'POINT_TO_POINT'
    >>> CommNames.of(ReadOptions(comm_names="^my_ring")).what("my_ring_step").name
    'UNKNOWN'
    """

    extra: re.Pattern[str] | None = None
    never: re.Pattern[str] | None = None

    @classmethod
    def of(cls, options: ReadOptions) -> CommNames:
        return cls(_compiled(options.comm_names), _compiled(options.compute_names))

    def what(self, name: str) -> Comm:
        if self.never is not None and self.never.search(name):
            return Comm.NONE
        if _COMM.search(name) is None:
            return Comm.UNKNOWN if self.extra is not None and self.extra.search(name) else Comm.NONE
        if _P2P.search(name):
            return Comm.POINT_TO_POINT
        return Comm.UNKNOWN if _UNSURE.search(name) else Comm.COLLECTIVE


def _compiled(expression: str) -> re.Pattern[str] | None:
    if not expression:
        return None
    try:
        return re.compile(expression)
    except re.error as error:
        raise UsageError(f"'{expression}' is not a regular expression ({error})") from error
