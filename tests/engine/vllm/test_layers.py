"""Copies beside a forward, on a lane that does nothing before it must: what is used too early is not there, and what is overwritten too
early is lost."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from baton.engine.vllm.layers import HostLane, Layers

NAMES = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")
THEIRS, OURS, HEADS, SIZE, WIDTH = 9, 7, 2, 4, 6


class LateLane:
    """Work is done when somebody waits for it. `order`: what happened, and how much work was behind it."""

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []
        self.done = 0
        self.order: list[str] = []

    def follow(self) -> None:
        self.order.append("follow")

    def upload(self, values: torch.Tensor, device: torch.device) -> torch.Tensor:
        return values

    def submit(self, work: Callable[[], None]) -> int:
        self._work.append(work)
        return len(self._work)

    def hold(self, mark: int) -> None:
        while self.done < mark:
            self._work[self.done]()
            self.done += 1

    def finish(self) -> None:
        self.order.append("finish")
        self.hold(len(self._work))


def parts(dtype: torch.dtype = torch.float32, heads: slice = slice(None)) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(THEIRS, HEADS, SIZE, WIDTH, generator=generator).to(dtype) for name in NAMES}
    whole = torch.randn(OURS, len(NAMES), 2 * HEADS, SIZE, WIDTH, generator=generator).to(dtype)
    return tensors, whole[:, :, heads]


@pytest.fixture(params=[(torch.float32, slice(0, 2)), (torch.bfloat16, slice(2, 4)), (torch.uint8, slice(2, 4))], ids=str)
def both(request: pytest.FixtureRequest) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return parts(*request.param)


def warmed_up(*arguments: Any) -> Layers:
    """All hooks have been called once."""
    layers = Layers(*arguments)
    layers.expect([])
    for name in NAMES:
        layers.before(name)
        layers.after(name)
    layers.end()
    return layers


LOADS = [(3, 5), (0, 8)]  # (staged block, vLLM's block)
SAVES = [(6, 1), (2, 4)]


def test_the_attention_of_a_layer_waits_for_its_own_kv_alone(both: tuple[dict[str, torch.Tensor], torch.Tensor]) -> None:
    tensors, staged = both
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    lane = LateLane()
    layers = warmed_up(tensors, staged, lane)
    layers.expect([])
    layers.load(LOADS, hooked=True)
    assert lane.done == 0 and all(torch.equal(tensors[name], before[name]) for name in NAMES), "nothing waits yet"
    for i, name in enumerate(NAMES):
        layers.before(name)
        assert lane.done == i + 1
        for ours, theirs in LOADS:
            before[name][theirs] = staged[ours, i]
        assert torch.equal(tensors[name], before[name])
        layers.after(name)
    layers.end()
    assert lane.order == ["follow"], "the host waits for no load"
    assert all(torch.equal(tensors[name], before[name]) for name in NAMES)


@pytest.mark.parametrize(("hooked", "by_layer"), [(False, True), (True, False)])
def test_a_forward_that_calls_no_hook_or_several_waits_for_all_loads(hooked: bool, by_layer: bool) -> None:
    tensors, staged = parts(heads=slice(0, 2))
    lane = LateLane()
    layers = warmed_up(tensors, staged, lane, by_layer)
    layers.expect([])
    layers.load(LOADS, hooked)
    assert lane.done == len(NAMES)
    assert all(torch.equal(tensors[name][5], staged[3, i]) for i, name in enumerate(NAMES))


@pytest.mark.parametrize("calling", [(), NAMES[:2]])
def test_hooks_are_relied_upon_only_once_every_layer_has_called_one(calling: tuple[str, ...]) -> None:
    """Attention of some kinds calls none."""
    tensors, staged = parts(heads=slice(0, 2))
    lane = LateLane()
    layers = Layers(tensors, staged, lane)
    for name in calling:
        layers.after(name)
    layers.load(LOADS, hooked=True)
    assert lane.done == len(NAMES)
    layers.end()


def test_a_forward_that_did_not_wait_for_a_layer_is_an_error_and_not_a_wrong_answer() -> None:
    tensors, staged = parts(heads=slice(0, 2))
    layers = warmed_up(tensors, staged, LateLane())
    layers.expect([])
    layers.load(LOADS, hooked=True)
    for name in (NAMES[0], NAMES[2]):
        layers.before(name)
    with pytest.raises(RuntimeError, match=rf"before the attention of {NAMES[1]}$"):
        layers.end()


def test_layers_are_staged_beside_the_forward_and_have_landed_at_its_end(both: tuple[dict[str, torch.Tensor], torch.Tensor]) -> None:
    tensors, staged = both
    expected = staged.clone()
    lane = LateLane()
    layers = Layers(tensors, staged, lane)
    layers.expect(SAVES)
    layers.load([], hooked=True)  # vLLM may call it after the forward, too
    for i, name in enumerate(NAMES):
        layers.before(name)
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
    tensors, staged = parts(heads=slice(0, 2))
    lane = LateLane()
    layers = Layers(tensors, staged, lane, by_layer)
    layers.expect(SAVES)
    for name in called:
        layers.after(name)
    if not by_layer:
        assert not lane._work
        for name in NAMES:
            tensors[name] += 1  # the other half
    layers.end()
    assert all(torch.equal(staged[ours, i], tensors[name][theirs]) for i, name in enumerate(NAMES) for ours, theirs in SAVES)


def test_hooks_of_a_step_that_copies_nothing_do_nothing() -> None:
    tensors, staged = parts(heads=slice(0, 2))
    lane: Any = LateLane()
    layers = Layers(tensors, staged, lane)
    layers.expect([])
    for name in (*NAMES, "a layer without KV"):
        layers.before(name)
        layers.after(name)
    layers.load([], hooked=True)
    layers.end()
    assert not lane._work and not lane.order


def test_a_cpu_copies_by_the_same_calls() -> None:
    tensors, staged = parts(heads=slice(0, 2))
    layers = warmed_up(tensors, staged, HostLane())
    layers.expect(SAVES)
    layers.load(LOADS, hooked=True)
    assert torch.equal(tensors[NAMES[2]][8], staged[0, 2])
    layers.after(NAMES[0])
    assert torch.equal(staged[6, 0], tensors[NAMES[0]][1])
    for name in NAMES:
        layers.before(name)
    layers.end()
    assert torch.equal(staged[2, 2], tensors[NAMES[2]][4])
