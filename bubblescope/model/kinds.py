"""What a span is (`Kind`) and which timeline it stands on (`Lane`)."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What happened in a span. `B` of the schedules is BACKWARD = BACKWARD_INPUT + BACKWARD_WEIGHT."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4
    RECOMPUTE = 5
    LOSS = 6
    OPTIMIZER = 7
    SEND = 8
    RECV = 9
    COLLECTIVE = 10
    MEMCPY = 11
    LAUNCH = 12
    DATA = 13
    HOST = 14
    STEP = 15


PIPELINE_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""The operations a pipeline schedule is made of."""

BACKWARD_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)

COMPUTE_KINDS = (*PIPELINE_KINDS, Kind.RECOMPUTE, Kind.LOSS, Kind.OPTIMIZER, Kind.OTHER)

SHORT = {
    Kind.FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.BACKWARD_INPUT: "I",
    Kind.BACKWARD_WEIGHT: "W",
}
"""The letters of the schedule literature and of torch's schedule CSV."""

FROM_SHORT = {letter: kind for kind, letter in SHORT.items()}


class Lane(IntEnum):
    """Which timeline a span stands on; this alone decides how it counts.

    Only spans with ``device >= 0`` occupy the device. On a CPU rank (gloo) the device is the CPU itself, so
    posting and waiting occupy it too; on a GPU rank a POST is a zero-length mark on the compute stream.

    =======  =====================================================  =====================
    lane     meaning                                                counts as
    =======  =====================================================  =====================
    COMPUTE  compute kernels, or recorded F/B/I/W/loss/optimizer    busy
    COMM     a communication kernel on the device                   exposed_comm if bare
    WAIT     the compute timeline waits for P2P or a collective     exposed_comm
    POST     P2P is handed over (isend, irecv, launch)              exposed_comm
    COPY     memcpy, memset                                         copies if bare
    HOST     host time: data loading, launches (device -1)          evidence only
    RANGE    annotations: ProfilerStep, PP:…, NVTX (device -1)      evidence only
    =======  =====================================================  =====================
    """

    COMPUTE = 0
    COMM = 1
    WAIT = 2
    POST = 3
    COPY = 4
    HOST = 5
    RANGE = 6
