"""What is tried before a worker is ready: which attention backend computes, and what memory the largest step leaves for KV."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine import build
from baton.engine.build import BuildError
from baton.engine.choice import load_runner
from baton.engine.core.kvcache import KvPool
from baton.engine.core.protocol import Chunk, OutOfDeviceMemory, Tokens
from baton.engine.defaults import DeviceFacts, settle
from baton.engine.gpu import footprint, trial
from baton.engine.gpu import runner as runner_module
from baton.engine.gpu.choice import BackendFacts, Tried, first_that_works, tries
from baton.engine.gpu.footprint import largest_step, spare
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.runner import GpuRunner
from baton.engine.gpu.trial import tried_here
from baton.engine.options import Options
from baton.models.make_small import make

H100 = BackendFacts("cuda", torch.bfloat16, 16, 128, 2)
CAPACITY = Capacity(3, 24, 90)
BLOCK, MIB = 4, 1 << 20
HERE = "cuda" if torch.cuda.is_available() else "cpu"  # where kernels are compiled, or interpreted


def everything(_: str) -> bool:
    return True


def broken(*names: str) -> Callable[[str], None]:
    def attempt(backend: str) -> None:
        if backend in names:
            raise RuntimeError("nvcc is not\nfound")

    return attempt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make(path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=300, context=96)
    return path


def loaded(folder: Path, **keys: Any) -> GpuRunner:
    return load_runner(GpuRunner, folder, block_size=BLOCK, compiled=False, **keys)


# --- backends ------------------------------------------------------------------------------------------------------------------------


def test_a_backend_that_is_installed_and_cannot_compute_is_passed_over() -> None:
    done = first_that_works("auto", H100, broken("flashinfer"), everything)
    assert [(each.backend, each.ok) for each in done] == [("flashinfer", False), ("flash_attn", False), ("triton", True)]
    assert done[0].reason == "RuntimeError: nvcc is not found" and "block_size" in done[1].reason
    assert first_that_works("auto", H100, broken("flashinfer", "triton"), everything)[-1] == Tried("torch", True)
    assert [each.backend for each in tries("auto", H100, broken(), everything)] == ["flashinfer", "flash_attn", "triton", "torch"]


def test_a_backend_that_is_named_must_compute() -> None:
    with pytest.raises(ValueError, match=r"^engine.attention_backend: flashinfer is not possible here: RuntimeError: nvcc is not found$"):
        first_that_works("flashinfer", H100, broken("flashinfer"), everything)
    with pytest.raises(ValueError, match=r"flashinfer is not possible.*; torch is not possible here: RuntimeError"):
        first_that_works("auto", H100, broken("flashinfer", "triton", "torch"), everything)
    with pytest.raises(ValueError, match="'xformers' is unknown"):
        first_that_works("xformers", H100, broken(), everything)


def test_without_a_gpu_torch_is_left_and_the_others_have_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = tried_here("cpu", heads=4, kv_heads=2, head_dim=16)
    assert [each.backend for each in done if each.ok] == ["torch"] and all(each.reason for each in done if not each.ok)


def test_a_worker_starts_with_the_first_that_works(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    real = trial.rehearse

    def rehearse(backend: str, *shape: Any) -> None:
        if backend == "triton":
            raise RuntimeError("out of resource: shared memory")
        real(backend, *shape)

    monkeypatch.setattr(runner_module, "rehearse", rehearse)
    assert loaded(folder).choose_attention("auto") == "torch"
    assert "triton is passed over: RuntimeError: out of resource: shared memory" in caplog.text


# --- the fingerprint -----------------------------------------------------------------------------------------------------------------


def test_unlike_gpus_and_kernels_do_not_share_kv_unless_declared_equal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(gpu: str, backend: str, equal: bool = False) -> GpuRunner:
        monkeypatch.setattr(runner_module, "model_of", lambda device: gpu)
        monkeypatch.setattr(runner_module, "rehearse", lambda *asked: None)
        monkeypatch.setattr(runner_module, "first_that_works", lambda *asked: [Tried(backend, True)])
        made = loaded(folder, equal_arithmetic=equal)
        made.choose_attention("auto", equal)
        return made

    here = worker("H100", "triton").layout
    assert here.difference(worker("H100", "triton").layout) is None
    for other in (worker("L40S", "triton"), worker("H100", "flashinfer")):
        assert (here.difference(other.layout) or "").startswith("model_fingerprint")
    declared = [worker(gpu, backend, True).layout for gpu, backend in (("H100", "flashinfer"), ("L40S", "triton"))]
    assert declared[0].difference(declared[1]) is None and declared[0].difference(here) is not None


# --- memory --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [CAPACITY, Capacity(1, 1, 2), Capacity(8, 8, 90), Capacity(2, 500, 90), Capacity(4, 24, 2)])
def test_the_largest_step_is_as_large_as_the_limits_allow(capacity: Capacity) -> None:
    chunks, blocks = largest_step(capacity, BLOCK)
    assert len(chunks) == min(capacity.max_num_seqs, capacity.max_num_batched_tokens) and all(chunk.samples for chunk in chunks)
    possible = len(chunks) * max(1, capacity.max_len - 1)
    assert sum(chunk.n for chunk in chunks) == min(capacity.max_num_batched_tokens, possible)
    assert len(chunks[0].seq.tokens) == max(1, capacity.max_len - 1)
    written = [block for chunk in chunks for block in chunk.seq.blocks[chunk.seq.computed // BLOCK : -(-len(chunk.seq.tokens) // BLOCK)]]
    assert len(set(written)) == len(written) and 0 not in written and max(written) < blocks, "no two sequences write to one block"


class Memory:
    """A device of 1,000 MiB. What is free is asked once, when all that takes memory has been made."""

    def __init__(self, runner: GpuRunner) -> None:
        self.runner, self.released = runner, 0
        self.steps: list[int] = []
        run = runner.run

        def noted(batch: Sequence[Chunk]) -> list[Tokens]:
            self.steps.append(sum(chunk.n for chunk in batch))
            return run(batch)

        runner.run = noted  # type: ignore[method-assign]

    def free(self) -> int:
        assert self.runner.graphs.sizes == (1, 2, 3) and self.steps == [24] and "_out" in vars(self.runner.pool.staged), "the copies, too"
        return 1000 * MIB

    def release(self) -> None:
        assert not hasattr(self.runner, "blocks"), "the small pool is gone"
        self.released += 1


def test_kv_gets_what_graphs_and_the_largest_step_leave(folder: Path) -> None:
    pytest.importorskip("triton")
    runner = loaded(folder, device=HERE)
    backend = runner.choose_attention("triton")
    memory, pools = Memory(runner), []

    def attach(blocks: int) -> None:
        pools.append(blocks)
        runner.attach(KvPool(runner.layout, blocks), capacity=CAPACITY, backend=backend)

    left = spare(runner, CAPACITY, attach, memory)
    assert left == 1000 * MIB + (pools[0] + 1) * runner.layout.block_bytes and memory.released == 2
    attach(40)  # the real one
    assert runner.pool.num_blocks == 40 and runner.graphs.sizes == (1, 2, 3)


class Left:
    """A device that has so many bytes left beside the small pool."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def free(self) -> int:
        return self.nbytes

    def release(self) -> None:
        pass


