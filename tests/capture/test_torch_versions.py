"""Shapes of torch.distributed.pipelining that are not the installed one, as stand-ins: 2.4 (one Work, waited for
directly), 2.14 (a Work may be None), coalesced batches (one Work for several messages)."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bubblescope.capture.hooks import torch_pipelining, torchtitan
from bubblescope.capture.hooks.torch_pipelining import _hook_messages, _Messages
from bubblescope.capture.recorder import Recorder
from bubblescope.model import Lane


class FirstStage:
    """Of two, on ranks 0 and 1."""

    stage_index = 0
    num_stages = 2
    stage_index_to_group_rank = (0, 1)
    group = SimpleNamespace(group_name="pp")


FIRST = FirstStage()


class Op:
    """A P2POp that the stage's hook has marked."""

    peer = 1
    tensor = SimpleNamespace(nbytes=32)

    def __init__(self, number: int) -> None:
        self._bubblescope = ("send", "act", FIRST, number, 0)


class Work:
    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> str:
        self.waited += 1
        return "done"

    def is_completed(self) -> bool:
        return True


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    monkeypatch.setattr(torch_pipelining, "_ranks", lambda group: [0, 1])
    made = Recorder(tmp_path)
    made.use_device("cpu", 0)
    made.running = True
    return made


def hooked(recorder: Recorder, answer: Any, with_wait: bool = True) -> Any:
    """A `schedules` module whose `_batch_p2p` returns `answer`, with our hooks in."""

    class Schedules:
        @staticmethod
        def _batch_p2p(p2p_ops: Any, desc: Any = None) -> Any:
            return answer

    if with_wait:

        def wait(work: Any) -> None:
            for w in work:
                if w is not None:
                    w.wait()

        Schedules._wait_batch_p2p = staticmethod(wait)  # type: ignore[attr-defined]

    class Stage:
        pass

    _hook_messages(recorder, _Messages(recorder), Stage, Schedules)
    return Schedules


def rows(recorder: Recorder) -> list[tuple[Lane, list[int]]]:
    recorder.settle()
    return [(event[0], [label.microbatch for label in event[6]]) for event in recorder.rule.current.events]


def test_one_work_that_is_waited_for_directly_is_timed_and_behaves_as_before(recorder: Recorder) -> None:
    work = Work()
    returned = hooked(recorder, work, with_wait=False)._batch_p2p([Op(0), Op(1)])
    assert returned.is_completed() and returned.wait() == "done" and work.waited == 1
    assert rows(recorder) == [(Lane.POST, [0, 1]), (Lane.WAIT, [0, 1])]


def test_no_work_at_all_stays_none(recorder: Recorder) -> None:
    assert hooked(recorder, None, with_wait=False)._batch_p2p([Op(0)]) is None
    assert rows(recorder) == [(Lane.POST, [0])]


def test_a_work_that_is_none_costs_only_its_wait(recorder: Recorder) -> None:
    works = [Work(), None]
    schedules = hooked(recorder, works)
    assert schedules._batch_p2p([Op(0), Op(1)]) is works
    schedules._wait_batch_p2p(works)
    assert rows(recorder) == [(Lane.POST, [0, 1]), (Lane.WAIT, [0])]


def test_one_work_of_a_coalesced_batch_carries_all_its_messages(recorder: Recorder) -> None:
    works = [Work()]
    schedules = hooked(recorder, works)
    schedules._wait_batch_p2p(schedules._batch_p2p([Op(0), Op(1), Op(2)]))
    assert rows(recorder) == [(Lane.POST, [0, 1, 2]), (Lane.WAIT, [0, 1, 2])]


def test_works_may_be_waited_for_in_lists_of_ones_own(recorder: Recorder) -> None:
    works = [Work(), Work()]
    schedules = hooked(recorder, works)
    schedules._batch_p2p([Op(0), Op(1)])
    schedules._wait_batch_p2p([works[1]])
    schedules._wait_batch_p2p([works[0]])
    assert rows(recorder) == [(Lane.POST, [0, 1]), (Lane.WAIT, [1]), (Lane.WAIT, [0])]


def test_a_stage_that_lacks_methods_is_reported(recorder: Recorder) -> None:
    hooked(recorder, None)
    assert set(recorder.patches.refused) == {
        "get_fwd_recv_ops",
        "get_fwd_send_ops",
        "get_bwd_recv_ops",
        "get_bwd_send_ops",
    }


def test_versions_that_were_not_tried_are_said(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    torch_pipelining.install(recorder)
    assert recorder.patches.warnings == []
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu150")
    monkeypatch.setitem(sys.modules, "torchtitan", ModuleType("torchtitan"))
    monkeypatch.setattr(sys.modules["torchtitan"], "__version__", "1.0.0", raising=False)
    torch_pipelining.install(recorder)
    torchtitan.install(recorder)
    recorder.patches.restore()
    first, second = recorder.patches.warnings
    assert "torch 2.99.0+cu150 was not tried" in first and "torchtitan 1.0.0 was not tried" in second
