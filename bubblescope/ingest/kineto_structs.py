"""What of a trace event is decoded, as msgspec structs: a strict shape for what torch writes, a lax one for the rest.

The strict shape is a union tagged by ``ph``: of phases without a struct below nothing is built. Whatever it refuses
(another type, a missing time, an unknown phase) is read by the lax one, which takes any value anywhere.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Union

import msgspec

PHASES = "EbeniItCPNODRcvVSTpFGW(),"
"""The phases of the Chrome format beside X (complete), M (metadata), B (begin), s and f (arrows), and those of its
older versions."""


class Args(msgspec.Struct, gc=False):
    """The few arguments that are used; every one may have any JSON type."""

    correlation: Any = None
    device: Any = None
    stream: Any = None
    name: Any = None
    labels: Any = None
    sequence: Any = msgspec.field(default=None, name="Sequence number")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    description: Any = msgspec.field(default=None, name="Process Group Description")
    members: Any = msgspec.field(default=None, name="Process Group Ranks")
    rank: Any = msgspec.field(default=None, name="Rank")
    src: Any = msgspec.field(default=None, name="Src Rank")
    dst: Any = msgspec.field(default=None, name="Dst Rank")
    seq: Any = msgspec.field(default=None, name="Seq")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    bytes: Any = None


class Event(msgspec.Struct, gc=False):
    """One trace event; times in microseconds, whatever they are written as."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    id: Any = None
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """`Event` with decimal times, for stamps that a float64 cannot hold to the nanosecond."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    id: Any = None
    args: Args | None = None


class StrictArgs(msgspec.Struct, gc=False, frozen=True):
    """`Args` with the types that Kineto gives them; -1 where there is none."""

    correlation: int = -1
    device: int = -1
    stream: int | str = -1
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    collective: Any = msgspec.field(default=None, name="Collective name")
    group: Any = msgspec.field(default=None, name="Process Group Name")
    description: Any = msgspec.field(default=None, name="Process Group Description")
    members: Any = msgspec.field(default=None, name="Process Group Ranks")
    rank: Any = msgspec.field(default=None, name="Rank")
    src: Any = msgspec.field(default=None, name="Src Rank")
    dst: Any = msgspec.field(default=None, name="Dst Rank")
    seq: Any = msgspec.field(default=None, name="Seq")
    elements_in: Any = msgspec.field(default=None, name="In msg nelems")
    elements_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    bytes: Any = None


class Complete(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """A complete event of the strict shape."""

    ts: int | float
    dur: int | float
    pid: int | str
    tid: int | str
    name: str = ""
    cat: str = ""
    args: StrictArgs = StrictArgs()


class _LabelArgs(msgspec.Struct, gc=False):
    name: Any = None
    labels: Any = None


class Metadata(msgspec.Struct, gc=False, tag_field="ph", tag="M"):
    """A metadata event."""

    name: Any = None
    pid: Any = None
    args: _LabelArgs | None = None


class Begin(msgspec.Struct, gc=False, tag_field="ph", tag="B"):
    """The first event of a pair, of which the other (E) tells the end."""

    cat: Any = None
    ts: Any = None
    dur: Any = None


class Arrow(msgspec.Struct, gc=False):
    """One end of an arrow between two events."""

    cat: Any = None
    id: Any = None
    tid: Any = None
    ts: Any = None


class ArrowBegin(Arrow, gc=False, tag_field="ph", tag="s"):
    """Where it begins."""


class ArrowEnd(Arrow, gc=False, tag_field="ph", tag="f"):
    """Where it ends."""


def _bare(phases: str) -> tuple[Any, ...]:
    """Structs of events of which nothing is read."""
    return tuple(msgspec.defstruct(f"_Phase{ord(p)}", [], gc=False, tag_field="ph", tag=p) for p in phases)


def _strict(*kinds: Any) -> msgspec.json.Decoder[Any]:
    union: Any = Union[(Complete, Metadata, Begin, *kinds, *_bare(PHASES))]
    return msgspec.json.Decoder(list[union])


STRICT = _strict(ArrowBegin, ArrowEnd)
NUMBERED = _strict(*_bare("sf"))
"""As `STRICT`, without arrows: there are two for every launch, and few files need them."""
LAX = msgspec.json.Decoder(list[Event])
EXACT = msgspec.json.Decoder(list[ExactEvent])
RAW = msgspec.json.Decoder(list[msgspec.Raw])
ONE = msgspec.json.Decoder(Event)
COMM_ARGS = msgspec.json.Decoder(Args)
