"""Retries against a sick pool stop, and one crash stops none."""

from hypothesis import given
from hypothesis import strategies as st

from router.retry_budget import RATIO, TOGETHER_S, RetryBudget


def spend(budget: RetryBudget, failures: int) -> None:
    """Failures of as many workers."""
    for number in range(failures):
        budget.note_failure(f"d{number}", 0.0)


def test_a_sick_pool_gets_no_retries_of_new_requests_and_then_none_of_streams() -> None:
    budget = RetryBudget(10)
    spend(budget, 4)
    assert budget.allows(begun=False, lost=False)
    budget.note_failure("d0", 1.0)
    assert not budget.allows(begun=False, lost=False) and budget.allows(begun=True, lost=False) and budget.left == 0.5
    for second in range(2, 7):
        budget.note_failure("d0", second)
    assert not budget.allows(begun=True, lost=False) and budget.left == 0
    assert budget.allows(begun=True, lost=True), "a stream whose worker died continues"
    assert not budget.allows(begun=False, lost=True)


def test_one_crash_costs_one_failure_however_many_requests_it_ends() -> None:
    budget = RetryBudget(10)
    for number in range(1000):
        budget.note_failure("d0", 5.0 + number * TOGETHER_S / 1001)
    assert budget.left == 0.9
    budget.note_failure("d1", 5.0)
    assert budget.left == 0.8


def test_success_pays_back() -> None:
    budget = RetryBudget(10)
    spend(budget, 10)
    for _ in range(round(5 / RATIO)):
        assert not budget.allows(begun=False, lost=False)
        budget.note_success()
    budget.note_success()
    assert budget.allows(begun=False, lost=False)


def test_no_budget_means_no_limit() -> None:
    budget = RetryBudget(0)
    spend(budget, 1000)
    assert budget.allows(begun=False, lost=False) and budget.left == 1


@given(st.integers(1, 50), st.lists(st.booleans(), max_size=300))
def test_the_budget_stays_within_its_bounds_and_bounds_the_retries(most: int, outcomes: list[bool]) -> None:
    """Every failed call is retried while that is allowed: no more than half of the budget, and what successes gave back."""
    budget, retries, successes = RetryBudget(most), 0, 0
    for number, ok in enumerate(outcomes):
        if ok:
            successes += 1
            budget.note_success()
        else:
            budget.note_failure("d0", float(number))
            retries += budget.allows(begun=False, lost=False)
        assert 0 <= budget.left <= 1
    assert retries <= most / 2 + RATIO * successes
