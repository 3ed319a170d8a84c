"""Each worker gets GPUs of its own, of one kind for each pool; a GPU is shared only if that was asked for, and what lacks is told."""

from collections.abc import Sequence

import pytest

from baton.cluster.gpus import Device
from baton.launch.placing import GpuDemand, HeldGpus, NoRoom, kinds, place, spared

GIB = 1 << 30


def gpu(index: int, kind: str = "H100", used: int = 0, part: bool = False, peers: Sequence[int] = ()) -> Device:
    return Device(f"GPU-{index}", index, kind, 80 * GIB, used, dict.fromkeys(peers, "NVLink"), part)


def given(devices: Sequence[Device], *demands: GpuDemand) -> dict[str, list[str]]:
    """What each worker of a cluster gets that starts pool by pool."""
    found = kinds(devices, demands)
    held: dict[str, HeldGpus] = {}
    for demand in demands:
        placed = place(devices, held, demand, [f"{demand.role}-{number}" for number in range(demand.replicas)], found)
        assert placed is not None
        held |= placed
    return {name: [device.token for device in each.devices] for name, each in held.items()}


def test_every_worker_gets_its_own() -> None:
    four = [gpu(index) for index in range(4)]
    assert given(four, GpuDemand("prefill", 1, 1), GpuDemand("decode", 1, 2)) == {
        "prefill-0": ["GPU-0"], "decode-0": ["GPU-1"], "decode-1": ["GPU-2"],
    }  # fmt: skip
    assert given(four, GpuDemand("prefill", 2, 1), GpuDemand("decode", 1, 2))["prefill-0"] == ["GPU-0", "GPU-1"]
    assert given([], GpuDemand("prefill", 0, 3)) == {"prefill-0": [], "prefill-1": [], "prefill-2": []}
    assert given(four[:2], GpuDemand("prefill", 1, 0), GpuDemand("decode", 1, 2)) == {"decode-0": ["GPU-0"], "decode-1": ["GPU-1"]}


def test_a_gpu_is_shared_only_if_that_was_asked_for() -> None:
    with pytest.raises(NoRoom):
        kinds([gpu(0)], [GpuDemand("prefill", 1, 1), GpuDemand("decode", 1, 1)])
    assert given([gpu(0)], GpuDemand("prefill", 0.3, 1), GpuDemand("decode", 0.7, 1)) == {"prefill-0": ["GPU-0"], "decode-0": ["GPU-0"]}
    assert given([gpu(0), gpu(1)], GpuDemand("prefill", 0.5, 3))["prefill-2"] == ["GPU-1"]
    with pytest.raises(NoRoom):
        kinds([gpu(0)], [GpuDemand("prefill", 0.4, 1), GpuDemand("decode", 0.7, 1)])


def test_the_sentence_says_how_many_there_are_how_many_are_lacking_and_what_to_do() -> None:
    with pytest.raises(NoRoom) as refused:
        kinds([gpu(0)], [GpuDemand("prefill", 1, 1), GpuDemand("decode", 1, 2)])
    said = str(refused.value)
    assert said.startswith("3 workers need 3 GPUs (prefill: 1 x 1, decode: 2 x 1), and 1 can be used here (GPU 0 (H100)): 2 too few;")
    assert "--prefill 0" in said
    shares = said.partition("memory: ")[2].split()
    assert shares == ["--prefill.gpus", "0.33", "--decode.gpus", "0.33"]
    assert given([gpu(0)], GpuDemand("prefill", 0.33, 1), GpuDemand("decode", 0.33, 2)), "the way that it names works"
    with pytest.raises(NoRoom, match=r"and 0 can be used here \(none\); GPU 0 \(H100\) is full"):
        kinds([], [GpuDemand("decode", 1, 1)], "GPU 0 (H100) is full")


def test_a_full_gpu_is_left_out_and_named() -> None:
    left, said = spared([gpu(0, used=79 * GIB + 1), gpu(1), Device("GPU-2", 2, "Orin", 0, 0)])
    assert [device.token for device in left] == ["GPU-1", "GPU-2"]
    assert said == "GPU 0 (H100) is full: 1.0 of 80.0 GiB are free"
    assert [device.token for device in spared([gpu(0, used=70 * GIB), gpu(1)], 16 * GIB)[0]] == ["GPU-1"]


def test_the_gpus_of_a_pool_are_of_one_kind_and_those_of_all_pools_if_possible() -> None:
    mixed = [gpu(0, "A100"), gpu(1), gpu(2)]
    one, two = GpuDemand("prefill", 1, 1), GpuDemand("decode", 1, 2)
    assert given(mixed, one, GpuDemand("decode", 1, 1)) == {"prefill-0": ["GPU-1"], "decode-0": ["GPU-2"]}
    assert given(mixed, one, two) == {"prefill-0": ["GPU-0"], "decode-0": ["GPU-1"], "decode-1": ["GPU-2"]}
    with pytest.raises(NoRoom, match="not enough of one kind for each pool"):
        kinds(mixed, [GpuDemand("prefill", 1, 0), GpuDemand("decode", 1, 3)])


def test_a_pool_that_grows_keeps_its_kind() -> None:
    mixed = [gpu(0, "A100"), gpu(1), gpu(2)]
    held = {"decode-0": HeldGpus("decode", 1.0, (mixed[1],))}
    grown = place(mixed, held, GpuDemand("decode", 1, 1), ["decode-1"], {})
    assert grown is not None and grown["decode-1"].devices == (mixed[2],)
    assert place(mixed, held | grown, GpuDemand("decode", 1, 1), ["decode-2"], {}) is None


def test_gpus_of_one_worker_reach_each_other_if_possible() -> None:
    pairs = [gpu(0, peers=[2]), gpu(1, peers=[3]), gpu(2, peers=[0]), gpu(3, peers=[1])]
    assert given(pairs, GpuDemand("prefill", 2, 1), GpuDemand("decode", 2, 1)) == {
        "prefill-0": ["GPU-0", "GPU-2"],
        "decode-0": ["GPU-1", "GPU-3"],
    }


def test_a_process_gets_one_slice_of_a_gpu() -> None:
    slices = [gpu(index, "MIG 3g.40gb", part=True) for index in range(2)]
    assert given(slices, GpuDemand("prefill", 1, 1), GpuDemand("decode", 1, 1)) == {"prefill-0": ["GPU-0"], "decode-0": ["GPU-1"]}
    with pytest.raises(NoRoom, match="one slice of a GPU in MIG mode, not several"):
        kinds(slices, [GpuDemand("decode", 2, 1)])
