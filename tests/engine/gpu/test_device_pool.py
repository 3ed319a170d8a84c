"""The pool of a device as transports see it, and engines whose KV goes from one such pool to the other, without the host and through it.

`test_on_a_device.py` shows it between processes; here, kernels are interpreted where there is no device."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.choice import load_runner
from baton.engine.core.kvcache import PROBE_PIECES, KvLayout, KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.overlap import OverlapEngine
from baton.engine.gpu.runner import GpuRunner

pytest.importorskip("triton")
from baton.engine.gpu.pool import DevicePool, rows
from baton.engine.gpu.triton_blocks import digest_on_host

TALE = Path(__file__).resolve().parents[3] / "baton" / "models" / "tale"
LAYOUT = KvLayout("device", "float32", 4, 2, 2, 8)
BLOCK = 16


def make(seed: int, device: torch.device, blocks: int = 12) -> DevicePool:
    torch.manual_seed(seed)
    return DevicePool(LAYOUT, torch.randn(rows(LAYOUT, blocks), *LAYOUT.block_shape).to(device))


def content(pool: DevicePool) -> np.ndarray:
    return pool._words.cpu().numpy().copy()


def finish(pool: DevicePool, peer: DevicePool, remote: list[int], local: list[int]) -> None:
    ended = pool.begin_copy(peer._words, remote, local)
    while not ended():
        time.sleep(0.001)


def test_a_copy_changes_the_blocks_that_are_named_and_no_others(device: torch.device) -> None:
    ours, theirs = make(1, device), make(2, device, blocks=20)
    expected = content(ours)
    remote, local = [17, 0, 5], [3, 11, 4]
    expected[local] = content(theirs)[remote]
    finish(ours, theirs, remote, local)
    assert np.array_equal(content(ours), expected)
    assert ours.num_blocks == 12 and ours.nbytes == 12 * LAYOUT.block_bytes  # the scratch block is no peer's business


def test_a_transport_may_register_all_of_the_memory_and_knows_whose_it_is(device: torch.device) -> None:
    pool = make(1, device)
    region, probes = pool.region, pool.probes
    assert (region.address, region.blocks, region.kind, region.device) == (pool._tensor.data_ptr(), len(pool._tensor), "VRAM", 0)
    assert probes[0] == 13 and probes[-1] == region.blocks - 1 and len(probes) == PROBE_PIECES * LAYOUT.probe_blocks
    assert (region.spare - region.address) // LAYOUT.block_bytes == probes[-1], "nobody else may write there"


def test_blocks_go_through_the_host_if_the_transport_does(device: torch.device) -> None:
    ours, theirs = make(1, device), make(2, device, blocks=20)
    expected = content(ours)
    expected[[3, 16]] = content(theirs)[[17, 25]]  # probes too
    theirs.expose([17, 25])
    ours.staged.array[[3, 16]] = theirs.staged.array[[17, 25]]
    ours.take_in([3, 16])
    assert np.array_equal(content(ours), expected)


def test_digests_are_those_of_the_bytes_and_a_flipped_bit_changes_one(device: torch.device) -> None:
    pool = make(3, device)
    bytes_of = content(pool).view(np.uint8)
    assert pool.digests([5, 0, 11]) == digest_on_host(bytes_of[[5, 0, 11]]) and pool.digests([]) == b""
    before = pool.digests(range(12))
    pool.flip(7)
    changed = [i for i in range(12) if pool.digests(range(12))[16 * i : 16 * i + 16] != before[16 * i : 16 * i + 16]]
    assert changed == [7]
    pool.expose([5])
    exposed = pool.staged.array[5].copy()
    pool.flip(5)
    assert np.flatnonzero(pool.staged.array[5] != exposed).tolist() == [0], "whoever reads from the host sees it, too"


def test_warming_up_leaves_the_pool_as_it_is(device: torch.device) -> None:
    pool = make(4, device)
    before = content(pool)
    pool.warm_up()
    assert np.array_equal(content(pool), before)


def engine(device: torch.device) -> OverlapEngine:
    runner = load_runner(GpuRunner, TALE, block_size=BLOCK, device=str(device))
    assert isinstance(runner, GpuRunner)
    runner.attach(KvPool(runner.layout, 32), capacity=Capacity(4, 64, 128), backend="torch", graph_sizes=())
    return OverlapEngine(runner, Limits(4, 64), 128)


def drain(engine: OverlapEngine) -> None:
    while not engine.idle:
        engine.step()


PROMPT = list(range(40, 90))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def whole(device: torch.device) -> list[int]:
    """What one engine says."""
    seq = Sequence("whole", list(PROMPT), len(PROMPT), GREEDY, b"")
    alone = engine(device)
    alone.add(seq)
    drain(alone)
    return seq.tokens


@pytest.fixture(scope="module")
def prefilled(device: torch.device) -> tuple[OverlapEngine, Sequence]:
    """An engine that holds the KV of the prompt."""
    held = Sequence("moved", list(PROMPT), len(PROMPT), GREEDY, b"", hold=True)
    prefill = engine(device)
    prefill.add(held)
    drain(prefill)
    return prefill, held


@pytest.mark.parametrize("way", ["device", "host", "nothing"])
def test_an_engine_goes_on_from_kv_that_came_either_way(
    device: torch.device, way: str, whole: list[int], prefilled: tuple[OverlapEngine, Sequence]
) -> None:
    """Negative control: what the host has is taken in, and nobody has copied it there."""
    (prefill, held), decode = prefilled, engine(device)
    moved = Sequence("moved", held.tokens[: len(PROMPT) + 1], len(PROMPT), GREEDY, b"")
    assert decode.reserve(moved)
    source, target = prefill.runner.pool, decode.runner.pool
    blocks = held.blocks[: -(-len(PROMPT) // BLOCK)]
    assert isinstance(source, DevicePool) and isinstance(target, DevicePool)
    there = moved.blocks[: len(blocks)]
    if way == "device":
        finish(target, source, blocks, there)
    else:
        source.expose(blocks)
        if way == "host":
            target.staged.array[there] = source.staged.array[blocks]
        target.take_in(there)
    assert (source.digests(blocks) == target.digests(there)) == (way != "nothing")
    decode.arrive(moved, len(PROMPT))
    decode.adopt(moved)
    drain(decode)
    assert (moved.tokens == whole) == (way != "nothing")
