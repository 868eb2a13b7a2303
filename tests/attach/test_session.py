"""Which way is taken, and what is said when none is open. No process is started here."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from bubblescope.attach import discover, inject, kineto, process, session, together
from bubblescope.attach.discover import Rank
from bubblescope.attach.process import Process
from bubblescope.errors import AttachError, UsageError


def rank(number: int = 0, **changes: object) -> Rank:
    fields: dict[str, object] = {
        "pid": 100 + number, "rank": number, "world": 2, "uid": 0, "framework": "torch", "job": "j", "environ": {},
    }  # fmt: skip
    return Rank(**{**fields, **changes})  # type: ignore[arg-type]


AGENT = {"agent": Path("/s/1.sock")}


@pytest.fixture(autouse=True)
def nothing_to_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "why_not", lambda pid: "")


@pytest.mark.parametrize(
    ("ranks", "via", "way"),
    [
        ([rank(**AGENT)], "auto", "agent"),
        ([rank(kineto=True)], "auto", "kineto"),
        ([rank(kineto=True, **AGENT)], "auto", "agent"),
        ([rank(kineto=True, **AGENT)], "kineto", "kineto"),
        ([rank()], "inject", "inject"),
        ([rank()], "gdb", "gdb"),
        ([rank(**AGENT)], "inject", "agent"),
        ([rank(**AGENT), rank(1)], "inject", "inject"),
    ],
)
def test_the_gentlest_way_that_is_open_for_all_ranks_is_taken(ranks: list[Rank], via: str, way: str) -> None:
    assert session.choose(ranks, via) == way


@pytest.mark.parametrize(
    ("ranks", "via", "what", "open_"),
    [
        ([rank()], "auto", "rank 0 (process 100) was not prepared", "--via inject --yes"),
        ([rank(**AGENT), rank(1)], "auto", "rank 1 (process 101) was not prepared", "--via inject --yes"),
        ([rank(), rank(1)], "auto", "rank 0 (process 100), rank 1 (process 101) were not prepared", "run --standby"),
        ([rank(kineto=True)], "agent", "there is no agent in rank 0", "open: --via kineto"),
        ([rank(**AGENT)], "kineto", "process 100) was started without KINETO_USE_DAEMON=1", "open: --via agent"),
    ],
)
def test_a_refusal_names_the_ranks_and_the_ways_that_are_open(
    ranks: list[Rank], via: str, what: str, open_: str
) -> None:
    with pytest.raises(AttachError) as caught:
        session.choose(ranks, via)
    assert what in caught.value.what
    assert open_ in caught.value.hint
    assert ("inject" in caught.value.hint) is (ranks[-1].prepared == "no"), "only where nothing gentler is open"


@pytest.mark.parametrize("via", [way for way in session.WAYS if way != "kineto"])
def test_a_job_that_records_already_is_entered_by_nobody(via: str) -> None:
    with pytest.raises(AttachError, match=r"rank 1 \(process 101\) records already, into /r") as caught:
        session.choose([rank(), rank(1, recording="/r")], via)
    assert caught.value.hint.startswith("bubblescope watch /r")
    assert session.choose([rank(kineto=True, recording="/r")], "kineto") == "kineto"


@pytest.mark.parametrize("via", ["auto", "agent"])
def test_a_job_that_stands_by_is_not_told_to(via: str) -> None:
    standby = {"environ": {"BUBBLESCOPE": "standby"}}
    with pytest.raises(AttachError, match=r"agent (of|in) rank 1") as caught:
        session.choose([rank(**AGENT), rank(1, **standby)], via)
    assert "when the process imports torch.distributed.pipelining" in caught.value.hint
    assert "run --standby" not in caught.value.hint


def test_where_injecting_is_closed_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "why_not", lambda pid: "the kernel forbids it")
    with pytest.raises(AttachError) as caught:
        session.choose([rank()], "auto")
    assert "--via inject is closed: the kernel forbids it" in caught.value.hint
    with pytest.raises(AttachError, match="cannot be entered: the kernel forbids it"):
        session._inject([rank()], lambda risk: True, print, with_gdb=False)


@pytest.mark.parametrize("via", session.WAYS)
def test_what_runs_in_a_container_is_attached_to_from_inside(via: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "in_container", lambda pid: pid == 101)
    ranks = [rank(kineto=True), rank(1, kineto=True)]
    with pytest.raises(AttachError, match=r"rank 1 \(process 101\) cannot be reached from outside") as caught:
        session.choose(ranks, via)
    assert "docker exec" in caught.value.hint
    assert session.choose([rank(1, **AGENT)], "agent") == "agent", "its agent was found all the same"


def test_nothing_is_injected_without_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "start_agent", lambda *a, **k: pytest.fail("injected"))
    asked: list[str] = []

    def no(risk: str) -> bool:
        asked.append(risk)
        return False

    with pytest.raises(AttachError, match="not confirmed"):
        session._inject([rank()], no, print, with_gdb=False)
    assert "can crash" in asked[0]


def test_a_job_with_its_own_profiler_gets_no_second_one(tmp_path: Path) -> None:
    plan = session.Plan("all", tmp_path, "kineto", seconds=1.0)
    with pytest.raises(AttachError, match=r"own torch\.profiler runs in rank 0"):
        session._by_kineto([rank(kineto=True, profiler=True)], plan, tmp_path, print)


def test_two_lengths_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        session.Plan("all", tmp_path, seconds=1.0, steps=1)


def test_who_does_not_wait_for_the_hooks_is_told_where_what_was_recorded_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(together, "record", interrupted)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        session._by_agent([rank(**AGENT)], session.Plan("all", tmp_path), tmp_path / "recording", "agent", said.append)
    assert f"stays in {tmp_path}/recording" in said[-1] and "hooks come out at the next step" in said[-1]


def test_ranks_of_two_jobs_are_not_recorded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "ranks", lambda: [rank(0), rank(1, job="k")])
    with pytest.raises(AttachError, match="these are 2 jobs: processes 100; processes 101"):
        session.targets("all")


def test_no_ranks_and_no_such_process_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "ranks", list)
    with pytest.raises(AttachError, match="no training ranks of yours"):
        session.targets("all")
    with pytest.raises(AttachError, match="no training ranks that belong to"):
        session.targets(str(tmp_path))
    with pytest.raises(AttachError, match="there is no process 4194305"):
        session.targets("4194305")
    with pytest.raises(UsageError, match="no process id, no folder"):
        session.targets("nonsense")
    with pytest.raises(UsageError, match="TARGET is an empty text"):
        session.targets("")


def test_a_folder_that_a_job_will_write_to_need_not_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "runs" / "x"
    monkeypatch.setattr(discover, "ranks", lambda: [rank(environ={"BUBBLESCOPE_OUT": str(folder)}), rank(1)])
    assert [r.pid for r in session.targets(str(folder))] == [100]


def test_what_records_is_told_by_its_open_file_and_before_that_by_what_was_asked_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recording(pid: int, ranks: str = "0-3") -> str:
        asked = {"BUBBLESCOPE": "record", "BUBBLESCOPE_OUT": str(tmp_path), "BUBBLESCOPE_RANKS": ranks}
        return discover.describe(started(pid, 1, "python train.py", RANK=1, **asked), None).recording

    assert recording(4194305) == str(tmp_path), "it has not come to its first step"
    assert recording(4194305, ranks="0") == ""
    with (tmp_path / "rank-00001.jsonl").open("w") as file:
        file.write(json.dumps({"kind": "header", "host": socket.gethostname(), "pid": os.getpid()}) + "\n")
        file.flush()
        assert process.records_into(os.getpid()) == tmp_path
        assert recording(os.getpid()) == str(tmp_path)
    assert recording(os.getpid()) == "", "it has recorded the steps that were asked for"


# ---- finding ranks, on a made-up /proc


def started(pid: int, parent: int, command: str, uid: int = 0, **environ: object) -> Process:
    return Process(pid, parent, uid, tuple(command.split()), {name: str(value) for name, value in environ.items()})


JOB = {"WORLD_SIZE": 2, "MASTER_PORT": 1, "KINETO_USE_DAEMON": 1}
PROCESSES = {
    one.pid: one
    for one in (
        started(1, 0, "/sbin/init"),
        started(10, 1, "/usr/bin/python3 /venv/bin/torchrun train.py", SLURM_PROCID=0, KINETO_USE_DAEMON=1),
        started(11, 10, "python -u megatron/train.py", RANK=0, **JOB),
        started(12, 10, "python -u train.py --engine deepspeed", RANK=1, **JOB),
        started(13, 11, "python -u megatron/train.py", RANK=0, **JOB),
        started(14, 11, "python -c from_multiprocessing.resource_tracker_import_main", RANK=0),
        started(15, 11, "python -c from_multiprocessing.spawn_import_spawn_main", RANK=0),
        started(16, 1, "bash", RANK=0),
        started(17, 1, "python theirs.py", 1000, RANK=0),
        started(18, 1, "python notebook.py"),
        started(19, 12, "python torch/_inductor/compile_worker", RANK=1, **JOB),
        started(20, 19, "/bin/sh", RANK=1),
    )
}


def make_up(monkeypatch: pytest.MonkeyPatch, processes: dict[int, Process], agents: dict[int, int | None]) -> None:
    """A /proc, and agents that say so many ranks. Everything but shells and trackers has torch in memory."""
    monkeypatch.setattr(discover, "_pids", lambda: list(processes))
    monkeypatch.setattr(discover, "_try", processes.get)
    monkeypatch.setattr(process, "look", processes.__getitem__)
    monkeypatch.setattr(discover, "_agents", lambda *_: {pid: Path(f"/s/{pid}.sock") for pid in agents})
    monkeypatch.setattr(discover, "_agent_of", lambda one: Path(f"/s/{one.pid}.sock") if one.pid in agents else None)
    monkeypatch.setattr(discover.client, "ask", lambda path, *a, **k: {"rank": agents[int(path.stem)]})
    monkeypatch.setattr(discover.os, "geteuid", lambda: 0)
    monkeypatch.setattr(process, "maps_torch", lambda pid: pid not in (1, 14, 16, 20))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch, PROCESSES, {})


@pytest.mark.usefixtures("made_up")
def test_launchers_helpers_shells_and_other_users_are_no_ranks() -> None:
    found = discover.ranks()
    assert [(r.pid, r.rank, r.world, r.framework) for r in found] == [(11, 0, 2, "megatron"), (12, 1, 2, "deepspeed")]


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("pid", "meant"),
    [(10, [11, 12]), (11, [11]), (13, [11]), (14, [11]), (15, [11]), (19, [12]), (20, [12]), (17, [17]), (18, [18])],
)
def test_a_launcher_stands_for_its_ranks_and_a_helper_for_the_rank_it_works_for(pid: int, meant: list[int]) -> None:
    """Launchers and helpers have torch in memory and poll for Kineto requests too; none of them is configured."""
    assert [r.pid for r in session.targets(str(pid))] == meant


LAUNCHERS = (
    "torchrun --nproc-per-node 1 train.py",
    "/usr/bin/python3.11 /venv/bin/torchrun train.py",
    "python -m torch.distributed.run train.py",
    "python3 -X dev -u -m torch.distributed.launch train.py",
    "python /venv/bin/deepspeed train.py",
    "python -u -m deepspeed.launcher.launch train.py",
    "python /venv/bin/accelerate launch train.py",
    "mpirun -n 1 python train.py",
    "mpiexec.hydra -n 1 python train.py",
)


@pytest.mark.parametrize("number", [{}, {"SLURM_PROCID": 0}], ids=["plain", "under-srun"])
@pytest.mark.parametrize("agent", [False, True], ids=["", "with-agents"])
@pytest.mark.parametrize("command", LAUNCHERS)
def test_every_launcher_is_told_from_its_only_rank(
    command: str, agent: bool, number: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = started(10, 1, command, KINETO_USE_DAEMON=1, **number)
    job = {10: launcher, 11: started(11, 10, "python train.py", RANK=0, KINETO_USE_DAEMON=1, **number)}
    make_up(monkeypatch, job, {10: None, 11: 0} if agent else {})
    assert [r.pid for r in discover.ranks()] == [11]
    assert [r.pid for r in session.targets("10")] == [11]


@pytest.mark.parametrize("agent", [False, True], ids=["", "with-agents"])
def test_a_launcher_of_no_known_name_is_told_by_the_numbers_below_it(
    agent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {
        10: started(10, 1, "python my_launcher.py", SLURM_PROCID=0, KINETO_USE_DAEMON=1),
        11: started(11, 10, "python train.py", SLURM_PROCID=0, RANK=0, KINETO_USE_DAEMON=1),
        12: started(12, 10, "python train.py", SLURM_PROCID=0, RANK=1, KINETO_USE_DAEMON=1),
    }
    make_up(monkeypatch, job, {10: None, 11: 0, 12: 1} if agent else {})
    assert [r.pid for r in discover.ranks()] == [11, 12]
    assert [r.pid for r in session.targets("10")] == [11, 12]


def test_a_rank_that_was_given_another_number_keeps_its_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun said 7, the script made it rank 3 for itself and for what it starts."""
    job = {
        11: started(11, 1, "python train.py", SLURM_PROCID=7),
        12: started(12, 11, "python compile_worker", SLURM_PROCID=7, RANK=3),
        13: started(13, 11, "python train.py", SLURM_PROCID=7),
    }
    make_up(monkeypatch, job, {11: 3})
    assert [(r.pid, r.rank) for r in discover.ranks()] == [(11, 3)]


