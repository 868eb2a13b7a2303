"""Contention is what the same kernel takes longer beside communication."""

from __future__ import annotations

import numpy as np

from bubblescope.analysis.contention import contention
from bubblescope.analysis.windows import find_windows
from bubblescope.model import Kind, Lane, Names, Run, Source, SpanBuilder


def run_of(timing: str, durations: list[int], beside: list[bool]) -> Run:
    names = Names()
    gemm = names.intern("gemm")
    spans = SpanBuilder()
    for i, (length, overlap) in enumerate(zip(durations, beside, strict=True)):
        start = i * 100
        spans.add(step=0, lane=Lane.COMPUTE, device=0, name=gemm, start_ns=start, end_ns=start + length)
        if overlap:
            spans.add(
                step=0, lane=Lane.COMM, kind=Kind.COLLECTIVE, device=0, stream=7, start_ns=start, end_ns=start + 5
            )
    return Run(spans.build(), names, source=Source("test", timing=timing))


def test_a_kernel_beside_communication_costs_what_it_takes_more_than_alone() -> None:
    run = run_of("kernels", [10, 10, 10, 14], [False, False, False, True])
    found = contention(run, find_windows(run))
    assert found is not None
    assert found.tolist() == [4.0]


def test_a_kernel_that_never_ran_alone_has_no_known_contention() -> None:
    run = run_of("kernels", [10, 14], [True, True])
    found = contention(run, find_windows(run))
    assert found is not None
    assert np.isnan(found).all()


def test_recorded_operations_say_nothing_about_contention() -> None:
    run = run_of("host", [10, 10, 10, 14], [False, False, False, True])
    assert contention(run, find_windows(run)) is None
