"""Copies KV between the layers of a rank and the staged blocks, layer by layer beside the forward.

A step's loads begin before its forward, and a layer's attention waits for that layer's alone. A layer's saves begin when its attention has
been submitted; whoever asks for the end of the step waits for what is left of them. On a GPU the waits are the device's, but for the last;
the staged blocks are pinned, so that kernels read and write them. On a CPU everything is copied immediately, by the same calls.

vLLM calls the hooks of layers from within the forward. When it replays a whole graph, or attention of a kind that has none, it calls none:
then the forward waits for all loads, and all saves begin after it. So a hook is relied upon only once every layer has called it.
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
        """For work that is submitted later. Nobody waits."""
        ...

    def submit(self, work: Callable[[], None]) -> Any:
        """Returns a mark behind this work."""
        ...

    def hold(self, mark: Any) -> None:
        """What the forward is given from now on comes after the mark."""
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

    def hold(self, mark: None) -> None:
        pass

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

    def hold(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        self._stream.synchronize()


class Layers:
    """`tensors`: the KV of each layer by its name, `[blocks, heads, block_size, width]`. `staged`: `[blocks, layers, heads, block_size,
    width]`, in memory that the device of the layers can reach, or in the host's. `by_layer`: hooks are called once for each layer of a
    forward, if at all. One thread calls."""

    def __init__(self, tensors: Mapping[str, Tensor], staged: Tensor, lane: Lane, by_layer: bool = True) -> None:
        self._tensors = dict(tensors)
        self._index = {name: i for i, name in enumerate(tensors)}
        self._staged = staged
        self._lane = lane
        self._by_layer = by_layer
        self._loading: dict[str, Any] = {}  # layers that the forward has not waited for, and their marks
        self._saves: _Places | None = None
        self._unsaved: list[str] = []
        self._calling: set[str] = set()  # layers whose hooks have been called

    def expect(self, saves: Pairs) -> None:
        """A step has begun, after whose forward these blocks are to be staged."""
        self._saves, self._unsaved = (self._upload(saves), list(self._tensors)) if saves else (None, [])

    def load(self, loads: Pairs, hooked: bool) -> None:
        """Begins to bring staged blocks to where the forward finds them. `hooked`: it will call `before` for every layer, if ever."""
        if loads:
            places = self._upload(loads)
            self._lane.follow()
            for name in self._tensors:
                self._loading[name] = self._lane.submit(partial(self._load, name, places))
        if not (hooked and self._by_layer and len(self._calling) == len(self._tensors)):
            for name in list(self._loading):
                self.before(name)

    def before(self, name: str) -> None:
        """The attention of a layer is about to be submitted."""
        if (mark := self._loading.pop(name, None)) is not None:
            self._lane.hold(mark)

    def after(self, name: str) -> None:
        """The attention of a layer has been submitted, and before it what this step adds to the layer's KV."""
        if name in self._tensors:
            self._calling.add(name)
        if self._by_layer and name in self._unsaved:
            self._unsaved.remove(name)
            self._begin_save(name)

    def end(self) -> None:
        """The forward has been submitted. Returns when all blocks are staged that `expect` named. Raises RuntimeError if a layer has not
        waited for its KV: nobody knows what the forward has read."""
        if self._loading:
            raise RuntimeError(f"no hook was called before the attention of {', '.join(self._loading)}")
        for name in self._unsaved:
            self._begin_save(name)
        if self._saves is not None:
            self._lane.finish()
        self.expect([])

    def _begin_save(self, name: str) -> None:
        assert self._saves is not None
        self._lane.follow()
        self._lane.submit(partial(self._save, name, self._saves))

    def _upload(self, pairs: Pairs) -> "_Places":
        ours, theirs = torch.tensor(pairs).unbind(1)
        device = next(iter(self._tensors.values())).device
        return _Places(self._lane.upload(ours, self._staged.device), self._lane.upload(theirs, device))

    def _load(self, name: str, places: "_Places") -> None:
        tensor = self._tensors[name]
        tensor[places.theirs] = self._staged[places.ours, self._index[name]].to(tensor.device)

    def _save(self, name: str, places: "_Places") -> None:
        self._staged[places.ours, self._index[name]] = self._tensors[name][places.theirs].to(self._staged.device)


class _Places(NamedTuple):
    ours: Tensor  # staged blocks, on the device of the staged memory
    theirs: Tensor  # vLLM's, on the device of the layers
