"""Nsight Systems exports: the truth of the generated job, a real sample, and files that lack or break something."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from bubblescope.align import prepare
from bubblescope.errors import InputError
from bubblescope.ingest import ReadOptions, read
from bubblescope.model import Kind, Lane, Run
from bubblescope.report.build import build
from tests.support import kineto_gen, nsys_gen
from tests.support.kineto_gen import Shape, Style, simulate, traces
from tests.support.nsys_gen import Export
from tests.unit.test_kineto import idle_without_transfer

SAMPLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "nsys" / "mfu_2gpu_after.sqlite"
TRUTH = simulate(Shape(steps=2))
KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD}
IDLE = pytest.approx([46.55, 45.67, 45.67, 20.26], abs=0.01)


def documents(**style: Any) -> dict[int, Any]:
    return traces(TRUTH, Style(launches=True, **style))


def wrong_kernels(run: Run) -> int:
    s, wrong = run.spans, 0
    compute = s.lane == Lane.COMPUTE
    base = int(s.start_ns[compute].min()) - min(o.start_ns for o in TRUTH.ops)
    for op in TRUTH.ops:
        rows = compute & (s.rank == op.rank)
        rows &= (s.start_ns >= op.start_ns + base) & (s.end_ns <= op.end_ns + base)
        told = set(zip(s.kind[rows].tolist(), s.stage[rows].tolist(), s.microbatch[rows].tolist(), strict=True))
        wrong += told != {(KINDS[op.kind], op.rank, op.microbatch)}
    return wrong


EXPORTS = {
    "blobs": Export(),
    "no init": Export(init=False),
    "start/end": Export(start_end=True),
    "normalised": Export(normalized=True),
    "2021 columns": Export(old_schema=True),
}
# Without payloads nothing says who sends to whom, which "" and the names of zero-bubble schedules need.
WITH_PAYLOADS = list(EXPORTS)[:-1]
OF_RANGES = {"zero bubble": WITH_PAYLOADS, "runtime": list(EXPORTS), "torch": list(EXPORTS), "": WITH_PAYLOADS}


@pytest.mark.parametrize(("ranges", "named"), [(r, name) for r, names in OF_RANGES.items() for name in names])
def test_every_kernel_gets_its_operation(tmp_path: Path, ranges: str, named: str) -> None:
    """Backward kernels are launched by another thread than the one that holds the range. Without ranges the messages
    tell, as long as payloads say who sends to whom."""
    export = EXPORTS[named]
    nsys_gen.write(tmp_path / "job.sqlite", documents(ranges=ranges, autograd=True), export)
    run = prepare(read(tmp_path))
    assert run.source.format == "nsys"
    assert wrong_kernels(run) == 0
    assert sorted(set(run.spans.step.tolist()) - {-1}) == [3, 4]
    if not export.old_schema:
        assert len(run.links.p2p) == len(TRUTH.messages)
        assert set(run.spans.bytes[run.links.p2p[:, 0]].tolist()) == {TRUTH.shape.bytes}


def test_idle_of_the_four_stage_job_is_what_it_must_be(tmp_path: Path) -> None:
    truth = simulate(Shape())
    nsys_gen.write(tmp_path / "job.sqlite", traces(truth, Style(launches=True)))
    assert idle_without_transfer(prepare(read(tmp_path))) == IDLE


def test_the_report_is_that_of_the_kineto_traces_of_the_same_job(tmp_path: Path) -> None:
    docs = documents(host=lambda rank: "node0")
    kineto_gen.write(tmp_path / "kineto", docs)
    nsys_gen.write(tmp_path / "nsys" / "job.sqlite", docs)
    ours, theirs = (build(prepare(read(tmp_path / f))).data for f in ("nsys", "kineto"))
    assert ours["bubble"] == theirs["bubble"]
    for cause, row in theirs["causes"].items():
        assert ours["causes"][cause]["seconds"] == pytest.approx(row["seconds"], abs=1e-9), cause


def test_several_files_are_one_job_and_utc_lays_them_together(tmp_path: Path) -> None:
    """Each session counts from its own start: the second one here began 3 ms later."""
    docs = documents()
    late = 3_000_000
    for document in (docs[2], docs[3]):
        for event in document["traceEvents"]:
            event["ts"] -= late / 1000
    nsys_gen.write(tmp_path / "a" / "node0.sqlite", {r: docs[r] for r in (0, 1)}, Export(init=False))
    shifted = Export(init=False, epoch_ns=Export().epoch_ns + late, host="node0")
    nsys_gen.write(tmp_path / "a" / "node1.sqlite", {r: docs[r] for r in (2, 3)}, shifted)
    run = prepare(read(tmp_path / "a"))
    assert run.ranks == [0, 1, 2, 3]
    assert wrong_kernels(run) == 0
    assert "rank-assumed" in [n.code for n in run.notices]


def test_one_file_per_rank_takes_its_rank_from_the_name(tmp_path: Path) -> None:
    for rank, document in documents(ranges="runtime").items():
        nsys_gen.write(tmp_path / f"rank{3 - rank}.sqlite", {rank: document}, Export(init=False))
    run = read(tmp_path)
    assert run.ranks == [0, 1, 2, 3]
    assert run.layout.inferred["ranks"] == "file name"


@pytest.mark.parametrize("names", ["rank{}.sqlite", "{}.sqlite"])
def test_a_stage_without_an_export_is_named(tmp_path: Path, names: str) -> None:
    """By its rank, where the file names tell ranks, and by its stage."""
    for rank, document in documents(ranges="runtime", metadata=False).items():
        if rank != 1:
            nsys_gen.write(tmp_path / names.format(rank), {rank: document}, Export(init=False, blobs=False))
    data = build(prepare(read(tmp_path))).data
    assert data["pipeline"]["stages"] == 4
    assert data["source"]["missing_ranks"] == [1]
    said = {w["code"]: w["message"] for w in data["source"]["warnings"]}
    assert said["rank-missing"].startswith("1 of at least 4 ranks have no trace: 1;")
    assert said["stage-missing"].startswith("no rank is known that holds stage 1;")


def test_copies_alone_are_the_reason_and_a_file_is_named_once(tmp_path: Path) -> None:
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"))
    with sqlite3.connect(path) as sql:
        sql.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, "
            "correlationId INTEGER, globalPid INTEGER)"
        )
        columns = "start, end, deviceId, streamId, correlationId, globalPid"
        sql.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY SELECT {columns} FROM CUPTI_ACTIVITY_KIND_KERNEL")
        sql.execute("DELETE FROM CUPTI_ACTIVITY_KIND_KERNEL")
    sql.close()
    with pytest.raises(InputError, match="no finished training step") as caught:
        build(prepare(read(path)))
    assert caught.value.hint == "copies between memories were recorded, and no kernel that computes: record these, too"
    assert caught.value.where == str(path)


@pytest.mark.parametrize("ranges", ["runtime", "zero bubble"])
def test_ranges_around_sends_and_receives_tell_who_they_are_for(tmp_path: Path, ranges: str) -> None:
    """Without payloads NCCL's own ranges say only which they are."""
    docs = documents(ranges=ranges)
    nsys_gen.write(tmp_path / "told" / "job.sqlite", docs)
    for rank, document in docs.items():
        nsys_gen.write(tmp_path / "ranges" / f"rank{rank}.sqlite", {rank: document}, Export(blobs=False))
    run, told = (prepare(read(tmp_path / name)) for name in ("ranges", "told"))
    assert len(run.links.p2p) == len(TRUTH.messages)
    assert run.layout.inferred["messages"] == "the operations around each send and receive"
    assert build(run).data["bubble"] == build(told).data["bubble"]


