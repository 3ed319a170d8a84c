"""What `baton doctor` makes of what it found."""

import pytest
from fake_nvml import FakeGpu, FakeNvml, FakeSlice

from baton.cli import doctor
from baton.cluster.config_layers import load
from baton.cluster.gpus import find


@pytest.mark.parametrize(
    ("adapters", "limit", "verdict"),
    [([], 8 << 20, "ok"), (["mlx5_0:1"], -1, "ok"), (["mlx5_0:1"], 1 << 30, "ok"), (["mlx5_0:1"], 8 << 20, "fail")],
)
def test_doctor_compares_the_memory_that_may_be_locked_with_the_pool(adapters: list[str], limit: int, verdict: str) -> None:
    assert doctor.locks(adapters, limit, lambda: 1 << 30).verdict == verdict


def test_doctor_misses_an_adapter_only_where_rdma_is_asked_for() -> None:
    asked = doctor.locks([], -1, lambda: 1 << 30, wanted=True)
    assert asked.verdict == "fail" and "kv.rdma asks for one" in asked.detail
    assert doctor.locks(["mlx5_0:1"], -1, lambda: 1 << 30, wanted=True).verdict == "ok"


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
    assert seen.count("found") == 7 and seen[0] == "python" and seen[-1] == "products"


def test_a_host_without_a_gpu_is_one_line() -> None:
    [found] = doctor.gpus(find(FakeNvml(fails=12)), "13.0", False, "cpu")
    assert (found.verdict, found.detail) == ("ok", "none: there is no NVIDIA driver here (libnvidia-ml.so.1)")


def test_gpus_are_told_with_what_is_wrong_and_what_to_do() -> None:
    lost, sliced = FakeGpu("GPU-3", fails=15), FakeGpu("GPU-4", mig=True, slices=[FakeSlice("MIG-a")])
    host = find(FakeNvml([FakeGpu("GPU-1", nvlink=[1]), FakeGpu("GPU-2", p2p=[0]), lost, sliced]))
    driver, *gpus, nvcc = doctor.gpus(host, "13.0", True, "cuda")
    assert driver.verdict == "ok" and driver.detail == "driver 580.95.05 for CUDA up to 13.0; torch is built for 13.0"
    assert gpus[0].detail == (
        "GPU 0 (NVIDIA H100 80GB HBM3): 79.5 of 80.0 GiB free, compute capability 9.0; peers: GPU 1 by NVLink"
    ) and gpus[1].detail.endswith("GPU 0 by P2P")
    assert gpus[2].verdict == "fail" and "reset it" in gpus[2].detail and "MIG-a" in gpus[3].detail
    assert nvcc.verdict == "ok" or "engine.attention_backend to triton" in nvcc.detail
    old = next(iter(doctor.gpus(host, "14.0", True, "cuda")))
    assert old.verdict == "fail" and "install a newer driver" in old.detail


def test_the_attention_backends_are_told_each_with_its_reason() -> None:
    found = doctor._tried("attention", doctor.ATTENTION, 120.0)
    assert found.verdict == "ok" and "torch: possible" in found.detail


def test_the_backends_of_nixl_are_opened() -> None:
    pytest.importorskip("nixl_cu13")
    found = doctor._tried("nixl backends", doctor.NIXL, 60.0)
    assert found.verdict == "ok" and "UCX opens" in found.detail


def test_what_workers_would_not_get_is_a_finding() -> None:
    config, found = doctor._settled(load([], {}, {"prefill.gpus": "1", "engine.device": "cpu"}).config)
    assert [finding.verdict for finding in found] == ["fail"] and "prefill.gpus 1" in found[0].detail
    assert doctor._settled(load([], {}, {"engine.device": "cpu"}).config)[1] == [] and config.engine.device == "cpu"
