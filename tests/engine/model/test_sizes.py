from hypothesis import given
from hypothesis import strategies as st

from baton.engine.model.sizes import rounded_up


@given(st.integers(1, 100_000), st.sampled_from([1, 4, 8]))
def test_rounding_up_adds_little(count: int, steps: int) -> None:
    assert count <= rounded_up(count, steps) <= count + max(0, count - 1) // steps
    assert rounded_up(rounded_up(count, steps), steps) == rounded_up(count, steps)


def test_rounded_sizes_are_few() -> None:
    assert {rounded_up(count) for count in range(1, 17)} == set(range(1, 17))
    assert len({rounded_up(count) for count in range(1, 2049)}) == 16 + 7 * 8
    assert len({rounded_up(count, 4) for count in range(1, 2049)}) == 8 + 8 * 4
