"""The load test of a simulated cluster: repeatable, labelled, with intervals, and doubted where nothing was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.cluster.config import Config
from baton.engine import defaults
from baton.plan import pools
from baton.plan.hardware import DEVICES
from baton.plan.pools import WorkerKind, sized
from baton.plan.shape import KNOWN
from baton.predict.crowding import COMPARED, LoadedRun, crowding_of
from baton.predict.fitted import profile_of
from baton.predict.measure import QUICK, Measurements, Rows, Unlike
from baton.predict.predict import Offer, doubts, interval, predict, run
from baton.predict.report import offer_of
from baton.predict.setting import setting_of
from baton.profile.file import Profile
from baton.profile.models import Fitted, Work, pairs_of, step_seconds, works_of_prompt
from loadtest.plan import Workload
from loadtest.slo import Slo
from loadtest.window import Window

TRUE = {"step": 2e-3, "read": 0.0, "tokens": 5e-5, "pairs": 1e-8, "decodes": 3e-4, "context": 1e-7, "mixed": 0.0}
PROFILE = Profile(
    "measured", "a processor", "m", {"kv_blocks": 512}, 6144.0, "sum",
    {
        "step": Fitted(TRUE, error=0.05),
        "handoff": Fitted({"base": 0.004, "byte": 1e-9}),
        "router": Fitted({"request": 1e-3, "token": 5e-5}),
        "client": Fitted({"request": 5e-4, "token": 5e-5}),
        "sharing": Fitted({"pair": 0.9}),
    },
    {"prompt tokens": (1.0, 1024.0)},
)  # fmt: skip
SLO = Slo.parse("ttft=60ms,tpot=10ms")


def config(prefill: int, decode: int, **more: object) -> Config:
    return Config.model_validate({"prefill": {"replicas": prefill}, "decode": {"replicas": decode}, **more})


def offer(rate: float = 6.0, seconds: float = 10.0, **load: object) -> Offer:
    workload = Workload(**{"input": "64-300", "output": "16", "duration_s": seconds, **load})  # type: ignore[arg-type]
    return offer_of(workload, rate, 1, Window(seconds, 1, 1))[0]


def test_a_run_is_the_same_twice_bit_for_bit_and_more_load_waits_longer() -> None:
    setting = setting_of(config(1, 1), PROFILE, cores=2)
    one = run(setting, PROFILE, offer())
    assert one == run(setting, PROFILE, offer()) and len(one.records) == one.due > 40
    assert all(record.outcome == "ok" and record.prefill_worker for record in one.records)
    assert all(record.stages_ms["decode"] > 14 * 2 for record in one.records), "the stages go on to the last token: 15 steps of 2 ms"
    few, many = (predict(setting, PROFILE, offer(rate), SLO, draws=0).figures["TTFT P90 (ms)"].value for rate in (2, 60))
    assert many > 1.5 * few


def test_cores_that_are_shared_slow_everything() -> None:
    alone, shared = (predict(setting_of(config(0, 3), PROFILE, cores), PROFILE, offer(40.0), SLO, draws=0).figures for cores in (None, 1))
    assert shared["TPOT P50 (ms)"].value > 1.3 * alone["TPOT P50 (ms)"].value


def test_a_shared_prefix_is_hit_and_a_small_pool_loses_it() -> None:
    shared = offer(input="300-400", hit_rate=0.6, prefix_tokens=256, prefix_branching=4)
    hits = []
    for mib in (64, 3):
        small = config(1, 1, router={"bypass_tokens": 0}, engine={"kv_memory_mib": mib})
        hits.append(predict(setting_of(small, PROFILE), PROFILE, shared, SLO, draws=0).figures["hit rate"].value)
    assert hits[0] > 0.4 and hits[1] < hits[0]


def test_intervals_are_as_wide_as_the_profile_is_unsure() -> None:
    setting = setting_of(config(1, 1), PROFILE)
    told = predict(setting, PROFILE, offer(), SLO, draws=6).figures["TPOT P50 (ms)"]
    assert told.low < 0.97 * told.value and told.high > 1.03 * told.value
    sure = replace(PROFILE, models={name: replace(fitted, error=0.0) for name, fitted in PROFILE.models.items()})
    exact = predict(setting, sure, offer(), SLO, draws=2).figures["TPOT P50 (ms)"]
    assert exact.low == pytest.approx(exact.value) == exact.high, "negative control"
    assert interval(0.5, [0.9, 0.1], share=True).high == 1.0 and interval(0.0, [1.0, 2.0]).low == 0.0


def test_busy_cores_slow_prompts_and_answers_each_in_their_own_way() -> None:
    load = offer(12.0, output="40")
    token, first = [], []
    for numbers in ({}, {"decode": 1.0}, {"decode_beside": 0.4}, {"prompt_beside": 0.4}):
        profile = replace(PROFILE, models={**PROFILE.models, "sharing": Fitted({"pair": 0.7, **numbers})})
        figures = predict(setting_of(config(0, 2), profile, cores=2), profile, load, SLO, draws=0).figures
        token.append(figures["TPOT P50 (ms)"].value)
        first.append(figures["TTFT P50 (ms)"].value)
    assert token[1] < 0.95 * token[0] and token[2] > 1.02 * token[0] and first[3] > 1.05 * first[0]


def test_what_was_not_measured_is_said_first() -> None:
    known = setting_of(config(1, 1), PROFILE)
    assert doubts(known, PROFILE, offer()) == ()
    long = offer(input="1200-1300")
    (told,) = doubts(known, PROFILE, long)
    assert "prompt tokens" in told and "measured: 1 to 1024" in told
    warned = predict(known, PROFILE, long, SLO, draws=0)
    assert warned.warning.startswith("Outside of what was validated: prompt tokens")
    guessing = setting_of(config(1, 1, engine={"speculation": "prompt_lookup"}, tiers={"memory_mib": 8}), PROFILE)
    assert len(doubts(guessing, PROFILE, offer())) == 2


def test_a_model_that_was_not_measured_is_said_where_it_would_count() -> None:
    alone = replace(PROFILE, models={name: PROFILE.models[name] for name in ("step", "router", "client")})
    assert alone.unmeasured == ("handoff", "worker", "path", "start", "sharing", "crowding")
    assert doubts(setting_of(config(0, 1), alone), alone, offer()) == ()
    (told,) = doubts(setting_of(config(1, 1), alone, cores=2), alone, offer())
    assert told == "not measured, and so without a time: handoff, sharing, crowding"
    assert Profile.read(alone.plain()) == alone


@pytest.mark.parametrize(("only", "words"), [("colocated,alone", "alone is none of"), ("split,pair", "colocated is missing")])
def test_a_profile_needs_arrangements_that_there_are(only: str, words: str, tmp_path: Path) -> None:
    asked = ["profile", "--model", str(tmp_path), "--arrangements", only, "--to", str(tmp_path / "p.yaml")]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and words in " ".join(result.output.split())


def test_a_worker_of_a_sheet_has_the_sizes_that_it_would_choose(tmp_path: Path) -> None:
    made, invoke = tmp_path / "p.yaml", CliRunner().invoke
    sizes = {}
    for device in ("h200", "a10"):
        assert invoke(app, ["profile", "--sheet", device, "--model", "llama-3.1-8b", "--to", str(made)]).exit_code == 0
        profile = Profile.load_file(made)
        sizes[device] = setting_of(config(0, 1), profile).sizes
    assert sizes["h200"].max_num_seqs == sizes["a10"].max_num_seqs == 256
    assert (sizes["h200"].max_num_batched_tokens, sizes["a10"].max_num_batched_tokens) == (8192, 2048)
    assert 50_000 < sizes["h200"].kv_blocks < 56_000 and 2000 < sizes["a10"].kv_blocks < 3000, "beside 16 GB of weights"
    chosen = (pools.MOST_SEQUENCES, pools.CHUNK, pools.SMALL_CHUNK, pools.LARGE)
    assert chosen == (defaults.GPU_SEQUENCES, defaults.LARGE_STEP, defaults.SMALL_STEP, defaults.LARGE), "as an engine chooses them"
    with pytest.raises(ValueError, match="no room for KV"):
        sized(PROFILE, WorkerKind(replace(DEVICES["a10"], memory=17e9)), KNOWN["llama-3.1-8b"])


def test_batches_form_as_the_engine_is_configured() -> None:
    """A static batch starts together, so what comes while one runs waits for its end."""
    spread, waits = offer(20.0, output="4-120"), {}
    for batching in ("continuous", "dynamic", "static"):
        setting = setting_of(config(0, 1, engine={"batching": batching, "max_num_seqs": 16, "batch_wait_s": 0.2}), PROFILE)
        assert setting.sizes.limits.batching == batching and not setting.unknown
        waits[batching] = predict(setting, PROFILE, spread, SLO, draws=0).figures["TTFT P50 (ms)"].value
    assert waits["continuous"] < waits["dynamic"] / 2 and waits["dynamic"] <= waits["static"]


def test_a_large_cluster_has_the_figures_of_one_that_is_simulated_step_by_step() -> None:
    """But for the processor time of each token, which is left out, and how routers hear of workers."""
    setting, load = setting_of(config(3, 3, router={"bypass_tokens": 0}), PROFILE), offer(30.0, output="20-60")
    exact, large = run(setting, PROFILE, load), run(setting, PROFILE, load, large=True)
    assert large == run(setting, PROFILE, load, large=True), "bit for bit"
    ends = [[record.token_times[-1] - record.sent for record in each.records] for each in (exact, large)]
    assert len(ends[0]) == len(ends[1]) > 200
    assert sum(ends[1]) == pytest.approx(sum(ends[0]), rel=0.02)
    assert [len(record.token_times) for record in exact.records] == [len(record.token_times) for record in large.records]


def test_the_fits_find_what_made_the_measurements() -> None:
    """From times that the models themselves make, as `measure` collects them."""
    found = Measurements(
        facts={"kv_blocks": 100}, prompts=[(0.08, 0.1), (0.09, 0.1)], paces=[(0.004, 0.0053), (0.004, 0.0041)], starts=[2.0]
    )
    found.unlike = [Unlike(0.125, 0.0053, 20), Unlike(0.08, 0.003, 20)]
    costs: Rows = [({"request": float(r), "token": float(t)}, 1e-3 * r + 1e-4 * t) for r, t in ((20, 40), (20, 800), (9, 9))]
    handoffs: Rows = [({"request": 20.0, "token": 20.0, "lend": 20.0}, 0.05), ({"request": 20.0, "token": 40.0, "fetch": 20.0}, 0.064)]
    found.rows = {"step": found_rows(), "router": [*costs], "worker": [*costs, *handoffs], "client": [*costs]}
    decode = {context: step_seconds(TRUE, "sum", Work(decodes=1, context=context)) for context in (64, 256, 1024)}
    found.handoffs = [(context, 6144 * context, decode[context] + 0.004 + 6144e-9 * context) for context in decode]
    profile = profile_of(found, "m", {"threads": 1}, QUICK, 512)
    values = profile.values("step")
    assert {name: values[name] for name in ("tokens", "decodes")} == pytest.approx({"tokens": 5e-5, "decodes": 3e-4}, rel=0.02)
    assert profile.values("handoff") == pytest.approx({"base": 0.004, "byte": 1e-9}, rel=0.02)
    assert profile.values("path")["request"] == pytest.approx(0.01 - 3 * 1.1e-3, rel=0.1), "less what is computed on the way"
    assert profile.kv_token_bytes == 6144
    assert profile.values("worker") == pytest.approx({"request": 1e-3, "token": 1e-4, "lend": 1.4e-3, "fetch": 2e-3}, rel=0.01)
    # Less 10 ms of path, and 0.1 ms of each of three processes. One that is faster beside the other is as fast as alone.
    sharing = {"pair": (7 / 9 + 8 / 9) / 2, "decode": 0.9, "prompt_beside": (75 / 112 + 1) / 2, "decode_beside": 0.9}
    assert profile.values("sharing") == pytest.approx(sharing, rel=0.01)
    assert len(profile.models["sharing"].draws) == 8 and all(
        0 < pace <= 1 for draw in profile.models["sharing"].draws for pace in draw.values()
    )


def test_crowding_is_found_by_the_loads_that_it_slowed() -> None:
    """Of loads whose times the simulator itself has made, with numbers that nobody tells."""
    crowded = replace(PROFILE, models={**PROFILE.models, "crowding": Fitted({"prompt": 0.5, "decode": 0.25})})
    runs = []
    for prefill, decode in ((1, 1), (0, 2)):
        settings = {"prefill.replicas": str(prefill), "decode.replicas": str(decode), "router.bypass_tokens": "0"}
        load = offer(14.0, 4.0)
        told = predict(setting_of(config(prefill, decode, router={"bypass_tokens": 0}), crowded, cores=2), crowded, load, SLO, draws=0)
        runs.append(LoadedRun(settings, load, {name: told.figures[name].value for name in COMPARED}))
    found = crowding_of(PROFILE, runs, cores=2)
    assert found.values == pytest.approx({"prompt": 0.5, "decode": 0.25}, rel=0.2) and found.error < 0.02
    assert all(0 < value <= 1 for draw in found.draws for value in draw.values())
    halved = replace(runs[0], measured={name: value / 2 for name, value in runs[0].measured.items()})
    assert crowding_of(PROFILE, [halved], cores=2).error > 0.3, "what no crowding explains is told as an error"


def found_rows() -> Rows:
    rows: Rows = []
    for tokens in (32, 64, 128, 300, 700):
        for cached in (0, 16):
            works = works_of_prompt(tokens, cached, 512)
            counts = {"path": 1.0, "step": float(len(works)), "tokens": float(tokens - cached), "pairs": pairs_of(tokens - cached, cached)}
            rows.append((counts, 0.01 + sum(step_seconds(TRUE, "sum", work) for work in works)))
    for batch in (1, 4, 8):
        for context in (32, 500):
            work = Work(decodes=batch, context=batch * context)
            counts = {"step": 1.0, "decodes": float(batch), "context": float(batch * context)}
            rows.append((counts, step_seconds(TRUE, "sum", work)))
    return rows


def test_the_commands_make_a_profile_from_a_sheet_and_simulate_by_it(tmp_path: Path) -> None:
    made, invoke = tmp_path / "p.yaml", CliRunner().invoke
    result = invoke(app, ["profile", "--sheet", "h100", "--model", "llama-3.1-8b", "--to", str(made)])
    assert result.exit_code == 0 and Profile.load_file(made).form == "roof"
    load = ["--slo", "ttft=500ms,tpot=30ms", "--rate", "4", "--duration", "8", "--seeds", "1", "--out", str(tmp_path / "report")]
    result = invoke(app, ["simulate", "--profile", str(made), "--draws", "1", *load, "--prefill.replicas", "1", "--decode.replicas", "2"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Outside of what was validated: nothing was measured")
    told = json.loads((tmp_path / "report" / "results.json").read_text())
    assert "SIMULATED" in told["title"] and [*told["arms"]] == ["simulated"] and told["completed"] > 5
    assert invoke(app, ["simulate", *load]).exit_code == 2 and invoke(app, ["simulate", "--sheet", "tpu", *load]).exit_code == 2
