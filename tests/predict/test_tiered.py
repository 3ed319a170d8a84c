"""Tiers in predictions: what is taken over from a configuration, what is doubted, and how a profile learns what moving takes."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cluster.config import Config
from baton.engine.core.block_key import DISK, HOST
from baton.engine.core.colder import TierPolicy
from baton.predict import measure_tiers as measuring
from baton.predict.measure import Measurements
from baton.predict.measure_tiers import HeardTier, kv_token_bytes, measure_tiers, tier_models
from baton.predict.predict import Offer, doubts, predict, run
from baton.predict.report import offer_of
from baton.predict.setting import setting_of
from baton.profile.file import Profile
from baton.profile.models import Fitted
from baton.simulate.tiers import TierPace
from baton.v1 import worker_pb2
from loadtest.plan import Workload
from loadtest.slo import Slo
from loadtest.window import Window

STEP = {"step": 2e-3, "tokens": 2e-4, "pairs": 1e-8, "decodes": 3e-4, "context": 1e-7}
TIER = Fitted({"base": 1e-3, "byte": 1.5e-10, "write": 5e-10})
PROFILE = Profile(
    "measured", "a processor", "m", {"kv_blocks": 4096}, 4096.0, "sum",
    {"step": Fitted(STEP), "handoff": Fitted({"base": 0.004, "byte": 1e-9}), "tier_memory": TIER},
)  # fmt: skip
SLO = Slo.parse("ttft=100ms,tpot=10ms")
SMALL = {"kv_memory_mib": 12}  # 3,072 tokens
SPREAD = {"input": "300-500", "hit_rate": 0.5, "prefix_tokens": 256, "prefix_branching": 10}


def config(engine: Mapping[str, object] = SMALL, kv: Mapping[str, object] | None = None, **tiers: object) -> Config:
    sizes = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "router": {"bypass_tokens": 0}}
    return Config.model_validate({**sizes, "engine": engine, "kv": kv or {}, "tiers": tiers})


def offer(seconds: float = 20.0) -> Offer:
    workload = Workload(**{"output": "16", "duration_s": seconds, **SPREAD})  # type: ignore[arg-type]
    return offer_of(workload, 4.0, 1, Window(seconds, 1, 1))[0]


def test_a_small_pool_over_a_tier_is_predicted_like_a_large_one() -> None:
    figures = {}
    for name, asked in {"large": config({}), "small": config(), "tier": config(memory_mib=256)}.items():
        told = predict(setting_of(asked, PROFILE), PROFILE, offer(), SLO, draws=0)
        assert not told.doubts
        figures[name] = {figure: each.value for figure, each in told.figures.items()}
    rates, waits = ({name: each[figure] for name, each in figures.items()} for figure in ("hit rate", "TTFT P50 (ms)"))
    assert rates["small"] < 0.7 * rates["large"] and rates["tier"] == pytest.approx(rates["large"], abs=0.01)
    assert waits["large"] < waits["tier"] < 0.9 * waits["small"]


def test_a_run_with_a_tier_is_the_same_twice_and_draws_differ_in_what_moving_takes() -> None:
    setting = setting_of(config(memory_mib=256), PROFILE, cores=2)
    assert run(setting, PROFILE, offer()) == run(setting, PROFILE, offer()), "bit for bit"
    unsure = replace(PROFILE, models={**PROFILE.models, "tier_memory": Fitted({"base": 0.03}, draws=({"base": 0.001}, {"base": 0.08}))})
    told = predict(setting, unsure, offer(), SLO, draws=3)
    assert told.figures["TTFT P50 (ms)"].low < told.figures["TTFT P50 (ms)"].high


def test_a_configuration_says_what_tiers_there_are() -> None:
    asked = config(memory_mib=64, disk="/kv", disk_mib=100, save="at_once", keep="all", wait_s=0.5, save_mib_per_s=2.5)
    told = setting_of(asked, PROFILE)
    tiers = told.sizes.tiers
    assert tiers is not None and tiers.blocks == ((HOST, 1024), (DISK, 1600)) and tiers.block_bytes == 65536
    assert tiers.policy == TierPolicy(at_once=True, wait_s=0.5, keeps_all=True) and tiers.save_bytes_per_s == 2.5 * 1024 * 1024
    assert told.unknown == ("tiers.disk_mib: the profile has no tier_disk: moving takes no time",)
    odd = setting_of(config(disk="/kv", disk_mib=100), replace(PROFILE, kv_token_bytes=100.0)).sizes.tiers
    assert odd is not None and odd.blocks == ((DISK, 100 * 256),), "a disk has whole sectors of 4096 bytes"
    assert setting_of(config(), PROFILE).sizes.tiers is None
    with pytest.raises(ValueError, match=r"tiers\.memory_mib: 1 MiB hold no block: one takes 1\.5 MiB"):
        setting_of(config({}, memory_mib=1), replace(PROFILE, kv_token_bytes=98304.0))


@pytest.mark.parametrize(
    ("more", "changes", "words"),
    [
        ({"object": "s3://b/p", "object_mib": 10}, {}, "tiers.object: no object store is simulated"),
        ({"memory_mib": 64}, {"kv_token_bytes": 0.0}, "does not say how large KV is"),
        ({"memory_mib": 64}, {"models": {"step": Fitted(STEP), "handoff": Fitted({})}}, "tiers.memory_mib: the profile has no tier_memory"),
        ({"memory_mib": 64, "long_contexts": 1}, {}, "tiers.long_contexts: sequences longer"),
        ({"memory_mib": 64, "disk": "/kv", "disk_mib": 10, "key_file": "/k"}, {}, "tiers.key_file: encryption"),
        ({"memory_mib": 64, "kv": {"events": "tcp://*:0"}}, {}, "kv.events: nothing is loaded before"),
    ],
)
def test_what_of_tiers_is_not_known_is_said_first(more: dict[str, object], changes: dict[str, Any], words: str) -> None:
    profile = replace(PROFILE, **changes)
    found = doubts(setting_of(config({}, **more), profile), profile, offer())  # type: ignore[arg-type]
    assert any(words in one for one in found) and found[0].startswith(("tiers", "kv.events"))
    sheet = replace(profile, source="sheet")
    assert found[0] in doubts(setting_of(config({}, **more), sheet), sheet, offer())  # type: ignore[arg-type]


def test_a_profile_keeps_what_moving_takes_and_one_without_it_is_read(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.yaml")
    read = Profile.load_file(tmp_path / "p.yaml")
    assert TierPace.of(read) == {HOST: TierPace(1e-3, 1.5e-10, 5e-10), DISK: TierPace()}
    older = replace(PROFILE, models={name: each for name, each in PROFILE.models.items() if name != "tier_memory"})
    assert Profile.read(older.plain()) == older and "tier_memory" not in older.unmeasured


BASE, BYTE, WRITE, BLOCK, UNIT = 0.0015, 2e-9, 7e-10, 16, 65536


@dataclass
class PlantedCluster:
    """Serves prompts from a pool of so many tokens, and from a tier that takes what was planted. `computes`: lengths that no tier brings
    whole."""

    pool: int
    computes: tuple[int, ...] = ()
    admin: str = "nowhere"
    seen: dict[tuple[int, ...], int] = field(default_factory=dict)  # prompt → tokens of all others since
    asked: int = 0

    @property
    def facts(self) -> dict[str, int]:
        return {"kv_blocks": self.pool // BLOCK, "block_size": BLOCK}

    def prompt(self, tokens: int) -> list[int]:
        self.asked += 1
        return [self.asked] * tokens

    async def ask(self, prompt: Sequence[int], tokens: int) -> Any:
        key = tuple(prompt)
        away = self.seen.get(key)
        self.seen = {other: since + len(prompt) for other, since in self.seen.items()} | {key: 0}
        cached = 0 if away is None else (len(prompt) - 1) // BLOCK * BLOCK
        seconds = 0.01 + (len(prompt) - cached) * 1e-4
        if away is not None and away > self.pool:
            if len(prompt) in self.computes:
                cached -= BLOCK
            seconds += BASE + BYTE * (cached // BLOCK) * UNIT
        return SimpleNamespace(times=[seconds], result=SimpleNamespace(usage=SimpleNamespace(cached_tokens=cached)))

    ask_alone = ask


def measured(
    monkeypatch: pytest.MonkeyPatch, made: PlantedCluster, settings: Mapping[str, str], known: Any
) -> tuple[Any, list[dict[str, str]]]:
    monkeypatch.setattr(measuring, "TOLD_S", 0.0)
    chosen = list[dict[str, str]]()

    def tier(admin: str) -> worker_pb2.Tier:
        key = "tiers.memory_mib" if "tiers.memory_mib" in chosen[-1] else "tiers.disk_mib"
        capacity = int(chosen[-1][key]) * (1 << 20) // UNIT
        return worker_pb2.Tier(capacity=capacity, blocks=200, spent_s=200 * UNIT * WRITE)

    monkeypatch.setattr(measuring, "_tier", tier)

    @asynccontextmanager
    async def running(settings: Mapping[str, str]) -> AsyncIterator[tuple[Any, Any, str]]:
        chosen.append(dict(settings))
        if "engine.kv_memory_mib" in settings and known.handoffs:
            assert float(settings["engine.kv_memory_mib"]) * (1 << 20) == pytest.approx(1536 * 4096, rel=1e-3)
        yield made, made, ""

    return asyncio.run(measure_tiers(settings, known, 2, lambda line: None, running)), chosen


KNOWN = Measurements(handoffs=[(64, 64 * 4096, 0.01)], facts={"block_size": BLOCK})


def test_what_loading_and_writing_take_is_found_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    settings = {"model.path": "m", "tiers.memory_mib": "9", "tiers.disk": str(folder), "tiers.disk_mib": "9", "tiers.wait_s": "2"}
    found, chosen = measured(monkeypatch, PlantedCluster(1536), settings, KNOWN)
    models = tier_models(found)
    assert [*models] == ["tier_memory", "tier_disk"]
    for fitted in models.values():
        assert fitted.values == pytest.approx({"base": BASE, "byte": BYTE, "write": WRITE}, rel=0.02) and fitted.rows == 8
        assert all(draw["write"] == pytest.approx(WRITE) for draw in fitted.draws)
    memory, disk = chosen
    assert "tiers.disk" not in memory and "tiers.memory_mib" not in disk and "tiers.wait_s" not in memory
    assert int(memory["tiers.memory_mib"]) > 36 and disk["tiers.disk"].startswith(str(folder)) and not list(folder.iterdir())


def test_noise_of_short_loads_counts_no_more_than_that_of_long_ones() -> None:
    """Also a prompt whose KV was loaded may have its first token sooner than the same one a moment later."""
    sizes = [UNIT * blocks for blocks in (4, 8, 16, 32)] * 4
    noise = [2, -2, 3, -3, -25, 1, -1, 900, 1, -1, 700, 2, -2, 2, -2, -2]  # tenths of a millisecond; some waited for something else
    loads = [(float(size), BASE + BYTE * size + more / 10_000) for size, more in zip(sizes, noise, strict=True)]
    assert min(seconds for _, seconds in loads) < 0
    fitted = tier_models({"tier_disk": HeardTier(float(UNIT), loads, WRITE)})["tier_disk"]
    assert fitted.values == pytest.approx({"base": BASE, "byte": BYTE, "write": WRITE}, rel=0.2)
    draws = sorted(draw["byte"] for draw in fitted.draws)
    assert draws[0] < BYTE < draws[-1] and draws[0] > 0


def test_a_load_of_which_a_part_was_computed_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"tiers.memory_mib": "9"}
    found, _ = measured(monkeypatch, PlantedCluster(1536, computes=(528,)), settings, KNOWN)
    assert {size // UNIT for size, _ in found["tier_memory"].loads} == {4, 8, 16}
    none, _ = measured(monkeypatch, PlantedCluster(1536, computes=measuring.LENGTHS), settings, KNOWN)
    assert not none["tier_memory"].loads and not tier_models(none)


def test_without_handoffs_the_pool_is_the_one_that_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Measurements(facts={"block_size": BLOCK})
    with pytest.raises(ValueError, match="tiers needs split"):
        measured(monkeypatch, PlantedCluster(1536), {"tiers.memory_mib": "64"}, alone)
    settings = {"tiers.memory_mib": "64", "engine.kv_memory_mib": "8"}
    found, chosen = measured(monkeypatch, PlantedCluster(2048), settings, alone)
    assert chosen[0]["engine.kv_memory_mib"] == "8" and chosen[0]["tiers.memory_mib"] == "64"
    assert tier_models(found)["tier_memory"].values["byte"] == pytest.approx(BYTE, rel=0.02)
    alone.tiers = {"tier_memory": HeardTier(float(UNIT), [], 0.0)}
    assert kv_token_bytes(alone) == 4096 and kv_token_bytes(Measurements()) == 0
    with pytest.raises(ValueError, match=r"engine\.kv_memory_mib: a pool of 131072 tokens is too large"):
        measured(monkeypatch, PlantedCluster(1 << 17), settings, Measurements(facts={"block_size": BLOCK}))
