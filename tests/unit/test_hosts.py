"""An equal host name is no proof of one clock, and a rank whose times are in another unit costs no other rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bubblescope.align import prepare
from bubblescope.errors import InputError
from bubblescope.ingest import read
from bubblescope.model import Run
from bubblescope.report.build import build
from tests.support.kineto_gen import Json, Shape, Style, simulate, traces, write

MS = 1_000_000
HOUR_US = 3.6e9
OFFSETS: dict[str, dict[int, tuple[int, float]]] = {
    "200 us": {1: (200_000, 0.0), 2: (-200_000, 0.0), 3: (90_000, 0.0)},
    "5 ms": {1: (5 * MS, 0.0), 2: (-5 * MS, 0.0), 3: (2 * MS, 0.0)},
    "20 ms and 20 ppm": {1: (20 * MS, 20e-6), 2: (-20 * MS, -20e-6), 3: (0, 10e-6)},
    "two ranks 5 ms": {2: (5 * MS, 0.0), 3: (5 * MS, 0.0)},
}


def localhost(rank: int) -> str:
    return "localhost"


def prepared(folder: Path, documents: dict[int, Json]) -> Run:
    write(folder, documents)
    return prepare(read(folder))


def events(document: Json, wanted: Callable[[Json], bool]) -> list[Json]:
    return [e for e in document["traceEvents"] if e["ph"] == "X" and wanted(e)]


def notices(run: Run, code: str) -> list[str]:
    return [n.message for n in run.notices if n.code == code]


def notices_of(data: dict[str, Any], code: str) -> list[str]:
    return [n["message"] for n in data["source"]["warnings"] if n["code"] == code]


def one_clock(folder: Path, shape: Shape) -> dict[str, Any]:
    return build(prepared(folder, traces(simulate(shape), Style(host=localhost)))).data


def assert_same_causes(found: dict[str, Any], true: dict[str, Any]) -> None:
    for cause, row in true["causes"].items():
        assert found["causes"][cause]["seconds"] == pytest.approx(row["seconds"], abs=5e-6), cause
    for ours, theirs in zip(found["gpus"], true["gpus"], strict=True):
        assert ours["idle"] == pytest.approx(theirs["idle"], abs=20e-6)


NAMES: dict[str, Callable[[int], str]] = {
    "one name": localhost,
    "two names": lambda rank: "ab"[rank // 2],
    "two names, neighbours on the other": lambda rank: "ab"[rank % 2],
}


@pytest.mark.parametrize("hosts", sorted(NAMES))
@pytest.mark.parametrize("clocks", sorted(OFFSETS))
def test_ranks_of_one_host_name_whose_clocks_differ_are_aligned_by_messages(
    tmp_path: Path, clocks: str, hosts: str
) -> None:
    shape = Shape(steps=3)
    documents = traces(simulate(shape), Style(host=NAMES[hosts], clock_ns=OFFSETS[clocks]))
    run = prepared(tmp_path / "off", documents)
    data = build(run).data
    assert_same_causes(data, one_clock(tmp_path / "one", shape))
    assert data["clock"]["aligned"]
    assert data["causes"]["p2p_transfer"]["sure"] == "estimated"
    if hosts == "one name":
        assert [h.host for h in run.clock.hosts] == [f"localhost (rank {r})" for r in range(4)]
        assert len(notices(run, "host-not-believed")) == 1


@pytest.mark.parametrize("lost", ["base time", "an hour"])
def test_one_rank_far_off_the_clock_of_its_host_is_named_and_costs_nothing(tmp_path: Path, lost: str) -> None:
    base = 1_719_853_884_000_000_000
    shape = Shape(steps=3, start_ns=base + 4_000 * MS)
    documents = traces(simulate(shape), Style(host=localhost, base_ns=dict.fromkeys(range(4), base)))
    if lost == "base time":
        del documents[2]["baseTimeNanoseconds"]
    else:
        for event in events(documents[2], lambda e: True):
            event["ts"] += HOUR_US
    run = prepared(tmp_path / "lost", documents)
    (message,) = notices(run, "host-not-believed")
    assert "the clock of rank 2 differs" in message
    assert_same_causes(build(run).data, one_clock(tmp_path / "one", shape))


def test_times_far_apart_are_seen_without_a_message(tmp_path: Path) -> None:
    """Nothing is then compared with rank 2, and each GPU's step is as long as it was."""
    shape = Shape(steps=3)
    documents = traces(simulate(shape), Style(host=localhost))
    for document in documents.values():
        for event in events(document, lambda e: "nccl" in e["name"]):
            event["args"] = {"stream": event["args"]["stream"], "device": event["args"]["device"]}
    for event in events(documents[2], lambda e: True):
        event["ts"] += HOUR_US
    run = prepared(tmp_path / "apart", documents)
    (message,) = notices(run, "host-not-believed")
    assert "lie between the times of rank 2 and those of its other ranks" in message
    assert not run.clock.aligned
    data = build(run).data
    assert data["bubble"]["fraction"] is None
    assert max(gpu["window"] for gpu in data["gpus"]) < 0.1


