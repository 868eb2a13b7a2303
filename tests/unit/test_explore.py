"""`explore`: every change is predicted by a replay, none is promised where the replay is not trusted."""

from __future__ import annotations

import pytest

from bubblescope.errors import UsageError
from bubblescope.model.layers import LayerTime
from bubblescope.report.advice import Wanted, explore
from bubblescope.report.build import ReportOptions
from bubblescope.views.summary import top_actions
from tests.support.cases import MS, layers, report, untrusted
from tests.support.synthetic import Job, constant


def test_more_microbatches_are_predicted_to_the_closed_form() -> None:
    # 1F1B with a last stage of 2x: (m - 1) · 60 + 2·... = the bottleneck works m times, fill and drain once.
    found = explore(report(), Wanted(microbatches=(16, 4)))
    by_count = {c["detail"]["microbatches"]: c for c in found["changes"]}
    fill = 3 * (10 + 20)
    for m, change in by_count.items():
        assert change["step_seconds"] == pytest.approx((m * 60 + fill + 1) / 1e3, rel=1e-6)
        assert change["saved_seconds"] == pytest.approx(found["step_seconds"] - change["step_seconds"] * 8 / m)
    assert by_count[16]["saved_seconds"] > 0 > by_count[4]["saved_seconds"]
    assert by_count[4]["saved_gpu_hours"] < 0
    assert [c["detail"]["microbatches"] for c in found["changes"]] == [16, 4]


def test_the_best_whole_cut_is_advised_with_its_step_time() -> None:
    found = explore(report(), Wanted(rebalance=True, layers=layers(4, 4, 4, 8)))
    (change,) = found["changes"]
    assert change["detail"]["layers"] == [5, 5, 5, 5]
    assert change["detail"]["bound"] == "integer"
    # (m + p - 1)(F + B) with F + B = 37.5 ms, and the optimizer.
    assert change["step_seconds"] == pytest.approx(11 * 0.0375 + 0.001, rel=1e-6)
    assert found["layer_times"] == "file"
    assert any("its layers, not its GPU" in a for a in change["assumptions"])


def test_nothing_is_moved_between_stages_that_take_equally_long() -> None:
    """A ten-thousandth is no reason to move layers: nobody is told of a stage that takes 1.00 times the others."""
    found = explore(report(duration=constant(10 * MS, 20 * MS, {0: 1.0001})), Wanted(rebalance=True))
    assert found["changes"] == []
    assert found["refused"] == [{"action": "Move layers between stages", "why": "the stages take equally long already"}]


def test_without_layer_times_only_the_bound_is_given_and_what_is_needed_is_said() -> None:
    (change,) = explore(report(), Wanted(rebalance=True))["changes"]
    assert change["detail"]["bound"] == "continuous"
    assert "layers" not in change["detail"]
    assert any("record with layer timers or give --layer-times" in a for a in change["assumptions"])


def test_layers_that_do_not_divide_get_the_best_whole_cut_and_not_the_bound() -> None:
    (change,) = explore(report(), Wanted(rebalance=True, layers=layers(4, 4, 4, 7)))["changes"]
    assert sorted(change["detail"]["layers"]) == [4, 5, 5, 5]
    assert change["detail"]["slowest_seconds"] > change["detail"]["bound_seconds"]


def test_a_memory_limit_that_nothing_fits_is_a_refusal_and_one_without_bytes_wrong_usage() -> None:
    found = explore(report(), Wanted(rebalance=True, layers=layers(4, 4, 4, 8), memory_limit=4 * 2**30))
    (refused,) = found["refused"]
    assert "fits the memory limit" in refused["why"]
    assert found["changes"] == []
    assert refused["why"] in found["verdict"]
    (change,) = explore(report(), Wanted(rebalance=True, layers=layers(4, 4, 4, 8), memory_limit=6 * 2**30))["changes"]
    assert "5 GiB" in change["memory_note"]
    with pytest.raises(UsageError, match="memory limit"):
        explore(report(), Wanted(rebalance=True, memory_limit=1.0))


def test_moving_layers_and_another_schedule_together_is_predicted_when_it_beats_each_alone() -> None:
    found = explore(report(), Wanted(rebalance=True, schedules=("ZBVZeroBubble",)))
    both = [c for c in found["changes"] if c["detail"].get("rebalanced")]
    assert len(both) == 1
    assert found["changes"][0] is both[0]


