"""The planner against queueing theory, against what must hold of any plan, and against the chart that its values are for."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kube import CHART, HELMS
from plans import CASES, DEEPSEEK, EIGHT, H100, L40S, LENGTHS, SEVENTY, made_of, plan, question
from rendering import config, helm, pod, rendered

from baton.plan import advice, formulae
from baton.plan.hardware import DEVICES
from baton.plan.pools import Question, attained, prefill_pool
from baton.plan.search import Rejected, Search, Stock, kinds, order, spread
from baton.plan.shape import KNOWN
from baton.plan.traffic import Length, Traffic, thinned, unevenness
from baton.plan.values import KV_BITS, engine_of, lacking, routers_of, values_of


def cost(asked: Question, *stocks: Stock) -> float:
    held = plan(asked, *stocks).held
    return held[0].cost if held else math.inf


def test_waits_are_those_of_queueing_theory() -> None:
    """One server: a wait happens as often as it is busy. Two that are half busy: 1 in 3 (Erlang C). M/M/1's waits are exact."""
    assert formulae.erlang_c(1, 0.7) == pytest.approx(0.7) and formulae.erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert formulae.erlang_c(10, 8.0) == pytest.approx(0.4092, abs=1e-4) and formulae.erlang_c(3, 3.0) == 1
    assert formulae.erlang_c(500, 400.0) < 1e-5, "no overflow"
    exact = 1 - 0.8 * math.exp(-(10 - 8) * 0.3)
    assert formulae.wait_within(0.3, 1, 0.8, 0.1, 1.0, 1.0) == pytest.approx(exact)
    assert formulae.wait_within(0.3, 1, 1.0, 0.1, 1.0, 1.0) == 0 == formulae.wait_within(-0.1, 1, 0.5, 0.1, 1.0, 1.0)
    assert formulae.wait_within(0.3, 1, 0.8, 0.1, 4.0, 1.0) < exact < formulae.wait_within(0.3, 1, 0.8, 0.1, 1.0, 0.0)


def test_waits_are_those_of_a_queue_that_is_played() -> None:
    """Poisson arrivals, constant service, one server: the share that waits no longer than that, within what the formula is good for."""
    rng, free, moment, within = random.Random(1), 0.0, 0.0, 0
    for _ in range(20_000):
        moment += rng.expovariate(8.0)
        within += max(0.0, free - moment) <= 0.3
        free = max(free, moment) + 0.1
    assert formulae.wait_within(0.3, 1, 0.8, 0.1, 1.0, 0.0) == pytest.approx(within / 20_000, abs=0.03)


def test_unevenness_is_1_for_independent_users_0_for_a_clock_and_more_for_bursts() -> None:
    rng, moment, poisson = random.Random(2), 0.0, list[float]()
    for _ in range(5000):
        poisson.append(moment := moment + rng.expovariate(5))
    assert unevenness([number / 5 for number in range(2000)]) == pytest.approx(0, abs=0.05)
    assert unevenness(poisson) == pytest.approx(1, abs=0.3)
    minutes = [each for each in poisson if int(each / 60) % 2]
    assert unevenness(minutes) > 5, "one minute on, one off: only windows see it"
    assert unevenness([1.0]) == unevenness([1.0, 1.0, 1.0]) == 1.0


def test_lengths_are_thinned_evenly() -> None:
    lengths = [Length(number, 1) for number in range(10_000)]
    few = thinned(lengths)
    assert len(few) == 200 and sum(each.prompt for each in few) / 200 == pytest.approx(4999.5, rel=0.01)
    assert thinned(lengths[:3]) == tuple(lengths[:3])


