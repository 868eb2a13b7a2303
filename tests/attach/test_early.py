"""A window that the user ends early ends in good order, and its exit status says by which signal."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bubblescope.attach import kineto, session
from bubblescope.attach.discover import Rank
from bubblescope.attach.early import SIGNALS, Early, EndedEarly, ends_early
from bubblescope.errors import AttachError, UsageError


def rank(directory: Path) -> Rank:
    return Rank(os.getpid(), 0, 1, os.geteuid(), "torch", "", environ={"KINETO_IPC_SOCKET_DIR": str(directory)})


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_the_second_interrupts(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), ends_early() as early:
        assert not early
        assert early.exit_status == 0
        signal.raise_signal(number)
        assert early
        assert early.exit_status == 128 + number
        assert early.says == f"ended early by {number.name}"
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(number) is before


def test_a_terminal_that_closes_may_send_several_signals() -> None:
    with ends_early() as early:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert early.exit_status == 129


def test_what_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_early() as early:
            signal.raise_signal(signal.SIGHUP)
            assert not early
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_kineto_is_not_waited_for_any_longer(tmp_path: Path) -> None:
    (tmp_path / "k").mkdir(mode=0o700)
    plan = kineto.Plan(tmp_path, seconds=1.0)
    with pytest.raises(EndedEarly, match="ended early by SIGTERM: no rank was asked") as caught:
        kineto.collect([rank(tmp_path / "k")], plan, Early(signal.SIGTERM), lambda text: None)
    assert caught.value.exit_code == 143


def test_a_rank_that_fetched_the_request_is_said_to_write_on(tmp_path: Path) -> None:
    mine = rank(tmp_path)
    wanted = {mine.pid: tmp_path / "x.json"}
    unfinished = tmp_path / "x.json.tmp"
    unfinished.touch()
    made = kineto._gather([mine], tmp_path, wanted, {mine.pid}, Early(signal.SIGINT))
    assert made.pending
    assert f"must not end before it has written {tmp_path / 'x.json'}" in made.lost[mine.label]
    assert unfinished.exists()


@pytest.mark.parametrize(
    ("error", "left"),
    [
        (AttachError("refused"), False),
        (KeyboardInterrupt(), False),
        (EndedEarly(Early(signal.SIGINT), "x"), False),
        (EndedEarly(Early(signal.SIGINT), "x", pending=True), True),
    ],
)
def test_an_attach_that_came_to_nothing_leaves_no_folder(error: BaseException, left: bool, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b" / "recording"
    with pytest.raises(type(error)), session._prepared(folder, os.geteuid()):
        assert folder.is_dir()
        raise error
    assert (tmp_path / "a").exists() is left


def test_folders_that_were_there_and_files_that_came_stay(tmp_path: Path) -> None:
    with pytest.raises(AttachError), session._prepared(tmp_path / "a", os.geteuid()):
        (tmp_path / "a" / "rank-00000.jsonl").touch()
        raise AttachError("refused")
    assert (tmp_path / "a" / "rank-00000.jsonl").exists()
    with pytest.raises(AttachError), session._prepared(tmp_path, os.geteuid()):
        raise AttachError("refused")
    assert tmp_path.exists()


def test_a_recording_that_cannot_be_finished_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").touch()
    (tmp_path / ".numbering.lock").symlink_to("/proc/x")
    with pytest.raises(UsageError, match="cannot be finished: Too many levels of symbolic links"):
        session._numbered(tmp_path, None, [], [])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder away")
def test_root_gives_the_jobs_user_the_folder_that_it_made_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "etc")
    for name, owner in (("new", 65534), ("etc", 0), ("link", 0)):
        with session._prepared(tmp_path / name, 65534):
            assert (tmp_path / name).stat().st_uid == owner
            assert (tmp_path / name).parent.stat().st_uid == 0


@pytest.mark.parametrize("where", ["/proc/x", "/dev/null/x", "/dev/null"])
def test_a_folder_that_cannot_be_made_is_the_users_to_change(where: str) -> None:
    with pytest.raises(UsageError, match="nothing can be written there"), session._prepared(Path(where), 0):
        pytest.fail("the block ran")