def test_no_stage_is_left_without_a_layer() -> None:
    """A first stage as long as all others together keeps one of its layers, and 7 layers do not fill 8 stages."""
    heavy = [LayerTime("embedding", 0.1, 0.2, pinned="first"), *layers(1, 2, 2, 2)]
    found = explore(report(), Wanted(rebalance=True, layers=tuple(heavy), schedules=("ZBVZeroBubble",)))
    (change,) = found["changes"]
    assert change["detail"]["layers"] == [1, 2, 2, 2]
    assert "it needs 8 virtual stages, and there are 7 layers" in found["refused"][0]["why"]


def test_fewer_layers_than_stages_are_refused() -> None:
    found = explore(report(), Wanted(rebalance=True, layers=layers(1, 1, 1)))
    assert found["changes"] == []
    assert [r["why"] for r in found["refused"]] == ["no cut of 3 layers into 4 stages has at least 1 on each"]


def test_what_is_best_together_is_in_the_report_beside_what_is_best_alone() -> None:
    made = report()
    best = explore(made, Wanted())["changes"][0]
    assert best["detail"]["rebalanced"]
    assert any("its layers, not its GPU" in a for a in best["assumptions"])
    top = top_actions(made.data)
    assert top[0]["action"] == best["action"]
    assert top[0]["saved_seconds"] == best["saved_seconds"]
    assert [row["kind"] for row in top] == ["schedule", "partition", "schedule"]


def test_nothing_is_promised_without_trust() -> None:
    found = explore(untrusted(report()), Wanted(microbatches=(16,)))
    assert found["changes"] == []
    assert "no saving is predicted" in found["verdict"]


def test_a_run_without_a_bubble_is_told_so_plainly() -> None:
    job = Job("GPipe", stages=1, microbatches=8, steps=3, optimizer=1 * MS)
    found = explore(report(job, constant(10 * MS, 20 * MS)), Wanted())
    assert found["changes"] == []
    assert "the bubble is not what holds this run back" in found["verdict"] or "Nothing can be" in found["verdict"]


def test_what_cannot_be_predicted_is_named_with_its_reason() -> None:
    wanted = Wanted(replace_node=True, fix_input=True, schedules=("1F1B", "DualPipeV"), microbatches=(3,))
    job = Job(steps=3, microbatches=4, optimizer=1 * MS)
    found = explore(report(job), wanted)
    why = {r["action"]: r["why"] for r in found["refused"]}
    assert "one pipeline" in why["Replace a slow node"]
    assert "waiting for its input" in why["Load data ahead"]
    assert "schedule of this run" in why["Use the 1F1B schedule"]
    assert any("DualPipeV" in action for action in why)


def test_a_slow_replica_and_late_input_are_predicted_where_they_are() -> None:
    def duration(step: int, replica: int, rank: int, action: object) -> int:
        base = constant(10 * MS, 20 * MS)(step, replica, rank, action)  # type: ignore[arg-type]
        return base * (2 if replica == 1 and rank == 2 else 1)

    job = Job(steps=3, replicas=3, data=30 * MS, optimizer=1 * MS, sync=1 * MS)
    found = explore(report(job, duration), Wanted(replace_node=True, fix_input=True))
    by_kind = {c["kind"]: c for c in found["changes"]}
    assert by_kind["node"]["detail"]["rank"] == 6
    assert by_kind["input"]["saved_seconds"] == pytest.approx(0.030, rel=1e-6)


def test_money_needs_a_price_and_hours_follow_the_whole_job() -> None:
    free = explore(report(), Wanted(microbatches=(16,)))["changes"][0]
    assert free["saved_money"] is None
    options = ReportOptions(price_per_gpu_hour=2.0, gpus=64, total_steps=1000)
    paid = explore(report(options=options), Wanted(microbatches=(16,)))["changes"][0]
    assert paid["saved_gpu_hours"] == pytest.approx(paid["saved_seconds"] * 64 * 1000 / 3600)
    assert paid["saved_money"] == pytest.approx(2 * paid["saved_gpu_hours"])
