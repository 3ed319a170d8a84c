"""What a device does behind the host's back, and how to wait for it. On the CPU everything is done at once, so that the same code runs."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def upload(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A new tensor on the device. Returns before the copy is made: the pinned memory in between is torch's, which keeps it until then."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.clone()


class Mark:
    """A moment in the work that was given to the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Moves the mark behind all work given so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the device has passed the mark; at once where none was recorded."""
        if self._event is not None:
            self._event.synchronize()
