"""The gRPC door: `baton.v1.Generation`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import grpc

from baton.client import AsyncClient, GenerateError
from baton.stages import TOLD
from loadtest.drive import DEADLINE, GRACE_S, NO_SERVER, Answer
from loadtest.record import Outcome

REFUSALS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "UNAUTHENTICATED", "PERMISSION_DENIED", "OUT_OF_RANGE")
CUT_SHORT = "CUT_SHORT"
Pem = tuple[bytes | None, bytes | None, bytes | None]  # authority, private key, certificate


class GrpcDoor:
    """Decoding is greedy and continues past any end-of-sequence token, so each request gets exactly as many tokens as the workload says.
    A stream that breaks is a failure of the cluster, and is not resumed. Only requests with the same `salt` share cached prefixes."""

    def __init__(
        self,
        address: str,
        salt: str = "",
        api_key: str | None = None,
        tls: Pem | None = None,
        server_name: str | None = None,
        more: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """`more`: further keywords of a request, which may be others each time (`baton.client.build_request`)."""
        credentials = None if tls is None else grpc.ssl_channel_credentials(*tls)
        self._client = AsyncClient(address, credentials, api_key, server_name=server_name, max_resumes=0)
        self._salt = salt
        self._more = more

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: Callable[[int], None]) -> Answer:
        tokens: list[int] = []
        asked = {"cache_salt": self._salt, **self._more()}
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                stream = self._client.generate(
                    token_ids=prompt,
                    max_tokens=output_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    timeout_s=timeout_s,
                    **asked,
                )
                async with stream:
                    async for token in stream:
                        on_tokens(1)
                        tokens.append(token.id)
        except TimeoutError:
            return Answer("timeout", DEADLINE)
        except GenerateError as error:
            return Answer(*_judge(error, bool(tokens)))
        try:
            result = stream.result
        except RuntimeError:  # the stream ended without the event that ends an answer
            return Answer("failed", CUT_SHORT)
        handoff = result.handoff
        return Answer(
            "ok" if len(tokens) == output_tokens else "failed",
            "" if len(tokens) == output_tokens else CUT_SHORT,
            tokens,
            result.usage.prompt_tokens,
            result.usage.cached_tokens,
            {name: result.stages_ms[name] for name in TOLD},
            result.workers["prefill"],
            result.workers["decode"],
            result.workers["retries"],
            handoff["transport"],
            handoff["bytes"],
            handoff["blocks"],
            handoff["recomputed_tokens"],
        )

    async def close(self) -> None:
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _judge(error: GenerateError, begun: bool) -> tuple[Outcome, str]:
    if error.code == "DEADLINE_EXCEEDED":
        return "timeout", DEADLINE
    reason = error.reason or error.code
    if error.code == "UNAVAILABLE" and not error.reason:
        return "failed", NO_SERVER  # without a reason, no Baton router answered
    if begun:
        return "failed", reason
    return ("refused", reason) if error.code in REFUSALS or error.retry_after_s is not None else ("failed", reason)
