"""Forward, backward, stage and micro-batch, from ranges or from nothing but messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bubblescope.align import prepare
from bubblescope.ingest import read
from bubblescope.label import LABELS, label
from bubblescope.label.schedule import operations
from bubblescope.label.sequence import Numbers, pair
from bubblescope.label.torch_pipelining import parse
from bubblescope.model import Kind, Lane, Layout, Names, Run, Source, SpanBuilder
from bubblescope.report.build import build
from tests.support.kineto_gen import Shape, Style, Truth, simulate, traces, write

PLAIN = Style()
KIND = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "O": Kind.OPTIMIZER}


def labelled(folder: Path, truth: Truth, style: Style = PLAIN) -> Run:
    write(folder, traces(truth, style))
    return label(read(folder))


def wrong_kernels(run: Run, truth: Truth, style: Style = PLAIN) -> int:
    """Kernels whose kind, micro-batch or stage is not the true one; they come in true order per rank."""
    s, shape = run.spans, truth.shape
    count = {"F": shape.kernels[0], "B": shape.kernels[1], "O": 2}
    wrong = 0
    for stage in range(shape.stages):
        rows = np.flatnonzero((s.rank == stage + style.first_rank) & (s.lane == Lane.COMPUTE))
        rows = rows[np.argsort(s.start_ns[rows], kind="stable")]
        ops = [o for o in truth.ops if o.rank == stage]
        meant = [
            (KIND[o.kind], o.microbatch, -1 if o.kind == "O" else stage) for o in ops for _ in range(count[o.kind])
        ]
        got = zip(s.kind[rows].tolist(), s.microbatch[rows].tolist(), s.stage[rows].tolist(), strict=True)
        wrong += sum(a != b for a, b in zip(meant, got, strict=True))
    return wrong


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("style", [Style(), Style(launches=True, autograd=True)], ids=["bare", "autograd"])
def test_messages_alone_tell_every_kernel(tmp_path: Path, schedule: str, stages: int, style: Style) -> None:
    shape = Shape(stages=stages, scale=(1.0, 1.2, 0.9, 1.5, 1.0, 1.1)[:stages], schedule=schedule, steps=2)
    truth = simulate(shape)
    run = labelled(tmp_path, truth, style)
    assert wrong_kernels(run, truth) == 0
    assert (run.layout.schedule, run.layout.stages, run.layout.microbatches) == (schedule, stages, 8)


@pytest.mark.parametrize("kernels", [(1, 1), (3, 6), (5, 5)])
def test_names_that_say_nothing_do_not_matter(tmp_path: Path, kernels: tuple[int, int]) -> None:
    truth = simulate(Shape(kernels=kernels, same_names=True, steps=2))
    assert wrong_kernels(labelled(tmp_path, truth), truth) == 0


def test_optimizer_kernels_are_no_backward(tmp_path: Path) -> None:
    truth = simulate(Shape(optimizer_ns=400_000, steps=2))
    assert wrong_kernels(labelled(tmp_path, truth), truth) == 0


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_few_microbatches_are_numbered_too(tmp_path: Path, microbatches: int) -> None:
    truth = simulate(Shape(microbatches=microbatches))
    run = labelled(tmp_path, truth)
    assert wrong_kernels(run, truth) == 0
    assert run.layout.microbatches == microbatches


REVERSED = Shape(schedule="GPipe", reversed=True, steps=2)
NUMBERED = Style(launches=True, autograd=True, sequence=True)


@pytest.mark.parametrize("kernels", [(4, 7), (1, 1), (3, 2)])
def test_backwards_in_reverse_order_are_numbered_by_sequence_numbers(tmp_path: Path, kernels: tuple[int, int]) -> None:
    truth = simulate(replace(REVERSED, kernels=kernels))
    run = labelled(tmp_path, truth, NUMBERED)
    assert wrong_kernels(run, truth) == 0
    assert run.layout.inferred["microbatch"].endswith(
        "backwards by autograd sequence numbers in 8 of 8 (rank, step) pairs"
    )
    assert (run.layout.schedule, run.layout.microbatches) == ("GPipe", 8)


def test_an_order_seen_on_one_rank_is_that_of_its_pipeline(tmp_path: Path) -> None:
    truth = simulate(REVERSED)
    run = labelled(tmp_path, truth, replace(NUMBERED, sequence_ranks=(2,)))
    assert wrong_kernels(run, truth) == 0
    assert "in 8 of 8 (rank, step) pairs, 6 of them by those of another rank" in run.layout.inferred["microbatch"]


@pytest.mark.parametrize("style", [Style(), Style(launches=True, autograd=True)], ids=["bare", "autograd"])
def test_without_sequence_numbers_the_order_of_backwards_is_said_to_be_assumed(tmp_path: Path, style: Style) -> None:
    run = labelled(tmp_path, simulate(REVERSED), style)
    assert run.layout.inferred["microbatch"].endswith("; backwards assumed to run in the order of the forwards")


def test_sequence_numbers_that_pair_two_backwards_with_one_forward_are_not_believed() -> None:
    numbers = Numbers(np.array([10, 20, 11, 12, 21]), np.array([1, 1, 2, 2, 2]))
    first, second, *rest = np.arange(5)[:, None]
    assert pair(numbers, [first, second], [rest[2], rest[0]]) == [1, 0]
    assert pair(numbers, [first, second], [rest[0], rest[1]]) is None
    assert pair(numbers, [first, second], [np.array([2, 4]), rest[2]]) is None
    assert pair(numbers, [second, first], [rest[2], rest[0]]) is None


@pytest.mark.parametrize(
    ("shape", "style"), [(Shape(), PLAIN), (REVERSED, NUMBERED)], ids=["in order", "gradients in reverse"]
)
def test_messages_carry_the_microbatch_that_they_move(tmp_path: Path, shape: Shape, style: Style) -> None:
    truth = simulate(shape)
    s = labelled(tmp_path, truth, style).spans
    for message in truth.messages:
        for rank, (start, _), kind in (
            (message.source, message.send, Kind.SEND),
            (message.destination, message.receive, Kind.RECV),
        ):
            rows = (s.rank == rank) & (s.kind == kind) & (s.lane == Lane.COMM) & (s.start_ns == start)
            peer = message.destination if kind == Kind.SEND else message.source
            assert message.microbatch in s.microbatch[rows & (s.peer == peer)].tolist()


def test_reversed_ranks_are_put_in_pipeline_order(tmp_path: Path) -> None:
    truth = simulate(Shape())
    docs = traces(truth, Style(members=(0, 1, 2, 3)))
    turned = {3 - rank: document for rank, document in docs.items()}
    for rank, document in turned.items():
        document["distributedInfo"]["rank"] = rank
        for event in document["traceEvents"]:
            args = event.get("args", {})
            for key in ("Rank", "Src Rank", "Dst Rank"):
                if key in args:
                    args[key] = 3 - args[key]
    write(tmp_path, turned)
    run = label(read(tmp_path))
    assert run.layout.stage_rank == {(0, 0): 3, (0, 1): 2, (0, 2): 1, (0, 3): 0}
    assert run.layout.schedule == "1F1B"


def test_two_replicas_are_two_pipelines(tmp_path: Path) -> None:
    truth = simulate(Shape())
    write(tmp_path, traces(truth, Style(world=8, members=(0, 1, 2, 3))))
    write(tmp_path, traces(truth, Style(world=8, first_rank=4, members=(4, 5, 6, 7))))
    run = label(read(tmp_path))
    assert run.layout.data_parallel == 2
    assert run.layout.stage_rank[(1, 2)] == 6
    assert run.layout.replica.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_missing_rank_leaves_the_others_their_stages(tmp_path: Path) -> None:
    truth = simulate(Shape())
    docs = traces(truth)
    del docs[2]
    write(tmp_path, docs)
    run = label(read(tmp_path))
    assert (run.layout.stages, run.layout.pp.tolist()) == (4, [0, 1, 3])
    assert run.layout.microbatches == 8
    assert run.layout.schedule == "1F1B"


def some_ranks(folder: Path, seen: tuple[int, ...], style: Style, replicas: int = 1) -> Run:
    documents = traces(simulate(Shape(replicas=replicas)), style)
    write(folder, {rank: documents[rank] for rank in seen})
    return label(read(folder))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("ranges", [None, "torch"])
@pytest.mark.parametrize(("world", "description"), [(8, ""), (4, "mesh_pp"), (4, "PIPELINE_MODEL_PARALLEL_GROUP")])
def test_a_rank_alone_in_the_communicator_of_its_pipeline_has_its_stage(
    tmp_path: Path, rank: int, ranges: str | None, world: int, description: str
) -> None:
    style = Style(world=world, members=(0, 1, 2, 3), description=description, launches=True, ranges=ranges)
    run = some_ranks(tmp_path, (rank,), style)
    assert (run.layout.stages, run.layout.pp.tolist()) == (4, [rank])
    assert set(run.spans.stage[run.spans.lane == Lane.COMPUTE].tolist()) == {rank}


@pytest.mark.parametrize(
    ("seen", "places"),
    [((0,), [0]), ((1,), [-1]), ((2,), [-1]), ((3,), [-1]), ((1, 2), [-1, -1]), ((0, 1), [0, 1]), ((0, 3), [0, -1])],
)
def test_a_pipeline_that_may_go_on_has_no_number_of_stages(
    tmp_path: Path, seen: tuple[int, ...], places: list[int]
) -> None:
    """The communicator of the whole job says nothing. Forward, backward and micro-batch are known all the same."""
    run = some_ranks(tmp_path, seen, Style(world=8, members=tuple(range(8)), description="default_pg"))
    assert (run.layout.stages, run.layout.schedule, run.layout.data_parallel) == (None, None, None)
    assert run.layout.pp.tolist() == places
    compute = run.spans.lane == Lane.COMPUTE
    assert set(run.spans.stage[compute].tolist()) == set(places)
    assert set(zip(run.spans.kind[compute].tolist(), run.spans.microbatch[compute].tolist(), strict=True)) == {
        (kind, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(8)
    }
    assert "stages-open" in [n.code for n in run.notices]


def test_communicators_of_two_ranks_are_no_pipelines(tmp_path: Path) -> None:
    documents = traces(simulate(Shape()), Style(description=""))
    for event in documents[3]["traceEvents"]:
        if "Src Rank" in event["args"]:
            event["args"] |= {"Process Group Ranks": "[2, 3]", "Group size": 2, "Rank": 1}
    write(tmp_path, {3: documents[3]})
    run = label(read(tmp_path))
    assert (run.layout.stages, run.layout.pp.tolist()) == (None, [-1])


@pytest.mark.parametrize(
    ("seen", "places"),
    [((0, 1, 2, 3, 6, 7), [0, 1, 2, 3, 2, 3]), ((0, 1, 2, 3, 7), [0, 1, 2, 3, 3]), ((0, 1, 2, 3, 5), [0, 1, 2, 3, -1])],
)
def test_a_whole_pipeline_tells_the_length_of_the_other(
    tmp_path: Path, seen: tuple[int, ...], places: list[int]
) -> None:
    run = some_ranks(tmp_path, seen, Style(world=8, members=tuple(range(8)), description="default_pg"), replicas=2)
    assert (run.layout.stages, run.layout.data_parallel) == (4, None)
    assert run.layout.pp.tolist() == places


@pytest.mark.parametrize(("seen", "stages"), [((0, 1, 2), 4), ((1, 2, 3), 4), ((0, 1), None), ((1, 2), 4), ((2, 3), 4)])
def test_ranges_that_name_stages_do_not_number_those_of_missing_ranks(
    tmp_path: Path, seen: tuple[int, ...], stages: int | None
) -> None:
    run = some_ranks(tmp_path, seen, Style(launches=True, ranges="runtime", description="default_pg"))
    assert (run.layout.stages, run.layout.pp.tolist()) == (stages, list(seen))
    assert [run.spans.stage[run.spans.rank == rank].max() for rank in seen] == list(seen)


@pytest.mark.parametrize("world", [True, False], ids=["world known", "world unknown"])
@pytest.mark.parametrize("metadata", [True, False], ids=["peers", "no peers"])
@pytest.mark.parametrize("seen", [(0,), (1,), (2,), (1, 2), (0, 1), (0, 1, 2)])
def test_the_last_stage_that_a_range_names_need_not_be_the_last(
    tmp_path: Path, seen: tuple[int, ...], metadata: bool, world: bool
) -> None:
    """It exchanges messages on: with a rank without a trace, with nobody else if it were alone, or twice as many."""
    style = Style(launches=True, ranges="runtime", metadata=metadata, members=tuple(range(8)), world=8, description="")
    documents = traces(simulate(Shape()), style)
    for document in documents.values():
        if not world:
            del document["distributedInfo"]
    write(tmp_path, {rank: documents[rank] for rank in seen})
    run = prepare(read(tmp_path))
    assert (run.layout.stages, run.layout.pp.tolist()) == (None, list(seen))
    assert "stages-open" in [n.code for n in run.notices]
    data = build(run).data
    assert data["bubble"]["fraction"] is None
    assert data["causes"]["warmup"]["seconds"] is None
    assert data["causes"]["host_launch"]["sure"] == "estimated"


@pytest.mark.parametrize(("seen", "stages"), [((0, 1, 2, 3), 4), ((0, 3), 4), ((0, 2, 3), 4), ((3,), None)])
def test_a_last_stage_with_as_many_messages_as_the_first_is_the_last(
    tmp_path: Path, seen: tuple[int, ...], stages: int | None
) -> None:
    documents = traces(simulate(Shape()), Style(launches=True, ranges="runtime", metadata=False))
    for document in documents.values():
        del document["distributedInfo"]
    write(tmp_path, {rank: documents[rank] for rank in seen})
    assert label(read(tmp_path)).layout.stages == stages


@pytest.mark.parametrize("missing", [6, 7])
def test_a_stage_that_only_one_pipeline_has_is_named(tmp_path: Path, missing: int) -> None:
    """Without peers and world size, by the ranges alone."""
    documents = traces(simulate(Shape(replicas=2)), Style(launches=True, ranges="runtime", metadata=False))
    for document in documents.values():
        del document["distributedInfo"]
    write(tmp_path, {rank: document for rank, document in documents.items() if rank != missing})
    (notice,) = [n for n in label(read(tmp_path)).notices if n.code == "stage-missing"]
    assert f"stage {missing - 4} in 1 of 2 pipelines;" in notice.message


@pytest.mark.parametrize(
    ("seen", "stages"),
    [((0,), None), ((0, 1), 4), ((0, 1, 2), 4), ((1, 2, 3), 4), ((0, 1, 2, 3), 4)],
)
def test_several_stages_on_each_gpu_tell_how_many_gpus_by_their_distance(
    tmp_path: Path, seen: tuple[int, ...], stages: int | None
) -> None:
    shape = Shape(schedule="Interleaved1F1B", chunks=2)
    documents = traces(simulate(shape), Style(launches=True, ranges="runtime"))
    write(tmp_path, {rank: documents[rank] for rank in seen})
    run = label(read(tmp_path))
    assert (run.layout.stages, run.layout.pp.tolist()) == (stages, list(seen))


def test_kernels_that_name_no_peer_are_said_and_not_guessed(tmp_path: Path) -> None:
    run = labelled(tmp_path, simulate(Shape()), Style(metadata=False))
    assert run.layout.stages is None
    assert not np.any(run.spans.microbatch >= 0)
    assert "p2p-without-peers" in [n.code for n in run.notices]


def test_two_ranks_that_both_send_first_are_counted(tmp_path: Path) -> None:
    docs = traces(simulate(Shape(stages=2, scale=(1.0, 1.0))))
    first = next(e for e in docs[1]["traceEvents"] if "Src Rank" in e.get("args", {}))
    first["args"] |= {"Collective name": "send", "Src Rank": 1, "Dst Rank": 0}
    write(tmp_path, docs)
    (said,) = [n.message for n in label(read(tmp_path)).notices if n.code == "no-pipeline-found"]
    assert said.startswith("point-to-point messages between 2 ranks do not form a pipeline")


def test_all_to_all_messages_are_no_pipeline(tmp_path: Path) -> None:
    docs = traces(simulate(Shape()))
    for rank, document in docs.items():
        for i, event in enumerate(e for e in document["traceEvents"] if "Src Rank" in e.get("args", {})):
            other = [r for r in range(4) if r != rank][i % 3]
            sends = event["args"]["Collective name"] == "send"
            event["args"]["Src Rank"], event["args"]["Dst Rank"] = (rank, other) if sends else (other, rank)
    write(tmp_path, docs)
    run = label(read(tmp_path))
    assert run.layout.stages is None
    assert "no-pipeline-found" in [n.code for n in run.notices]


def test_what_a_step_runs_after_its_last_backward_is_no_forward(tmp_path: Path) -> None:
    """Metrics or moving averages, as in the step of a rank without a pipeline: launched outside of autograd."""
    truth = simulate(Shape(stages=1, scale=(1.0,), microbatches=2, schedule="GPipe"))
    docs = traces(truth, Style(launches=True, autograd=True, world=4))
    events = docs[0]["traceEvents"]
    end = max(e["ts"] + e["dur"] for e in events if e.get("cat") == "kernel")
    for event in events:
        if event["name"].startswith("ProfilerStep"):
            event["dur"] = end + 1_000 - event["ts"]
    for k in range(3):
        at = end + 100 + 10 * k
        events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 4000, "tid": 4000,
                       "ts": at, "dur": 2, "args": {"correlation": 9000 + k}})  # fmt: skip
        events.append({"ph": "X", "cat": "kernel", "name": "ema", "pid": 0, "tid": 7, "ts": at + 3, "dur": 5,
                       "args": {"device": 0, "stream": 7, "correlation": 9000 + k}})  # fmt: skip
    write(tmp_path, docs)
    run = label(read(tmp_path))
    s = run.spans
    named = np.array([run.names[i] for i in s.name.tolist()])
    kinds = {name: set(s.kind[(named == name) & (s.lane == Lane.COMPUTE)].tolist()) for name in set(named.tolist())}
    assert kinds["ema"] == {Kind.OTHER}
    assert kinds["fwd_gemm_0"] == {Kind.FORWARD}
    assert kinds["bwd_gemm_0"] == {Kind.BACKWARD}


def test_overlapped_pairs_are_told_apart_by_autograd(tmp_path: Path) -> None:
    """DualPipeV runs a forward and a backward inside one range; autograd's threads launch the backward."""
    truth = simulate(Shape(stages=2, scale=(1.0, 1.0), microbatches=2, schedule="GPipe"))
    docs = traces(truth, Style(launches=True, autograd=True))
    events = docs[0]["traceEvents"]
    launches = [e for e in events if e.get("name") == "cudaLaunchKernel"]
    low, high = min(e["ts"] for e in launches) - 1, max(e["ts"] for e in launches) + 1
    events.append(
        {"ph": "X", "cat": "user_annotation", "name": "PP:(0F3;3B1)OVERLAP_F_B", "pid": 1, "tid": 1,
         "ts": low, "dur": high - low}
    )  # fmt: skip
    write(tmp_path, {0: docs[0]})
    s = label(read(tmp_path)).spans
    rows = s.lane == Lane.COMPUTE
    found = set(zip(s.kind[rows].tolist(), s.stage[rows].tolist(), s.microbatch[rows].tolist(), strict=True))
    assert found == {(Kind.FORWARD, 0, 3), (Kind.BACKWARD, 3, 1)}