def test_ranks_of_mpirun_are_found_by_its_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"OMPI_COMM_WORLD_SIZE": 2}
    job = {10: started(10, 1, "mpirun -n 2 python train.py")} | {
        11 + i: started(11 + i, 10, "python train.py", OMPI_COMM_WORLD_RANK=i, **sizes) for i in range(2)
    }
    make_up(monkeypatch, job, {})
    assert [(r.pid, r.rank, r.world) for r in session.targets("10")] == [(11, 0, 2), (12, 1, 2)]


def test_a_launcher_without_ranks_is_not_attached_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch, {10: started(10, 1, "python /venv/bin/torchrun train.py", KINETO_USE_DAEMON=1)}, {})
    with pytest.raises(AttachError, match=r"process 10 is a launcher \(torchrun\), and no training rank"):
        session.targets("10")


def test_a_shell_with_two_jobs_below_it_is_not_recorded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = {
        10: started(10, 1, "tmux"),
        11: started(11, 10, "python a.py", RANK=0, MASTER_PORT=1),
        12: started(12, 10, "python b.py", RANK=0, MASTER_PORT=2),
    }
    make_up(monkeypatch, jobs, {})
    with pytest.raises(AttachError, match="these are 2 jobs: processes 11; processes 12"):
        session.targets("10")


