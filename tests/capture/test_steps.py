"""Where one optimizer step ends and the next begins."""

from __future__ import annotations

from bubblescope.capture.steps import UNDECIDED_CALLS, Label, StepBuffer, StepRule
from bubblescope.model import Kind, Lane


class Loop:
    """A training loop in miniature: drives the rule and keeps the steps it closes."""

    def __init__(self) -> None:
        self.closed: list[StepBuffer] = []
        self.rule = StepRule(StepBuffer, self.closed.append)

    def put(self, kind: Kind, microbatch: int = -1) -> None:
        here = self.rule.current
        lane = Lane.HOST if kind is Kind.DATA else Lane.COMPUTE
        here.events.append((lane, 0, 1, -1, -1, here.offset, (Label(kind, 0, microbatch),)))

    def data(self) -> None:
        self.rule.work_begins()
        self.put(Kind.DATA)

    def schedule(self, microbatches: int = 2, training: bool = True, first: bool = False) -> None:
        self.rule.schedule_begins({"microbatches": microbatches}, training, first)
        for microbatch in range(microbatches):
            self.put(Kind.FORWARD, microbatch)
        self.rule.schedule_ends()

    def optimizer(self) -> None:
        self.put(Kind.OPTIMIZER)
        self.rule.optimizer_stepped()

    def shapes(self) -> list[tuple[int, str, list[int]]]:
        """(step, kinds, microbatches of the forwards) of each closed step."""
        made = []
        for buffer in self.closed:
            labels = [(e, label) for e in buffer.events for label in e[6]]
            kinds = "".join(label.kind.name[0] for _, label in labels)
            made.append((buffer.index, kinds, [e[5] + x.microbatch for e, x in labels if x.microbatch >= 0]))
        return made


def test_data_schedule_optimizer_is_one_step() -> None:
    loop = Loop()
    for _ in range(3):
        loop.data()
        loop.schedule()
        loop.optimizer()
    loop.rule.finish()
    assert loop.shapes() == [(k, "DFFO", [0, 1]) for k in range(3)]
    assert not any(buffer.partial for buffer in loop.closed)


def test_several_optimizers_are_one_step() -> None:
    loop = Loop()
    for _ in range(2):
        loop.schedule()
        loop.optimizer()
        loop.optimizer()
    loop.rule.finish()
    assert loop.shapes() == [(0, "FFOO", [0, 1]), (1, "FFOO", [0, 1])]


def test_accumulation_numbers_microbatches_on_from_the_first_step() -> None:
    loop = Loop()
    for _ in range(2):
        for _ in range(3):
            loop.data()
            loop.schedule()
        loop.optimizer()
    loop.rule.finish()
    assert loop.shapes() == [(k, "DFFDFFDFFO", [0, 1, 2, 3, 4, 5]) for k in range(2)]


def test_without_any_optimizer_each_schedule_call_becomes_a_step() -> None:
    calls = UNDECIDED_CALLS + 5
    loop = Loop()
    for _ in range(calls):
        loop.data()
        loop.schedule()
    loop.rule.finish()
    assert loop.shapes() == [(k, "DFF", [0, 1]) for k in range(calls)]
    assert not any(buffer.partial for buffer in loop.closed)


def test_a_short_run_without_optimizer_is_split_at_its_end() -> None:
    loop = Loop()
    for _ in range(3):
        loop.schedule()
    loop.rule.finish()
    assert loop.shapes() == [(k, "FF", [0, 1]) for k in range(3)]


def test_each_of_these_steps_keeps_the_layout_of_its_call_and_whether_it_is_a_warm_up() -> None:
    loop = Loop()
    for microbatches in (2, 2, 4, 4):
        loop.schedule(microbatches, first=len(loop.rule.current.cuts) % 2 == 0)
    loop.rule.finish()
    assert [buffer.layout and buffer.layout["microbatches"] for buffer in loop.closed] == [2, 2, 4, 4]
    assert [buffer.warmup for buffer in loop.closed] == [True, False, True, False]


def test_evaluation_is_kept_apart_and_costs_no_step() -> None:
    loop = Loop()
    loop.schedule()
    loop.optimizer()
    loop.schedule(training=False)
    loop.schedule()
    loop.optimizer()
    loop.rule.finish()
    assert loop.shapes() == [(-1, "FF", [0, 1]), (0, "FFO", [0, 1]), (1, "FFO", [0, 1])]
    assert loop.closed[0].evaluation


def test_a_step_that_had_not_ended_is_partial() -> None:
    loop = Loop()
    loop.schedule()
    loop.optimizer()
    loop.rule.schedule_begins({"microbatches": 2}, True)
    loop.put(Kind.FORWARD, 0)
    loop.rule.finish()
    assert [buffer.partial for buffer in loop.closed] == [False, True]


def test_a_schedule_call_that_raised_marks_its_step_and_the_job_goes_on() -> None:
    loop = Loop()
    loop.rule.schedule_begins({"microbatches": 2}, True)
    loop.put(Kind.FORWARD, 0)  # raised here, and the job caught it
    loop.schedule()
    loop.optimizer()
    loop.schedule()
    loop.optimizer()
    loop.rule.finish()
    assert [buffer.partial for buffer in loop.closed] == [True, False]


def test_an_optimizer_of_something_else_makes_no_step() -> None:
    loop = Loop()
    loop.optimizer()
    loop.schedule()
    loop.optimizer()
    loop.rule.finish()
    assert [(index, kinds) for index, kinds, _ in loop.shapes()] == [(0, "OFFO")]


def test_the_user_can_say_where_steps_end() -> None:
    loop = Loop()
    for _ in range(2):
        loop.put(Kind.FORWARD, 0)
        loop.rule.current.busy = True
        loop.rule.step()
    loop.rule.finish()
    assert loop.shapes() == [(0, "F", [0]), (1, "F", [0])]