@pytest.mark.parametrize(
    "text", ["PP:F0", "PP:1X0", "PP:(0F3)OVERLAP_F_B", "Forward", "Backward x", "PP:1F99999999999999999999", ""]
)
def test_other_names_are_no_actions(text: str) -> None:
    assert parse(text) == ()


def test_passes_do_not_touch_what_is_done(tmp_path: Path) -> None:
    run = labelled(tmp_path, simulate(Shape()))
    again = label(run)
    assert (again.spans.kind == run.spans.kind).all()
    assert (again.spans.microbatch == run.spans.microbatch).all()
    assert again.layout.stage_rank == run.layout.stage_rank


def test_every_pass_takes_an_empty_run() -> None:
    for one in LABELS:
        assert len(one(Run.empty()).spans) == 0
    assert operations(Run.empty()) == {}


# --- several pipelines of ranks whose messages name no peer ---------------------------------------------------


def gloo_job(chains: list[list[int]], microbatches: int = 3, *, reversed_by_numbers: bool = False) -> Run:
    """GPipe on CPU ranks: posts and waits without peers, host operators between them. reversed_by_numbers: the k-th
    last forward and the k-th backward share a sequence number."""
    rows = SpanBuilder()
    for chain in chains:
        for stage, rank in enumerate(chain):
            first, last = stage == 0, stage == len(chain) - 1
            common, at = {"rank": rank, "step": 0, "device": 0}, 1000 * stage
            for name, inputs, outputs in ((1, not first, not last), (2, not last, not first)):
                for k in range(microbatches):
                    number = 10 + (k if name == 1 else microbatches - 1 - k) if reversed_by_numbers else -1
                    if inputs:
                        rows.add(**common, lane=Lane.POST, kind=Kind.RECV, start_ns=at, end_ns=at + 1)
                    rows.add(**common, lane=Lane.COMPUTE, start_ns=at + 10, end_ns=at + 90, name=name, seq=number)
                    if outputs:
                        rows.add(**common, lane=Lane.POST, kind=Kind.SEND, start_ns=at + 91, end_ns=at + 92)
                    at += 100
    ranks = np.array(sorted(r for chain in chains for r in chain))
    layout = Layout(ranks=ranks, pp=ranks * 0 - 1, replica=ranks * 0 - 1, tp=ranks * 0, host=ranks * 0)
    names = Names.of(["fwd", "bwd"])
    return Run(rows.build().sorted(), names, layout, source=Source("kineto", (), "host"))