def test_messages_that_do_not_fit_the_other_ends_get_no_peer(tmp_path: Path) -> None:
    """A receive of rank 1 that lies behind its operation would be the next one's input: the step is not believed."""
    docs = documents(ranges="runtime")
    receive = next(e for e in docs[1]["traceEvents"] if e["args"].get("Collective name") == "recv")
    launch = next(
        e for e in docs[1]["traceEvents"]
        if e.get("cat") == "cuda_runtime" and e["args"]["correlation"] == receive["args"]["correlation"]
    )  # fmt: skip
    launch["ts"] += 4_000.0
    for rank, document in docs.items():
        nsys_gen.write(tmp_path / f"rank{rank}.sqlite", {rank: document}, Export(blobs=False))
    s = prepare(read(tmp_path)).spans
    forwards = s.where(kind=Kind.RECV, lane=Lane.COMM) & (s.rank == 1) & (s.peer == 0)
    assert set(s.step[forwards].tolist()) == {4}


def test_processes_of_one_export_are_of_one_host_whose_name_may_not_be_known(tmp_path: Path) -> None:
    nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"), Export(host=""))
    run = prepare(read(tmp_path))
    assert {run.names[int(h)] for h in run.layout.host} == {"job.sqlite (host unknown)"}
    assert run.clock.aligned


