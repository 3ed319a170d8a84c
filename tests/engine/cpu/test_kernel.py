"""A kernel call accepts what its declaration says and refuses everything else before any native code runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from baton.engine.cpu import decode_attention, draw, experts, groups, int4, int8, kernel, panels, pointwise, span_attention
from baton.engine.cpu.group_tile import WORDS
from baton.engine.cpu.kernel import INT, REAL, ArgumentError, floats, int64s, numbers
from baton.engine.cpu.tile import OUTS


@kernel.kernel(
    "rows * width",
    x=numbers("rows", "width", strided=1),
    more=numbers("width", optional=True),
    marks=int64s("rows"),
    out=floats("rows", "2 * width"),
    times=INT,
    add=REAL,
)
def _spread(x, x_stride0, more, has_more, marks, out, rows, width, times, add):  # type: ignore[no-untyped-def]
    """out = x · times + add + more, and the row's mark next to each. It reads only what was declared."""
    for row in range(rows):
        for i in range(width):
            value = x[row * x_stride0 + i]
            out[2 * (row * width + i)] = value * times + add + (more[i] if has_more else 0)
            out[2 * (row * width + i) + 1] = marks[row]


def arguments(**change: Any) -> dict[str, Any]:
    given = {
        "x": torch.arange(12.0).view(3, 4)[:, :2],
        "more": torch.tensor([100.0, 200.0]),
        "marks": torch.tensor([7, 8, 9]),
        "out": torch.zeros(3, 4),
        "times": 10,
        "add": 0.5,
    }
    return given | change


def test_every_argument_arrives_where_it_is_declared() -> None:
    given = arguments()
    _spread(**given)
    assert given["out"].tolist() == [[100.5, 7, 210.5, 7], [140.5, 8, 250.5, 8], [180.5, 9, 290.5, 9]]
    given = arguments(more=None)
    _spread(*given.values())
    assert given["out"].tolist() == [[0.5, 7, 10.5, 7], [40.5, 8, 50.5, 8], [80.5, 9, 90.5, 9]]


