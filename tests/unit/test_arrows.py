"""Arrows from forward to backward say what sequence numbers say, where a trace has no numbers."""

from __future__ import annotations

import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bubblescope.ingest import ReadOptions, read
from bubblescope.ingest.arrows import numbered
from bubblescope.ingest.kineto_scan import scan_blocks
from bubblescope.label import label
from tests.support.kineto_gen import Json, Shape, Style, simulate, traces, write
from tests.unit.test_label import NUMBERED, REVERSED, wrong_kernels
from tests.unit.test_native_scanner import agree

SAMPLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "kineto" / "nccl_data.json.gz"
SMALL = Shape(stages=2, scale=(1.0, 1.0), microbatches=2)


def with_arrows(document: Json, category: str = "fwdbwd", wide: bool = False) -> Json:
    """The trace as a torch that writes no sequence numbers would export it: each arrow beside the operator it leaves
    or reaches, from the last operator of the forward thread that had the number. wide: in microseconds since 1970."""
    document = copy.deepcopy(document)
    events = document["traceEvents"]
    if wide:
        for event in events:
            event["ts"] += 1_712_195_495_519_695
    operators = [e for e in events if "Sequence number" in e.get("args", {})]
    forward: dict[int, Json] = {}
    pairs: list[tuple[Json, Json]] = []
    for event in sorted(operators, key=lambda e: e["ts"]):
        number, thread = event["args"].pop("Sequence number"), event["args"].pop("Fwd thread id")
        if thread == 0:
            forward[number] = event
        else:
            pairs.append((forward[number], event))
    for i, ends in enumerate(pairs):
        for phase, event in zip("sf", ends, strict=True):
            arrow = {"ph": phase, "id": i, "pid": event["pid"], "tid": event["tid"], "ts": event["ts"], "cat": category}
            events.insert(events.index(event) + 1, arrow | {"name": category, "bp": "e"})
    return document


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kernels", [(4, 7), (1, 1), (3, 2)])
def test_backwards_in_reverse_order_are_numbered_by_arrows(
    tmp_path: Path, kernels: tuple[int, int], wide: bool
) -> None:
    truth = simulate(replace(REVERSED, kernels=kernels))
    write(tmp_path, {rank: with_arrows(d, wide=wide) for rank, d in traces(truth, NUMBERED).items()})
    run = label(read(tmp_path))
    assert wrong_kernels(run, truth) == 0
    assert run.layout.inferred["microbatch"].endswith(
        "backwards by autograd sequence numbers in 8 of 8 (rank, step) pairs"
    )
    assert [n.code for n in run.notices] == ["numbered-by-arrows"] * 4


def test_arrows_are_not_needed_where_there_are_numbers(tmp_path: Path) -> None:
    documents = traces(simulate(SMALL), NUMBERED)
    plain = read(write(tmp_path / "plain", documents))
    both = {
        rank: d | {"traceEvents": [*d["traceEvents"], *(e for e in with_arrows(d)["traceEvents"] if e["ph"] in "sf")]}
        for rank, d in documents.items()
    }
    run = read(write(tmp_path / "both", both))
    assert run.notices == plain.notices == ()
    assert np.array_equal(run.spans.seq, plain.spans.seq)


@pytest.mark.skipif(not SAMPLE.exists(), reason="../shared/data is not beside this checkout")
def test_a_real_traces_arrows_give_the_order_of_its_numbers() -> None:
    text = gzip.decompress(SAMPLE.read_bytes())
    hidden = text.replace(b'"Sequence number"', b'"hidden"')
    keep = ReadOptions(keep_cpu_ops=True)
    truth = scan_blocks([text], "x", keep).events.sequence
    found = scan_blocks([hidden], "x", keep)
    made = numbered(found.events, found.names, found.arrows).sequence
    rows = np.flatnonzero(made >= 0)
    assert len(rows) == len(found.arrows) == 1086
    pairs = sorted(set(zip(made[rows].tolist(), truth[rows].tolist(), strict=True)))
    numbers = [number for _, number in pairs]
    assert [arrow for arrow, _ in pairs] == list(range(543))
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("category", ["fwdbwd", "forward_backward", "Fwdbwd", "ac2g"])
@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"id": "0x1f"},
        {"id": None},
        {"id": 2**70},
        {"tid": "main"},
        {"tid": "7"},
        {"ts": "5.25"},
        {"ts": None},
        {"ts": 1712195495519695.75},
        {"ts": 1e300},
        {"ts": [1]},
        {"args": [1]},
        {"cat": 7},
        {"ph": "t"},
    ],
    ids=str,
)
def test_arrows_are_read_alike_by_both_scanners(category: str, odd: Json) -> None:
    document = with_arrows(traces(simulate(SMALL), NUMBERED)[0], category)
    arrows = [e for e in document["traceEvents"] if e["ph"] in "sf"]
    arrows[3].update(odd)
    data = json.dumps(document).encode()
    agree(data)
    whole = len(arrows) if category in ("fwdbwd", "forward_backward") else 0
    assert whole - 1 <= len(scan_blocks([data], "x").arrows) <= whole or whole == 0
    assert not whole or len(scan_blocks([data], "x").arrows)


def test_ends_without_an_operator_or_another_end_number_nothing() -> None:
    document = with_arrows(traces(simulate(SMALL), Style(launches=True, autograd=True, sequence=True))[0])
    for event in document["traceEvents"]:
        if event["ph"] == "s":
            event["ts"] += 10**9
        elif event["ph"] == "f" and event["id"] % 2:
            event["id"] += 10**6
    found = scan_blocks([json.dumps(document).encode()], "x")
    assert len(found.arrows)
    assert numbered(found.events, found.names, found.arrows).sequence.max() == -1
