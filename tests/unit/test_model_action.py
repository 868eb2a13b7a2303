"""An action prints and parses torch's notation, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bubblescope.errors import InputError, ScheduleError
from bubblescope.model import PIPELINE_KINDS, Action, Kind


@given(st.integers(0, 10**6), st.sampled_from(PIPELINE_KINDS), st.integers(0, 10**6))
def test_what_is_printed_parses_back_to_the_same_action(stage: int, kind: Kind, microbatch: int) -> None:
    action = Action(stage, kind, microbatch)
    assert Action.parse(str(action)) == action


def test_the_notation_is_that_of_torch() -> None:
    assert str(Action(2, Kind.FORWARD, 0)) == "2F0"
    assert str(Action(0, Kind.BACKWARD, 11)) == "0B11"
    assert str(Action(1, Kind.BACKWARD_INPUT, 3)) == "1I3"
    assert str(Action(1, Kind.BACKWARD_WEIGHT, 3)) == "1W3"


def test_spaces_around_an_action_are_those_of_a_csv_and_ignored() -> None:
    assert Action.parse(" 2F0\n") == Action(2, Kind.FORWARD, 0)


@pytest.mark.parametrize(
    "text",
    ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F-1", "2F0 3F1", "2F0\n3F1", "2 F 0", "1.5F0", "2SEND_F0", "²F0"],
)
def test_anything_else_is_refused_with_the_text_and_the_rule(text: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Action.parse(text)
    assert f"'{text}'" in str(caught.value)
    assert "2F0" in caught.value.hint
    assert isinstance(caught.value, InputError)