def test_a_copy_of_an_export_counts_once_and_is_named(tmp_path: Path) -> None:
    docs = documents(ranges="runtime")
    nsys_gen.write(tmp_path / "node0.sqlite", {r: docs[r] for r in (0, 1)}, Export(init=False))
    for name in ("node1.sqlite", "node2.sqlite"):
        nsys_gen.write(tmp_path / name, {r: docs[r] for r in (2, 3)}, Export(init=False))
    run = prepare(read(tmp_path))
    assert run.ranks == [0, 1, 2, 3]
    assert wrong_kernels(run) == 0
    said = [n for n in run.notices if n.code == "rank-duplicate"]
    assert [n.where for n in said] == [str(tmp_path / "node2.sqlite")] * 2
    assert "is in " + str(tmp_path / "node1.sqlite") in said[0].message


def test_ranks_that_nothing_tells_are_refused_and_listed(tmp_path: Path) -> None:
    for rank, document in documents().items():
        nsys_gen.write(tmp_path / f"{'abcd'[rank]}.sqlite", {rank: document}, Export(init=False, blobs=False))
    with pytest.raises(InputError, match=r"ranks of 4 exports.*a\.sqlite, b\.sqlite") as caught:
        read(tmp_path)
    assert "rank%q{RANK}" in caught.value.hint


def test_without_blobs_and_ranges_autograd_threads_tell_the_direction(tmp_path: Path) -> None:
    nsys_gen.write(tmp_path / "job.sqlite", documents(autograd=True), Export(blobs=False))
    run = prepare(read(tmp_path))
    assert run.layout.inferred["stages"] == "rank order; the message counts fit one chain"
    assert wrong_kernels(run) == 0


def test_where_nothing_tells_the_direction_causes_are_unavailable(tmp_path: Path) -> None:
    nsys_gen.write(tmp_path / "job.sqlite", documents(), Export(blobs=False))
    report = build(prepare(read(tmp_path)))
    assert "direction-unknown" in [w["code"] for w in report.data["source"]["warnings"]]
    assert report.data["causes"]["stage_imbalance"]["seconds"] is None
    for gpu in report.data["gpus"]:
        assert gpu["busy"] == pytest.approx(TRUTH.busy_ns(gpu["rank"]) / 2e9, abs=1e-8)


def test_without_blobs_ranges_still_tell_what_each_gpu_did(tmp_path: Path) -> None:
    nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"), Export(blobs=False))
    run = prepare(read(tmp_path))
    assert wrong_kernels(run) == 0
    kinds = set(run.spans.kind[run.spans.lane == Lane.COMM].tolist())
    assert kinds == {Kind.SEND, Kind.RECV}, "the calls around the launch say send or receive"


def test_graphs_traced_as_a_whole_are_busy_and_said(tmp_path: Path) -> None:
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"), Export(graph_mode=True))
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1000, 5000, 0, 1, 1, 7, 5, ?)",
                       [(1 << 48) | (4000 << 24)])  # fmt: skip
    connection.commit()
    connection.close()
    run = read(path)
    assert "cuda-graphs-whole" in [n.code for n in run.notices]
    assert "CUDA graph" in {run.names[i] for i in run.spans.name[run.spans.lane == Lane.COMPUTE].tolist()}


def test_launched_graphs_without_device_events_are_said(tmp_path: Path) -> None:
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(), Export(graph_mode=True))
    connection = sqlite3.connect(path)
    connection.execute("INSERT INTO StringIds VALUES (9999, 'cudaGraphLaunch_v10000')")
    connection.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (10, 20, 0, ?, 77, 9999, 0)",
                       [(1 << 48) | (4000 << 24) | 1])  # fmt: skip
    connection.commit()
    connection.close()
    assert any(n.code == "cuda-graphs-missing" and "1 CUDA graph" in n.message for n in read(path).notices)


def test_correlation_ids_of_two_processes_do_not_mix(tmp_path: Path) -> None:
    """The generated ranks use the same correlation ids; launches must stay within their process."""
    run = read(nsys_gen.write(tmp_path / "job.sqlite", documents()))
    s, launch = run.spans, run.links.launch
    assert len(launch)
    assert (s.rank[launch[:, 0]] == s.rank[launch[:, 1]]).all()
    assert (s.corr[launch[:, 0]] == s.corr[launch[:, 1]]).all()


