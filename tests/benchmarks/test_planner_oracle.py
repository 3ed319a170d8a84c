"""The benchmark of the planner: what the oracle thinks of, and that objectives are of an idle cluster."""

from planner_loads import Sent, objectives
from planner_oracle import Made, by_part, frontier, neighbours, wanted

from baton.planner.capacity import PoolSizes

SMALL, LARGE = PoolSizes(1, 1), PoolSizes(3, 1)
# The first of two parts needs the large one; the second is served as well by the small one.
SPLITS = {SMALL: Made((20, 98), 200.0), LARGE: Made((99, 100), 400.0)}


def test_the_frontier_takes_for_each_part_what_it_needs() -> None:
    best, *others = frontier(SPLITS, 200, 0.9)
    assert best == (LARGE, SMALL) and (LARGE, LARGE) in others
    assert all(schedule != (SMALL, SMALL) for schedule in (best, *others[:-1])), "it serves too few, and comes last"
    assert (SMALL, SMALL) in frontier(SPLITS, 200, 0.5)
    assert frontier(SPLITS, 200, 0.999)[0] == (LARGE, LARGE), "where none serves enough, the one that should meet most"


def test_each_arrival_is_in_one_part() -> None:
    assert by_part([0.0, 9.9, 10.0, 31.0], 10.0, 3) == [[0, 1], [2], [3]]
    assert by_part([1.0], 10.0, 2) == [[0], []]


def test_neighbours_differ_in_one_part_and_stay_within_the_budget() -> None:
    found = list(neighbours((LARGE, SMALL), 1, 4))
    assert (PoolSizes(2, 2), SMALL) in neighbours((LARGE, SMALL), 0, 4), "or with one that serves the other role"
    assert (LARGE, PoolSizes(1, 2)) in found and (LARGE, PoolSizes(2, 1)) in found
    assert all(schedule[0] == LARGE and schedule[1] != SMALL and 2 <= schedule[1].total <= 4 for schedule in found)
    assert len(set(found)) == len(found)


def test_workers_start_ahead_and_flip_on_time() -> None:
    more, flipped = (PoolSizes(2, 1), PoolSizes(3, 2)), (PoolSizes(3, 1), PoolSizes(1, 3))
    assert [wanted(more, 100.0, now, 15.0, 8) for now in (80.0, 90.0, 100.0)] == [PoolSizes(2, 1), PoolSizes(3, 2), PoolSizes(3, 2)]
    assert [wanted(flipped, 100.0, now, 15.0, 8) for now in (90.0, 100.0)] == [PoolSizes(3, 1), PoolSizes(1, 3)]
    assert wanted(more, 100.0, 90.0, 15.0, 4).total == 4, "no more than the budget"
    assert wanted(more, 100.0, 1e6, 15.0, 8) == PoolSizes(3, 2)


def test_objectives_are_multiples_of_what_an_idle_cluster_takes() -> None:
    """Also of the prompts that are long: it is not the mean that counts."""
    one = objectives([Sent(0.0, 1000, 50)] * 10)
    mixed = objectives([Sent(0.0, 1000, 50)] * 8 + [Sent(0.0, 4000, 50)] * 2)
    assert one.ttft_s is not None and one.tpot_s is not None and mixed.ttft_s is not None
    assert 1.0 < one.ttft_s < 2.5 and 0.09 < one.tpot_s < 0.13
    assert mixed.ttft_s > 3.5 * one.ttft_s