def test_an_engine_on_a_device_has_the_blocks_that_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # the plain backend
    runner = loaded(folder, device=HERE)
    _, small = footprint.largest_step(CAPACITY, BLOCK)
    monkeypatch.setattr(footprint, "DeviceMemory", lambda device, share: Left((100 - small - 1) * runner.layout.block_bytes))
    asked = Options.of(folder, block_size=BLOCK, max_num_seqs=3, max_num_batched_tokens=24)
    settled = settle(asked, DeviceFacts("cuda")).options
    engine = build._on_device(runner, settled, 90)
    assert engine.pool.num_blocks == 95 and engine.block_size == BLOCK, "95 % of what is left: the rest is in reserve"

    def fail(*asked: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GpuRunner, "_forward", fail)
    with pytest.raises(BuildError, match=r"^engine.max_num_batched_tokens: a step of 24 tokens and 3 sequences does not fit.*CUDA out of"):
        build._on_device(loaded(folder, device=HERE), settled, 90)


def test_a_step_that_does_not_fit_is_told_at_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loaded(folder, device=HERE)

    def fail(*asked: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "_forward", fail)

    def attach(blocks: int) -> None:
        runner.attach(KvPool(runner.layout, blocks), capacity=CAPACITY, backend="torch")

    monkeypatch.setattr(Memory, "free", lambda self: 0)
    with pytest.raises(OutOfDeviceMemory, match="CUDA out of memory"):
        spare(runner, CAPACITY, attach, Memory(runner))
