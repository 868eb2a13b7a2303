"""Whatever is in the file: a Run or an InputError, never a traceback and never a hang."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bubblescope.align import prepare, wait_transfer
from bubblescope.errors import InputError
from bubblescope.ingest import kineto
from bubblescope.ingest.kineto_scan import scan_blocks
from tests.support.kineto_gen import Shape, Style, dumps, simulate, traces

BOUNDED = settings(
    max_examples=120, deadline=4000, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
DOCUMENTS = traces(
    simulate(Shape(stages=2, scale=(1.0, 1.0), microbatches=2, kernels=(1, 1))), Style(launches=True, autograd=True)
)
TEXTS = [dumps(DOCUMENTS[rank]).encode() for rank in (0, 1)]


def survives(folder: Path, data: bytes, name: str = "rank0.json") -> None:
    """Read the bytes beside a sound rank 1, and go through every pass."""
    (folder / name).write_bytes(data)
    (folder / "rank1.json").write_bytes(TEXTS[1])
    try:
        run = prepare(kineto.read([folder / name, folder / "rank1.json"]))
    except InputError as error:
        assert error.exit_code == 3
        return
    assert (run.spans.end_ns >= run.spans.start_ns).all()
    messages = wait_transfer(run)
    assert (messages.transfer_low <= messages.transfer_high).all()
    assert np.isin(run.spans.rank, run.layout.ranks).all()


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The sound file with pieces cut out, doubled, overwritten or swapped."""
    data = bytearray(TEXTS[0])
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.sampled_from([1, 2, 8, 100, 5000]))
        action = draw(st.sampled_from(["cut", "double", "write", "end"]))
        if action == "cut":
            del data[at : at + length]
        elif action == "double":
            data[at:at] = data[at : at + length]
        elif action == "write":
            data[at : at + 8] = draw(st.binary(min_size=0, max_size=16))
        else:
            del data[at:]
    return bytes(data)


@BOUNDED
@given(mutations())
def test_mutated_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    survives(tmp_path_factory.mktemp("f"), data)


@BOUNDED
@given(mutations(), st.integers(0, 4000))
def test_mutated_gzip(tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int) -> None:
    packed = bytearray(gzip.compress(data, 1))
    packed[at % len(packed)] ^= 0x5A
    survives(tmp_path_factory.mktemp("f"), bytes(packed), "rank0.json.gz")


@BOUNDED
@given(st.binary(max_size=300))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    survives(tmp_path_factory.mktemp("f"), data)


NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([0, -1, 2**63, 2**64, 2**70, 1e308, -1e308, 5e-324]), st.none()
)
ANYTHING = st.one_of(
    NUMBERS, st.text(max_size=8), st.booleans(), st.lists(NUMBERS, max_size=3), st.builds(lambda: {"a": {}})
)
FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
ARGS = (
    "correlation", "device", "stream", "External id", "Sequence number", "Fwd thread id", "Collective name",
    "Process Group Name", "Process Group Ranks", "Rank", "Src Rank", "Dst Rank", "Seq", "In msg nelems", "dtype",
)  # fmt: skip


@BOUNDED
@given(st.data())
def test_any_values_in_the_fields_of_events(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    document: dict[str, Any] = json.loads(TEXTS[0])
    events = document["traceEvents"]
    for _ in range(data.draw(st.integers(1, 10))):
        event = events[data.draw(st.integers(0, len(events) - 1))]
        if data.draw(st.booleans()):
            event[data.draw(st.sampled_from(FIELDS))] = data.draw(ANYTHING)
        elif isinstance(event.get("args"), dict):
            event["args"][data.draw(st.sampled_from(ARGS))] = data.draw(ANYTHING)
    for key in ("distributedInfo", "baseTimeNanoseconds", "host_name", "traceEvents"):
        if data.draw(st.integers(0, 9)) == 0:
            document[key] = data.draw(ANYTHING)
    survives(tmp_path_factory.mktemp("f"), json.dumps(document).encode())


@BOUNDED
@given(st.lists(st.integers(1, 4000), max_size=12))
def test_blocks_may_break_anywhere(cuts: list[int]) -> None:
    whole = scan_blocks([TEXTS[0]], "x")
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(TEXTS[0][at : at + cut])
        at += cut
    parts = scan_blocks([*pieces, TEXTS[0][at:]], "x")
    assert (parts.events.start_ns == whole.events.start_ns).all()
    assert parts.head == whole.head


def test_chunks_do_not_change_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same file in chunks of a few hundred bytes, sound and damaged."""
    from bubblescope.ingest import kineto_scan

    damaged = TEXTS[0].replace(b'"fwd_gemm_0"', b'"fwd "gemm" 0"', 1)
    for text in (TEXTS[0], damaged, json.dumps(json.loads(TEXTS[0])).encode()):
        whole = scan_blocks([text], "x")
        monkeypatch.setattr(kineto_scan, "CHUNK", 600)
        small = scan_blocks([text[i : i + 97] for i in range(0, len(text), 97)], "x")
        monkeypatch.undo()
        assert (small.events.start_ns == whole.events.start_ns).all()
        assert small.names.texts == whole.names.texts
        assert small.head == whole.head
        assert [n.code for n in small.notices] == [n.code for n in whole.notices]
