"""What is decided where nobody decides: a GPU gets the numbers of a GPU, a CPU those that it had, and what is set stays."""

from pathlib import Path
from typing import Any

import pytest

from baton.engine.core.limits import Limits
from baton.engine.defaults import GIB, DeviceFacts, settle
from baton.engine.options import Options

CPU = DeviceFacts("cpu")
H100, A10 = DeviceFacts("cuda", 79 * GIB, (9, 0)), DeviceFacts("cuda", 23 * GIB, (8, 6))
T4 = DeviceFacts("cuda", 15 * GIB, (7, 5))


def settled(device: DeviceFacts, stored: str | None = "bfloat16", **keys: Any) -> Options:
    return settle(Options.of(Path(), device=device.kind, **keys), device, stored).options


def numbers(options: Options) -> tuple[Any, ...]:
    engine = options.engine
    return options.model.dtype, engine.block_size, engine.max_num_seqs, engine.max_num_batched_tokens, engine.kv_memory_fraction


@pytest.mark.parametrize(
    ("device", "keys", "expected"),
    [
        (CPU, {}, ("float32", 16, 64, 512, 0.25)),
        (H100, {}, ("bfloat16", 16, 256, 8192, 0.95)),
        (A10, {}, ("bfloat16", 16, 256, 2048, 0.95)),
        (DeviceFacts("cuda"), {}, ("bfloat16", 16, 256, 2048, 0.95)),
        (H100, {"attention_backend": "flash_attn"}, ("bfloat16", 256, 256, 8192, 0.95)),
        (H100, {"kind": "vllm"}, ("auto", None, None, None, 0.95)),
        (CPU, {"kind": "vllm"}, ("float32", 32, 64, 512, 0.25)),
    ],
)
def test_what_is_left_open_is_decided_by_the_device(device: DeviceFacts, keys: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert numbers(settled(device, **keys)) == expected
    assert Limits().max_num_seqs == 64 and Limits().max_num_batched_tokens == 512, "a CPU's figures are those of the scheduler"


@pytest.mark.parametrize(
    ("device", "stored", "dtype"),
    [
        (H100, "float16", "float16"),
        (H100, "float32", "float32"),
        (H100, None, "float32"),
        (H100, "float8_e4m3fn", "float32"),
        (T4, "bfloat16", "float16"),
        (T4, "float16", "float16"),
        (CPU, "float16", "float32"),
        (CPU, "bfloat16", "float32"),
    ],
)
def test_the_type_is_the_checkpoints_where_the_device_can_multiply_it(device: DeviceFacts, stored: str | None, dtype: str) -> None:
    assert settled(device, stored).model.dtype == dtype


@pytest.mark.parametrize("device", [CPU, H100])
@pytest.mark.parametrize("kind", ["baton", "vllm"])
def test_what_is_set_stays_and_has_no_reason(device: DeviceFacts, kind: str) -> None:
    mine: dict[str, Any] = {
        "dtype": "float16",
        "block_size": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 77,
        "kv_memory_fraction": 0.5,
        "speculation_batch_tokens": 9,
    }
    answer = settle(Options.of(Path(), kind=kind, device=device.kind, **mine), device, "bfloat16")
    assert numbers(answer.options) == ("float16", 64, 3, 77, 0.5) and not answer.why
    again = settle(settled(device, kind=kind), device, "bfloat16")
    assert again.options == settled(device, kind=kind)


def test_of_two_bounds_the_open_one_follows_the_other() -> None:
    assert settled(H100, max_num_batched_tokens=100).engine.max_num_seqs == 100
    assert settled(CPU, max_num_batched_tokens=32).engine.max_num_seqs == 32
    assert settled(CPU, max_num_seqs=1024).engine.max_num_batched_tokens == 1024
    assert settled(H100, max_num_seqs=8).engine.max_num_batched_tokens == 8192
    settled(CPU, max_num_seqs=1024).engine.limits  # noqa: B018 - it raises for bounds that do not fit each other


def test_whatever_was_open_has_a_reason() -> None:
    for device in (CPU, H100):
        why = settle(Options.of(Path(), device=device.kind), device, "bfloat16").why
        keys = {"block_size", "kv_memory_fraction", "max_num_seqs", "max_num_batched_tokens", "speculation_batch_tokens"}
        assert why.keys() == {"model.dtype", *(f"engine.{key}" for key in keys)} and all(why.values())
        for guesses in ({"predictions": False}, {"predictions": False, "speculation": "prompt_lookup"}):
            settled = settle(Options.of(Path(), device=device.kind, **guesses), device, "bfloat16")
            assert ("engine.speculation_batch_tokens" in settled.why) == ("speculation" in guesses)
    assert settle(Options.of(Path()), T4, "bfloat16").why["model.dtype"].startswith("the checkpoint is bfloat16, which a GPU of")
