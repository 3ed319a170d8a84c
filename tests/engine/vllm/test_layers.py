"""Copies beside a forward, on a lane that does nothing before it must: what is used too early is not there, and what is overwritten too
early is lost."""

from collections.abc import Callable

import pytest
import torch

from baton.engine.vllm.layers import HostLane, Layers

NAMES = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")
THEIRS, OURS, HEADS, SIZE, WIDTH = 9, 7, 2, 4, 6
LOADS = [(3, 5), (0, 8)]  # (staged block, vLLM's block)
SAVES = [(6, 1), (2, 4)]
Parts = tuple[dict[str, torch.Tensor], torch.Tensor]


class LateLane:
    """Work is done when somebody waits for it, or a test lets it. `order`: what happened."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0
        self.order: list[str] = []

    def follow(self) -> None:
        self.order.append("follow")

    def upload(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        return values

    def submit(self, work: Callable[[], None]) -> int:
        self.work.append(work)
        return len(self.work)

    def passed(self, mark: int) -> bool:
        return self.done >= mark

    def finish(self) -> None:
        self.order.append("finish")
        self.go_on(len(self.work))

    def go_on(self, mark: int) -> None:
        while self.done < mark:
            self.work[self.done]()
            self.done += 1


def parts(dtype: torch.dtype = torch.float32, heads: slice = slice(0, 2)) -> Parts:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: (20 * torch.randn(THEIRS, HEADS, SIZE, WIDTH, generator=generator)).to(dtype) for name in NAMES}
    whole = (20 * torch.randn(OURS, len(NAMES), 2 * HEADS, SIZE, WIDTH, generator=generator)).to(dtype)
    return tensors, whole[:, :, heads]


@pytest.fixture(params=[(torch.float32, slice(0, 2)), (torch.bfloat16, slice(2, 4)), (torch.uint8, slice(2, 4))], ids=str)
def both(request: pytest.FixtureRequest) -> Parts:
    """The layers and the staged part of a rank; fp8 is bytes."""
    return parts(*request.param)


def test_nobody_waits_for_a_load_and_its_request_is_named_once_when_it_is_there(both: Parts) -> None:
    tensors, staged = both
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    lane, outward = LateLane(), LateLane()
    layers = Layers(tensors, staged, lane, outward)
    layers.expect(SAVES)
    layers.load("r1", LOADS)
    layers.load("r2", [(1, 2)])
    layers.end()  # nor does a save
    assert outward.done == len(NAMES)
    assert layers.loaded() == set() and lane.order == ["follow", "follow"] and lane.done == 0
    assert all(torch.equal(tensors[name], expected[name]) for name in NAMES)
    for mark, request, pairs in ((1, "r1", LOADS), (2, "r2", [(1, 2)])):
        lane.go_on(mark)
        for i, name in enumerate(NAMES):
            for ours, theirs in pairs:
                expected[name][theirs] = staged[ours, i]
            assert torch.equal(tensors[name], expected[name])
        assert layers.loaded() == {request} and layers.loaded() == set()


def test_layers_are_staged_beside_the_forward_and_have_landed_at_its_end(both: Parts) -> None:
    tensors, staged = both
    expected = staged.clone()
    lane = LateLane()
    layers = Layers(tensors, staged, LateLane(), lane)
    layers.expect(SAVES)
    for i, name in enumerate(NAMES):
        tensors[name][1:5] += 1  # what the forward adds
        layers.after(name)
        assert lane.order == ["follow"] * (i + 1) and lane.done == 0, "behind this layer, and nobody waits"
        for ours, theirs in SAVES:
            expected[ours, i] = tensors[name][theirs]
    layers.end()
    assert lane.order[-1] == "finish" and torch.equal(staged, expected)
    layers.end()
    assert lane.order.count("finish") == 1, "a step without saves waits for nothing"


@pytest.mark.parametrize(("called", "by_layer"), [((), True), (NAMES, False), (NAMES[:1], True)])
def test_what_no_hook_has_staged_is_staged_after_the_forward(called: tuple[str, ...], by_layer: bool) -> None:
    """A graph that is replayed whole calls none. Two halves of a batch call each twice: after the first, a part is missing."""
    tensors, staged = parts()
    lane = LateLane()
    layers = Layers(tensors, staged, LateLane(), lane, by_layer)
    layers.expect(SAVES)
    for name in called:
        layers.after(name)
    if not by_layer:
        assert not lane.work
        for name in NAMES:
            tensors[name] += 1  # the other half
    layers.end()
    assert all(torch.equal(staged[ours, i], tensors[name][theirs]) for i, name in enumerate(NAMES) for ours, theirs in SAVES)
    assert len(lane.work) == len(NAMES)


def test_hooks_of_a_step_that_saves_nothing_do_nothing() -> None:
    tensors, staged = parts()
    lane = LateLane()
    layers = Layers(tensors, staged, LateLane(), lane)
    layers.expect([])
    for name in (*NAMES, "a layer without KV"):
        layers.after(name)
    layers.end()
    assert not lane.work and not lane.order and layers.loaded() == set()


def test_a_cpu_copies_by_the_same_calls() -> None:
    tensors, staged = parts()
    layers = Layers(tensors, staged, HostLane(), HostLane())
    layers.expect(SAVES)
    layers.load("r", LOADS)
    assert torch.equal(tensors[NAMES[2]][8], staged[0, 2]) and layers.loaded() == {"r"} and layers.loaded() == set()
    layers.after(NAMES[0])
    assert torch.equal(staged[6, 0], tensors[NAMES[0]][1])
    layers.end()
    assert torch.equal(staged[2, 2], tensors[NAMES[2]][4])