# ---- Kineto's settings


def test_the_poll_interval_is_read_from_the_jobs_own_file(tmp_path: Path) -> None:
    conf = tmp_path / "k.conf"
    conf.write_text("X=1\nON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS = 3\n")
    assert kineto.poll_seconds(rank(environ={"KINETO_CONFIG": str(conf)})) == 3.0
    assert kineto.poll_seconds(rank(environ={"KINETO_CONFIG": str(tmp_path / "no")})) == 10.0
    assert kineto.poll_seconds(rank()) == 10.0


def test_the_user_is_told_how_long_the_job_must_live(tmp_path: Path) -> None:
    assert kineto.Plan(tmp_path, seconds=2.0).lasts([rank()]) == "within the next 22 s"
    assert "5 steps" in kineto.Plan(tmp_path, steps=5).lasts([rank()])


def test_a_trace_tells_its_rank_by_name_and_inside(tmp_path: Path) -> None:
    import json

    path = tmp_path / "x_7.json"
    path.write_text('\n {\n "schemaVersion": 1, "traceEvents": []}')
    made = kineto._named(path, tmp_path, 3, 8)
    assert made.name == "rank-3.pt.trace.json"
    assert json.loads(made.read_text())["distributedInfo"] == {"rank": 3, "world_size": 8}
    assert not path.exists()


def test_a_socket_folder_that_is_too_long_for_kineto_is_pointed_out() -> None:
    assert "longer than 54" in kineto._why_silent(rank(environ={"KINETO_IPC_SOCKET_DIR": "/tmp/" + "x" * 60}))
    assert "before the job starts" in kineto._why_silent(rank(environ={"KINETO_IPC_SOCKET_DIR": "/tmp/x"}))