@pytest.mark.parametrize(
    ("field", "what"), [("rate", {"rate": 0.0}), ("rate", {"rate": -1.0}), ("rate", {"rate": math.nan}), ("trace", {"lengths": ()})]
)
def test_traffic_that_is_none_is_refused_by_field(field: str, what: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        Traffic(**{"rate": 1.0, "lengths": LENGTHS, **what})


RATES = st.floats(0.2, 200.0)
MODELS = st.sampled_from(["llama-3.1-8b", "qwen3-30b-a3b"])


@settings(max_examples=25, deadline=None)
@given(MODELS, RATES, st.floats(1.0, 4.0), st.floats(0.0, 6.0))
def test_more_rate_never_costs_less(model: str, rate: float, factor: float, cv2: float) -> None:
    few = question(rate, KNOWN[model], cv2=cv2)
    assert cost(few, H100) <= cost(replace(few, traffic=replace(few.traffic, rate=rate * factor)), H100)


@settings(max_examples=25, deadline=None)
@given(MODELS, RATES, st.floats(0.1, 3.0), st.floats(0.008, 0.1), st.floats(1.0, 3.0), st.sampled_from(["ttft_s", "tpot_s"]))
def test_a_looser_objective_never_costs_more(model: str, rate: float, ttft: float, tpot: float, factor: float, which: str) -> None:
    tight = question(rate, KNOWN[model], ttft, tpot)
    assert cost(replace(tight, **{which: factor * getattr(tight, which)}), H100) <= cost(tight, H100)


@settings(max_examples=15, deadline=None)
@given(RATES, st.floats(0.1, 5.0), st.floats(0.1, 1.0))
def test_a_cheaper_gpu_never_makes_the_plan_dearer(rate: float, price: float, factor: float) -> None:
    dear = replace(L40S, price=price, per_node=2)
    assert cost(question(rate), H100, replace(dear, price=price * factor)) <= cost(question(rate), H100, dear) + 1e-9


@settings(max_examples=15, deadline=None)
@given(RATES, st.integers(1, 16), st.integers(0, 16))
def test_more_gpus_never_make_the_plan_dearer(rate: float, count: int, more: int) -> None:
    assert cost(question(rate), replace(H100, count=count + more)) <= cost(question(rate), replace(H100, count=count))


def test_every_configuration_holds_by_its_own_estimate_and_one_worker_fewer_does_not() -> None:
    asked = question(60.0)
    for made in plan(asked, H100, L40S).held:
        assert made.attainment >= asked.attainment
        assert all(made.gpus_of(stock.device) <= stock.count for stock in (H100, L40S))
        if made.prefill is not None and made.prefill.workers > 1:
            less = prefill_pool(made.prefill.speed, made.prefill.workers - 1, asked)
            dearer = made.decode.tpot
            assert attained(less.ttft, dearer) < asked.attainment or made.decode.workers > 1


def test_what_does_not_fit_says_how_much_is_needed() -> None:
    (told,) = kinds(KNOWN["llama-3.1-70b"], replace(H100, count=1), 16, 16)
    assert told == Rejected("h100", "141 GB of weights need at least 2 GPUs; there are 1")
    found = [each for each in kinds(KNOWN["llama-3.1-70b"], H100, 16, 16) if not isinstance(each, Rejected)]
    assert {kind.gpus for kind in found} == {2, 4, 8}, "inside a node"
    over = [each for each in kinds(KNOWN["deepseek-v3"], replace(H100, count=64), 16, 16) if not isinstance(each, Rejected)]
    assert {(kind.tensor, kind.stages) for kind in over} == {(8, 3)}, "1,342 GB need three nodes"


def test_an_objective_that_cannot_be_held_is_named() -> None:
    for what, words in (({"tpot_s": 0.001}, "TPOT: a step of a single"), ({"ttft_s": 0.01}, "TTFT: ")):
        asked = question(1.0, **what)  # type: ignore[arg-type]
        search = Search(asked, [H100], [16], [16])
        assert search.found().held == ()
        (term,) = advice.terms(search, asked)
        assert (term.startswith(words) and "at least tpot=" in term) or "least ttft" in term
        assert advice.needed(asked, [H100], [16], [16]) is None
    few = question(2000.0)
    search = Search(few, [H100], [16], [16])
    assert search.found().held == () and advice.terms(search, few) == []
    more = advice.needed(few, [H100], [16], [16])
    assert more is not None and more.gpus > 16


def test_fast_decode_is_what_separate_pools_are_for() -> None:
    """Where TPOT leaves no room for prompts among the decodes, two pools are cheaper; where it does, one is no dearer."""
    assert plan(question(60.0, ttft_s=2.0, tpot_s=0.012)).held[0].prefill is not None
    assert plan(question(20.0, ttft_s=2.0, tpot_s=0.1)).held[0].prefill is None


def test_objectives_that_leave_a_batch_of_two_need_many_workers_and_get_them() -> None:
    """A step of one sequence takes 8 ms, and one of 200 twice that: for a TPOT near the first, the pool is many times what the rate
    alone would need."""
    asked = question(150.0, ttft_s=2.0, tpot_s=0.0085)
    many = replace(H100, count=4000, per_node=1)
    held = [one for one in plan(asked, many).held if one.prefill is not None]
    loose = [one for one in plan(replace(asked, tpot_s=0.05), many).held if one.prefill is not None]
    assert held and held[0].decode.workers > 10 * loose[0].decode.workers


def test_the_interval_holds_the_figure() -> None:
    asked = question(60.0)
    best = plan(asked).held[0]
    fast, slow = spread(asked, [H100], best)
    assert fast is not None and fast.cost <= best.cost and (slow is None or slow.cost >= best.cost)
    assert slow is None or slow.cost > fast.cost


def test_decisions_follow_from_what_was_found() -> None:
    asked = question(10.0, KNOWN["qwen3-30b-a3b"], cached=0.4, distinct_tokens=10_000_000)
    stocks = [H100, L40S]
    found = plan(asked, *stocks)
    told = {each.question: each for each in advice.decisions(asked, stocks, found, ([16.0], [16.0]))}
    assert set(told) == {
        "tensor parallelism", "pipeline parallelism", "data parallelism", "expert parallelism", "one pool or two", "unlike GPUs",
        "bits of weights", "bits of KV", "tiers of KV",
    }  # fmt: skip
    assert told["tiers of KV"].answer.startswith("worth a try") and "--weight-bits 8" in told["bits of weights"].why
    able = [one for one in found.held if not lacking(one, asked.shape, 8)]
    shown = advice.best_of(found, 5, able)
    assert len(shown) == 5 and all(one in shown for one in able[:2])
    assert shown == sorted(shown, key=order) and shown[0] == found.held[0] and len({advice.family(one) for one in shown}) > 2
    others = advice.losers(found, Search(asked, stocks, [16], [16]), asked, shown)
    assert {advice.family(one) for one in found.held} >= {advice.family(one) for one in shown} and isinstance(others, list)
    assert "TPOT allows" in advice.because(shown[0], asked)


ANSWERS: dict[str, tuple[Question, tuple[Stock, ...], dict[str, str]]] = {
    "one worker": (
        question(0.5), (H100,),
        {"pipeline parallelism": "none", "data parallelism": "none", "one pool or two": "one: colocated"},
    ),
    "two colocated": (
        question(20.0), (H100, L40S),
        {"data parallelism": "2 workers", "one pool or two": "one: colocated", "unlike GPUs": "no"},
    ),
    "fast decode": (
        question(60.0, ttft_s=2.0, tpot_s=0.012), (H100, L40S),
        {"data parallelism": "6 and 1 workers", "one pool or two": "two: prefill and decode", "unlike GPUs": "yes"},
    ),
    "one pool of one GPU": (question(0.5), (replace(H100, count=1),), {"one pool or two": "one"}),
    "two pools or nothing": (question(150.0, ttft_s=2.0, tpot_s=0.009), (H100,), {"one pool or two": "two"}),
    "over nodes": (
        question(1.0, DEEPSEEK, 5.0, 0.2), (Stock(DEVICES["h100"], 64, 2.5),),
        {"pipeline parallelism": "3 stages, over nodes", "expert parallelism": "over the 8 GPUs of a worker"},
    ),
    "no links": (question(20.0, SEVENTY, 5.0, 0.2), (replace(L40S, count=64),), {"pipeline parallelism": "4 stages, inside a node"}),
    "whole experts": (question(10.0, KNOWN["qwen3-30b-a3b"]), (H100,), {"expert parallelism": "none"}),
    "large experts": (
        question(5.0, KNOWN["mixtral-8x7b"], 2.0, 0.05), (H100,),
        {"expert parallelism": "none: each GPU has a part of every expert"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_the_answers_are_those_of_the_configuration_that_wins(case: str) -> None:
    asked, stocks, answers = ANSWERS[case]
    found = plan(asked, *stocks)
    told = {each.question: each for each in advice.decisions(asked, stocks, found, ([16.0], [16.0]))}
    assert {question: told[question].answer for question in answers} == answers
    assert ("unlike GPUs" in told) == (len(stocks) > 1) and ("expert parallelism" in told) == (asked.shape.experts is not None)
    best = found.held[0]
    cheapest = [min((one.cost for one in found.held if (one.prefill is None) == alone), default=None) for alone in (True, False)]
    assert all(f"{each:g}" in told["one pool or two"].why for each in cheapest if each) and best.cost in cheapest


def test_how_many_experts_a_step_reads_is_told() -> None:
    """One sequence reads its own; with many of them, nearly all are read."""
    mixtral = KNOWN["mixtral-8x7b"]
    for rate, share in ((0.01, "25%"), (5.0, "100%")):
        asked = question(rate, mixtral, 2.0, 0.05)
        told = {each.question: each for each in advice.decisions(asked, [H100], plan(asked), ([16.0], [16.0]))}
        assert f"reads {share} of them" in told["expert parallelism"].why


def test_ranks_are_explained_by_what_workers_of_one_gpu_would_cost() -> None:
    for shape, words in ((KNOWN["llama-3.1-70b"], "do not hold the objectives"), (EIGHT, "would cost")):
        asked = question(2.0, shape, 1.0, 0.05)
        found = plan(asked)
        ranked = replace(found, held=tuple(sorted(found.held, key=lambda one: -max(kind.tensor for kind in one.kinds))))
        told = advice.decisions(asked, [H100], ranked, ([8.0], [16.0, 8.0]))[0]
        assert told.answer == "8 GPUs, inside a node" and words in told.why


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_that_the_chart_takes(case: str, tmp_path: Path) -> None:
    """By the chart's schema always, and as helm renders them where there is one."""
    jsonschema = pytest.importorskip("jsonschema")
    asked, stocks, how = CASES[case]
    made = made_of(asked, *stocks, **how)
    values = values_of(made, asked, 4096)
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(values)
    wrong = {**values, "config": {**values["config"], "engine": {**values["config"]["engine"], "tensor_parallel_size": 2}}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(wrong)
    assert (engine_of(made) == "vllm") == ("engine" in values) == (case not in ("colocated", "two pools", "8-bit KV"))
    if not HELMS:
        return
    (path := tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    for program in HELMS:
        objects = rendered(program=program, files=(path,))
        container = pod(objects, "decode")["containers"][0]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == made.decode.kind.gpus
        assert objects["Deployment", "decode"]["spec"]["replicas"] == made.decode.workers
        assert objects["Deployment", "prefill"]["spec"]["replicas"] == (made.prefill.workers if made.prefill else 0)
        assert config(objects, "decode")["engine"] == {**values["config"]["engine"], **({"kind": "vllm"} if "engine" in values else {})}


def test_unlike_gpus_are_installed_where_one_gpu_makes_a_worker() -> None:
    asked = question(20.0)
    mixed = next(one for one in plan(asked, H100, L40S).held if one.prefill and len({pool.kind.device for pool in one.pools}) == 2)
    single = [one for one in plan(asked, replace(H100, per_node=1), replace(L40S, per_node=1)).held if one.prefill]
    unlike = next(one for one in single if one.prefill and one.prefill.kind.device != one.decode.kind.device)
    assert lacking(unlike, EIGHT, 8) == ()
    values = values_of(unlike, asked, 4096)
    assert values["config"]["engine"]["equal_arithmetic"] is True and set(values["profiles"]) == {"h100", "l40s"}
    assert bool(lacking(mixed, EIGHT, 8)) == any(pool.kind.gpus > 1 for pool in mixed.pools)


def test_what_baton_lacks_is_named() -> None:
    asked = question(1.0, DEEPSEEK, 5.0, 0.2)
    held = plan(asked, Stock(DEVICES["h200"], 64, 3.5), weight_bits=8, kv_bits=KV_BITS[8]).held
    told = {reason for one in held for reason in lacking(one, DEEPSEEK, 8)}
    assert any("latent attention" in reason for reason in told) and any("kv_dtype" in reason for reason in told)
    assert any("unlike numbers of ranks" in reason for reason in told)
    far = plan(question(1.0, DEEPSEEK, 5.0, 0.2), Stock(DEVICES["h100"], 64, 2.5)).held
    assert all(any("several nodes" in reason for reason in lacking(one, DEEPSEEK, 8)) for one in far) and far


def test_routers_are_busy_half_of_the_time_and_two_at_least() -> None:
    assert routers_of(Traffic(1.0, LENGTHS)) == 2
    assert routers_of(Traffic(100.0, LENGTHS)) == math.ceil(2 * 100 * (0.001 + 175 * 6e-5))


@pytest.mark.skipif(not HELMS, reason="no helm on PATH")
def test_a_key_that_the_chart_does_not_know_would_be_refused(tmp_path: Path) -> None:
    """Negative control of the test above."""
    values = values_of(made_of(question(), H100, split=True), question(), 4096)
    (path := tmp_path / "values.yaml").write_text(yaml.safe_dump(values | {"tensorParallel": 2}))
    assert helm(files=(path,)).returncode != 0
