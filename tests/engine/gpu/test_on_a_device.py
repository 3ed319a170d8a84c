"""What only a CUDA device can show: graphs, streams, bfloat16, and third-party backends. Run with `pytest -m gpu tests/engine/gpu`.

Where there is a device, the other tests of this folder run on it as well, and compile their kernels instead of interpreting them.
"""

import multiprocessing as mp
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.cluster.errors import BatonError
from baton.engine.choice import load_runner
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.choice import BACKENDS, BackendFacts, why_not
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.overlap import OverlapEngine
from baton.engine.gpu.runner import GpuRunner
from baton.engine.model.checkpoint import LayerAttention
from baton.engine.runner import ModelRunner
from kvtransfer.cuda_ipc_transport import CudaIpcTransport
from kvtransfer.select import make_transport

pytest.importorskip("triton")
from baton.engine.gpu.pool import DevicePool, rows
from baton.engine.gpu.triton_blocks import digest_on_host

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
HEADS, KV_HEADS, DIM = 8, 2, 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 Llama with heads of 128, which all backends support."""
    from transformers import LlamaConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=768, num_hidden_layers=3, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM,
        vocab_size=1000, max_position_embeddings=2048, initializer_range=0.1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    return path


def runner(
    folder: Path,
    backend: str,
    block_size: int,
    dtype: str = "bfloat16",
    graph_sizes: tuple[int, ...] | None = None,
    kv_dtype: str = "auto",
) -> GpuRunner:
    loaded = load_runner(GpuRunner, folder, dtype=dtype, block_size=block_size, device="cuda", kv_dtype=kv_dtype)
    assert isinstance(loaded, GpuRunner)
    pool = KvPool(loaded.layout, 8 * 1024 // block_size)
    loaded.attach(pool, capacity=Capacity(8, 1024, 1024), backend=backend, graph_sizes=graph_sizes)
    return loaded


def logits(runner: GpuRunner | ModelRunner) -> torch.Tensor:
    """The logits of prompt chunks mixed with decodes, then of decodes alone."""
    rng, found = random.Random(1), []
    per = 512 // runner.layout.block_size
    seqs = [
        Sequence(
            str(i), [rng.randrange(1000) for _ in range(n)], 1, SamplingParams(max_tokens=9), b"", blocks=[*range(i * per, i * per + per)]
        )
        for i, n in enumerate((1, 300, 17, 256, 500))
    ]
    for _ in range(6):
        batch = [Chunk(seq, min(seq.pending, 200)) for seq in seqs]
        found.append(runner.run_logits(batch).float().cpu())
        for chunk in batch:
            chunk.seq.computed += chunk.n
            if chunk.seq.pending == 0:
                chunk.seq.tokens.append(7)
    return torch.cat(found)


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def usable(block_size: int) -> list[str]:
    return [backend for backend in BACKENDS if why_not(backend, BackendFacts("cuda", torch.bfloat16, block_size, DIM, 2)) is None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("graph_sizes", [(), (2, 8)], ids=["eager", "captured"])
def test_logits_of_every_backend_are_close_to_float32(folder: Path, backend: str, block_size: int, graph_sizes: tuple[int, ...]) -> None:
    if backend not in usable(block_size):
        pytest.skip(f"{backend} is not possible here")
    plain = {}
    for dtype in ("float32", "bfloat16"):
        reference = load_runner(ModelRunner, folder, dtype=dtype, block_size=block_size, compiled=False)
        reference.attach(KvPool(reference.layout, 8 * 1024 // block_size))
        plain[dtype] = logits(reference)
    found = logits(runner(folder, backend, block_size, graph_sizes=graph_sizes))
    assert rms(found - plain["float32"]) < 1.5 * rms(plain["bfloat16"] - plain["float32"])


@pytest.mark.parametrize("kv_dtype", ["int8", "int5"])
@pytest.mark.parametrize("graph_sizes", [(), (2, 8)], ids=["eager", "captured"])
def test_logits_over_rounded_kv_are_those_of_plain_torch(folder: Path, kv_dtype: str, graph_sizes: tuple[int, ...]) -> None:
    """A last bit of a key may round it up or down, so they are close; those over KV that is not rounded are farther."""
    found = {}
    for kind in ("auto", kv_dtype):
        reference = load_runner(ModelRunner, folder, dtype="float32", block_size=16, compiled=False, kv_dtype=kind)
        reference.attach(KvPool(reference.layout, 512))
        found[kind] = logits(reference)
    ours = logits(runner(folder, "triton", 16, "float32", graph_sizes, kv_dtype))
    assert rms(ours - found[kv_dtype]) < 0.5 * rms(found["auto"] - found[kv_dtype])


def test_captured_steps_give_the_same_logits_as_eager_ones(folder: Path) -> None:
    """Bit for bit: a graph holds the same launches."""
    assert torch.equal(logits(runner(folder, "triton", 16, graph_sizes=(8,))), logits(runner(folder, "triton", 16, graph_sizes=())))


def test_one_step_in_flight_gives_the_tokens_of_the_plain_engine(folder: Path) -> None:
    """In float32, so that different kernels rarely decide a near tie differently."""
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=256)
    texts = []
    for kind in ("plain", "overlapped"):
        rng = random.Random(2)
        if kind == "plain":
            exact = load_runner(ModelRunner, folder, compiled=False)
            exact.attach(KvPool(exact.layout, 300))
            engine = Engine(exact, limits, 600)
        else:
            engine = OverlapEngine(runner(folder, "triton", 16, "float32"), limits, 600)
        seqs = []
        for i in range(24):
            params = SamplingParams(
                max_tokens=rng.randint(1, 60), temperature=rng.choice((0.0, 0.9)), top_p=rng.choice((1.0, 0.8)), top_k=rng.choice((0, 40)),
                repetition_penalty=rng.choice((1.0, 1.2)), seed=i, ignore_eos=True,
            )  # fmt: skip
            tokens = [rng.randrange(1000) for _ in range(rng.randint(1, 400))]
            seqs.append(Sequence(str(i), tokens, len(tokens), params, b""))
            engine.add(seqs[-1])
        while not engine.idle:
            engine.step()
        texts.append([seq.tokens[seq.prompt_len :] for seq in seqs])
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= 22, f"{same} of 24 texts are the same"


def test_submitting_does_not_wait(folder: Path) -> None:
    """While the device is busy, a step is submitted long before the device reaches it."""
    ours = runner(folder, "triton", 16, graph_sizes=(1,))
    seq = Sequence("a", [1] * 64, 64, SamplingParams(max_tokens=9, top_p=0.9, logprobs=3, repetition_penalty=1.2), b"", blocks=[*range(8)])
    ours.run([Chunk(seq, 64)])
    seq.computed = 64
    seq.tokens.append(5)
    ours.run([Chunk(seq, 1)])  # does what only the first decode has to set up
    torch.cuda._sleep(2_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    pending = ours.submit([Chunk(seq, 1)])
    assert not busy.query(), "submitting waited for the device"
    assert pending.result().tokens[0] and busy.query()


@pytest.mark.parametrize("how", [LayerAttention(), LayerAttention(window=300, softcap=30.0)], ids=["plain", "gemma"])
@pytest.mark.parametrize("batch", [1, 64])
def test_decode_at_full_size_matches_the_formula(how: LayerAttention, batch: int) -> None:
    from baton.engine.gpu.triton_attention import decode, splits

    length, blocks = 3000, 64 * 190
    pool = torch.randn(blocks, 1, 2, 8, 16, 128, device=CUDA).bfloat16()
    tables = torch.randperm(blocks, device=CUDA)[: batch * 188].view(batch, 188).int()
    seats, lens = torch.arange(batch, device=CUDA).int(), torch.full((batch,), length, device=CUDA).int()
    q, out = torch.randn(batch, 32, 128, device=CUDA).bfloat16(), torch.empty(batch, 32, 128, device=CUDA).bfloat16()
    decode(q, pool[:, 0], tables, seats, lens, how, out, splits(batch, 8, 132))
    for b in (0, batch - 1):
        kv = pool[tables[b].long(), 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].float()  # [2, Hkv, length, D]
        k, v = (x.repeat_interleave(4, dim=0) for x in kv)
        scores = torch.einsum("hd,hkd->hk", q[b].float(), k) * 128**-0.5
        if how.softcap:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        if how.window:
            scores[:, : length - how.window] = -torch.inf
        torch.testing.assert_close(out[b].float(), torch.einsum("hk,hkd->hd", scores.softmax(-1), v), rtol=2e-2, atol=2e-2)


def test_blocks_copied_to_the_host_and_back_are_unchanged() -> None:
    from baton.engine.gpu.staging import Staging
    from baton.engine.gpu.triton_blocks import digest_on_host

    pool = torch.randn(300, 4, 2, 8, 16, 128, device=CUDA).bfloat16()
    before, staging = pool.clone(), Staging(pool, 100)
    blocks = np.random.default_rng(0).permutation(300)[:100]
    staging.begin_out(blocks)
    staging.wait()
    assert staging.host.is_pinned()
    assert staging.digests(blocks.tolist()) == digest_on_host(staging.host.numpy())
    pool[torch.from_numpy(blocks).to(CUDA)] = 0
    staging.begin_in(blocks)
    staging.wait()
    assert torch.equal(pool, before)


LAYOUT = KvLayout("device", "bfloat16", 16, 3, 2, 64)


def device_pool(seed: int) -> DevicePool:
    torch.manual_seed(seed)
    return DevicePool(LAYOUT, torch.randn(rows(LAYOUT, 64), *LAYOUT.block_shape, device=CUDA).bfloat16())


def hold(told: "mp.Queue[tuple[bytes, bytes]]") -> None:
    """Another process, which serves its pool until it is killed."""
    pool = device_pool(7)
    transport = CudaIpcTransport(pool)
    told.put((transport.address(), pool.digests(range(64))))
    time.sleep(600)


def test_blocks_go_from_one_process_to_another_without_the_host() -> None:
    context = mp.get_context("spawn")
    told: mp.Queue[tuple[bytes, bytes]] = context.Queue()
    process = context.Process(target=hold, args=(told,), daemon=True)
    process.start()
    try:
        address, theirs = told.get(timeout=120)
        pool = device_pool(1)
        before, reader = pool.digests(range(64)), CudaIpcTransport(pool)
        reader.connect("peer", address)
        remote, local = np.random.default_rng(0).permutation(64)[:40].tolist(), np.random.default_rng(1).permutation(64)[:40].tolist()
        with ThreadPoolExecutor(4) as threads:  # as a worker does: threads that have not used the device yet
            list(threads.map(lambda at: reader.read("peer", remote[at : at + 10], local[at : at + 10], 10.0), range(0, 40, 10)))
        piece = {here: theirs[16 * there : 16 * there + 16] for there, here in zip(remote, local, strict=True)}
        assert pool.digests(range(64)) == b"".join(piece.get(block, before[16 * block : 16 * block + 16]) for block in range(64))
        process.kill()
        process.join()
        with pytest.raises(BatonError, match="its process has ended"):
            reader.read("peer", [0], [0], 10.0)
        reader.close()
        torch.cuda.synchronize()
    finally:
        process.kill()


def offer(told: "mp.Queue[tuple[bytes, bytes]]", kind: str) -> None:
    pool = device_pool(7)
    transport = make_transport(kind, peer="holder:1", pool=pool, host="127.0.0.1", key=b"key")
    pool.expose(range(64))
    told.put((transport.address(), pool.digests(range(64))))
    time.sleep(600)


@pytest.mark.parametrize(("kind", "carriers"), [("auto", {"cuda_ipc"}), ("nixl", {"nixl_vram", "nixl"}), ("tcp", {"tcp"})])
def test_a_probe_decides_what_carries_blocks_between_processes(kind: str, carriers: set[str]) -> None:
    if kind == "nixl":
        pytest.importorskip("nixl_cu13")
    context = mp.get_context("spawn")
    told: mp.Queue[tuple[bytes, bytes]] = context.Queue()
    process = context.Process(target=offer, args=(told, kind), daemon=True)
    process.start()
    try:
        address, theirs = told.get(timeout=120)
        pool = device_pool(1)
        reader = make_transport(kind, peer="reader:1", pool=pool, host="127.0.0.1", key=b"key")
        reader.connect("holder:1", address)
        route = reader.route("holder:1")
        assert route is not None and route.carrier in carriers and route.rate > 0
        print(f"{kind}: {route.carrier} at {route.rate / 1e9:.3g} GB/s; {reader.backend_detail()}")
        reader.read("holder:1", list(range(64)), list(range(64)), 10.0)
        if route.through_host:
            pool.take_in(range(64))
        assert pool.digests(range(64)) == theirs
        reader.close()
    finally:
        process.kill()


def test_the_digests_of_a_pool_are_those_of_its_bytes() -> None:
    pool = device_pool(3)
    host = pool._tensor.cpu().view(torch.uint8).view(len(pool._tensor), -1).numpy()
    assert pool.digests([5, 0, 63]) == digest_on_host(host[[5, 0, 63]])
    before = pool.digests([5])
    pool.flip(5)
    assert pool.digests([5]) != before
    pool.flip(5)
    assert pool.digests([5]) == before


def test_a_handoff_between_two_engines_on_the_device_continues_bit_for_bit(folder: Path) -> None:
    """Prefill in one engine, KV through the device's memory, decode in the other: the logits of an undisturbed sequence."""
    ours, theirs = (runner(folder, "triton", 16, graph_sizes=()) for _ in range(2))
    assert isinstance(ours.pool, DevicePool) and isinstance(theirs.pool, DevicePool)
    prompt = [random.Random(4).randrange(1000) for _ in range(200)]
    alone = Sequence("alone", list(prompt), 200, SamplingParams(max_tokens=9), b"", blocks=[*range(100, 120)])
    first = ours.run_logits([Chunk(alone, 200)])
    moved = Sequence("moved", list(prompt), 200, SamplingParams(max_tokens=9), b"", blocks=[*range(40, 60)])
    source, target = alone.blocks[:13], moved.blocks[:13]
    ended = theirs.pool.begin_copy(ours.pool._words, source, target)
    while not ended():
        time.sleep(0.001)
    assert ours.pool.digests(source) == theirs.pool.digests(target)
    for seq in (alone, moved):
        seq.computed = 200
        seq.tokens.append(int(first.argmax()))
    assert torch.equal(ours.run_logits([Chunk(alone, 1)]), theirs.run_logits([Chunk(moved, 1)]))
