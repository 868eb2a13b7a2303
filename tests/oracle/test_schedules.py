"""Generated orders are torch's own, for every class over a grid of stages, micro-batches and chunks."""

from __future__ import annotations

import itertools

import pytest

from bubblescope.errors import ScheduleError, UsageError
from bubblescope.model import Action
from bubblescope.replay import schedules

visualizer = pytest.importorskip(
    "torch.distributed.pipelining._schedule_visualizer", reason="torch is not installed: nothing to compare with"
)

SINGLE, LOOPED, V_SHAPED = (
    ["GPipe", "1F1B"],
    ["LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"],
    ["ZBVZeroBubble", "DualPipeV"],
)
GRID = [
    *((n, p, m, 1) for n, p, m in itertools.product(SINGLE, (1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 8, 16))),
    *(
        (n, p, m, v)
        for n, p, m, v in itertools.product(LOOPED, (1, 2, 3, 4, 8), (1, 2, 3, 4, 6, 7, 8, 10, 16), (2, 3, 4))
    ),
    *(
        (n, p, m, 2)
        for n, p, m in itertools.product(V_SHAPED, (1, 2, 3, 4, 5, 8), (1, 2, 4, 7, 8, 10, 16, 17, 33))
    ),
]


def by_torch(name: str, p: int, m: int, v: int) -> dict[int, list[Action]]:
    """torch's compute actions; overlapped ones flattened, REDUCE_GRAD and waiting slots dropped."""
    orders: dict[int, list[Action]] = {}
    for rank, actions in enumerate(visualizer.get_schedule_ops(name, p, m, v)):
        flat = [part for a in actions if a is not None for part in (a.sub_actions or (a,))]
        orders[rank] = [Action.parse(str(a)) for a in flat if a.computation_type.value in "FBIW"]
    if name == "1F1B":  # torch 2.13 counts the last rank's forwards from 1; its runtime executes them from 0
        last = orders[p - 1]
        first = min(a.microbatch for a in last if a.kind.name == "FORWARD")
        orders[p - 1] = [Action(a.stage, a.kind, a.microbatch - first * (a.kind.name == "FORWARD")) for a in last]
    return orders


@pytest.mark.parametrize(("name", "p", "m", "v"), GRID)
def test_orders_are_torchs_own_and_refused_where_torch_refuses(name: str, p: int, m: int, v: int) -> None:
    try:
        wanted = by_torch(name, p, m, v)
    except ValueError:
        if name == "1F1B":  # torch wants m ≥ p; Megatron and DeepSpeed run 1F1B with fewer, so it is generated
            assert schedules.generate(name, p, m, v)
            return
        with pytest.raises(ScheduleError):
            schedules.generate(name, p, m, v)
        return
    assert schedules.generate(name, p, m, v) == wanted


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 8), (5, 17)])
def test_overlapped_pairs_are_torchs_own(p: int, m: int) -> None:
    made = schedules.make("DualPipeV", p, m)
    wanted = visualizer.get_schedule_ops("DualPipeV", p, m, 2)
    for rank, actions in enumerate(wanted):
        pairs = [tuple(map(str, a.sub_actions)) for a in actions if a is not None and a.sub_actions]
        order = made.orders[rank]
        assert [(str(order[i]), str(order[i + 1])) for i in made.overlapped.get(rank, [])] == pairs


@pytest.mark.parametrize("name", schedules.NAMES)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_placements_agree_with_the_orders(name: str, p: int) -> None:
    made = schedules.make(name, p, 4 * p)
    for stage, rank in schedules.stage_ranks(made.orders).items():
        assert schedules.rank_of_stage(name, stage, p) == rank
        assert stage in {schedules.stage_of(name, rank, c, p) for c in range(made.chunks)}
    assert (made.stages, made.virtual_stages, made.microbatches) == (p, p * made.chunks, 4 * p)


@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_microbatch_goes_forward_and_backward_once_on_every_stage(name: str) -> None:
    made = schedules.make(name, 4, 12)
    actions = [a for order in made.orders.values() for a in order]
    assert len(set(actions)) == len(actions)
    letters = {(s, i): "" for s in range(made.virtual_stages) for i in range(12)}
    for a in actions:
        letters[a.stage, a.microbatch] += str(a)[len(str(a.stage))]
    assert set(letters.values()) <= {"FB", "FIW"}


@pytest.mark.parametrize("name", schedules.NAMES)
def test_names_match_without_case_hyphen_or_underscore(name: str) -> None:
    assert schedules.canonical(name.upper().replace("-", "_")) == name


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        schedules.canonical("2F2B")
    assert all(name in caught.value.hint for name in schedules.NAMES)


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "says"),
    [
        ("1F1B", 4, 8, 2, "exactly 1 chunk"),
        ("Interleaved1F1B", 4, 8, 1, "at least 2 chunks"),
        ("Interleaved1F1B", 4, 9, 2, "equal rounds"),
        ("DualPipeV", 4, 7, 2, "7 < 8"),
        ("GPipe", 0, 8, 1, "at least one stage"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused_with_the_rule(
    name: str, p: int, m: int, v: int, says: str
) -> None:
    with pytest.raises(ScheduleError, match=says):
        schedules.generate(name, p, m, v)


@pytest.mark.parametrize(
    ("name", "peaks"),
    [
        ("GPipe", [8, 8, 8, 8]),
        ("1F1B", [4, 3, 2, 1]),
        ("ZB-H1", [4, 4, 4, 4]),
        ("ZB-H2", [7, 7, 7, 7]),
        ("Interleaved1F1B", [11, 9, 7, 5]),
        ("ZBVZeroBubble", [8, 8, 8, 8]),
    ],
)
def test_peak_activations_are_those_of_the_papers(name: str, peaks: list[int]) -> None:
    assert schedules.peak_activations(schedules.generate(name, 4, 8)) == peaks


@pytest.mark.parametrize("name", schedules.NAMES)
def test_a_generated_order_is_recognised_for_what_it_is(name: str) -> None:
    found = schedules.recognise(schedules.generate(name, 4, 16))
    assert (found.name, found.confidence) == (name, 1.0)


def test_recognition_survives_a_swapped_pair_and_missing_ranks_but_says_so() -> None:
    orders = schedules.generate("1F1B", 4, 16)
    orders[0][10], orders[0][11] = orders[0][11], orders[0][10]
    found = schedules.recognise(orders)
    assert found.name == "1F1B"
    assert 0.9 < found.confidence < 1
    alone = schedules.recognise({2: schedules.generate("1F1B", 4, 16)[2]}, stages=4, chunks=1)
    assert alone.name == "1F1B"
    assert 0.5 < alone.confidence < 0.7
    assert "1 of 4" in alone.how


def test_an_order_of_its_own_is_called_custom() -> None:
    orders = {r: order[::-1] for r, order in schedules.generate("1F1B", 4, 8).items()}
    assert schedules.recognise(orders).name == "custom"
    assert schedules.recognise({}).confidence == 0
