"""Hooks go in and out on the training thread, between two operations, and never against torch's own loops."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from bubblescope.attach import safepoint
from bubblescope.attach.protocol import ProtocolError
from bubblescope.attach.safepoint import SafePoint
from bubblescope.attach.window import limits_of


class Schedule:
    def step(self, x: int) -> int:
        return x + 1


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Schedule]]:
    """A framework with one class, in place of torch."""
    module = ModuleType("fake_schedules")
    module.Schedule = Schedule  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_schedules", module)
    monkeypatch.setattr(safepoint, "ENTRIES", (("fake_schedules", "Schedule", "step"), ("not_imported", "X", "y")))
    original = Schedule.step
    yield Schedule
    assert Schedule.step is original


def test_the_action_runs_once_on_the_calling_thread_and_the_call_goes_through(schedule: type[Schedule]) -> None:
    ran: list[int] = []
    point = SafePoint(lambda: ran.append(threading.get_ident()))
    assert point.arm()
    assert not point.wait(0.01)
    assert [schedule().step(1), schedule().step(2)] == [2, 3]
    assert ran == [threading.get_ident()]
    assert point.wait(0)


def test_a_hook_that_went_in_sees_the_very_call_that_let_it_in(schedule: type[Schedule]) -> None:
    seen: list[int] = []
    original = schedule.step

    def install() -> None:
        def hooked(self: Any, x: int) -> int:
            seen.append(x)
            return original(self, x)

        schedule.step = hooked  # type: ignore[method-assign]

    assert SafePoint(install).arm()
    assert schedule().step(5) == 6
    assert seen == [5]
    schedule.step = original  # type: ignore[method-assign]


def test_an_action_that_raises_is_kept_from_the_job(schedule: type[Schedule]) -> None:
    point = SafePoint(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    point.arm()
    assert schedule().step(1) == 2
    assert isinstance(point.error, ZeroDivisionError)


def test_disarming_puts_back_what_was_there_and_the_action_never_runs(schedule: type[Schedule]) -> None:
    ran: list[int] = []
    original = schedule.step
    point = SafePoint(lambda: ran.append(1))
    point.arm()
    assert schedule.step is not original
    assert point.disarm()
    assert schedule.step is original
    assert not point.disarm()
    schedule().step(1)
    assert ran == []


def test_a_wrapper_that_somebody_put_over_the_gate_stays_and_does_not_loop(schedule: type[Schedule]) -> None:
    original = schedule.step
    ran: list[int] = []
    point = SafePoint(lambda: ran.append(1))
    point.arm()
    gate = schedule.step
    schedule.step = lambda self, x: gate(self, x) * 10  # type: ignore[method-assign]
    assert [schedule().step(1), schedule().step(1)] == [20, 20]
    assert ran == [1]
    schedule.step = original  # type: ignore[method-assign]


def test_many_threads_run_the_action_once(schedule: type[Schedule]) -> None:
    ran: list[int] = []

    def slow() -> None:
        time.sleep(0.05)
        ran.append(1)

    point = SafePoint(slow)
    point.arm()
    threads = [threading.Thread(target=schedule().step, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ran == [1]


def test_without_a_framework_there_is_no_safe_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safepoint, "ENTRIES", (("not_imported", "X", "y"),))
    assert not SafePoint(lambda: None).arm()


def test_inside_an_optimizers_step_is_not_a_safe_point() -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    ran: list[str] = []

    def change_the_list() -> None:
        register_optimizer_step_post_hook(lambda *a: None).remove()
        ran.append("now")

    handle = register_optimizer_step_post_hook(lambda *a: optimizer.zero_grad())
    try:
        point = SafePoint(change_the_list)
        point.arm()
        optimizer.step()  # its hook calls zero_grad while torch walks through the list of hooks
        assert ran == []
        optimizer.zero_grad()
        assert ran == ["now"]
        assert point.error is None
    finally:
        handle.remove()


def test_limits_are_what_was_asked_for_or_the_most_that_is_allowed() -> None:
    found = limits_of({"command": "start", "out": "/x", "steps": 5})
    assert (str(found.out), found.steps, found.seconds) == ("/x", 5, 3600.0)
    with pytest.raises(ProtocolError, match="`seconds`"):
        limits_of({"command": "start", "out": "/x", "seconds": 10_000})


def test_a_forked_child_never_runs_what_its_parent_asked_for(schedule: type[Schedule]) -> None:
    ran: list[int] = []
    point = SafePoint(lambda: ran.append(1))
    point.arm()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if schedule().step(1) == 2 and not ran else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert point.disarm()
