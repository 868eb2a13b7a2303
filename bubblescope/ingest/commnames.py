"""Which kernels are communication, by name: NCCL and its kin of every vendor, DeepEP, NVSHMEM, MSCCL++, symmetric
memory, the fused all-reduces of inference libraries; and by the user's own rules before these."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from bubblescope.ingest.options import KernelRule, ReadOptions


class Comm(IntEnum):
    """What a kernel's name alone can say."""

    NONE = 0
    POINT_TO_POINT = 1
    COLLECTIVE = 2
    UNKNOWN = 3
    WORK = 4
    """The user says that it is none, whatever else says so."""


# Spellings met in the wild. ncclKernel_ until NCCL 2.18, ncclDevKernel_ after, ncclSymDevKernel_ and
# ncclSymkDevKernel_ on symmetric memory; RCCL keeps these and adds a generic kernel that runs any operation; HCCL
# tasks carry the operation in lower case.
_COMM = re.compile(
    r"\bnccl\w*Kernel|\bnccl:|rccl|msccl(?:Kernel|pp)|"
    r"\bhcom_|hccl|"
    r"\b(?:cncl|(?:x|ix|m)ccl)|"
    r"deep_ep::|intranode::(?:dispatch|combine)|internode(?:_ll)?::(?:dispatch|combine)|"
    r"oneccl|ccl_kernel|"
    r"\bnvshmem|"
    r"(?:one|two)_?shot_?all_?reduce|cross_device_reduce|multimem_(?:one_shot_)?(?:all_|reduce_)|"
    r"all_?reduce_fusion|allreduce_prototype|"
    r"userbuffers_(?:fp16|push|pull)|kuserbuffers",
    re.IGNORECASE,
)
_P2P = re.compile(r"send_?recv|hcom_(?:batch)?(?:send|receive|recv)|\bnccl:(?:send|recv)", re.IGNORECASE)
_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier", re.IGNORECASE)
_UNSURE = re.compile(r"Kernel_Generic|msccl|\bnvshmem|\b(?:cncl|(?:x|ix|m)ccl)", re.IGNORECASE)


@dataclass(frozen=True)
class CommNames:
    """The built-in table with a user's own rules before it, of which the first that fits decides.

    >>> CommNames.of(ReadOptions()).what("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)").name
    'POINT_TO_POINT'
    >>> CommNames.of(ReadOptions(names=(KernelRule("^my_ring", communication=True),))).what("my_ring_step").name
    'UNKNOWN'
    """

    rules: tuple[KernelRule, ...] = ()

    @classmethod
    def of(cls, options: ReadOptions) -> CommNames:
        return cls(tuple(options.kernel_rules()))

    def what(self, name: str) -> Comm:
        said = next((rule for rule in self.rules if rule.search(name)), None)
        if said is not None and not said.communication:
            return Comm.WORK
        if _COMM.search(name) is None:
            return Comm.NONE if said is None else Comm.UNKNOWN
        if _P2P.search(name):
            return Comm.POINT_TO_POINT
        return Comm.UNKNOWN if _UNSURE.search(name) and not _COLLECTIVE.search(name) else Comm.COLLECTIVE
