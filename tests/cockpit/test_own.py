"""The cluster that an experiment has for itself: what it may take, how it is started, and that nothing of it is left. The processes here
only stand in for `baton up`; `tests/system/test_cockpit.py` runs real ones."""

import asyncio
import json
import os
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from baton.cluster.config_layers import load
from baton.cluster.errors import BatonError, Reason
from baton.cockpit import own as owns
from baton.cockpit.bench import Bench, RunKept
from baton.cockpit.bounds import KV_MIB, LEAST_MOST, MOST_WORKERS, MachineRoom, notes, refuse_beyond, start_flags
from baton.cockpit.checkpoints import CHECKPOINTS
from baton.cockpit.experiments import find
from baton.cockpit.knobs import KNOBS, Menu, Settings
from baton.cockpit.own import NAME, OwnClusters
from baton.engine.build import build
from baton.engine.options import Options
from baton.launch.state import born
from baton.models.make_small import make

AMPLE = MachineRoom(16, 64 << 30)
# What `baton up` is replaced by. Each starts a process, as `baton up` does, and says so.
BEGIN = "import os, signal, subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('2 of 3 workers ready', flush=True);"
WAITS = (sys.executable, "-c", f"{BEGIN} signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, 9)); time.sleep(600)")
DEAF = (sys.executable, "-c", f"{BEGIN} signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
FAILS = (sys.executable, "-c", "import os, sys; print(sorted(n for n in os.environ if n.startswith('BATON_'))); sys.exit('baton: no room')")


def refused(room: MachineRoom, longest: int = 100, **settings: Any) -> str:
    """The field that is named; empty: none."""
    try:
        refuse_beyond(Settings(**{"prefill": 0, **settings}), longest, room)
    except BatonError as error:
        return error.violations[0].field
    return ""


def test_a_cluster_takes_no_more_workers_than_the_machine_has_cores() -> None:
    assert [MachineRoom(cores, 1).workers for cores in (1, 2, 6, 64)] == [LEAST_MOST, LEAST_MOST, 6, MOST_WORKERS]
    six = MachineRoom(6, 64 << 30)
    assert refused(six, prefill=2, decode=4) == "" and refused(six, prefill=2, decode=5) == "decode"
    assert refused(six, prefill=6, decode=1) == "prefill"


def test_a_cluster_takes_no_more_memory_than_is_free() -> None:
    room = MachineRoom(16, 3 << 30)
    assert refused(room, decode=2) == "" and refused(room, decode=6) == "decode" and refused(room, prefill=5) == "prefill"
    assert refused(MachineRoom(16, 1400 << 20), checkpoint="tale") == ""
    assert refused(MachineRoom(16, 1400 << 20), checkpoint="untrained-86m") == "checkpoint"


def test_a_request_that_the_model_has_no_room_for_is_refused() -> None:
    assert refused(AMPLE, longest=2048) == "" and refused(AMPLE, longest=2049) == "prompt"


@pytest.mark.parametrize("name", ["static", "workers", "size"])
def test_its_flags_are_a_configuration_that_listens_on_loopback_alone(name: str) -> None:
    settings = find(name).settings("own", {"batch": 5, "decode": 2})
    command, *flags = start_flags(settings, "it", "folder")
    given = {key.removeprefix("--"): value for key, value in zip(flags[::2], flags[1::2], strict=True)}
    config = load(env={}, flags=given).config
    assert command == "up" and config.cluster.host == "127.0.0.1" and config.redis.url == "embedded" and config.launcher.kind == "local"
    assert {config.router.port, config.router.admin_port, config.router.http_port, config.router.page_port} == {0}
    assert (config.cluster.name, config.model.path, config.engine.max_num_seqs, config.decode.replicas) == ("it", "folder", 5, 2)
    assert (config.engine.batching, config.prefill.replicas) == (settings.batching, settings.prefill)
    assert config.engine.device == "cpu" and config.engine.threads == 1 and config.engine.kv_memory_mib


def test_what_disturbs_it_is_said() -> None:
    assert notes(Settings(prefill=1, decode=2), AMPLE, []) == []
    [beside] = notes(Settings(), AMPLE, ["shop"])
    assert "the cluster shop runs on the same cores: the two disturb each other" in beside
    [crowded] = notes(Settings(prefill=1, decode=1), MachineRoom(2, 1 << 30), [])
    assert "2 workers of one thread share 2 cores" in crowded
    [noise] = notes(Settings(checkpoint="untrained-27m"), AMPLE, [])
    assert "untrained" in noise


def numbers(file: Path) -> int:
    """In all tensors of a safetensors file."""
    with file.open("rb") as read:
        (length,) = struct.unpack("<Q", read.read(8))
        header = json.loads(read.read(length))
    size = {"BF16": 2, "F32": 4}
    tensors = [one for name, one in header.items() if name != "__metadata__"]
    return sum((one["data_offsets"][1] - one["data_offsets"][0]) // size[one["dtype"]] for one in tensors)


@pytest.mark.parametrize("name", [name for name, one in CHECKPOINTS.items() if not one.made])
def test_models_that_ship_are_as_they_are_told(name: str) -> None:
    model = CHECKPOINTS[name]
    assert numbers(model.folder / "model.safetensors") == model.parameters
    assert json.loads((model.folder / "config.json").read_text())["max_position_embeddings"] == model.context


@pytest.mark.parametrize("name", [name for name, one in CHECKPOINTS.items() if not one.made])
def test_every_choice_of_types_can_be_computed(name: str) -> None:
    model = CHECKPOINTS[name]
    for weights, kv in product(*(cast(Menu, KNOBS[knob]).options for knob in ("weight_dtype", "kv_dtype"))):
        made = build(Options.of(model.folder, weight_dtype=weights, kv_dtype=kv, kv_memory_mib=KV_MIB, threads=1))
        assert made.max_model_len == model.context, "its KV has room for the longest request"


def test_models_that_are_made_are_as_they_are_told(tmp_path: Path) -> None:
    def formula(hidden: int, layers: int, heads: int, kv_heads: int) -> int:
        kv = hidden // heads * kv_heads
        return layers * (11 * hidden**2 + 2 * kv * hidden + 2 * hidden) + 2 * 2048 * hidden + hidden

    tiny = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    make(tmp_path, **tiny)
    assert numbers(tmp_path / "model.safetensors") == formula(**tiny)
    made = [one for one in CHECKPOINTS.values() if one.made]
    assert made and [one.parameters for one in made] == [formula(**one.made) for one in made]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_STATE_DIR", str(tmp_path))
    return tmp_path


def running() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]


@contextmanager
def bench(*program: str) -> Iterator[Bench]:
    before = {one.pid for one in running()}
    yield Bench(cast(Any, None), own=OwnClusters(program))
    left = [one.cmdline() for one in running() if one.pid not in before]
    assert not left


async def begun(bench: Bench, **settings: Any) -> RunKept:
    return await bench.start({"experiment": "static", "where": "own", "settings": {"duration_s": 5, **settings}})


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_run_that_is_stopped_while_its_cluster_starts_leaves_no_process() -> None:
    with bench(*WAITS) as tried:
        run = await begun(tried)
        await until(lambda: "2 of 3 workers ready" in run.doing)
        assert len(running()) >= 2 and run.label == "real cluster of its own"
        tried.stop()
        tried.stop()
        await until(lambda: run.state != "running")
        assert run.state == "stopped" and run.doing == ""
        again = await begun(tried)
        tried.stop()
        await until(lambda: again.state != "running")


async def test_the_end_of_the_cockpit_takes_it_down_even_if_it_does_not_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owns, "ENDING", tuple((number, 0.2 if number != 9 else 5.0) for number, _ in owns.ENDING))
    with bench(*DEAF) as tried:
        run = await begun(tried)
        await until(lambda: "2 of 3 workers ready" in run.doing)
        [up] = [one for one in running() if "signal.SIG_IGN" in " ".join(one.cmdline())]
        [started] = up.children()
        tried.stop()
        await until(lambda: run.doing == "its cluster is taken down")
        await tried.close()
        assert not up.is_running() and run.state == "stopped"
        started.kill()  # it is on no leash here, unlike the processes of `baton up`


