"""`bubblescope doctor` tells what is here, what is not, and whether recording works."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bubblescope.attach import discover, launcher
from bubblescope.cli import doctor
from tests.support.cli_runner import Runner


def test_this_machine_is_described_as_it_is(bubblescope: Runner) -> None:
    import importlib.metadata

    data = json.loads(bubblescope("doctor", "--json", "-").stdout)
    assert data["python"]["python"]["value"] == ".".join(map(str, sys.version_info[:3]))
    assert data["torch"]["torch"]["value"] == importlib.metadata.version("torch")
    assert "gloo" in data["torch"]["torch.distributed"]["value"]
    assert data["can_record"] is True, data["problems"]
    for framework in doctor.FRAMEWORKS:
        assert framework in data["frameworks"]


def test_the_text_has_every_finding_and_the_verdict(bubblescope: Runner) -> None:
    done = bubblescope("doctor")
    assert done.returncode == 0
    for name in ("torch.distributed", "ptrace_scope", "KINETO_USE_DAEMON", "megatron-core", "writable"):
        assert name in done.stdout
    assert done.stdout.rstrip().endswith("everything that recording needs is here")


def test_without_torch_it_says_that_recording_needs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda name: None)
    found = doctor.examine(tmp_path)
    assert not doctor.can_record(found)
    assert doctor.as_data(found)["torch"]["torch"]["state"] == "missing"


def test_a_torch_that_the_hooks_do_not_fit_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.distributed.pipelining.stage import _PipelineStageBase

    monkeypatch.delattr(_PipelineStageBase, "forward_one_chunk")
    found = doctor.examine(tmp_path)
    assert not doctor.can_record(found)
    assert any("forward_one_chunk" in problem for problem in doctor.problems(found))


@pytest.mark.parametrize(
    ("mode", "path", "state", "said"),
    [
        (None, "", "missing", f"not set; for all jobs of a shell: {launcher.standby_line()}"),
        (
            "standby",
            "",
            "missing",
            "only jobs that import bubblescope can be attached to; for all",
        ),
        ("standby", f"/mine:{launcher.SITE}", "ok", "jobs of this shell can be attached to"),
    ],
)
def test_what_makes_the_jobs_of_a_shell_attachable_is_said(
    mode: str | None, path: str, state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.delenv("BUBBLESCOPE", raising=False)
    if mode:
        monkeypatch.setenv("BUBBLESCOPE", mode)
    found = doctor.Findings()
    doctor._standby(found)
    [item] = found.items
    assert (item.area, item.name, item.state, item.value) == ("attach", "BUBBLESCOPE", state, mode)
    assert said in item.note


@pytest.mark.parametrize(
    ("what", "state", "said"),
    [
        ({}, "missing", "not prepared: --via inject"),
        ({"trouble": "the process is stopped"}, "missing", "the process is stopped"),
        ({"recording": "/r"}, "ok", "records already: bubblescope watch /r"),
        ({"environ": {"BUBBLESCOPE": "standby"}}, "ok", "stands by, and has imported no pipeline yet"),
    ],
)
def test_why_a_rank_cannot_be_attached_to_is_said(
    what: dict[str, Any], state: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = discover.Rank(7, 0, 1, 0, "torch", "", **what)
    monkeypatch.setattr(discover, "ranks", lambda: [rank])
    found = doctor.Findings()
    doctor._ranks(found)
    [item] = found.items
    assert (item.state, item.note) == (state, f"torch; {said}; no job name")


def test_looking_leaves_torch_as_it_was(tmp_path: Path) -> None:
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase

    before = dict(vars(_PipelineStageBase)), schedules._batch_p2p
    assert doctor.as_data(doctor.examine(tmp_path))["hooks"]
    assert (dict(vars(_PipelineStageBase)), schedules._batch_p2p) == before


@pytest.mark.parametrize(
    ("version", "state"), [("2.4.0", "ok"), ("2.14.1", "ok"), ("2.3.1", "problem"), ("3.0.0", "problem")]
)
def test_a_torch_outside_the_known_range_is_pointed_out(
    version: str, state: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "_version_of", lambda name: version)
    assert doctor.as_data(doctor.examine(tmp_path))["torch"]["torch"]["state"] == state


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = doctor.examine(Path("/proc/nowhere"))
    assert any("writable" in problem for problem in doctor.problems(found))


def test_a_folder_that_does_not_exist_yet_is_judged_by_its_parent_and_not_made(tmp_path: Path) -> None:
    found = doctor.examine(tmp_path / "a" / "b")
    assert doctor.as_data(found)["disk"]["writable"]["value"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