@pytest.fixture
def nothing_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that gets as far as packing its arguments fails with a different error."""

    def packed(*_: object) -> bytes:
        raise AssertionError("the arguments were packed")

    for call in (_spread, *KERNELS.values()):
        monkeypatch.setitem(call.__globals__, "pack", packed)


@pytest.mark.usefixtures("nothing_native")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"x": torch.zeros(3, 2, dtype=torch.float64)}, "x: must be torch.float32 or torch.bfloat16, got torch.float64"),
        ({"x": torch.zeros(3, 2, dtype=torch.bfloat16)}, "more: must be torch.bfloat16, got torch.float32"),
        ({"x": torch.zeros(3, 2, 1)}, r"x: must be \[rows, width\], got \[3, 2, 1\]"),
        ({"x": torch.zeros(2, 3).t()}, "x: must be contiguous, after its first 1 dimensions"),
        ({"x": None}, "x: must be a tensor, got NoneType"),
        ({"more": torch.zeros(3)}, r"more: must be \[width\] = \[2\], got \[3\]"),
        ({"more": torch.zeros(4)[::2]}, "more: must be contiguous"),
        ({"marks": torch.zeros(3)}, "marks: must be torch.int64, got torch.float32"),
        ({"marks": torch.zeros(4, dtype=torch.int64)}, r"marks: must be \[rows\] = \[3\], got \[4\]"),
        ({"marks": 5}, "marks: must be a tensor, got int"),
        ({"out": torch.zeros(3, 2)}, r"out: must be \[rows, 2 \* width\] = \[3, 4\], got \[3, 2\]"),
        ({"out": torch.zeros(3, 8)[:, ::2]}, "out: must be contiguous"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=f"^_spread: {says}"):
        _spread(**arguments(**change))


@pytest.mark.usefixtures("nothing_native")
@pytest.mark.parametrize("name", arguments())
def test_a_missing_argument_is_refused_by_name(name: str) -> None:
    given = arguments()
    del given[name]
    with pytest.raises(TypeError, match=rf"_spread\(\) missing 1 required positional argument: '{name}'"):
        _spread(**given)


@pytest.mark.usefixtures("nothing_native")
def test_arguments_that_fit_are_packed() -> None:
    """Negative control of the fixture."""
    with pytest.raises(AssertionError, match="packed"):
        _spread(**arguments())


def test_a_kernel_with_an_undeclared_parameter_is_refused() -> None:
    def asks(x, hight):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(ArgumentError, match="asks: hight: neither declared"):
        kernel.kernel("rows", x=numbers("rows"))(asks)
    kernel.prepare(torch.bfloat16)  # it is not among those that are made for the first model of that type


def half(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


KEPT: list[Tensor] = []


def tables(*parts: Tensor) -> Tensor:
    """Where the parts of a matrix are, for one expert."""
    KEPT.extend(parts)
    return torch.tensor([[part.data_ptr() for part in parts]])


FOUR, EIGHT = torch.zeros(OUTS * WORDS, dtype=torch.int32), torch.zeros(OUTS * 32, dtype=torch.uint8)
HALF, SINGLE = torch.zeros(OUTS, dtype=torch.float16), torch.zeros(OUTS)
# Forms of W in groups: numbers, scales, shifts
GROUPED: dict[str, tuple[Tensor, ...]] = {
    "half4": (FOUR, HALF),
    "half4_shifted": (FOUR, HALF, HALF),
    "single4": (FOUR, SINGLE, SINGLE),
    "half8": (EIGHT, HALF),
    "single8": (EIGHT, SINGLE, SINGLE),
}
KERNELS: dict[str, Callable[..., None]] = {
    "add_rms_norm": pointwise.add_rms_norm,
    "gated": pointwise.gated,
    "rotate": pointwise.rotate,
    "turn": pointwise.turn,
    "embed": pointwise.embed,
    "turns": pointwise.turns,
    "norm_heads": pointwise.norm_heads,
    "latent_heads": pointwise.latent_heads,
    "to_logits": pointwise.to_logits,
    "greatest": pointwise.greatest,
    "next_greatest": pointwise.next_greatest,
    "draw": draw._draw,
    "quantize": int8.quantize,
    "dequantize": int8.dequantize,
    "attend": decode_attention._attend,
    "store": decode_attention._store,
    "attend_span": span_attention._attend_span,
    "product": panels.product,
    "product_int8": int8.product_int8,
    "product_int4": int4.product_int4,
    **{f"{what}_{form}": getattr(groups, f"{what}_{form}") for what in ("product", "take") for form in GROUPED},
    "product_each": experts.product_each,
    "product_int8_each": experts.product_int8_each,
    "product_int4_each": experts.product_int4_each,
    "route": experts.route,
    "combine": experts.combine,
}
# A call to each kernel with tensors that fit: 3 rows or tokens of 8 numbers.
GOOD: dict[str, tuple[Any, ...]] = {
    "add_rms_norm": (half(3, 8), half(3, 8), half(8), half(3, 8), 1e-5),
    "gated": (half(3, 16), half(3, 8), 0),
    "rotate": (half(3, 2, 8), torch.zeros(3, 1, 4, dtype=torch.complex64)),
    "turn": (half(3, 2, 8), 8),
    "embed": (half(5, 8), torch.arange(3), half(3, 8), 1.0),
    "turns": (torch.arange(3), torch.zeros(4), torch.zeros(3, 1, 4, dtype=torch.complex64), 1.0),
    "latent_heads": (half(3, 2, 6), half(3, 8), half(3, 2, 2), half(6), half(3, 3, 8), 1e-6),
    "norm_heads": (half(3, 2, 8), half(2, 8), 1e-5),
    "to_logits": (half(3, 8), torch.zeros(3, 8), 0.0),
    "greatest": (torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)),
    "next_greatest": (torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64)),
    "draw": (
        torch.zeros(5, 8), torch.full((3, 1), -1, dtype=torch.int32), torch.ones(3, 4), torch.ones(3, 2, dtype=torch.int64),
        torch.arange(3), torch.zeros(3, dtype=torch.int64),
    ),
    "quantize": (half(3, 8), torch.zeros(3, 8, dtype=torch.uint8), torch.zeros(3)),
    "dequantize": (torch.zeros(3, 8), torch.zeros(3), half(8), half(3, 8)),
    "attend": (
        half(4, 2, 2, 1, 4, 8), half(3, 2, 8), half(3, 2, 1, 8), half(3, 16), torch.tensor([0, 1, 2, 0, 1, 2, -1, -1, -1, 1, 2, 3]),
        3, 6, 8, 1, 1 << 62, 0.0, 1.0,
    ),
    "store": (half(3, 2, 1, 8), half(64, 8), torch.arange(6)),
    "attend_span": (
        half(3, 2, 8), half(16, 32), torch.tensor([[[0, 2]], [[1, 3]]]), half(OUTS * 8), half(OUTS * OUTS), half(3, 16),
        6, 4, 8, 1 << 62, 0.0, 1.0,
    ),
    "product": (half(3, 8), half(OUTS * 8), torch.zeros(OUTS), half(3, OUTS)),
    "product_int8": (
        half(3, 8), torch.zeros(OUTS * 8, dtype=torch.int8), torch.zeros(OUTS), torch.zeros(OUTS, dtype=torch.int32), torch.zeros(OUTS),
        half(3, OUTS),
    ),
    "product_int4": (half(3, 32), torch.zeros(OUTS * WORDS, dtype=torch.int32), half(OUTS), torch.zeros(OUTS), half(3, OUTS)),
    **{f"product_{form}": (half(3, 32), *given, torch.zeros(OUTS), 32, half(3, OUTS)) for form, given in GROUPED.items()},
    **{f"take_{form}": (torch.arange(3), *given, 32, OUTS, 1.0, half(3, 32)) for form, given in GROUPED.items()},
    "product_each": (half(3, 8), torch.zeros(6, dtype=torch.int64), tables(half(OUTS * 8), torch.zeros(OUTS)), half(6, OUTS), 2),
    "product_int8_each": (
        half(3, 8), torch.zeros(6, dtype=torch.int64),
        tables(torch.zeros(OUTS * 8, dtype=torch.int8), torch.zeros(OUTS), torch.zeros(OUTS, dtype=torch.int32), torch.zeros(OUTS)),
        half(6, OUTS), 2,
    ),
    "product_int4_each": (
        half(3, 32), torch.zeros(6, dtype=torch.int64),
        tables(torch.zeros(OUTS * WORDS, dtype=torch.int32), half(OUTS), torch.zeros(OUTS)), half(6, OUTS), 2,
    ),
    "route": (torch.zeros(3, 8), torch.zeros(8), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64), 1, 4, 2, 1, 1.0),
    "combine": (half(6, 8), torch.zeros(3, 2), half(3, 8), half(3, 8)),
}  # fmt: skip
TENSORS = [(name, i) for name, given in GOOD.items() for i, value in enumerate(given) if isinstance(value, Tensor)]


def test_every_compiled_kernel_is_tested_here() -> None:
    made = {
        name.lstrip("_")
        for module in (pointwise, groups, int4, int8, decode_attention, span_attention, panels, draw, experts)
        for name, value in vars(module).items()
        if getattr(value, "__code__", None) and value.__code__.co_filename.startswith("<call of")
    }
    assert made == set(KERNELS) == set(GOOD)


@pytest.mark.parametrize("name", GOOD)
def test_a_call_that_fits_runs(name: str) -> None:
    """Negative control of the next test."""
    KERNELS[name](*(value.clone() if isinstance(value, Tensor) else value for value in GOOD[name]))


@pytest.mark.usefixtures("nothing_native")
@pytest.mark.parametrize(("name", "at"), TENSORS)
def test_every_kernel_refuses_a_wrong_type_size_rank_or_stride(name: str, at: int) -> None:
    good = GOOD[name][at]
    longer = torch.cat((good, good), dim=-1)
    wrong = {
        "type": good.to(torch.float64 if not good.is_complex() else torch.complex128),
        "size": longer,
        "rank": good[None],
        "stride": longer[..., ::2],
    }
    if (name, at) in (("attend", 4), ("attend_span", 2), ("greatest", 0), ("draw", 0), ("turn", 0)) or name.endswith(
        ("_each", "next_greatest")
    ):
        del wrong["size"]  # block tables, heads and rows of logits may have any length; `Each` checks what the tables describe
    for how, tensor in wrong.items():
        with pytest.raises(ArgumentError, match=rf"^_?{name}: "):
            KERNELS[name](*GOOD[name][:at], tensor, *GOOD[name][at + 1 :])
            pytest.fail(f"a wrong {how} was accepted")
