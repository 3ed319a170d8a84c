"""What the machine can do: reading memory that is in no cache, and multiplying matrices, both through torch."""

import functools
import time
from collections.abc import Callable

import torch

from peers.driver import Handler, Message, serve

FAR = 1 << 29  # bytes
SIDE, TRIES = 2048, 3


def best(work: Callable[[], object]) -> float:
    """The shortest time, in seconds."""
    work()
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def prepacked(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """Multiplies through oneDNN, which on some processors is faster than the library behind `@`."""
    packed = torch.ops.mkldnn._reorder_linear_weight(b, None)
    return lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")


def start(message: Message) -> tuple[str, Handler]:
    far = torch.ones(FAR // 4)
    halves = far[: FAR // 8], far[FAR // 8 :]
    pairs = {dtype: torch.randn(2, SIDE, SIDE).to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def measure(_: Message) -> Message:
        found = {}
        for threads in sorted({1, message["threads"]}):
            torch.set_num_threads(threads)
            seconds = min(best(way) for way in (far.sum, far.amax, lambda: torch.dot(*halves)))
            found[f"read GB/s, {threads} threads"] = FAR / seconds / 1e9
        for dtype, (a, b) in pairs.items():
            seconds = min(best(way) for way in (functools.partial(torch.mm, a, b), prepacked(a, b)))
            found[f"{str(dtype).removeprefix('torch.')} matmul GFLOP/s"] = 2 * SIDE**3 / seconds / 1e9
        return found

    return torch.__version__, measure


if __name__ == "__main__":
    serve(start)
