"""What a scanner of trace files hands over: the events as columns, nothing interpreted.

`kineto_scan` makes it, `kineto_assemble` reads it; a faster scanner only has to fill the same columns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from bubblescope.model import Names, Notice

Int = NDArray[np.int64]
AUTOGRAD = "autograd::engine::evaluate_function"
"""Names of the engine's calls, each of which runs the backward of one node, begin so."""


class Cat(IntEnum):
    """Event categories, all spellings folded."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    CPU_OP = 3
    RANGE = 4
    RUNTIME = 5
    GPU_RANGE = 6
    SYNC = 7
    BARE = 8


DEVICE = (Cat.KERNEL, Cat.MEMCPY, Cat.MEMSET)

CATEGORIES: dict[str, Cat] = {
    "kernel": Cat.KERNEL,
    "concurrent_kernel": Cat.KERNEL,
    "gpu_op": Cat.KERNEL,
    "xpu_op": Cat.KERNEL,
    "hpu_op": Cat.KERNEL,
    "mtia_ccp_events": Cat.KERNEL,
    "gpu_memcpy": Cat.MEMCPY,
    "memcpy": Cat.MEMCPY,
    "gpu_memset": Cat.MEMSET,
    "memset": Cat.MEMSET,
    "cpu_op": Cat.CPU_OP,
    "operator": Cat.CPU_OP,
    "user_annotation": Cat.RANGE,
    "cpu_instant_event": Cat.RANGE,
    "cuda_runtime": Cat.RUNTIME,
    "cuda_driver": Cat.RUNTIME,
    "runtime": Cat.RUNTIME,
    "hip_runtime": Cat.RUNTIME,
    "xpu_runtime": Cat.RUNTIME,
    "mtia_runtime": Cat.RUNTIME,
    "glow_runtime": Cat.RUNTIME,
    "privateuse1_runtime": Cat.RUNTIME,
    "privateuse1_driver": Cat.RUNTIME,
    "gpu_user_annotation": Cat.GPU_RANGE,
    "cuda_sync": Cat.SYNC,
    "": Cat.BARE,
}
"""Lower-case category text -> `Cat`; an event of any other category is not kept."""


class CommArgs(msgspec.Struct, frozen=True, gc=False):
    """NCCL metadata of one operation, as written. Ranks are as the trace gives them: global or group-local."""

    collective: str = ""
    group: str = ""
    description: str = ""
    group_text: str = ""
    members: tuple[int, ...] = ()
    rank: int = -1
    src: int = -1
    dst: int = -1
    seq: int = -1
    bytes: int = -1


@dataclass(frozen=True, eq=False)
class Events:
    """Complete (``ph: X``) events as columns of one length, in file order.

    cat: `Cat`. start_ns, end_ns: relative to `Scan.base_ns`. name: index into `Scan.names`. pid, tid: as
    written when numbers, else negative stand-ins. device, stream, corr, sequence: from ``args``, -1 when absent; these
    six may be int32. comm: index into `Scan.comms`, -1 when the event has no NCCL metadata.
    """

    cat: NDArray[np.int8]
    start_ns: Int
    end_ns: Int
    name: NDArray[np.int32]
    pid: Int
    tid: Int
    device: Int
    stream: Int
    corr: Int
    sequence: Int
    comm: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.cat)

    def device_index(self, rows: Any) -> Int:
        """The device of these rows, all of a device: as the arguments say, else the process id, which stands for it."""
        own = self.device[rows]
        result: Int = np.where(own >= 0, own, self.pid[rows])
        return result

    def time_by_device(self, rows: NDArray[np.bool_]) -> list[tuple[int, int]]:
        """(device, summed durations of its `rows` in ns), most first."""
        index, length = self.device_index(rows), self.end_ns[rows] - self.start_ns[rows]
        if len(index) and (index == index[0]).all():  # as nearly always; no sorting of millions
            return [(int(index[0]), int(length.sum()))]
        devices, at = np.unique(index, return_inverse=True)
        spent = np.zeros(len(devices), dtype=np.int64)
        np.add.at(spent, at, length)
        return sorted(zip(devices.tolist(), spent.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))

    def take(self, rows: Any) -> Events:
        return Events(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})


@dataclass(eq=False)
class Scan:
    """One file, read. `head`: the keys beside ``traceEvents``. `processes`: pid -> name and labels.
    `file_ranks`: every rank a ``distributedInfo`` in the file names (more than one: two files in one). `dropped`: why
    events are not among the columns -> how many; `lost`: how many of these are of the device. `arrows`: rows (id, 1
    where it begins and 0 where it ends, thread, ns) of arrows from forward to backward, only where no event has a
    sequence number. base_lost: the file is cut before the place where `base_ns` may have stood."""

    path: str
    events: Events
    names: Names
    comms: list[CommArgs] = field(default_factory=list)
    head: dict[str, Any] = field(default_factory=dict)
    processes: dict[int, str] = field(default_factory=dict)
    base_ns: int = 0
    base_lost: bool = False
    file_ranks: set[int] = field(default_factory=set)
    notices: list[Notice] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    arrows: Int = field(default_factory=lambda: np.empty((0, 4), dtype=np.int64))
