"""The door of a simulated cluster: the load test asks it as it asks a real one."""

import asyncio
from collections.abc import Sequence

from baton.cluster.errors import BatonError, Reason
from baton.profile.file import Profile
from baton.simulate.cluster import SimulatedCluster
from baton.simulate.cores import Thread
from baton.stages import STAGES, TOLD
from loadtest.drive import DEADLINE, Answer, OnTokens
from router.request import Request

REFUSED = {Reason.SATURATED, Reason.INVALID_FIELD}  # said before anything is computed


class SimulatedDoor:
    """A `loadtest.drive.Door`. Requests go to the routers in turn. `client`: who asks; its processor time is the profile's."""

    def __init__(self, cluster: SimulatedCluster, profile: Profile, client: Thread) -> None:
        self._cluster, self._client = cluster, client
        self._path_s = profile.values("path")["request"]
        cost = profile.values("client")
        self._request_s, self._token_s = cost["request"], 0.0 if cluster.large else cost["token"]
        self._turn = 0

    async def ask(self, prompt: Sequence[int], output_tokens: int, timeout_s: float, on_tokens: OnTokens) -> Answer:
        router, self._turn = self._turn % len(self._cluster.routers), self._turn + 1
        came: asyncio.Queue[int] = asyncio.Queue()
        reader = asyncio.create_task(self._read(came, on_tokens)) if self._token_s else None
        begun = False

        def note(tokens: int, at: Sequence[float]) -> None:
            nonlocal begun
            begun = True
            if reader is None:
                on_tokens(tokens, at)
            else:
                came.put_nowait(tokens)

        try:
            await self._client.work(self._request_s)
            await asyncio.sleep(self._path_s)
            request = await self._cluster.ask(list(prompt), output_tokens, timeout_s, router=router, told=note)
            came.put_nowait(0)
            if reader is not None:
                await reader
        except BatonError as error:
            return _failed(error, begun)
        finally:
            if reader is not None:
                reader.cancel()
        return _answer(request)

    async def _read(self, came: "asyncio.Queue[int]", on_tokens: OnTokens) -> None:
        while tokens := await came.get():
            await self._client.work(tokens * self._token_s)
            on_tokens(tokens)


def _answer(request: Request) -> Answer:
    trace = request.trace
    parts = {"prefill_wait": trace.prefill_wait_ms, "prefill_compute": trace.prefill_compute_ms}
    stages = {name: 1000 * trace.watch.seconds.get(name, 0.0) if name in STAGES else parts.get(name, 0.0) for name in TOLD}
    return Answer(
        "ok",
        tokens=request.tokens[request.prompt_len :],
        prompt_tokens=request.prompt_len,
        cached_tokens=trace.cached_tokens,
        stages_ms=stages,
        prefill_worker=trace.prefill_worker,
        decode_worker=trace.decode_worker,
        retries=trace.retries,
        transport=trace.handoff.transport,
    )


def _failed(error: BatonError, begun: bool) -> Answer:
    """Judges an error as the load test's real doors do."""
    if error.reason is Reason.DEADLINE:
        return Answer("timeout", DEADLINE)
    return Answer("refused" if error.reason in REFUSED and not begun else "failed", error.reason.name)