def test_collectives_that_end_before_they_begin_show_two_clocks(tmp_path: Path) -> None:
    """Each pipeline is on a clock of its own; their all-reduces of half a millisecond are 5 ms apart."""
    shape = Shape(steps=3, replicas=2, reduce_ns=MS // 2)
    clocks = dict.fromkeys(range(4, 8), (5 * MS, 0.0))
    run = prepared(tmp_path / "off", traces(simulate(shape), Style(host=localhost, clock_ns=clocks)))
    (message,) = notices(run, "host-not-believed")
    assert "3 of 3 collectives end on rank" in message
    assert_same_causes(build(run).data, one_clock(tmp_path / "one", shape))


def test_a_few_messages_that_are_matched_wrongly_are_no_second_clock(tmp_path: Path) -> None:
    """In step 1 rank 1's first activation and rank 2's last receive of one are lost: each of seven receives there is
    matched with the send after its own."""
    documents = traces(simulate(Shape(steps=3)), Style(host=localhost))
    mark = events(documents[1], lambda e: e["name"].startswith("ProfilerStep"))[1]

    def activations(rank: int) -> list[Json]:
        ends = {"Src Rank": 1, "Dst Rank": 2}
        found = events(documents[rank], lambda e: ends.items() <= e["args"].items())
        return [e for e in found if 0 <= e["ts"] - mark["ts"] < mark["dur"]]

    documents[1]["traceEvents"].remove(activations(1)[0])
    documents[2]["traceEvents"].remove(activations(2)[-1])
    run = prepared(tmp_path, documents)
    s, p2p = run.spans, run.links.p2p
    early = s.end_ns[p2p[:, 1]] < s.start_ns[p2p[:, 0]]
    assert early.sum() == 7
    assert not notices(run, "host-not-believed")
    assert run.clock.how == "one host"


@pytest.mark.parametrize("host", ["localhost", ""])
def test_a_rank_in_nanoseconds_is_left_out_and_the_others_are_as_without_its_file(tmp_path: Path, host: str) -> None:
    documents = traces(simulate(Shape(steps=3)), Style(host=lambda rank: host))
    without = {rank: document for rank, document in documents.items() if rank != 2}
    true = build(prepared(tmp_path / "without", without)).data
    for event in events(documents[2], lambda e: True):
        event["ts"], event["dur"] = event["ts"] * 1000, event["dur"] * 1000
    run = prepared(tmp_path / "nanoseconds", documents)
    (message,) = notices(run, "rank-other-unit")
    assert message.startswith("rank 2 is left out")
    assert run.layout.missing_ranks == [2]
    assert 2 not in run.ranks
    data = build(run).data
    for part in ("gpus", "causes", "bubble", "clock", "p2p"):
        assert data[part] == true[part], part
    (unavailable,) = notices_of(data, "fraction-unavailable")
    assert "exact" not in unavailable


def test_two_units_and_no_most_ranks_are_refused(tmp_path: Path) -> None:
    documents = traces(simulate(Shape(steps=3, stages=2, scale=(1.0, 1.5))), Style(host=localhost))
    for event in events(documents[1], lambda e: True):
        event["ts"], event["dur"] = event["ts"] * 1000, event["dur"] * 1000
    write(tmp_path, documents)
    with pytest.raises(InputError, match=r"the steps of rank 1 last .* times those of rank 0"):
        prepare(read(tmp_path))


def test_links_of_the_ranks_that_stay_keep_their_meaning(tmp_path: Path) -> None:
    documents = traces(simulate(Shape(steps=2)), Style(host=localhost, launches=True))
    for event in events(documents[1], lambda e: True):
        event["ts"], event["dur"] = event["ts"] * 1000, event["dur"] * 1000
    run = prepared(tmp_path, documents)
    launch = run.links.launch
    assert len(launch)
    assert (run.spans.corr[launch[:, 0]] == run.spans.corr[launch[:, 1]]).all()
    assert (run.spans.rank[launch[:, 0]] == run.spans.rank[launch[:, 1]]).all()
    assert np.unique(run.spans.rank[launch]).tolist() == [0, 2, 3]
