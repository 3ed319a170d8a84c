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


def ways(a: torch.Tensor, b: torch.Tensor) -> list[Callable[[], object]]:
    """Of multiplying: through the library behind `@`, and oneDNN, which on some processors is faster. Raises ValueError where no
    instruction that oneDNN knows multiplies the type: the former then takes minutes, and says nothing of the processor."""
    if a.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise ValueError("oneDNN does not multiply bfloat16 on this processor")
    packed = torch.ops.mkldnn._reorder_linear_weight(b, None)
    return [functools.partial(torch.mm, a, b), lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], "")]


def start(message: Message) -> tuple[str, Handler]:
    far = torch.ones(FAR // 4)
    halves = far[: FAR // 8], far[FAR // 8 :]

    def read(threads: int) -> float:
        torch.set_num_threads(threads)
        return FAR / min(best(way) for way in (far.sum, far.amax, lambda: torch.dot(*halves))) / 1e9

    def multiply(dtype: torch.dtype) -> float:
        return 2 * SIDE**3 / min(best(way) for way in ways(*torch.randn(2, SIDE, SIDE).to(dtype))) / 1e9

    ceilings = {f"read GB/s, {threads} threads": functools.partial(read, threads) for threads in sorted({1, message["threads"]})}
    for dtype in (torch.float32, torch.bfloat16):
        ceilings[f"{str(dtype).removeprefix('torch.')} matmul GFLOP/s"] = functools.partial(multiply, dtype)

    def measure(_: Message) -> Message:
        """One that cannot be measured is missing; the others are found."""
        found, missing = {}, {}
        for name, ceiling in ceilings.items():
            try:
                found[name] = ceiling()
            except (RuntimeError, ValueError) as error:
                missing[name] = str(error).partition("\n")[0]
        return {"found": found, "missing": missing}

    return torch.__version__, measure


if __name__ == "__main__":
    serve(start)
