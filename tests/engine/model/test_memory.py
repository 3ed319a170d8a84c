"""Weights live close together in huge pages, memory goes back while a model is loaded, and stays once it serves."""

import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forks import forked

from baton.engine.core.pages import LINE
from baton.engine.model import memory
from baton.engine.model.memory import REGION, zeros

KEPT = """
import sys
import torch
from baton.engine.model.memory import keep_memory, return_memory

def resident():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))

def stays(megabytes):
    large, barrier = torch.ones(megabytes << 18), torch.ones(1000)
    full = resident()
    del large
    return full - resident() < megabytes // 2

stays(30)  # from now on, glibc would keep such memory
{first}
stays(30)
before = stays(20)
{then}
stays(30)
print(before, stays(60))  # more than anything free
"""


COMPILER = """
import os
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from baton.engine.cpu.recording import Arena, _Watch

class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {{}}))

class Finder:  # to be asked for it is enough: it takes seconds
    def find_spec(self, name, path, target=None):
        if name == "torch._dynamo":
            print(True, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder())
x = torch.ones(3)
with {mode}:
    x.new_empty(2)
print("torch._dynamo" in sys.modules)
"""
SCRIPTS = {
    "loading": KEPT.format(first="return_memory()", then="keep_memory()"),
    "the next": KEPT.format(first="keep_memory()", then="return_memory()"),
    "ours": COMPILER.format(mode="_Watch(Arena())"),
    "plain": COMPILER.format(mode="Plain()"),
}


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """What each script prints, in words."""
    return {name: printed.split() for name, printed in zip(SCRIPTS, forked(*SCRIPTS.values()), strict=True)}


@pytest.mark.skipif(sys.platform != "linux", reason="settings of glibc")
def test_freed_memory_goes_back_while_a_model_is_loaded_and_stays_afterwards(told: dict[str, list[str]]) -> None:
    assert told["loading"] == ["False", "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="settings of glibc")
def test_the_next_model_gives_back_what_it_needs_for_moments_too(told: dict[str, list[str]]) -> None:
    assert told["the next"] == ["True", "False"]


def test_recording_a_step_does_not_import_torchs_compiler(told: dict[str, list[str]]) -> None:
    """It takes 100 MiB."""
    assert told["ours"] == ["False"] and told["plain"] == ["True"]


def test_weights_are_zeros_that_share_nothing() -> None:
    shapes = [((3, 5), torch.float32), ((7,), torch.int8), ((2, 2, 33), torch.bfloat16), ((100,), torch.uint8)]
    tensors = [zeros(shape, dtype) for shape, dtype in shapes for _ in range(3)]
    for tensor, (shape, dtype) in zip(tensors, [each for each in shapes for _ in range(3)], strict=True):
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % LINE == 0
    for i, tensor in enumerate(tensors):
        assert not tensor.any(), "another tensor's numbers"
        tensor.fill_(i + 1)
    for i, tensor in enumerate(tensors):
        assert tensor.eq(i + 1).all()


def test_a_tensor_larger_than_a_region_has_one_of_its_own() -> None:
    large = zeros((REGION + 1,), torch.uint8)
    assert large[-1] == 0
    large[-1] = 1
    assert not zeros((LINE,), torch.uint8).any()


def test_memory_goes_when_its_last_tensor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_newest", None)
    one, other = zeros((10,), torch.uint8), zeros((10,), torch.uint8)
    region = memory._newest
    assert isinstance(region, weakref.ref)
    del one
    assert region() is not None
    part = other[3:]
    del other
    assert region() is not None
    del part
    assert region() is None
    assert not zeros((10,), torch.uint8).any()


def test_threads_get_memory_of_their_own() -> None:
    with ThreadPoolExecutor(8) as pool:
        tensors = list(pool.map(lambda i: zeros((999,), torch.int64).fill_(i), range(400)))
    assert all(tensor.eq(i).all() for i, tensor in enumerate(tensors))
