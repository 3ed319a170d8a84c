"""Copies KV between the layers of a rank and the staged blocks, beside the forward.

Nobody waits for a load: its request is in no step until it has landed. A layer's saves begin when its attention has been submitted; whoever
asks for the end of the step waits for what is left of them. On a GPU, copies have a stream of their own, and the staged blocks are pinned,
so that kernels read and write them. On a CPU everything is copied immediately, by the same calls.

vLLM calls the hooks of layers from within the forward, but not when it replays a whole graph, or for attention of some kinds: what no hook
has saved begins after the forward.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from baton.engine.vllm.ledger import Pairs


class Lane(Protocol):
    """Work beside the forward's."""

    def follow(self) -> None:
        """What is submitted from now on comes after what the forward has been given so far."""
        ...

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        """Uploads what work needs that is submitted later. Nobody waits."""
        ...

    def submit(self, work: Callable[[], None]) -> Any:
        """Returns a mark behind this work."""
        ...

    def passed(self, mark: Any) -> bool:
        """Whether everything before the mark is done."""
        ...

    def finish(self) -> None:
        """Waits for all that was submitted."""
        ...


class HostLane:
    """A CPU does its work immediately."""

    def follow(self) -> None:
        pass

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        return values

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def passed(self, mark: None) -> bool:
        return True

    def finish(self) -> None:
        pass


class CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def upload(self, values: Tensor, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return values
        with torch.cuda.stream(self._stream):
            return values.pin_memory().to(device, non_blocking=True)

    def submit(self, work: Callable[[], None]) -> torch.cuda.Event:
        with torch.cuda.stream(self._stream):
            work()
            event: torch.cuda.Event = self._stream.record_event()
            return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def finish(self) -> None:
        self._stream.synchronize()


class Layers:
    """`tensors`: the KV of each layer by its name, `[blocks, heads, block_size, width]`. `staged`: `[blocks, layers, heads, block_size,
    width]`, in memory that the device of the layers can reach, or in the host's. `inward`, `outward`: for loads and saves, so that they do
    not wait for each other. `by_layer`: hooks are called once for each layer of a forward, if at all. One thread calls."""

    def __init__(self, tensors: Mapping[str, Tensor], staged: Tensor, inward: Lane, outward: Lane, by_layer: bool = True) -> None:
        self._tensors = dict(tensors)
        self._index = {name: i for i, name in enumerate(tensors)}
        self._staged = staged
        self._inward, self._outward = inward, outward
        self._by_layer = by_layer
        self._loading: dict[str, Any] = {}  # what is loaded for whom: the mark behind it
        self._saves: _Places | None = None
        self._unsaved: list[str] = []

    def expect(self, saves: Pairs) -> None:
        """A step has begun, after whose forward these blocks are to be staged."""
        self._saves, self._unsaved = (self._upload(saves, self._outward), list(self._tensors)) if saves else (None, [])

    def load(self, request_id: str, pairs: Pairs) -> None:
        """Begins to bring staged blocks to where a later forward finds them."""
        places = self._upload(pairs, self._inward)
        self._inward.follow()
        self._loading[request_id] = self._inward.submit(partial(self._load, places))

    def loaded(self) -> set[str]:
        """The requests whose blocks have come, each of them once."""
        found = {request_id for request_id, mark in self._loading.items() if self._inward.passed(mark)}
        for request_id in found:
            del self._loading[request_id]
        return found

    def after(self, name: str) -> None:
        """The attention of a layer has been submitted, and before it what this step adds to the layer's KV."""
        if self._by_layer and name in self._unsaved:
            self._unsaved.remove(name)
            self._begin_save(name)

    def end(self) -> None:
        """The forward has been submitted. Returns when all blocks are staged that `expect` named."""
        for name in self._unsaved:
            self._begin_save(name)
        if self._saves is not None:
            self._outward.finish()
        self.expect([])

    def _begin_save(self, name: str) -> None:
        assert self._saves is not None
        self._outward.follow()
        self._outward.submit(partial(self._save, name, self._saves))

    def _upload(self, pairs: Pairs, lane: Lane) -> "_Places":
        ours, theirs = torch.tensor(pairs).unbind(1)
        device = next(iter(self._tensors.values())).device
        return _Places(lane.upload(ours, self._staged.device), lane.upload(theirs, device))

    def _load(self, places: "_Places") -> None:
        for layer, tensor in enumerate(self._tensors.values()):
            tensor[places.theirs] = self._staged[places.ours, layer].to(tensor.device)

    def _save(self, name: str, places: "_Places") -> None:
        self._staged[places.ours, self._index[name]] = self._tensors[name][places.theirs].to(self._staged.device)


class _Places(NamedTuple):
    ours: Tensor  # staged blocks, on the device of the staged memory
    theirs: Tensor  # vLLM's, on the device of the layers
