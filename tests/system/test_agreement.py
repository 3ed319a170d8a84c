"""Workers whose own trials found unlike things serve together: the first one's holds, through the registry."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from by_hand import Hand, healthy, workers

from baton.client import Client
from baton.engine.cpu import kernel_cache, products
from baton.launch.ports import Ports
from baton.launch.redis_server import find_binary

pytestmark = pytest.mark.system
KEY = "a key that all workers share"
TALE = Path(__file__).parents[2] / "baton" / "models" / "tale"


def kernels_with(folder: Path, by: str) -> Path:
    """A cache of kernels of its own, as in a container, in which a trial with one thread has found `by`."""
    place = kernel_cache.place_of(kernel_cache.OWN)
    assert place is not None and place.complete
    copied = folder / place.folder.name
    shutil.copytree(place.folder, copied, ignore=shutil.ignore_patterns("products-*"))
    kept = copied / f"products-{products._machine(torch.float32, 1):08x}.json"
    kept.write_text(json.dumps(asdict(products.ProductChoice(by, {by: []}))))
    return folder


def test_workers_multiply_alike_whatever_each_has_found(tmp_path: Path) -> None:
    found = {"prefill": "torch", "decode": "baton"}
    hand = Hand(tmp_path)
    with Ports("127.0.0.1") as held:
        redis, door, admin = (held.hold() for _ in range(3))
        common = {
            "BATON_REDIS_URL": f"redis://127.0.0.1:{redis}/0",
            "BATON_MODEL_PATH": str(TALE),
            "BATON_CLUSTER_KEY": "a key that all workers share",
        }
        own = {role: {kernel_cache.VARIABLE: str(kernels_with(tmp_path / f"kernels-{role}", by))} for role, by in found.items()}
        try:
            for role in found:
                hand.python(f"{role}_worker", "--engine.threads", "1", "--engine.kv-memory-mib", "64", env={**common, **own[role]})
            ports = ("--router.port", str(door), "--router.admin-port", str(admin), "--router.http-port=0", "--router.page-port=0")
            hand.python("router", *ports, "--router.bypass-tokens=0", env=common)
            hand.start("redis", str(find_binary()), "--port", str(redis), "--bind", "127.0.0.1", "--save", "")  # they wait for it
            hand.wait(lambda: healthy(f"127.0.0.1:{door}") and sum(bool(worker["roles"]) for worker in workers(f"127.0.0.1:{admin}")) == 2)
            with Client(f"127.0.0.1:{door}") as client, client.generate("Once upon a time", max_tokens=8, timeout_s=60) as stream:
                assert len(list(stream)) == 8
                answer = stream.result
        finally:
            hand.stop()
    assert answer.handoff["digests_checked"] > 0 and answer.handoff["recomputed_tokens"] == 0
    told = [next(line for line in hand.log(f"{role}_worker").splitlines() if "arithmetic: " in line) for role in found]
    (what,) = {json.loads(line)["message"] for line in told}
    assert any(f"'torch.float32': '{by}" in what for by in found.values()), "so one of them does what it had not found"