@pytest.mark.parametrize(
    "chains",
    [[[0, 1, 2]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3, 4, 5]], [[0, 2, 4], [1, 3, 5]]],
    ids=["one", "two, consecutive", "two, apart", "two of three", "two of three, apart"],
)
def test_replicas_of_ranks_without_peers_are_pipelines_of_their_own(chains: list[list[int]]) -> None:
    layout = label(gloo_job(chains)).layout
    assert layout.stages == len(chains[0])
    assert layout.data_parallel == len(chains)
    assert layout.stage_rank == {(r, s): rank for r, chain in enumerate(chains) for s, rank in enumerate(chain)}


def test_operators_of_a_cpu_rank_are_paired_by_their_own_numbers() -> None:
    s = label(gloo_job([[0, 1]], reversed_by_numbers=True)).spans
    backwards = np.flatnonzero((s.kind == Kind.BACKWARD) & (s.rank == 0))
    assert s.microbatch[backwards[np.argsort(s.start_ns[backwards])]].tolist() == [2, 1, 0]


def test_ranks_that_fit_no_order_stay_without_stages() -> None:
    assert label(gloo_job([[1, 0], [2, 3]])).layout.stages is None


def partly_named(folder: Path, truth: Truth, style: Style, named: Callable[[int, str], bool]) -> Run:
    """Labelled without those ranges of operations that `named` (rank, text) does not want."""
    documents = traces(truth, replace(style, launches=True))
    for rank, document in documents.items():
        document["traceEvents"] = [
            e
            for e in document["traceEvents"]
            if e["name"].startswith("ProfilerStep") or e.get("cat") != "user_annotation" or named(rank, e["name"])
        ]
    write(folder, documents)
    return label(read(folder))


