"""Work that a device does while the host goes on, and how to wait for it. A CPU does its work immediately, so the same code runs there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A new tensor on the device. Returns before the copy is made; torch keeps the pinned memory until then."""
    host = torch.from_numpy(values)
    if device.type != "cuda" or not len(host):
        return host.to(device, copy=True)
    return host.pin_memory().to(device, non_blocking=True)


def why_not(device: str) -> str:
    """Why this process cannot use the device; empty if it can. Tried, because what CUDA says of a device may be out of date."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the second from a torch that is built for CPUs
        return str(error).partition("\n")[0]
    return ""


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device; elsewhere, where kernels are interpreted, that of Hopper."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def model_of(device: torch.device) -> str:
    """The name of a GPU's model; of another device, its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def share_memory(share: float) -> None:
    """This process allocates no more than that share of the current CUDA device's memory; whoever exceeds it has a CUDA out of memory."""
    if share < 1:
        torch.cuda.set_per_process_memory_fraction(share)


def free_memory(device: torch.device, share: float = 1.0) -> int:
    """Bytes of a CUDA device that this process, which may use `share` of them, can still allocate."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free if share >= 1 else max(min(free, total * share - torch.cuda.memory_reserved(device)), 0))


def recover(device: torch.device) -> None:
    """Cleans up after a failed allocation: waits for what was begun, and gives back what the allocator keeps for later."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


class Mark:
    """A moment in the work that was submitted to the current stream."""

    def __init__(self, device: torch.device) -> None:
        # Blocking: a thread that waits sleeps, and leaves its core to others.
        self._event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None

    def record(self) -> None:
        """Sets the mark after all work submitted so far."""
        if self._event is not None:
            self._event.record()

    def passed(self) -> bool:
        """Whether the device has passed the mark, or none was recorded. Raises RuntimeError if the device has failed."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Waits until the device has passed the mark; returns immediately if none was recorded."""
        if self._event is not None:
            self._event.synchronize()


class Stream:
    """A stream beside the one on which steps are computed; a CPU has none."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def on(self) -> AbstractContextManager[object]:
        """What is submitted within goes to it."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait(self) -> None:
        """Returns when all that was submitted has ended."""
        if self._stream is not None:
            self._stream.synchronize()


class OwnStream:
    """Work for a device on a stream of its own, one piece after the other, each of which is waited for. For one thread."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._done = Stream(device), Mark(device)

    def _begin(self, work: Callable[[], None]) -> None:
        """Submits it. What fails in the middle has ended when it raises: nothing of it touches memory that is given away then."""
        with self._stream.on():
            try:
                work()
                self._done.record()
            except BaseException:
                self._stream.wait()
                raise

    def _wait(self) -> None:
        """Returns when the device has done what was submitted."""
        self._done.wait()
