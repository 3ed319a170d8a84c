"""Decode steps as CUDA graphs, one for each size of a ladder: one launch instead of hundreds.

A graph reads and writes fixed addresses, so what changes from step to step is copied into the tensors of `Inputs` before the graph is
replayed, and a batch is padded up to the next rung with decodes of a dummy sequence. Batches above the ladder, and those with longer spans,
run eagerly.
"""

from collections.abc import Callable

import torch
from torch import Tensor

LARGEST = 512  # decodes of a captured step
GUESSED = 64  # decodes up to which steps with guesses are captured: larger ones are rarely bound by reading the weights
WARM_UPS = 2  # runs before a capture: libraries allocate, and kernels are compiled, during the first ones

# What a step computes, and what replays it.
Compute = Callable[[], Tensor]


def ladder(most: int) -> tuple[int, ...]:
    """Batch sizes from 1 to `most`, LARGEST at most: powers of two up to 8, then steps of 8, 16 and 32."""
    sizes = [1, 2, 4, 8, *range(16, 65, 8), *range(80, 257, 16), *range(288, LARGEST + 1, 32)]
    below = [size for size in sizes if size < most]
    return (*below, most) if most <= sizes[-1] else tuple(below)


class Graphs:
    """Captured decode steps, by size."""

    def __init__(self, capture: Callable[[Compute], Compute]) -> None:
        """`capture`: `Captures(device)`, or `uncaptured` on a device without graphs."""
        self._capture = capture
        self._replays: dict[int, tuple[Compute, Compute]] = {}  # by size: the replay, and what it replays

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self._replays))

    def add(self, size: int, compute: Compute) -> None:
        """Add the largest first: the smaller ones then fit into its memory.

        `compute` is kept: a graph reads its tensors by address, and would find whatever lies there once they are freed.
        """
        self._replays[size] = self._capture(compute), compute

    def run(self, size: int) -> Tensor:
        """The result of this size's `compute` for the current inputs. Valid until the next run of any size."""
        replay, _ = self._replays[size]
        return replay()


class Captures:
    """Captures on a CUDA device; all graphs share one memory pool, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                compute()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            answer = compute()

        def replay() -> Tensor:
            graph.replay()
            return answer

        return replay


def uncaptured(compute: Compute) -> Compute:
    """Runs a step on a device without graphs."""
    return compute
