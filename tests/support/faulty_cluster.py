"""A cluster in which something goes wrong once, and what its client sees. With the toy model, "the same tokens" means exactly the same."""

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live_cluster import Cluster, cluster, toy_output

from baton.client import AsyncClient, Result

PROMPT = list(range(1, 151))
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "timeout_s": 60}
# Of a cluster that several tests share: those that were killed are back at once, and no worker has a bad name from the test before.
SHARED = ("--launcher.restart-backoff-s", "0.1", "--launcher.restart-backoff-max-s", "0.1", "--router.outlier-share", "0")
_salts = itertools.count(1000)


@contextmanager
def faulty(model: Path, failpoints: str = "", *flags: str, prefill: int = 2, decode: int = 2) -> Iterator[Cluster]:
    """A cluster in which each failpoint fires once, in the first process that reaches it."""
    with tempfile.TemporaryDirectory() as folder:
        limits = ("--kv.lease-ttl-s", "2", "--kv.read-timeout-s", "1")
        env = {"BATON_FAILPOINTS_FOLDER": folder}
        with cluster(model, *limits, *flags, prefill=prefill, decode=decode, env=env) as live, live.faults(failpoints):
            yield live


@contextmanager
def disturbed(live: Cluster, failpoints: str = "", prompt: Sequence[int] = PROMPT) -> Iterator[list[int]]:
    """The same in a cluster that tests share. Yields `prompt` with a beginning of its own, so that no worker caches it. At the end, all
    workers are there."""
    before = ready(live)
    with live.faults(failpoints):
        yield [next(_salts) % 251, next(_salts) % 241, *prompt[2:]]
    live.wait(lambda: ready(live) == before)


def ready(live: Cluster) -> set[str]:
    """The names of workers that can be asked."""
    return {worker["name"] for worker in live.workers() if worker.get("state") == "ready" and "error" not in worker}


async def ask(client: AsyncClient, prompt: list[int] = PROMPT, **sampling: object) -> Result:
    params: dict[str, Any] = {"max_tokens": 24, **GREEDY, **sampling}
    async with client.generate(token_ids=prompt, **params) as stream:
        tokens = [token async for token in stream]
        assert [token.index for token in tokens] == list(range(len(tokens)))
        return stream.result


def expected(prompt: list[int] = PROMPT, **params: object) -> list[int]:
    return toy_output(prompt, **{"max_tokens": 24, **params})
