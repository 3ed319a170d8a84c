"""A real cluster is recorded: on request, when a process fails, hangs or is asked by a signal; and what it decided is decided again."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_cluster import SHARED, ask, disturbed, expected
from live_cluster import Cluster, cluster, toy

from baton.cluster.config_layers import MASK
from baton.recorder.recording import read

pytestmark = pytest.mark.system
PROMPT = list(range(1, 151))
LONG = {"timeout": 150}  # seconds, for a command on a busy machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("toy") / "toy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def live(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    env = {"BATON_FAILPOINTS_FOLDER": str(tmp_path_factory.mktemp("failpoints"))}
    flags = (*SHARED, "--launcher.hang-s", "6", "--recorder.folder", str(folder))
    with cluster(model, *flags, prefill=2, decode=2, env=env) as running:
        yield running


def replayed(live: Cluster, path: Path) -> list[dict[str, object]]:
    done = live.here("replay-run", str(path), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    assert not [one for one in found if one["difference"] or one["left_out"]], found
    return found


async def load(live: Cluster, count: int) -> None:
    """Prompts that begin alike, several at a time; some clients leave."""

    async def one(number: int) -> None:
        prompt = [number % 5, *PROMPT[: 20 + number % 100], number]
        try:
            async with asyncio.timeout(0.05 if number % 7 == 6 else 60):
                await ask(client, prompt, max_tokens=8 + number % 24)
        except TimeoutError:
            pass

    async with live.client() as client:
        for start in range(0, count, 8):
            await asyncio.gather(*(one(number) for number in range(start, start + 8)))


async def test_a_cluster_under_load_is_decided_again_as_it_was(live: Cluster, tmp_path: Path) -> None:
    await load(live, 64)
    path = tmp_path / "cluster.jsonl"
    done = await asyncio.to_thread(live.here, "record", str(path), "--name", live.name)
    assert done.returncode == 0, done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    found = await asyncio.to_thread(replayed, live, path)
    assert {str(one["process"]) for one in found} == {"router-0", "prefill-0", "prefill-1", "decode-0", "decode-1"}
    compared = {str(one["process"]): one["compared"] for one in found}
    assert compared["router-0"]["policy.prefill"] >= 50 and compared["router-0"]["members.note_answer"] > 0  # type: ignore[index]
    assert all(compared[name]["engine.step"] > 0 for name in compared if name.startswith("decode"))  # type: ignore[index]
    sections = {section.head["process"]: section for section in read(path)}
    assert len(sections["router-0"].requests) >= 50 and sections["decode-0"].head["config"]["cluster"]["key"] == MASK


async def test_a_process_that_is_asked_by_a_signal_writes_a_file_and_goes_on(live: Cluster, folder: Path) -> None:
    pid = live.worker_pid("decode-0")
    os.kill(pid, signal.SIGUSR2)
    [path] = await asyncio.to_thread(live.wait, lambda: sorted(folder.glob("decode-0-*-signal.*")))
    assert await asyncio.to_thread(replayed, live, path)
    async with live.client() as client:
        assert list((await ask(client)).token_ids) == expected()
    assert live.worker_pid("decode-0") == pid


async def test_an_engine_that_fails_leaves_a_file(live: Cluster, folder: Path) -> None:
    with disturbed(live, "engine.step=raise@3") as prompt:
        async with live.client() as client:
            assert list((await ask(client, prompt)).token_ids) == expected(prompt)
    [path] = await asyncio.to_thread(live.wait, lambda: sorted(folder.glob("*-crash.*")))
    [one] = await asyncio.to_thread(replayed, live, path)
    assert one["compared"]["engine.step"] >= 2  # type: ignore[index]


async def test_a_process_that_hangs_leaves_a_file_before_it_is_killed(live: Cluster, folder: Path) -> None:
    before = set(folder.iterdir())
    with disturbed(live, "engine.step=sleep:600@2") as prompt:
        async with live.client() as client:
            assert list((await ask(client, prompt)).token_ids) == expected(prompt)
        [path] = await asyncio.to_thread(live.wait, lambda: set(folder.glob("*-signal.*")) - before)
    assert await asyncio.to_thread(replayed, live, path)


async def test_nothing_is_recorded_when_it_is_off(model: Path, tmp_path: Path) -> None:
    with cluster(model, "--recorder.minutes", "0", "--recorder.folder", str(tmp_path / "none")) as off:
        async with off.client() as client:
            await ask(client)
        done = await asyncio.to_thread(off.baton, "record", str(tmp_path / "off.jsonl"), "--name", off.name, **LONG)
        assert done.returncode == 0, done.stderr
        sections = list(read(tmp_path / "off.jsonl"))
        assert len(sections) == 3 and not any(section.stretches for section in sections)
        assert all(section.head["off"] == "recorder.minutes is 0" for section in sections)
        off.kill("decode-0", signal.SIGUSR2)
        await asyncio.to_thread(off.wait, lambda: "nothing is recorded" in off.log("decode-0"))
    assert not (tmp_path / "none").exists()
