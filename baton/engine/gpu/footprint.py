"""What a model takes of a device beside its weights and its KV: found out by doing, before the KV gets its place."""

import gc
from collections.abc import Callable
from typing import Protocol

import torch

from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.device import free_memory
from baton.engine.gpu.inputs import Capacity
from baton.engine.gpu.runner import GpuRunner

# Everything that a sampler makes room for.
EVERYTHING = SamplingParams(max_tokens=2, top_k=2, top_p=0.5, min_p=0.1, logprobs=1, repetition_penalty=1.1)


def largest_step(capacity: Capacity, block_size: int) -> tuple[list[Chunk], int]:
    """The batch that needs most memory, and how many blocks it writes to: as many tokens and sequences as one step may have, one of which
    ends a sequence of full length. What came before is read from block 0, whatever it holds."""
    seats, left, block = min(capacity.max_num_seqs, capacity.max_num_batched_tokens), capacity.max_num_batched_tokens, 1
    longest, chunks = max(1, capacity.max_len - 1), []
    for i in range(seats):
        n = min(left - (seats - 1 - i), longest)
        length = n if i else longest
        past = (length - n) // block_size
        own = -(-length // block_size) - past
        blocks = [0] * past + list(range(block, block + own))
        chunks.append(Chunk(Sequence(f"largest-{i}", [0] * length, length, EVERYTHING, b"", computed=length - n, blocks=blocks), n))
        left, block = left - n, block + own
    return chunks, block


class Memory(Protocol):
    """The memory of a device."""

    def free(self) -> int:
        """Bytes that nobody has."""
        ...

    def release(self) -> None:
        """Gives back what nothing refers to any more."""
        ...


class DeviceMemory:
    def __init__(self, device: torch.device, share: float = 1.0) -> None:
        """`share`: of its memory, which this process may use."""
        self._device, self._share = device, share

    def free(self) -> int:
        return free_memory(self._device, self._share)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def spare(runner: GpuRunner, capacity: Capacity, attach: Callable[[int], None], memory: Memory) -> int:
    """Bytes that are left for KV. `attach` gives the runner a pool of so many blocks, and captures its graphs.

    With a small pool, all is done that takes memory: graphs, the largest step, the copies of KV. Allocators and libraries keep what they
    took. So KV may have what is free then, and the small pool itself. Raises OutOfDeviceMemory, and what `attach` raises.
    """
    memory.release()
    chunks, blocks = largest_step(capacity, runner.layout.block_size)
    attach(blocks)
    runner.pool.warm_up()
    runner.run(chunks)
    left = memory.free() + (blocks + 1) * runner.layout.block_bytes
    runner.detach()
    memory.release()
    return left
