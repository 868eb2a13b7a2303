"""Errors say what, where and what to do, also after crossing a process boundary."""

from __future__ import annotations

import pickle

import pytest

from bubblescope.errors import (
    AttachError,
    BubblescopeError,
    InputError,
    ScheduleError,
    ThresholdExceeded,
    UsageError,
)

EXIT_CODES = [
    (BubblescopeError, 1),
    (UsageError, 2),
    (InputError, 3),
    (ScheduleError, 3),
    (AttachError, 4),
    (ThresholdExceeded, 5),
]


@pytest.mark.parametrize(("kind", "code"), EXIT_CODES)
def test_every_error_has_the_exit_status_of_the_contract(kind: type[BubblescopeError], code: int) -> None:
    assert kind("x").exit_code == code


@pytest.mark.parametrize("kind", [kind for kind, _ in EXIT_CODES])
def test_an_error_survives_pickling_with_all_it_says(kind: type[BubblescopeError]) -> None:
    error = kind("no steps", hint="record one", where="a.json, byte 12")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    assert type(again) is kind
    assert (again.what, again.hint, again.where) == (error.what, error.hint, error.where)
    assert str(again) == "no steps, in a.json, byte 12"


def test_an_error_about_no_file_names_none() -> None:
    assert str(InputError("no steps")) == "no steps"
