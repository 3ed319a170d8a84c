from itertools import combinations, product

import pytest
from all_pairs import EVERY_CASE, all_pairs


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (2, 4, 10), (3, 3, 3, 3), (2, 2, 2, 2, 2, 2, 2), (5, 1, 4, 3)])
def test_every_pair_of_values_occurs_in_few_cases(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EVERY_CASE, raising=False)
    axes = [range(size) for size in sizes]
    cases = all_pairs(*axes)
    for a, b in combinations(range(len(sizes)), 2):
        assert {(case[a], case[b]) for case in cases} == set(product(axes[a], axes[b]))
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(cases) <= 2 * largest * second and len(set(cases)) == len(cases)
    assert cases == all_pairs(*axes)


def test_the_whole_product_is_there_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EVERY_CASE, "1")
    assert all_pairs("ab", [1, 2], [True, False]) == list(product("ab", [1, 2], [True, False]))


def test_values_need_no_hash() -> None:
    assert len(all_pairs([{}, {"a": 1}], [[1], [2]])) == 4
