"""A decode step as one call into native code: the kernel calls of a step, recorded once for each size of the batch, and repeated.

A recording is an ordinary step, in which each kernel call is kept with its packed arguments; so what a step computes is written down once,
in the model. When it is repeated, kernels read and write the same addresses: the step's inputs stay where they are, and what the step
allocates comes from an `Arena` that lives as long as the recording. A step that computes anything outside a kernel is refused. (On a GPU,
CUDA graphs do the same: `baton.engine.gpu.graphs`.)
"""

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from baton.engine.core.pages import LINE
from baton.engine.cpu import kernel

Bytes = npt.NDArray[np.uint8]
Made = TypeVar("Made")


class Unrecordable(RuntimeError):
    """The step computes something outside a kernel."""


class Arena:
    """Memory for what a step allocates. What nothing refers to any more is given again: calls are repeated in their order, so whoever used
    it before has finished. Recordings that never run at the same time may share one."""

    def __init__(self) -> None:
        self._idle: list[Bytes] = []
        self._all: list[Bytes] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        fitting = [i for i, each in enumerate(self._idle) if len(each) >= size]
        memory = self._idle.pop(min(fitting, key=lambda i: len(self._idle[i]))) if fitting else self._more(size)
        part = memory[:size]
        weakref.finalize(part, self._idle.append, memory)  # the tensor and its views refer to `part`
        return torch.from_numpy(part).view(dtype).view(shape)

    def lent(self, tensor: Tensor) -> Tensor:
        """The same numbers, without keeping their memory: the next recording may use it, too. A tensor that is not from here stays."""
        first, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        for memory in self._all:
            at = first - memory.ctypes.data
            if 0 <= at <= len(memory) - size and tensor.is_contiguous():
                return torch.from_numpy(memory[at : at + size]).view(tensor.dtype).view(tensor.shape)
        return tensor

    def _more(self, size: int) -> Bytes:
        """A power of two: steps of many sizes need no memory of their own then."""
        memory = _aligned(1 << max(0, size - 1).bit_length())
        self._all.append(memory)
        return memory


def _aligned(size: int) -> Bytes:
    whole = np.empty(size + LINE, np.uint8)
    first = -whole.ctypes.data % LINE
    return whole[first : first + size]


class _Watch(TorchDispatchMode):
    """Allocations come from the arena; views and marks for torch's profiler are allowed, and nothing else is."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arena = arena

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch imports its whole compiler at the first call, to keep it away from this class: 100 MiB, and a second or more."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.ops.aten.new_empty.default:
            return self._arena.empty(tuple(args[1]), given.get("dtype") or args[0].dtype)
        if func is torch.ops.aten.empty_like.default:
            return self._arena.empty(tuple(args[0].shape), given.get("dtype") or args[0].dtype)
        returned = func._schema.returns
        if func.namespace == "profiler":
            return func(*args, **given)
        if returned and all(each.alias_info is not None and not each.alias_info.is_write for each in returned):
            return func(*args, **given)
        raise Unrecordable(str(func))


class Recording(Generic[Made]):
    """`compute`'s kernel calls. Calling it repeats them, and returns the tensors that `compute` returned, with new contents."""

    def __init__(self, compute: Callable[[], Made], arena: Arena) -> None:
        """Computes once. Raises Unrecordable."""
        with kernel.recorded() as calls, _Watch(arena):
            self.result = compute()
        self._arena = arena
        self.replay = kernel.Repeated(calls)

    def __call__(self) -> Made:
        self.replay()
        return self.result
