"""Patches are reversible, bound by name, and their own faults never reach the job."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from bubblescope.capture.hooks.shared import TimedWork
from bubblescope.capture.patching import PatchSet


class Base:
    def work(self, item: int, scale: int = 1, *, mode: str = "plain") -> int:
        if item < 0:
            raise KeyError(item)
        return item * scale


class Child(Base):
    pass


def watch(owner: Any, seen: list[Any], **more: Any) -> PatchSet:
    patches = PatchSet()
    patches.around(
        owner,
        "work",
        "work",
        needs=("self", "item"),
        optional={"scale": 0, "mode": "", "absent": "fallback"},
        before=lambda *values: seen.append(values[1:]) or "token",
        after=lambda token, result: seen.append((token, result)),
        **more,
    )
    return patches


def test_values_are_taken_by_name_however_they_are_passed() -> None:
    seen: list[Any] = []
    patches = watch(Base, seen)
    base = Base()
    assert (base.work(2), base.work(2, 3), base.work(item=4, scale=5, mode="x")) == (2, 6, 20)
    patches.restore()
    assert seen[::2] == [(2, 1, "plain", "fallback"), (2, 3, "plain", "fallback"), (4, 5, "x", "fallback")]
    assert patches.hooks["work"].hits == 3


def test_restore_gives_back_the_identical_original_also_where_it_was_inherited() -> None:
    original = vars(Base)["work"]
    patches = watch(Child, [])
    assert "work" in vars(Child) and vars(Base)["work"] is original
    patches.restore()
    assert "work" not in vars(Child) and Child.work is original


def test_a_patch_that_someone_put_over_ours_stays_and_ours_only_passes_through() -> None:
    original, seen = vars(Base)["work"], []
    patches = watch(Base, seen)
    ours = vars(Base)["work"]
    theirs = lambda self, item: ours(self, item) + 100  # noqa: E731
    Base.work = theirs  # type: ignore[method-assign,assignment]
    try:
        patches.restore()
        assert vars(Base)["work"] is theirs and Base().work(1) == 101 and seen == []
    finally:
        Base.work = original  # type: ignore[method-assign]


def test_an_exception_of_the_job_passes_unchanged_and_is_not_a_hit() -> None:
    undone: list[Any] = []
    patches = watch(Base, [], abort=undone.append)
    with pytest.raises(KeyError) as caught:
        Base().work(-1)
    patches.restore()
    assert caught.value.args == (-1,) and undone == ["token"] and patches.hooks["work"].hits == 0


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_fault_of_ours_turns_the_hook_off_with_one_warning(where: str, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*values: Any) -> Any:
        raise ZeroDivisionError("ours")

    calls = {"before": lambda *values: "token", "after": lambda token, result: None} | {where: broken}
    patches = PatchSet()
    patches.around(Base, "work", "work", needs=("self",), **calls)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "bubblescope"):
        assert [Base().work(n) for n in (1, 2, 3)] == [1, 2, 3]
    patches.restore()
    assert len(caplog.records) == 1 and "ZeroDivisionError" in caplog.text
    assert len(patches.warnings) == 1


def test_of_several_faults_the_user_is_told_the_first_and_their_number(caplog: pytest.LogCaptureFixture) -> None:
    patches = PatchSet()
    with caplog.at_level(logging.WARNING, "bubblescope"):
        for number in (1, 2, 3):
            patches.fail(patches.hook(f"hook {number}"), ZeroDivisionError("ours"))
        patches.tell_faults()
    assert len(caplog.records) == 2 and "hook 1" in caplog.records[0].getMessage()
    assert "missing from now on" in caplog.records[0].getMessage()
    said = caplog.records[1].getMessage()
    assert "3 faults" in said and said.endswith("lacks, at least in part: hook 1, hook 2, hook 3")
    assert len(patches.warnings) == 3  # the recording has them all


@pytest.mark.parametrize(("name", "needs"), [("absent", ()), ("work", ("self", "chunk_id"))])
def test_what_this_version_lacks_is_refused_and_reported(name: str, needs: tuple[str, ...]) -> None:
    patches = PatchSet()
    done = patches.around(Base, name, "label", needs=needs, before=lambda *v: None, after=lambda t, r: None)
    assert not done and "label" in patches.refused


def test_what_the_job_raises_reaches_it_also_where_our_own_end_of_the_call_fails() -> None:
    def broken(token: Any) -> None:
        raise ZeroDivisionError

    patches = watch(Base, [], abort=broken)
    with pytest.raises(KeyError):
        Base().work(-1)
    patches.restore()
    assert patches.faults == 1 and not patches.hooks["work"].enabled


def test_a_wait_that_we_cannot_time_is_waited_for_all_the_same() -> None:
    class Untimed:
        running, patches = True, PatchSet()

        def mark(self) -> int:
            raise ZeroDivisionError

    work = TimedWork(Untimed(), SimpleNamespace(wait=lambda: "arrived"), ("label",))
    assert work.wait() == "arrived" and Untimed.patches.faults == 1
