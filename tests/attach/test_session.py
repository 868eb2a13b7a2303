"""Which way is taken, and what is said when none is open. No process is started here."""

from __future__ import annotations

from pathlib import Path

import pytest

from bubblescope.attach import discover, inject, kineto, process, session
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
        ([rank(kineto=True)], "agent", "there is no agent in rank 0", "--via kineto"),
        ([rank(**AGENT)], "kineto", "started without KINETO_USE_DAEMON=1", "--via agent"),
    ],
)
def test_a_refusal_names_the_ranks_and_the_ways_that_are_open(
    ranks: list[Rank], via: str, what: str, open_: str
) -> None:
    with pytest.raises(AttachError) as caught:
        session.choose(ranks, via)
    assert what in caught.value.what
    assert open_ in caught.value.hint


def test_where_injecting_is_closed_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inject, "why_not", lambda pid: "the kernel forbids it")
    with pytest.raises(AttachError) as caught:
        session.choose([rank()], "auto")
    assert "--via inject is closed: the kernel forbids it" in caught.value.hint
    with pytest.raises(AttachError, match="cannot be entered: the kernel forbids it"):
        session._inject([rank()], lambda risk: True, print, with_gdb=False)


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
        session._by_kineto([rank(kineto=True, profiler=True)], plan, print)


def test_two_lengths_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        session.Plan("all", tmp_path, seconds=1.0, steps=1)


def test_ranks_of_two_jobs_are_not_recorded_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "ranks", lambda: [rank(0), rank(1, job="k")])
    with pytest.raises(AttachError, match="2 jobs of yours run here: processes 100; processes 101"):
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


# ---- finding ranks, on a made-up /proc


PROCESSES = {
    1: Process(1, 0, 0, ("/sbin/init",), {}),
    10: Process(10, 1, 0, ("/usr/bin/python3", "/venv/bin/torchrun", "train.py"), {"SLURM_PROCID": "0"}),
    11: Process(11, 10, 0, ("python", "-u", "megatron/train.py"), {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}),
    12: Process(12, 10, 0, ("python", "-u", "train.py"), {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}),
    13: Process(13, 11, 0, ("python", "-u", "megatron/train.py"), {"RANK": "0", "WORLD_SIZE": "2"}),
    14: Process(14, 11, 0, ("python", "-c", "from multiprocessing.resource_tracker import main"), {"RANK": "0"}),
    15: Process(15, 11, 0, ("python", "-c", "from multiprocessing.spawn import spawn_main"), {"RANK": "0"}),
    16: Process(16, 1, 0, ("bash",), {"RANK": "0"}),
    17: Process(17, 1, 1000, ("python", "theirs.py"), {"RANK": "0"}),
    18: Process(18, 1, 0, ("python", "notebook.py"), {}),
}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover, "_pids", lambda: list(PROCESSES))
    monkeypatch.setattr(discover, "_try", PROCESSES.get)
    monkeypatch.setattr(discover, "_agents", lambda processes: {})
    monkeypatch.setattr(discover.os, "geteuid", lambda: 0)
    monkeypatch.setattr(process, "maps_torch", lambda pid: pid not in (1, 14, 16))


@pytest.mark.usefixtures("made_up")
def test_launchers_helpers_shells_and_other_users_are_no_ranks() -> None:
    found = discover.ranks()
    assert [(r.pid, r.rank, r.world, r.framework) for r in found] == [(11, 0, 2, "megatron"), (12, 1, 2, "torch")]


@pytest.mark.usefixtures("made_up")
def test_a_launcher_stands_for_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [r.pid for r in discover.below(10)] == [11, 12]
    assert discover.below(16) == []


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
