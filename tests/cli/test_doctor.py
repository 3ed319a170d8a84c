"""What `baton doctor` makes of what it found."""

import pytest

from baton.cli import doctor
from baton.cluster.config_layers import load


@pytest.mark.parametrize(
    ("adapters", "limit", "verdict"),
    [([], 8 << 20, "ok"), (["mlx5_0:1"], -1, "ok"), (["mlx5_0:1"], 1 << 30, "ok"), (["mlx5_0:1"], 8 << 20, "fail")],
)
def test_doctor_compares_the_memory_that_may_be_locked_with_the_pool(adapters: list[str], limit: int, verdict: str) -> None:
    assert doctor.locks(adapters, limit, lambda: 1 << 30).verdict == verdict


def test_the_pool_that_must_be_locked_is_the_one_that_a_worker_makes_not_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_pool_bytes", lambda config: 64 << 40)
    needed = doctor._pool_needed(load([], {}, {"engine.kv-memory-mib": "20000"}).config)
    assert needed == 1024 << 20, "of the model that ships: twice what 64 sequences of full length take"
    assert doctor._pool_needed(load([], {}, {"model.path": "/nowhere"}).config) == 64 << 40


def test_each_finding_is_told_when_it_is_there_and_a_quick_look_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_transports", "_tried", "_products"):
        monkeypatch.setattr(doctor, name, lambda *given: pytest.fail("it takes seconds"))
    seen: list[str] = []
    for finding in doctor.examine(load([], {}).config, False, quick=True, begin=seen.append):
        assert seen[-1] == finding.subject
        seen.append("found")
    assert seen.count("found") == 6 and seen[0] == "python" and seen[-1] == "products"
