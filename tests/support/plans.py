"""Plans that the tests of `baton plan` make: what is asked, the GPUs that there are, and cases whose values the chart must take."""

from dataclasses import replace
from typing import Any

from baton.plan.hardware import DEVICES, MEASURED
from baton.plan.pools import Question
from baton.plan.search import Configuration, Found, Search, Stock
from baton.plan.shape import KNOWN, Shape
from baton.plan.traffic import Length, Traffic
from baton.plan.values import KV_BITS, lacking

LENGTHS = tuple(Length(prompt, output) for prompt in (200, 1500, 3000) for output in (50, 300))
EIGHT = KNOWN["llama-3.1-8b"]
H100, L40S = Stock(DEVICES["h100"], 16, 2.5), Stock(DEVICES["l40s"], 16, 0.9)


def question(rate: float = 20.0, shape: Shape = EIGHT, ttft_s: float = 0.5, tpot_s: float = 0.03, **more: Any) -> Question:
    return Question(shape, Traffic(rate, LENGTHS, **more), ttft_s, tpot_s, MEASURED)


def plan(asked: Question, *stocks: Stock, weight_bits: float = 16, kv_bits: float = 16) -> Found:
    return Search(asked, stocks or (H100,), [weight_bits], [kv_bits]).found()


def made_of(asked: Question, *stocks: Stock, split: bool, weight_bits: float = 16, kv_bits: float = 16) -> Configuration:
    """The cheapest one that Baton can install."""
    held = plan(asked, *stocks, weight_bits=weight_bits, kv_bits=kv_bits).held
    return next(one for one in held if (one.prefill is not None) == split and not lacking(one, asked.shape, 8))


SEVENTY, DEEPSEEK = KNOWN["llama-3.1-70b"], KNOWN["deepseek-v3"]
CASES: dict[str, tuple[Question, tuple[Stock, ...], dict[str, Any]]] = {
    "colocated": (question(20.0), (H100,), {"split": False}),
    "two pools": (question(20.0), (H100,), {"split": True}),
    "tensor parallel": (question(2.0, SEVENTY, 1.0, 0.05), (H100,), {"split": True}),
    "8 bits": (question(2.0, SEVENTY, 1.0, 0.05), (H100,), {"split": False, "weight_bits": 8}),
    "8-bit KV": (question(20.0), (H100,), {"split": True, "kv_bits": KV_BITS[8]}),
    "experts": (question(20.0, KNOWN["qwen3-30b-a3b"]), (replace(L40S, count=64),), {"split": False}),
    "latent": (question(1.0, DEEPSEEK, 5.0, 0.2), (Stock(DEVICES["h200"], 32, 3.5),), {"split": False, "weight_bits": 8}),
}  # fmt: skip
