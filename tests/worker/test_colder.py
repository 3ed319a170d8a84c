"""What `tiers` in the configuration makes, with the stores that it names; and what it refuses, by key."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_dma import StandInPool
from tiered import UNIT, WITHIN_S, PlainStore, Tiered, make_seq, tiered, until

from baton.cluster.config_engine import TiersConfig
from baton.cluster.membership import lasting_name
from baton.cluster.metrics import Book
from baton.engine.build import BuildError
from baton.engine.core.block_key import DISK, HOST, REMOTE
from baton.engine.core.colder import Colder
from baton.engine.core.contract import Listener
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import naive
from baton.engine.options import EngineOptions, ModelOptions, Options
from baton.engine.start import start_engine
from baton.models.make_small import make_toy
from baton.tiers.locked_store import LockedStore, slot_bytes
from baton.tiers.tiers import Tiers
from baton.worker.colder import MEMORY_READERS, make_tiers, records
from baton.worker.meter import Meter

MIB = 1 << 20


def made(name: str = "prefill-0", **keys: Any) -> Tiers:
    tiers = make_tiers(TiersConfig(wait_s=20.0, **keys), name)
    assert tiers is not None
    return tiers


def told(name: str, number: int, length: int) -> Sequence:
    return make_seq(name, [(number * 37 + i * 11 + i // 256) % 256 for i in range(length)])


async def say(t: Tiered, name: str, number: int, length: int = 33) -> Sequence:
    seq = told(name, number, length)
    await t.run(seq)
    await t.settled()
    assert seq.tokens[seq.prompt_len :] == naive(seq.tokens[: seq.prompt_len], seq.params, 8)
    return seq


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tier holds is loaded, and waited for: how fast this machine loads and computes at the moment does not matter, because nobody
    knows what computing takes."""
    monkeypatch.setattr(Colder, "paced", lambda *_: None)


def _ignore(told: object) -> None: ...


def test_without_a_tier_there_are_none() -> None:
    assert make_tiers(TiersConfig(), "prefill-0") is None


def test_under_a_devices_pool_memory_is_page_locked_and_has_room_for_whole_pages() -> None:
    pool, tiers = StandInPool(KvLayout("toy", "int64", 4, 1, 1, 80), 4), made(memory_mib=1)
    tiers.open(pool, SimpleNamespace(moved=lambda *_: None))
    [tier] = tiers.tiers
    assert isinstance(tier.store, LockedStore) and tier.store.capacity == MIB // slot_bytes(pool) < MIB // pool.unit_bytes
    assert sum("reader" in thread.name for thread in tier._threads) == MEMORY_READERS > 1
    tiers.close()


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("sealed", [False, True])
async def test_what_the_memory_has_no_more_room_for_comes_back_from_the_disk(tmp_path: Path, sealed: bool) -> None:
    keys: dict[str, Any] = {"memory_mib": 1, "disk": str(tmp_path / "kv"), "disk_mib": 32}
    if sealed:
        (tmp_path / "key").write_text(os.urandom(32).hex())
        keys["key_file"] = str(tmp_path / "key")
    length = 1025
    async with tiered(blocks=300, tiers=made(**keys)) as t:
        deadline, said, whole = time.monotonic() + 3 * WITHIN_S, 0, list[int]()
        while not whole and time.monotonic() < deadline:
            await say(t, f"a{said}", said, length)
            said += 1
            disk = t.held(DISK)  # what is not saved in time is nowhere; what is in memory may move while it is looked for
            keys_of = {number: set(t.engine.scheduler.usable_keys(told(f"k{number}", number, length))) for number in range(said)}
            whole = [number for number, keys in keys_of.items() if keys <= disk]
        again = await say(t, "b", whole[0], length)
        assert again.prefilled <= length // 2, "half of it or more was loaded"
        assert t.tiers.tiers[1].worth.tally.hits > 0


async def test_a_worker_of_the_same_name_finds_what_it_kept_and_another_does_not(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"disk": str(tmp_path), "disk_mib": 8, "save": "at_once"}
    async with tiered(blocks=64, tiers=made(**keys)) as t:
        await say(t, "a", 1)
        await until(lambda: len(t.held(DISK)) >= 8)
    async with tiered(blocks=64, tiers=made(**keys)) as t:
        assert (await say(t, "b", 1)).prefilled == 0
    async with tiered(blocks=64, tiers=made("prefill-1", **keys)) as t:
        assert (await say(t, "c", 1)).prefilled == 32