async def test_a_cluster_that_is_never_ready_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owns, "START_WITHIN_S", 0.5)
    with bench(*WAITS) as tried:
        run = await begun(tried)
        await until(lambda: run.state != "running")
        assert run.state == "failed" and "its cluster was not ready within 0.5 s" in run.message


async def test_why_it_does_not_start_is_told_and_no_setting_of_the_user_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BATON_REDIS_URL", "BATON_CLUSTER_HOST", "BATON_API_KEY", "BATON_CLUSTER_KEY"):
        monkeypatch.setenv(name, "redis://elsewhere")
    with bench(*FAILS) as tried:
        run = await begun(tried)
        await until(lambda: run.state != "running")
        assert run.state == "failed" and run.message.startswith("its cluster did not start: ") and "baton: no room" in run.message
        assert "BATON_STATE_DIR" in run.message
        assert "BATON_REDIS" not in run.message and "BATON_C" not in run.message and "BATON_A" not in run.message


async def test_one_runs_at_a_time_whichever_cockpit_asks() -> None:
    with bench(*WAITS) as one, bench(*WAITS) as other:
        run = await begun(one)
        with pytest.raises(BatonError) as caught:
            await begun(other)
        assert caught.value.reason is Reason.SATURATED and not other.runs
        with pytest.raises(BatonError) as caught:
            await begun(one)
        assert caught.value.reason is Reason.SATURATED and len(one.runs) == 1
        one.stop()
        await until(lambda: run.state != "running")
        again = await begun(other)
        await other.close()
        assert again.state == "stopped"


async def test_a_cluster_of_that_name_is_left_alone(folder: Path) -> None:
    known = {"name": NAME, "pid": os.getpid(), "endpoints": {}, "redis_url": "", "log_dir": "", "born": born(os.getpid())}
    (folder / f"{NAME}.json").write_text(json.dumps(known))
    with bench(*WAITS) as tried:
        with pytest.raises(BatonError) as caught:
            await begun(tried)
        assert caught.value.reason is Reason.SATURATED and (folder / f"{NAME}.json").exists()


async def test_what_this_machine_has_no_room_for_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owns, "usable_cores", lambda: 2)
    with bench(*WAITS) as tried:
        for field, settings in (("decode", {"decode": 4}), ("prompt", {"prompt": 2048})):
            with pytest.raises(BatonError) as caught:
                await begun(tried, **settings)
            assert caught.value.violations[0].field == field and not tried.runs
        assert (await begun(tried, decode=3)).state == "running", "as many as there is room for"
        await tried.close()
