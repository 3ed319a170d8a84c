"""What `baton doctor` makes of what it found."""

import pytest

from baton.cli import doctor


@pytest.mark.parametrize(
    ("adapters", "limit", "verdict"),
    [([], 8 << 20, "ok"), (["mlx5_0:1"], -1, "ok"), (["mlx5_0:1"], 1 << 30, "ok"), (["mlx5_0:1"], 8 << 20, "fail")],
)
def test_doctor_compares_the_memory_that_may_be_locked_with_the_pool(adapters: list[str], limit: int, verdict: str) -> None:
    assert doctor.locks(adapters, limit, 1 << 30).verdict == verdict
