"""Work that a device does while the host goes on, and how to wait for it. A CPU does its work immediately, so the same code runs there."""

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


def is_there(device: str) -> bool:
    return torch.device(device).type != "cuda" or torch.cuda.is_available()


def model_of(device: torch.device) -> str:
    """The name of a GPU's model; of another device, its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free_memory(device: torch.device) -> int:
    """Bytes that a CUDA device has left."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def recover(device: torch.device) -> None:
    """After an allocation that failed: waits for what was begun, and gives back what the allocator keeps for later."""
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