async def test_a_folder_is_named_by_the_launcher_or_by_the_role_and_serves_one_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a number of the process would leave a folder behind at every start."""
    monkeypatch.setenv("BATON_WORKER_NAME", "decode-3")
    assert lasting_name("decode") == "decode-3"
    monkeypatch.delenv("BATON_WORKER_NAME")
    keys: dict[str, Any] = {"disk": str(tmp_path), "disk_mib": 8}
    async with tiered(blocks=64, tiers=made(lasting_name("decode"), **keys)):
        assert [path.name for path in tmp_path.iterdir()] == ["decode"]
        with pytest.raises(ValueError, match=r"tiers\.disk: .*decode.* used by"):
            made("decode", **keys)._make(KvPool(KvLayout("m", "float32", 16, 1, 1, 64), 1))


async def test_workers_share_what_is_in_an_object_store(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"object": (tmp_path / "kv").as_uri(), "object_mib": 8, "save": "at_once"}
    async with tiered(blocks=64, tiers=made(**keys)) as t, tiered(blocks=64, tiers=made("prefill-1", **keys)) as other:
        await say(t, "a", 1)
        await until(lambda: len(t.held(REMOTE)) >= 8)
        tier = other.tiers.tiers[0]
        tier._next_refresh = 0.0  # its time has come
        await until(lambda: t.held(REMOTE) == other.held(REMOTE))
        assert (await say(other, "b", 1)).prefilled == 0 and tier.worth.tally.hits == 8


def metered(tiers: Tiers) -> Callable[[], dict[str, float]]:
    """Returns what reads the metrics of these."""
    book, tracer = Book("prefill", "prefill-0", "toy"), SimpleNamespace(exported=0, dropped=0)
    membership = SimpleNamespace(reachable=True, reconnects=0)
    Meter(book, membership, tracer).tell_tiers(tiers)  # type: ignore[arg-type]
    return lambda: {
        family.name: family.series[0].value for family in book.families() if family.name.startswith("baton_tier") and family.series
    }


async def test_metrics_and_the_record_tell_that_a_tier_only_watches() -> None:
    async with tiered(PlainStore(16)) as t:
        read = metered(t.tiers)
        for number in range(10):
            await say(t, f"{number}", number)
        values, [record] = read(), records(t.tiers)
        assert (values["baton_tier_on"], values["baton_tier_watching"], values["baton_tier_returned_total"]) == (1, 1, 0)
        assert record.state == "watching" and f"none of {values['baton_tier_left_total']:.0f} blocks" in record.why


@pytest.mark.usefixtures("unmeasured")
async def test_metrics_tell_what_each_tier_did() -> None:
    async with tiered(tiers=made(memory_mib=1)) as t:
        read = metered(t.tiers)
        for number in (1, 2, 3, 1):
            await say(t, f"{number}-{len(t.outputs)}", number)
        values = read()
        assert values["baton_tier_hits_total"] == values["baton_tier_reads_total"] > 0 and values["baton_tier_on"] == 1
        assert values["baton_tier_watching"] == 0 and values["baton_tier_left_total"] >= values["baton_tier_returned_total"] > 0
        assert values["baton_tier_read_bytes_total"] == values["baton_tier_hits_total"] * UNIT
        assert values["baton_tier_blocks"] * UNIT == values["baton_tier_written_bytes_total"] > 0
        gain = values["baton_tier_saved_seconds_total"] - values["baton_tier_spent_seconds_total"]
        assert values["baton_tier_gain_seconds"] == pytest.approx(gain)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"memory_mib": 1}, "tiers.memory_mib: 1 MiB hold no block: one takes 4.0 MiB"),
        ({"memory_mib": 1 << 30}, "tiers.memory_mib: .* more than this machine has"),
        ({"disk": "KV", "disk_mib": 3}, "tiers.disk_mib: 3 MiB hold no block"),
        ({"disk": "KV", "disk_mib": 1 << 40}, "tiers.disk: "),
        ({"object": "nonsense://kv", "object_mib": 64}, "tiers.object: nonsense"),
        ({"object": "s3://bucket/kv", "object_mib": 3}, "tiers.object_mib: 3 MiB hold no block"),
        ({"disk": "KV", "disk_mib": 64, "key_file": "none"}, "tiers.key_file: none cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    if "disk" in keys:
        keys = {**keys, "disk": str(tmp_path / "kv")}
    layout = KvLayout("m", "float32", 16, 32, 8, 128)
    assert layout.block_bytes == 4 * MIB
    with pytest.raises(ValueError, match=message):
        made(**keys)._make(KvPool(layout, 1))


async def test_a_folder_of_another_model_is_refused_and_nothing_in_it_is_lost(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"disk": str(tmp_path), "disk_mib": 8, "save": "at_once"}
    async with tiered(blocks=64, tiers=made(**keys)) as t:
        await say(t, "a", 1)
        await until(lambda: len(t.held(DISK)) >= 8)
    with pytest.raises(ValueError, match=r"tiers\.disk: .* holds KV of another model or layout: fingerprint"):
        made(**keys)._make(KvPool(KvLayout("another", "float32", 4, 1, 1, 64), 1))
    async with tiered(blocks=64, tiers=made(**keys)) as t:
        assert (await say(t, "b", 1)).prefilled == 0
        assert HOST not in t.tiers.media


@pytest.mark.parametrize("engine", [{"kind": "vllm"}, {"prefix_caching": False}])
async def test_tiers_are_refused_where_no_pool_of_ours_is_above_them(tmp_path: Path, engine: dict[str, Any]) -> None:
    options = Options(ModelOptions(path=str(tmp_path)), EngineOptions(**{"device": "cpu", **engine}))
    with pytest.raises(BuildError, match=r"tiers need engine\.kind baton"):
        await start_engine(options, Listener(_ignore, _ignore, _ignore), tiers=made(memory_mib=1))


async def test_what_a_tier_refuses_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    make_toy(tmp_path / "toy")
    options = Options.of(tmp_path / "toy", kv_memory_mib=1)
    with pytest.raises(BuildError, match=r"tiers\.memory_mib: .* more than this machine has"):
        await start_engine(options, Listener(_ignore, _ignore, _ignore), tiers=made(memory_mib=1 << 30))