@pytest.mark.parametrize("autograd", [False, True], ids=["bare", "autograd"])
@pytest.mark.parametrize("ranges", ["torch", "runtime"])
@pytest.mark.parametrize(
    ("named", "word"),
    [
        (lambda rank, text: "F" in text, "0, 1, 2, 3 name no backwards"),
        (lambda rank, text: "B" in text, "0, 1, 2, 3 name no forwards"),
        (lambda rank, text: rank != 3 or "F" in text, "3 name no backwards"),
        (lambda rank, text: rank != 3, "3 name no forwards or backwards"),
        (lambda rank, text: rank != 0, "0 name no forwards or backwards"),
    ],
    ids=["forwards", "backwards", "one rank's forwards", "not rank 3", "not rank 0"],
)
def test_ranges_that_name_a_part_of_the_operations_do_not_hide_the_rest(
    tmp_path: Path, autograd: bool, ranges: str, named: Callable[[int, str], bool], word: str
) -> None:
    """The rest would be counted as stray compute, as loss or as optimizer, and a rank without names as none at all."""
    truth = simulate(Shape(steps=2))
    run = partly_named(tmp_path, truth, Style(ranges=ranges, autograd=autograd), named)
    assert wrong_kernels(run, truth) == 0
    assert (run.layout.stages, run.layout.schedule) == (4, "1F1B")
    assert [word in n.message for n in run.notices if n.code == "ranges-one-sided"] == [True]


def test_where_only_forwards_run_their_names_are_used(tmp_path: Path) -> None:
    """An evaluation has no backwards to name."""
    documents = traces(simulate(Shape(microbatches=4)), Style(launches=True, ranges="torch"))
    for document in documents.values():
        document["traceEvents"] = [
            e for e in document["traceEvents"] if not e["name"].startswith("Backward") and "bwd" not in e["name"]
        ]
    write(tmp_path, documents)
    run = label(read(tmp_path))
    compute = run.spans.lane == Lane.COMPUTE
    assert set(run.spans.kind[compute].tolist()) == {Kind.FORWARD}
    assert set(run.spans.microbatch[compute].tolist()) == {0, 1, 2, 3}
    assert not [n for n in run.notices if n.code == "ranges-one-sided"]
