"""One window over several ranks: all or none, and not for ever where there is nothing to record. Agents are made up."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bubblescope.attach import client, session, together
from bubblescope.attach.discover import Rank
from bubblescope.attach.early import Early, EndedEarly
from bubblescope.errors import AttachError, InputError


@dataclass
class Fake:
    """An agent of this process, as the client sees it. refuses: what its status says; refuses_start: its answer to
    a start. When it is asked to stop, it takes some looks until its hooks are out and its file is written."""

    rank: int
    refuses: str = ""
    refuses_start: str = ""
    pipeline: bool = True
    looks_to_stop: int = 3
    state: str = ""
    heard: list[str] = field(default_factory=list)
    optimizer_steps: int = 0
    folder: Path = Path()

    def answer(self, command: str, fields: dict[str, Any]) -> dict[str, Any]:
        self.heard.append(command)
        if command == "start":
            if self.refuses_start:
                raise AttachError(f"the agent refuses: {self.refuses_start}")
            self.state, self.folder = "recording", Path(fields["out"])
        if command == "stop":
            self.state = "removing"
        if self.state == "recording":
            self.optimizer_steps += 1
        if self.state == "removing":
            self.looks_to_stop -= 1
            if not self.looks_to_stop:
                self.state = "done"
                self.write()
        return {"refuses": self.refuses, "window": self.window() if self.state else None}

    def write(self) -> None:
        header = {"kind": "header", "rank": self.rank, "host": socket.gethostname(), "pid": os.getpid()}
        (self.folder / f"rank-{self.rank:05d}.jsonl").write_text(json.dumps(header) + "\n")
        (self.folder / "job.json").touch()

    def window(self) -> dict[str, Any]:
        steps = self.optimizer_steps if self.pipeline else 0
        return {
            "state": self.state, "error": "", "steps": steps, "pipeline": self.pipeline,
            "optimizer_steps": self.optimizer_steps, "stall_ms": 0.1, "warnings": [],
        }  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "POLL_SECONDS", 0.004)
    monkeypatch.setattr(together, "NO_SCHEDULE_SECONDS", 0.2)
    monkeypatch.setattr(together, "PATIENCE_SECONDS", 0.05)


def ranks_of(fakes: list[Fake], monkeypatch: pytest.MonkeyPatch) -> list[Rank]:
    def ask(path: Path, command: str, timeout_s: float = 5.0, **fields: Any) -> dict[str, Any]:
        return fakes[int(path.stem)].answer(command, fields)

    monkeypatch.setattr(client, "ask", ask)
    return [
        Rank(os.getpid(), one.rank, len(fakes), os.geteuid(), "torch", "", agent=Path(f"/s/{one.rank}.sock"))
        for one in fakes
    ]


def attach(fakes: list[Fake], folder: Path, monkeypatch: pytest.MonkeyPatch, steps: int | None = 20) -> list[str]:
    """What was told; as `session.attach` does it once ranks and way are chosen."""
    told: list[str] = []
    ranks = ranks_of(fakes, monkeypatch)
    plan = session.Plan("all", folder.parent, seconds=None if steps else 0.1, steps=steps)
    with session._prepared(folder, os.geteuid()):
        session._by_agent(ranks, plan, folder, "agent", told.append)
    return told


def test_a_rank_that_would_refuse_is_found_before_any_rank_starts(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [Fake(0), Fake(1, refuses="the job's own torch.profiler is running\x1b[31m")]
    with pytest.raises(AttachError) as caught:
        attach(fakes, tmp_path / "out" / "recording", monkeypatch)
    assert caught.value.what.endswith(": the agent refuses: the job's own torch.profiler is running[31m")
    assert caught.value.what.startswith("rank 1 ")
    assert [one.heard for one in fakes] == [["status"], ["status"]]
    assert not (tmp_path / "out").exists()


def test_a_rank_that_refuses_at_the_last_moment_stops_the_others_and_nothing_stays(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [Fake(0), Fake(1, refuses_start="somebody is attached already"), Fake(2)]
    with pytest.raises(AttachError, match="somebody is attached already"):
        attach(fakes, tmp_path / "out" / "recording", monkeypatch)
    assert fakes[0].state == "done", "what had begun was seen to its end"
    assert "stop" not in fakes[1].heard, "that may be the window of somebody else"
    assert not (tmp_path / "out").exists()


def test_what_other_hosts_and_processes_recorded_stays(tmp_path: Path) -> None:
    here, mine = socket.gethostname(), os.getpid()
    for rank, (host, pid) in enumerate([(here, mine), (here, 1), ("other", mine)]):
        (tmp_path / f"rank-{rank:05d}.jsonl").write_text(json.dumps({"host": host, "pid": pid}) + "\n")
    (tmp_path / "job.json").touch()
    session._discard(tmp_path, [Rank(mine, 0, 3, 0, "torch", "")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.json", "rank-00001.jsonl", "rank-00002.jsonl"]


@pytest.mark.parametrize("steps", [20, None])
def test_a_job_without_a_pipeline_is_given_up_with_that_reason(
    steps: int | None, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = [Fake(0, pipeline=False), Fake(1, pipeline=False)]
    with pytest.raises(
        InputError, match=r"rank 0 .*: no pipeline schedule ran in \d+ optimizer steps; rank 1"
    ) as caught:
        attach(fakes, tmp_path / "out" / "recording", monkeypatch, steps)
    assert "bubblescope.span" in caught.value.hint
    assert [one.state for one in fakes] == ["done", "done"]
    assert not (tmp_path / "out").exists()


def test_while_it_is_waited_for_the_user_hears_that_no_schedule_ran(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    ranks = ranks_of([Fake(0, pipeline=False)], monkeypatch)
    [watch] = together.record(ranks, tmp_path, None, 20, Early(), told.append)
    assert watch.hopeless
    assert len(told) == 1
    assert "waiting for 23 further steps in rank 0" in told[0]
    assert "no pipeline schedule ran in" in told[0]


def test_one_that_is_ended_early_without_a_pipeline_keeps_its_exit_status(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    fake = Fake(0, pipeline=False)
    answer = fake.answer

    def interrupted(command: str, fields: dict[str, Any]) -> dict[str, Any]:
        if fake.optimizer_steps == 5:
            signal.raise_signal(signal.SIGINT)
        return answer(command, fields)

    fake.answer = interrupted  # type: ignore[method-assign]
    with pytest.raises(EndedEarly, match="no pipeline schedule ran") as caught:
        attach([fake], tmp_path / "out" / "recording", monkeypatch)
    assert caught.value.exit_code == 130


def test_a_slow_pipeline_is_not_given_up(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its schedule was seen; and before the first optimizer step nothing can be said."""
    watch = together.Watch(Rank(1, 0, 1, 0, "torch", ""), pipeline=True, optimizer_steps=9, first_s=1.0, last_s=9.0)
    assert (watch.unseen, watch.hopeless) == ("", False)
    watch = together.Watch(Rank(1, 0, 1, 0, "torch", ""))
    assert (watch.unseen, watch.hopeless) == ("", False)
    watch = together.Watch(Rank(1, 0, 1, 0, "torch", ""), optimizer_steps=9, first_s=1.0, last_s=1.1)
    assert not watch.hopeless, "nine optimizers of one step"
