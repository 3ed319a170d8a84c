"""A cluster in which something goes wrong once, and what its client sees. With the toy model, "the same tokens" means exactly the same."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from live_cluster import Cluster, cluster, toy_output

from baton.client import AsyncClient, Result

PROMPT = list(range(1, 151))
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "timeout_s": 60}


@contextmanager
def faulty(model: Path, failpoints: str = "", *flags: str, prefill: int = 2, decode: int = 2) -> Iterator[Cluster]:
    """A cluster in which each failpoint fires once, in the first process that reaches it."""
    with tempfile.TemporaryDirectory() as once:
        env = {"BATON_FAILPOINTS": failpoints, "BATON_FAILPOINTS_ONCE": once}
        with cluster(model, "--kv.lease-ttl-s", "2", "--kv.read-timeout-s", "1", *flags, prefill=prefill, decode=decode, env=env) as live:
            yield live
            if failpoints:
                names = {point.partition("=")[0] for point in failpoints.split(",")}
                assert set(os.listdir(once)) == names, "the fault did not happen"


async def ask(client: AsyncClient, prompt: list[int] = PROMPT, **sampling: object) -> Result:
    params: dict[str, Any] = {"max_tokens": 24, **GREEDY, **sampling}
    async with client.generate(token_ids=prompt, **params) as stream:
        tokens = [token async for token in stream]
        assert [token.index for token in tokens] == list(range(len(tokens)))
        return stream.result


def expected(prompt: list[int] = PROMPT, **params: object) -> list[int]:
    return toy_output(prompt, **{"max_tokens": 24, **params})
