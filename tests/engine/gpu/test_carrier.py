"""Units leave a device's pool and come back. Nobody reads a copy that has not ended, and one that nobody waited for does not come back."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from baton.engine.core.kvcache import Carrier, KvLayout, KvPool, Pool

pytest.importorskip("triton")
from baton.engine.gpu.carrier import DeviceCarrier
from baton.engine.gpu.pool import DevicePool, rows
from baton.engine.gpu.triton_blocks import digest_on_host

LAYOUT = KvLayout("device", "float32", 4, 2, 2, 8)
LONG = 100_000_000  # cycles, 50 ms: what comes on the stream after it has not been done when the host goes on


class LateCarrier(DeviceCarrier):
    """A stream that does its work when somebody waits for it, and no sooner."""

    def _begin(self, work: Callable[[], None]) -> None:
        self._late = work

    def _wait(self) -> None:
        self._late()


class SlowCarrier(DeviceCarrier):
    """The same on a device, whose stream is busy with something else before."""

    def _begin(self, work: Callable[[], None]) -> None:
        with self._stream.on():
            torch.cuda._sleep(LONG)
        super()._begin(work)


def make(device: torch.device, seed: int = 1, blocks: int = 12) -> DevicePool:
    torch.manual_seed(seed)
    return DevicePool(LAYOUT, torch.randn(rows(LAYOUT, blocks), *LAYOUT.block_shape).to(device))


def content(pool: Pool) -> np.ndarray:
    """uint8 `[blocks, block_bytes]`."""
    if isinstance(pool, KvPool):
        return pool.array.copy()
    assert isinstance(pool, DevicePool)
    return pool._words.cpu().numpy().view(np.uint8).copy()


def on_host(_: torch.device) -> KvPool:
    pool = KvPool(LAYOUT, 12)
    pool.array[:] = np.random.default_rng(1).integers(0, 256, pool.array.shape, dtype=np.uint8)
    return pool


def keep(units: list[memoryview], carrier: Carrier) -> None:
    """What a store does: `units`, taken out earlier, lie in the carrier's memory."""
    for unit, into in zip(units, carrier.units, strict=False):
        into[:] = unit


def taken(carrier: Carrier, blocks: list[int]) -> list[memoryview]:
    return [memoryview(bytearray(unit)) for unit in carrier.out(blocks)]


@pytest.mark.parametrize("kind", [make, on_host])
def test_units_come_back_to_the_blocks_that_are_named_and_to_no_others(device: torch.device, kind: Callable[..., Pool]) -> None:
    pool = kind(device)
    before, carrier = content(pool), pool.carrier(4)
    units = taken(carrier, [7, 0, 11])
    assert [bytes(unit[: LAYOUT.block_bytes]) for unit in units] == [before[block].tobytes() for block in (7, 0, 11)]
    assert all(len(unit) == pool.unit_bytes for unit in (*units, *carrier.units))
    keep(units, carrier)
    assert carrier.into([3, 5, 2], [0, 1, 2]) == [True] * 3
    after = before.copy()
    after[[3, 5, 2]] = before[[7, 0, 11]]
    assert np.array_equal(content(pool), after)
    assert carrier.into([1, 4], [2, 0]) == [True] * 2, "not all that lies there, in another order"
    after[[1, 4]] = before[[11, 7]]
    assert np.array_equal(content(pool), after)
    assert carrier.out([]) == [] and carrier.into([], []) == []


def test_a_unit_ends_with_the_digest_of_its_block(device: torch.device) -> None:
    pool = make(device)
    [unit] = taken(pool.carrier(1), [5])
    block = np.frombuffer(unit, np.uint8)[: LAYOUT.block_bytes]
    assert bytes(unit[LAYOUT.block_bytes :]) == digest_on_host(block[None]) == pool.digests([5])


@pytest.mark.parametrize("where", [0, LAYOUT.block_bytes - 1, LAYOUT.block_bytes, LAYOUT.block_bytes + 15])
def test_a_unit_with_a_flipped_bit_is_not_whole(device: torch.device, where: int) -> None:
    carrier = make(device).carrier(3)
    units = taken(carrier, [1, 2, 3])
    units[1][where] ^= 4
    keep(units, carrier)
    assert carrier.into([7, 8, 9], [0, 1, 2]) == [True, False, True]


def test_what_crosses_is_waited_for(device: torch.device) -> None:
    kind = SlowCarrier if device.type == "cuda" else LateCarrier
    pool = make(device)
    before, carrier = content(pool), kind(pool._words, 2)
    units = taken(carrier, [7, 4])
    assert [bytes(unit[: LAYOUT.block_bytes]) for unit in units] == [before[block].tobytes() for block in (7, 4)]
    keep(units, carrier)
    assert carrier.into([1, 2], [0, 1]) == [True, True]
    assert np.array_equal(content(pool)[[1, 2]], before[[7, 4]])


@pytest.mark.parametrize("way", ["out", "into"])
def test_a_copy_that_nobody_waits_for_does_not_count_as_a_block(device: torch.device, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the wait the host has other bytes, and goes on before the pool has them."""
    kind = SlowCarrier if device.type == "cuda" else LateCarrier
    pool = make(device)
    carrier = kind(pool._words, 1)
    [unit] = taken(carrier, [7])
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_wait", lambda self: None)
        if way == "out":
            [unit] = taken(carrier, [9])
            assert bytes(unit[: LAYOUT.block_bytes]) != content(make(device))[9].tobytes()
            damaged = bytearray(unit)
            damaged[: LAYOUT.block_bytes // 2] = content(make(device))[9].tobytes()[: LAYOUT.block_bytes // 2]  # half of it was there
            unit = memoryview(damaged)
        else:
            keep([unit], carrier)
            assert carrier.into([3], [0]) == [False]
    if device.type == "cuda":
        torch.cuda.synchronize()
    if way == "out":
        keep([unit], carrier)
        assert carrier.into([3], [0]) == [False], "what the device said of the block does not fit what the host has"
