"""The pool of a device as transports see it, and engines whose KV goes from one such pool to the other without the host.

`test_on_a_device.py` shows it between processes; here, kernels are interpreted where there is no device."""

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.engine.choice import load_runner
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.scheduler import Limits
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.overlap import OverlapEngine
from baton.engine.gpu.runner import GpuRunner

pytest.importorskip("triton")
from baton.engine.gpu.pool import DevicePool
from baton.engine.gpu.triton_blocks import digest_on_host

TALE = Path(__file__).resolve().parents[3] / "baton" / "models" / "tale"
LAYOUT = KvLayout("device", "float32", 4, 2, 2, 8)
BLOCK = 16


def make(seed: int, device: torch.device, blocks: int = 12) -> DevicePool:
    torch.manual_seed(seed)
    return DevicePool(LAYOUT, torch.randn(blocks + 1, *LAYOUT.block_shape).to(device))


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


def test_digests_are_those_of_the_bytes_and_a_flipped_bit_changes_one(device: torch.device) -> None:
    pool = make(3, device)
    bytes_of = content(pool).view(np.uint8)
    assert pool.digests([5, 0, 11]) == digest_on_host(bytes_of[[5, 0, 11]]) and pool.digests([]) == b""
    before = pool.digests(range(12))
    pool.flip(7)
    changed = [i for i in range(12) if pool.digests(range(12))[16 * i : 16 * i + 16] != before[16 * i : 16 * i + 16]]
    assert changed == [7]


def test_warming_up_leaves_the_pool_as_it_is(device: torch.device) -> None:
    pool = make(4, device)
    before = content(pool)
    pool.warm_up()
    assert np.array_equal(content(pool), before)


def engine(device: torch.device, direct: bool) -> OverlapEngine:
    runner = load_runner(GpuRunner, TALE, block_size=BLOCK, device=str(device))
    assert isinstance(runner, GpuRunner)
    runner.attach(KvPool(runner.layout, 32), capacity=Capacity(4, 64, 128), backend="torch", graph_sizes=(), direct=direct)
    return OverlapEngine(runner, Limits(4, 64), 128)


def drain(engine: OverlapEngine) -> None:
    while not engine.idle:
        engine.step()


@pytest.mark.parametrize("direct", [True, False])
def test_an_engine_goes_on_from_kv_that_never_saw_the_host(device: torch.device, direct: bool) -> None:
    """Negative control: with staging, what lies in the device's memory is overwritten with what the host has, which nobody copied."""
    prompt = list(range(40, 90))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    alone, prefill, decode = (engine(device, direct) for _ in range(3))
    whole = Sequence("whole", list(prompt), len(prompt), params, b"")
    alone.add(whole)
    drain(alone)

    held = Sequence("moved", list(prompt), len(prompt), params, b"", hold=True)
    prefill.add(held)
    drain(prefill)
    moved = Sequence("moved", held.tokens[: len(prompt) + 1], len(prompt), params, b"")
    assert decode.reserve(moved)
    source, target = prefill.runner.pool, decode.runner.pool
    blocks = held.blocks[: -(-len(prompt) // BLOCK)]
    if isinstance(source, DevicePool) and isinstance(target, DevicePool):
        finish(target, source, blocks, moved.blocks[: len(blocks)])
        assert source.digests(blocks) == target.digests(moved.blocks[: len(blocks)])
    else:
        decode.runner.blocks[moved.blocks[: len(blocks)]] = prefill.runner.blocks[blocks]  # type: ignore[attr-defined]
        target.take_in(moved.blocks[: len(blocks)])
    decode.arrive(moved, len(prompt))
    decode.adopt(moved)
    drain(decode)
    assert (moved.tokens == whole.tokens) == direct