def change(path: Path, *statements: str) -> Path:
    """Run SQL on an export whose tables accept any value."""
    connection = sqlite3.connect(path)
    for table in ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"):
        connection.execute(f"CREATE TABLE t AS SELECT * FROM {table}")
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"ALTER TABLE t RENAME TO {table}")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


def of_rank(rank: int) -> str:
    return f"globalPid = {(1 << 48) | (4000 + rank) << 24}"


def busy_ns(run: Run, rank: int) -> int:
    rows = (run.spans.rank == rank) & (run.spans.lane == Lane.COMPUTE)
    return int(run.spans.duration_ns[rows].sum())


def test_a_process_that_drives_two_gpus_is_refused_and_costs_no_other(tmp_path: Path) -> None:
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"))
    change(path, f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = correlationId % 2 WHERE {of_rank(2)}")
    run = read(path)
    assert [run.ranks, run.layout.missing_ranks] == [[0, 1, 3], [2]]
    (said,) = [n.message for n in run.notices if n.code == "process-unreadable"]
    assert "rank 2 (process 4002): one process drove 2 devices" in said
    assert " on device 0" in said
    assert " on device 1" in said
    for rank in run.ranks:
        assert busy_ns(run, rank) == TRUTH.busy_ns(rank)
    alone = nsys_gen.write(tmp_path / "alone.sqlite", {2: documents(ranges="runtime")[2]})
    with pytest.raises(InputError, match=r"drove 2 devices \(.* on device 0, .* on device 1\)"):
        read(change(alone, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = correlationId % 2"))


def test_a_context_on_another_gpu_neither_counts_nor_tells_the_order(tmp_path: Path) -> None:
    """Every process also runs a kernel on GPU 0; ranks that only their GPUs tell apart keep their places."""
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"), Export(init=False, blobs=False))
    swap = [f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = {7 - rank} WHERE {of_rank(rank)}" for rank in range(4)]
    stray = [
        f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 0 WHERE rowid = "
        f"(SELECT min(rowid) FROM CUPTI_ACTIVITY_KIND_KERNEL WHERE {of_rank(rank)})"
        for rank in range(4)
    ]
    run = read(change(path, *swap, *stray, "DROP TABLE TARGET_INFO_CUDA_DEVICE"))
    assert [n.code for n in run.notices].count("other-device") == 4
    whole = [TRUTH.busy_ns(rank) for rank in (3, 2, 1, 0)]
    assert all(0 <= all_of_it - busy_ns(run, rank) < 2_000_000 for rank, all_of_it in enumerate(whole))


@pytest.mark.parametrize("value", ["NULL", "'soon'", "1.5"])
@pytest.mark.parametrize("column", ["start", '"end"'])
def test_rows_without_times_are_counted(tmp_path: Path, column: str, value: str) -> None:
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"))
    tables = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME")
    run = read(change(path, *(f"UPDATE {table} SET {column} = {value} WHERE rowid IN (7, 9)" for table in tables)))
    messages = [n.message for n in run.notices if n.code == "events-dropped"]
    assert messages == [f"2 events dropped: no usable time in table {table}" for table in tables]


def test_a_process_none_of_whose_kernels_has_a_time_is_refused_for_that(tmp_path: Path) -> None:
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"), Export(init=False, blobs=False))
    run = read(change(path, f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE {of_rank(1)}"))
    assert run.ranks == [0, 2, 3]
    (said,) = [n.message for n in run.notices if n.code == "process-unreadable"]
    assert "GPU events cannot be used" in said
    assert "no usable time in table CUPTI_ACTIVITY_KIND_KERNEL" in said
    with pytest.raises(InputError, match="GPU events cannot be used"):
        read(change(path, "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = NULL"))


def test_a_report_file_gets_the_command_that_exports_it(tmp_path: Path) -> None:
    (tmp_path / "run.nsys-rep").write_bytes(b"NVIDIA\0\1\2")
    with pytest.raises(InputError, match="binary format") as caught:
        read(tmp_path / "run.nsys-rep")
    assert "nsys export --type sqlite --include-blobs=true run.nsys-rep" in caught.value.hint


def test_a_database_of_somebody_else_is_not_ours(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "x.sqlite")
    connection.execute("CREATE TABLE people (name TEXT)")
    connection.commit()
    connection.close()
    with pytest.raises(InputError, match="no Nsight Systems export"):
        read(tmp_path / "x.sqlite")


def test_an_export_without_gpu_events_says_how_to_record_them(tmp_path: Path) -> None:
    path = nsys_gen.write(tmp_path / "x.sqlite", {}, Export())
    with pytest.raises(InputError, match="no GPU events") as caught:
        read(path)
    assert "--trace=cuda,nvtx" in caught.value.hint


@pytest.mark.parametrize("table", sorted(set(nsys_gen.DDL) - {"CUPTI_ACTIVITY_KIND_KERNEL", "StringIds"}))
def test_any_table_may_be_missing(tmp_path: Path, table: str) -> None:
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"), Export(lacking=(table,)))
    assert len(prepare(read(path)).spans)


def test_kernels_without_names_are_no_work(tmp_path: Path) -> None:
    """Without the table of names receives would count as busy."""
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"), Export(lacking=("StringIds",)))
    with pytest.raises(InputError, match="have no name: communication cannot be told from work"):
        read(path)


@pytest.mark.parametrize("process", ["NULL", "-1", "'x'"])
def test_kernels_that_name_no_process_are_never_merged_over_processes(tmp_path: Path, process: str) -> None:
    lost = f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET globalPid = {process}"
    path = nsys_gen.write(tmp_path / "job.sqlite", documents(ranges="runtime"))
    with pytest.raises(InputError, match="name none of the 4 processes"):
        read(change(path, lost))
    one = nsys_gen.write(tmp_path / "one.sqlite", {2: documents(ranges="runtime")[2]})
    run = read(change(one, lost))
    assert busy_ns(run, run.ranks[0]) == TRUTH.busy_ns(2)
    few = nsys_gen.write(tmp_path / "few.sqlite", documents(ranges="runtime"))
    run = read(change(few, lost + " WHERE rowid = 1"))
    assert [n.message for n in run.notices] == [
        "1 GPU events name none of the 4 processes in the file; they are not used",
    ]


def test_a_truncated_export_gives_its_rows_or_a_reason(tmp_path: Path) -> None:
    whole = nsys_gen.write(tmp_path / "whole.sqlite", documents(ranges="runtime")).read_bytes()
    for share in (0.2, 0.5, 0.9):
        path = tmp_path / f"cut{share}.sqlite"
        path.write_bytes(whole[: int(len(whole) * share)])
        try:
            run = read(path)
        except InputError as error:
            assert error.where == str(path)
            continue
        assert any(n.code == "table-damaged" for n in run.notices)


def test_a_schema_that_is_no_text_is_a_reason(tmp_path: Path) -> None:
    """SQLite quotes it in its message, which then is no text either."""
    path = nsys_gen.write(tmp_path / "job.sqlite", documents())
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE NVTX_EVENTS", b"CREATE \xc3ABLE NVTX_EVENTS"))
    with pytest.raises(InputError, match="cannot be read") as caught:
        read(path)
    assert caught.value.hint


def test_too_many_events_are_refused(tmp_path: Path) -> None:
    path = nsys_gen.write(tmp_path / "job.sqlite", documents())
    with pytest.raises(InputError, match="more than 10 events"):
        read(path, options=ReadOptions(max_events=10))


@pytest.mark.skipif(not SAMPLE.exists(), reason="../shared/data is not beside this checkout")
def test_the_real_sample_has_no_pipeline_and_exact_busy_time() -> None:
    """Two H100s of a sequence-parallel job: SendRecv kernels are an all-to-all, and no pipeline is made of them."""
    run = prepare(read(SAMPLE))
    report = build(run).data
    assert report["pipeline"]["stages"] is None
    assert report["bubble"]["fraction"] is None
    s = run.spans
    comm = s.lane == Lane.COMM
    connection = sqlite3.connect(f"file:{SAMPLE}?mode=ro&immutable=1", uri=True)
    (kernels,) = connection.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    (sends, total) = connection.execute(
        "SELECT count(*), sum(end - start) FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.shortName "
        "WHERE s.value LIKE 'nccl%'"
    ).fetchone()
    connection.close()
    assert int((s.lane == Lane.COMPUTE).sum()) == kernels - sends
    columns = (s.rank[comm].tolist(), s.start_ns[comm].tolist(), s.end_ns[comm].tolist())
    distinct = set(zip(*columns, strict=True))
    assert len(distinct) == sends == 62
    assert sum(b - a for _, a, b in distinct) == total
