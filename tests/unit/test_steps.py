"""Steps of one rank: the period of its kernels, found in bounded time."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bubblescope.ingest.steps import from_period

MILLIONS = 2_000_000


@pytest.mark.parametrize("share", [0.0, 0.02], ids=["one name", "96 % alike at every distance"])
def test_millions_of_kernels_without_a_period_take_seconds(share: float) -> None:
    codes = (np.random.default_rng(1).random(MILLIONS) < share).astype(np.int64)
    at = np.arange(MILLIONS) * 10
    begun = time.process_time()
    assert from_period(codes, at, at + 10) is None
    assert time.process_time() - begun < 30


def test_a_long_sequence_with_a_few_odd_kernels_has_its_period() -> None:
    rng = np.random.default_rng(1)
    codes = np.tile(rng.integers(0, 50, 15_000), 20)
    codes[rng.integers(1, len(codes) - 1, 1_000)] = 77
    codes[15_000::15_000] = codes[0]
    at = np.arange(len(codes)) * 10
    found = from_period(codes, at, at + 10)
    assert found is not None
    assert found.start_ns.tolist() == list(range(0, 3_000_000, 150_000))


def test_two_thirds_of_a_repetition_are_no_period() -> None:
    codes = np.array([1, 2, 3, 4, 1, 2])
    at = np.arange(6) * 10
    assert from_period(codes, at, at + 10) is None
