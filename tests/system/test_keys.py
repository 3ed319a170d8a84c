"""A cluster that listens on the network and is protected by API keys alone."""

import asyncio
import os
import time
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from urllib.error import HTTPError

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from live_cluster import Cluster, cluster, toy

from baton.client import AsyncClient, GenerateError

pytestmark = pytest.mark.system


def entry(name: str, key: str, *words: str) -> str:
    return " ".join((name, sha256(key.encode()).hexdigest(), *words)) + "\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(entry("shop", "shop-key") + entry("bank", "bank-key") + entry("ops", "ops-key", "admin=yes"))
    return path


@pytest.fixture(scope="module")
def guarded(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = toy(tmp_path_factory.mktemp("models") / "toy", step_delay_ms=50)
    with cluster(model, "--cluster.host", "0.0.0.0", "--security.api-keys", str(keys)) as running:
        yield running


def test_the_host_of_the_cluster_needs_no_key_and_others_need_the_right_one(guarded: Cluster) -> None:
    here = guarded.here("status", "--name", guarded.name)
    assert here.returncode == 0, here.stderr
    tenant = guarded.here("top", "--once", "--name", guarded.name, "--api-key", "shop-key")
    assert tenant.returncode == 0, "the cluster's own token comes first on its host"
    for key, works in (("ops-key", True), ("shop-key", False), (None, False)):
        flags = () if key is None else ("--api-key", key)
        done = guarded.here("status", "--address", guarded.admin, *flags)
        assert (done.returncode == 0) == works, done.stderr
        assert works or "admin=yes" in done.stderr


@pytest.mark.parametrize("door", ["page", "metrics"])
def test_the_page_and_metrics_need_a_key(guarded: Cluster, door: str) -> None:
    at = guarded.page if door == "page" else str(guarded.status()["endpoints"]["metrics"])
    path = "/live" if door == "page" else "/metrics"
    for key, status in ((None, 401), ("guess", 401), ("ops-key", 200)):
        request = urllib.request.Request(f"http://{at}{path}", headers={"Authorization": f"Bearer {key}"} if key else {})
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
                assert answer.status == status
        except HTTPError as error:
            assert error.code == status
    assert all(worker["metrics"] for worker in guarded.workers())


def test_the_api_is_not_described_to_strangers(guarded: Cluster) -> None:
    """Over a blocking channel: if the answer overtakes the question, grpc.aio says INTERNAL in place of the server's status."""
    with grpc.insecure_channel(guarded.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            next(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=20))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_removed_key_stops_working_and_its_running_stream_finishes(guarded: Cluster, keys: Path) -> None:
    async with AsyncClient(guarded.grpc, api_key="bank-key") as client:
        running = client.generate("hello", max_tokens=200, ignore_eos=True, timeout_s=120)
        tokens = aiter(running)
        await anext(tokens)
        kept = keys.read_text()
        new = keys.with_suffix(".new")
        new.write_text("".join(line for line in kept.splitlines(keepends=True) if not line.startswith("bank")))
        os.replace(new, keys)
        try:
            removed = time.monotonic()
            while await answered(client):
                assert time.monotonic() - removed < 60, "the key still works"
                await asyncio.sleep(0.1)
            rest = [token async for token in tokens]
            assert len(rest) == 199 and running.result.finish_reason == "length", "the stream that ran was cut"
            async with AsyncClient(guarded.grpc, api_key="shop-key") as other:
                assert await answered(other), "negative control: another key"
        finally:
            keys.write_text(kept)


async def answered(client: AsyncClient) -> bool:
    try:
        async with client.generate("hello", max_tokens=1, timeout_s=60) as stream:
            async for _ in stream:
                pass
    except GenerateError as error:
        assert error.reason == "UNAUTHENTICATED"
        return False
    return True
