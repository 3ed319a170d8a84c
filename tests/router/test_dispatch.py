"""The owner of a request: whatever fails, the stream is the undisturbed one or ends in the right error, and nothing is left behind."""

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_workers import MODEL, TOKENIZER, Call, FakeWorkers, Fault, answers, record, tied, unusable
from turn_work import TurnWork

from baton.clock import loop_time
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import Load, WorkerRecord
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import naive
from router import choosing, dispatch, policy
from router.dispatch import Dispatcher
from router.policy import choose_prefill
from router.request import Request, Stopwatch, Suspicion, Trace
from router.view import ClusterView
from router.workers import Answer, DecodeEvent, Died

PROMPT = list(range(1, 41))
SHORT = PROMPT[:5]  # computed by the decode worker itself
OUTPUT = 8
PARAMS = SamplingParams(max_tokens=OUTPUT, temperature=1.0, seed=7, ignore_eos=True)
FIRST = tied(0)
LOST = BatonError(Reason.WORKER_LOST, "connection reset")

pytestmark = pytest.mark.virtual_time


@dataclass
class World:
    """A router's dispatcher with scripted workers, and the client's end of its streams."""

    names: str = "p0 d0"
    config: RouterConfig = field(default_factory=lambda: RouterConfig(bypass_tokens=8, recover_wait_s=0.2))
    healer: "asyncio.Task[None] | None" = None  # brings dead workers back

    def __post_init__(self) -> None:
        self.view = ClusterView({MODEL: TOKENIZER})
        self.view.update([record(name) for name in self.names.split()], 0.0)
        self.workers = FakeWorkers()
        self.dispatcher = Dispatcher(self.view.models[MODEL], self.workers, self.config)

    def request(self, prompt: list[int] = PROMPT, params: SamplingParams = PARAMS, timeout_s: float = 10.0, name: str = FIRST) -> Request:
        return Request(name, list(prompt), len(prompt), params, "", loop_time() + timeout_s, Trace(Stopwatch(loop_time)))

    async def serve(self, request: Request | None = None) -> tuple[Request, list[int]]:
        """Runs a request to its end and checks that its record of the output is what the client saw."""
        request = request or self.request()
        seen: list[int] = []
        try:
            async for tokens in self.dispatcher.generate(request):
                seen.extend(token.id for token in tokens)
        finally:
            assert seen == request.output
        return request, seen

    async def refused(self, request: Request | None = None) -> tuple[BatonError, list[int]]:
        """Like `serve`, for a request that ends in an error. Checks that the tokens sent before the error are right."""
        request = request or self.request()
        with pytest.raises(BatonError) as caught:
            await self.serve(request)
        assert request.output == truth(request)[: len(request.output)] and request.finish is None
        return caught.value, request.output

    def check(self) -> None:
        """Checks that nothing is left behind: no lease, no call, no number in the view."""
        assert not self.workers.leases
        assert set(self.workers.endings.values()) <= {1}, "each lease ended once"
        assert self.workers.ends.total() == len(self.workers.calls), "each call ended"
        for worker in self.view.members.records():
            assert self.view.members.prefill_tokens(worker.name, 0.0) == 0 == self.view.members.unreported_decode_tokens(worker.name)

    def stop_healer(self) -> None:
        if self.healer is not None:
            self.healer.cancel()

    def kinds(self) -> list[tuple[str, str, int]]:
        return [(call.kind, call.worker, call.known) for call in self.workers.calls]


def truth(request: Request) -> list[int]:
    return naive(request.tokens[: request.prompt_len], request.params)


def fail(world: World, name: str, tokens: int | None = None, error: BatonError | None = LOST, times: int = 1) -> None:
    world.workers.faults[name].extend([Fault(error, tokens)] * times)


# Undisturbed


async def test_a_request_crosses_both_workers() -> None:
    world = World()
    request, seen = await world.serve()
    assert seen == truth(request) and len(seen) == OUTPUT and request.finish == "length"
    assert world.workers.calls == [Call("prefill", "p0", 40), Call("decode", "d0", 41, b"lease 1")]
    trace = request.trace
    assert (trace.prefill_worker, trace.decode_worker, trace.retries, trace.cached_tokens) == ("p0", "d0", 0, 16)
    assert (trace.prefill_wait_ms, trace.prefill_compute_ms, trace.handoff.read_ms, trace.handoff.verify_ms) == (1.0, 2.0, 1.0, 2.0)
    assert (trace.handoff.transport, trace.handoff.blocks, trace.handoff.bytes, trace.handoff.digests_checked) == ("tcp", 3, 3000, 3)
    assert world.workers.released == []
    world.check()


# What the model says of the prompt


@pytest.mark.parametrize("lost", [None, -1, 0, 3])
async def test_the_decode_worker_scores_the_prompt_and_a_retry_tells_nothing_twice(lost: int | None) -> None:
    """Lost in the middle of the scores, before the first token, or later."""
    world = World("p0 d0 d1 d2")
    if lost is not None:
        for name in ("d0", "d1"):
            fail(world, name, tokens=lost)
    request = world.request()
    request.params = replace(request.params, prompt_logprobs=0)
    _, seen = await world.serve(request)
    assert seen == truth(request) and request.trace.bypasses[0] == "prompt_logprobs" and (request.trace.retries > 0) == (lost is not None)
    assert [each.index for each in request.scores] == list(range(1, request.prompt_len))
    assert ("prefill" in {call.kind for call in world.workers.calls}) == (lost == 3), "once they are told, it is a request like any other"
    world.check()


# Many at once


async def test_choices_of_many_requests_are_spread_over_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams of a worker fail at once, and each choice walks the keys of a prompt."""
    work = TurnWork()
    monkeypatch.setattr(choosing, "CHOSEN_A_TURN", 100)
    for choose in ("choose_prefill", "choose_decode"):
        monkeypatch.setattr(policy, choose, work.counted(getattr(policy, choose)))
    world = World("p0 d0 d1")
    fail(world, "d0", tokens=3, times=50)
    with work.watched():
        done = await asyncio.gather(*(world.serve(world.request(name=f"r{i}")) for i in range(50)))
    assert all(seen == truth(request) for request, seen in done) and sum(request.trace.retries for request, _ in done) > 5
    assert 1 < work.most <= 100 // (2 + choosing.KEYS_A_WORKER)
    world.check()


async def test_a_long_prompt_is_not_sent_in_the_turn_in_which_its_worker_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a short one is, so that it is not a turn later at its worker."""
    most = {}
    for long_prompt in (39, 41):  # of 40 tokens
        work = TurnWork()
        monkeypatch.setattr(choosing, "CHOSEN_A_TURN", 1)
        monkeypatch.setattr(choosing, "LONG_PROMPT", long_prompt)
        world = World("p0 d0")
        index = world.view.models[MODEL].index
        monkeypatch.setattr(index, "predict", work.counted(index.predict))
        for call in ("prefill", "decode"):
            monkeypatch.setattr(world.workers, call, work.counted(getattr(world.workers, call)))
        with work.watched():
            request, seen = await world.serve()
        assert seen == truth(request)
        most[long_prompt] = work.most
        world.check()
    assert most == {39: 1, 41: 2}


async def workers_of(world: World, ids: list[str]) -> list[tuple[str, str]]:
    """Which workers serve requests that come one after the other, to an idle cluster."""
    served = [(await world.serve(world.request([*id_.encode(), *PROMPT], name=id_)))[0].trace for id_ in ids]
    return [(trace.prefill_worker, trace.decode_worker) for trace in served]


async def test_routers_that_see_the_same_do_not_choose_the_same_workers_at_the_same_moment() -> None:
    names = "p0 p1 p2 p3 d0 d1 d2 d3"
    ours, theirs = [await workers_of(World(names), [f"{router}{i}" for i in range(200)]) for router in "ab"]
    for chosen in (ours, theirs):
        for role in (0, 1):
            counts = Counter(pair[role] for pair in chosen)
            assert len(counts) == 4 and min(counts.values()) > 35, "an idle cluster spreads requests"
    for role in (0, 1):
        assert 30 < sum(one[role] == other[role] for one, other in zip(ours, theirs, strict=True)) < 70, "a quarter, as chance has it"


async def test_a_request_gets_the_same_of_equal_workers_from_every_router_and_after_any_others() -> None:
    alone, after_others = World("p0 p1 d0 d1"), World("p0 p1 d0 d1")
    await workers_of(after_others, ["x", "y", "z"])
    assert [await workers_of(alone, ["a"]), await workers_of(alone, ["b"])] == [await workers_of(after_others, [id_]) for id_ in "ab"]


async def test_requests_of_one_worker_share_the_question_whether_it_lives() -> None:
    world, probed = World("p0 d0 d1"), list[str]()
    probe = world.workers.probe

    async def counted(worker: WorkerRecord, timeout_s: float) -> Answer:
        probed.append(worker.name)
        await asyncio.sleep(0.01)
        return await probe(worker, timeout_s)

    world.workers.probe = counted  # type: ignore[method-assign]
    world.workers.alive["d0"] = 0.0
    fail(world, "d0", tokens=3, error=Died("reset"), times=50)
    done = await asyncio.gather(*(world.serve(world.request(name=f"r{i}")) for i in range(50)))
    assert all(seen == truth(request) for request, seen in done)
    assert 1 <= len(probed) < 10
    world.check()


async def test_a_short_prompt_is_computed_by_the_decode_worker() -> None:
    world = World()
    request, seen = await world.serve(world.request(SHORT))
    assert seen == truth(request) and world.kinds() == [("decode", "d0", 5)]
    assert (request.trace.prefill_worker, request.trace.cached_tokens) == ("", 5)
    world.check()


async def test_without_prefill_workers_the_decode_worker_computes_every_prompt() -> None:
    world = World("d0")
    request, seen = await world.serve()
    assert seen == truth(request) and world.kinds() == [("decode", "d0", 40)]
    world.check()


@pytest.mark.parametrize("prompt", [PROMPT, SHORT])
@pytest.mark.parametrize("stop", ["length", "stop"])
async def test_the_first_token_may_be_the_last(prompt: list[int], stop: str) -> None:
    world = World()
    first = naive(prompt, PARAMS)[0]
    params = replace(PARAMS, max_tokens=1) if stop == "length" else replace(PARAMS, stop_token_ids=frozenset([first]))
    request, seen = await world.serve(world.request(prompt, params))
    assert seen == [first] and request.finish == stop
    assert [call.kind for call in world.workers.calls] == ["prefill" if prompt is PROMPT else "decode"]
    assert not world.workers.endings and request.trace.decode_worker == ("" if prompt is PROMPT else "d0")
    world.check()


async def test_a_stop_token_in_the_middle_ends_the_output() -> None:
    world = World()
    whole = naive(PROMPT, PARAMS)
    request, seen = await world.serve(world.request(params=replace(PARAMS, stop_token_ids=frozenset([whole[4]]))))
    assert seen == whole[:5] and request.finish == "stop"
    world.check()


async def test_the_view_counts_work_in_progress() -> None:
    world = World()
    numbers: list[tuple[str, float, int]] = []
    world.workers.tick = lambda stage: numbers.append(
        (stage, world.view.members.prefill_tokens("p0", 0.0), world.view.members.unreported_decode_tokens("d0"))
    )
    await world.serve()
    assert numbers[:3] == [("prefill", 40, 0), ("transfer", 0, 48), ("decode", 0, 48)]
    world.check()


async def test_two_requests_with_the_same_id_are_served_separately() -> None:
    """Callers choose the ids, so a second request with the same id must not disturb the first."""
    world = World()
    most = 0

    def look(stage: str) -> None:
        nonlocal most
        most = max(most, world.view.members.unreported_decode_tokens("d0"))

    world.workers.tick = look
    other = PROMPT[::-1]
    ends = await asyncio.gather(world.serve(), world.serve(world.request(other)))
    assert [seen for _, seen in ends] == [naive(PROMPT, PARAMS), naive(other, PARAMS)]
    assert most == 2 * 48
    world.check()


# Failing workers


async def test_a_prefill_lost_before_its_reply_is_retried_on_another_worker() -> None:
    world = World("p0 p1 d0")
    fail(world, "p0")
    request, seen = await world.serve()
    assert seen == truth(request) and request.trace.retries == 1
    assert world.kinds() == [("prefill", "p0", 40), ("prefill", "p1", 40), ("decode", "d0", 41)]
    assert [worker.name for worker in unusable(world.view)] == ["p0"]
    world.check()


@pytest.mark.parametrize("reason", [Reason.WORKER_LOST, Reason.SATURATED, Reason.DRAINING, Reason.INTERNAL])
async def test_the_decode_worker_computes_the_prompt_if_the_only_prefill_worker_fails(reason: Reason) -> None:
    world = World()
    fail(world, "p0", error=BatonError(reason, "no"))
    request, seen = await world.serve()
    assert seen == truth(request) and world.kinds() == [("prefill", "p0", 40), ("decode", "d0", 40)]
    assert request.trace.decode_worker == "d0"
    world.check()


@pytest.mark.parametrize("reason", [Reason.WORKER_LOST, Reason.SATURATED, Reason.DRAINING])
async def test_if_decode_fails_before_it_holds_the_kv_another_worker_reads_the_same_lease(reason: Reason) -> None:
    world = World("p0 d0 d1")
    fail(world, "d0", error=BatonError(reason, "no"))
    request, seen = await world.serve()
    assert seen == truth(request) and request.trace.retries == 1
    prefill, lost, second = world.workers.calls
    assert prefill.kind == "prefill" and lost == replace(second, worker="d0") and second == Call("decode", "d1", 41, b"lease 1")
    assert world.workers.released == []
    world.check()


@pytest.mark.parametrize("k", range(OUTPUT - 1))
async def test_an_output_whose_decode_worker_is_lost_continues_on_another(k: int) -> None:
    world = World("p0 p1 d0 d1")
    fail(world, "d0", tokens=k)
    request, seen = await world.serve()
    assert seen == truth(request), "the stream is the undisturbed one"
    again = [("prefill", "p0", 41 + k), ("decode", "d1", 42 + k)]
    assert world.kinds() == [("prefill", "p0", 40), ("decode", "d0", 41), *(again if k < OUTPUT - 2 else again[:1])]
    assert request.trace.retries == 1
    world.check()


@pytest.mark.parametrize("k", range(OUTPUT))
async def test_an_output_without_a_handoff_continues_on_another_decode_worker(k: int) -> None:
    world = World("d0 d1")
    fail(world, "d0", tokens=k)
    request, seen = await world.serve()
    assert seen == truth(request) and world.kinds() == [("decode", "d0", 40), ("decode", "d1", 40 + k)]
    world.check()


async def test_a_continuation_that_starts_over_is_detected() -> None:
    """Negative control: an attempt that forgets the sent tokens produces a different stream, and so does a different seed."""
    world = World("d0 d1")
    fail(world, "d0", tokens=3)
    honest = world.workers.decode

    def forgetful(worker: WorkerRecord, request: Request, handle: bytes, timeout_s: float, *_: Any) -> AsyncGenerator[DecodeEvent, None]:
        return honest(worker, replace(request, tokens=request.tokens[: request.prompt_len]), handle, timeout_s)

    world.workers.decode = forgetful  # type: ignore[method-assign, assignment]
    request, seen = await world.serve()
    assert seen[:3] == truth(request)[:3] and seen[3:6] == truth(request)[:3] and seen != truth(request)
    assert naive(PROMPT, replace(PARAMS, seed=8)) != truth(request)


async def test_a_request_survives_the_loss_of_both_its_workers() -> None:
    world = World("p0 p1 d0 d1")
    fail(world, "p0")
    fail(world, "d0", tokens=2)
    request, seen = await world.serve()
    assert seen == truth(request) and request.trace.retries == 2
    assert world.kinds() == [
        ("prefill", "p0", 40), ("prefill", "p1", 40), ("decode", "d0", 41), ("prefill", "p1", 43), ("decode", "d1", 44),
    ]  # fmt: skip
    world.check()


@pytest.mark.parametrize("reason", [Reason.TRANSFER_FAILED, Reason.LEASE_EXPIRED, Reason.DIGEST_MISMATCH, Reason.HANDSHAKE_MISMATCH])
async def test_kv_that_cannot_be_used_is_computed_again(reason: Reason) -> None:
    """The decode workers are configured to fail in that case. No other one is sent to the same lease."""
    world = World("p0 p1 d0 d1")
    fail(world, "d0", error=BatonError(reason, "no"))
    request, seen = await world.serve()
    assert seen == truth(request) and world.workers.released == [b"lease 1"]
    again = "p1" if reason is Reason.DIGEST_MISMATCH else "p0"  # what p0 holds may be damaged
    assert world.kinds() == [("prefill", "p0", 40), ("decode", "d0", 41), ("prefill", again, 41), ("decode", "d1", 42)]
    world.check()


async def test_the_number_of_retries_is_limited() -> None:
    world = World("d0 d1 d2 d3", RouterConfig(max_retries=2))
    for name in ("d0", "d1", "d2"):
        fail(world, name, tokens=1)
    error, seen = await world.refused()
    assert error.reason is Reason.RETRIES_SPENT and error.metadata == {"tokens_emitted": "3"}
    assert len(seen) == 3 and [call.worker for call in world.workers.calls] == ["d0", "d1", "d2"]
    world.check()


async def test_retries_on_the_same_lease_are_limited_too() -> None:
    world = World("p0 d0 d1 d2", RouterConfig(bypass_tokens=8, max_retries=1))
    for name in ("d0", "d1", "d2"):
        fail(world, name)
    error, seen = await world.refused()
    assert error.reason is Reason.RETRIES_SPENT and error.metadata == {"tokens_emitted": "1"} and len(seen) == 1
    assert world.workers.released == [b"lease 1"]
    world.check()


@pytest.mark.parametrize("reason", [reason for reason in Reason if not reason.value.retry_elsewhere])
@pytest.mark.parametrize("where", ["p0", "d0"])
async def test_an_error_that_no_other_worker_can_avoid_is_passed_on_immediately_and_unchanged(where: str, reason: Reason) -> None:
    world = World("p0 p1 d0 d1")
    told = BatonError(reason, "no", metadata={"a": "b"})
    fail(world, where, error=told)
    error, seen = await world.refused()
    assert error is told and len(seen) == (where == "d0")
    assert len(world.workers.calls) == 1 + (where == "d0")
    world.check()


async def test_without_a_decode_worker_a_new_request_is_refused_immediately() -> None:
    world = World("p0", RouterConfig(recover_wait_s=60))
    async with asyncio.timeout(30):
        error, seen = await world.refused()
    assert error.reason is Reason.NO_WORKER and seen == [] and world.workers.calls == []


async def come_back(world: World, name: str, after_s: float) -> None:
    await asyncio.sleep(after_s)
    answers(world.view, name, 1)


@pytest.mark.parametrize("tokens", [None, 0, 3])
async def test_a_request_continues_if_the_last_decode_worker_comes_back_in_time(tokens: int | None) -> None:
    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=5))
    fail(world, "d0", tokens)
    back = asyncio.create_task(come_back(world, "d0", 0.15))
    request, seen = await world.serve()
    assert back.done() and seen == truth(request)
    world.check()


@pytest.mark.parametrize("tokens", [None, 0, 3])
async def test_a_request_fails_if_the_last_decode_worker_does_not_come_back(tokens: int | None) -> None:
    world = World("p0 d0")
    fail(world, "d0", tokens)
    error, seen = await world.refused()
    assert error.reason is Reason.RETRIES_SPENT and error.metadata == {"tokens_emitted": str(len(seen))}
    assert len(seen) == 1 + (tokens or 0) and loop_time() == 0.2
    world.check()


async def test_a_started_request_waits_for_a_decode_worker_that_another_request_found_dead() -> None:
    """It has already sent a token: refusing it like a new request would break a stream that can continue."""
    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=5))
    world.workers.replies = lambda: world.view.members.mark_down("d0", 1)
    back = asyncio.create_task(come_back(world, "d0", 0.15))
    request, seen = await world.serve()
    assert back.done() and seen == truth(request)
    world.check()


async def test_a_request_waits_for_another_worker_when_its_only_one_drains() -> None:
    """The registry reports the drain a moment later than the worker does. No retries must be spent in between."""
    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=5))
    fail(world, "d0", error=BatonError(Reason.DRAINING, "draining"), times=100)

    async def replace_worker() -> None:
        await asyncio.sleep(0.1)
        world.view.update([record("p0"), record("d0", state="draining"), record("d1")], 1.0)

    replaced = asyncio.create_task(replace_worker())
    request, seen = await world.serve()
    assert replaced.done() and seen == truth(request) and request.trace.decode_worker == "d1"
    world.check()


# Deadline and saturation


@pytest.mark.parametrize("where", ["p0", "d0"])
async def test_the_deadline_ends_a_hanging_call(where: str) -> None:
    world = World()
    fail(world, where, error=None)
    error, seen = await world.refused(world.request(timeout_s=1.0))
    assert error.reason is Reason.DEADLINE and len(seen) == (where == "d0") and loop_time() == 1.0
    assert len(world.workers.released) == (where == "d0")
    world.check()


async def test_no_worker_is_tried_again_shortly_before_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "NEAR_DEADLINE_S", 100.0)
    world = World("d0 d1")
    fail(world, "d0", tokens=2)
    error, seen = await world.refused(world.request(timeout_s=99.0))
    assert error.reason is Reason.DEADLINE and error.metadata == {"tokens_emitted": "2"} and len(seen) == 2
    assert len(world.workers.calls) == 1
    world.check()


async def test_the_deadline_ends_the_wait_for_workers() -> None:
    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=60))
    fail(world, "d0", tokens=1)
    error, seen = await world.refused(world.request(timeout_s=1.0))
    assert error.reason is Reason.DEADLINE and error.metadata == {"tokens_emitted": "2"} and len(seen) == 2 and loop_time() == 1.0
    world.check()


async def test_who_waits_for_a_decode_worker_is_woken_by_nothing_else() -> None:
    """However long that takes, and whatever else changes meanwhile."""
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return loop_time()

    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=600))
    world.dispatcher = Dispatcher(world.view.models[MODEL], world.workers, world.config, clock)
    fail(world, "d0", tokens=2, times=20)
    requests = [replace(world.request(name=f"r{i}"), deadline=4000.0) for i in range(20)]
    serving = [asyncio.create_task(world.serve(request)) for request in requests]
    await asyncio.sleep(1)
    before = reads
    for now in range(100):
        world.view.update([record("p0"), record("d0")], float(now))
        await asyncio.sleep(5)
    assert reads == before and not any(task.done() for task in serving)
    answers(world.view, "d0", 1)
    assert all(seen == truth(request) for request, seen in await asyncio.gather(*serving))
    world.check()


@pytest.mark.parametrize(("recover_wait_s", "reason"), [(300.0, Reason.RETRIES_SPENT), (600.0, Reason.DEADLINE)])
async def test_the_wait_for_a_decode_worker_ends_at_its_time(recover_wait_s: float, reason: Reason) -> None:
    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=recover_wait_s))
    world.dispatcher = Dispatcher(world.view.models[MODEL], world.workers, world.config, loop_time)
    fail(world, "d0", tokens=1)
    error, _ = await world.refused(replace(world.request(), deadline=500.0))
    assert error.reason is reason and loop_time() == min(recover_wait_s, 500.0)
    world.check()


FULL = Load(waiting=256)


@pytest.mark.parametrize("prompt", [PROMPT, SHORT])
async def test_a_cluster_that_stays_full_refuses_the_request_after_the_wait(prompt: list[int]) -> None:
    """No prompt is computed without a decode worker for it, and waiting is not a retry."""
    world = World(config=RouterConfig(bypass_tokens=8, queue_timeout_s=0.1))
    world.view.update([record("p0"), record("d0", load=FULL)], 1.0)
    request = world.request(prompt)
    error, seen = await world.refused(request)
    assert error.reason is Reason.SATURATED and error.metadata == {"tokens_emitted": "0"} and seen == []
    assert world.workers.calls == [] and request.trace.retries == 0 and loop_time() == 0.1
    world.check()


@pytest.mark.parametrize("prompt", [PROMPT, SHORT])
async def test_a_request_waits_for_a_full_cluster(prompt: list[int]) -> None:
    world = World()
    world.view.update([record("p0"), record("d0", load=FULL)], 1.0)
    serving = asyncio.create_task(world.serve(world.request(prompt)))
    await asyncio.sleep(0.1)
    assert world.workers.calls == [], "nothing is computed in the meantime"
    world.view.update([record("p0"), record("d0")], 2.0)
    request, seen = await serving
    assert seen == truth(request) and request.trace.retries == 0 and request.trace.retry_reasons == []
    world.check()


async def test_a_computed_prompt_waits_for_a_full_cluster() -> None:
    world = World()

    def fill() -> None:
        world.view.update([record("p0"), record("d0", load=FULL)], 1.0)

    world.workers.replies = fill
    serving = asyncio.create_task(world.serve())
    await asyncio.sleep(0.1)
    assert world.kinds() == [("prefill", "p0", 40)]
    world.view.update([record("p0"), record("d0")], 2.0)
    request, seen = await serving
    assert seen == truth(request) and request.trace.retries == 0 and len(world.workers.calls) == 2
    world.check()


async def test_those_who_wait_for_room_are_served_by_priority_and_then_by_arrival() -> None:
    world = World()
    world.view.update([record("p0"), record("d0", load=FULL)], 1.0)
    serving = []
    for length, priority in ((40, 1), (41, 0), (42, 1), (43, 0)):
        request = world.request(list(range(length)))
        request.priority = priority
        serving.append(asyncio.create_task(world.serve(request)))
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert world.workers.calls == []
    world.view.update([record("p0"), record("d0")], 2.0)
    await asyncio.gather(*serving)
    assert [known for kind, _, known in world.kinds() if kind == "prefill"] == [41, 43, 40, 42]
    world.check()


async def test_of_a_thousand_who_wait_only_the_first_looks_and_only_when_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return choose_prefill(*arguments)

    monkeypatch.setattr(policy, "choose_prefill", counted)
    world = World()
    world.view.update([record("p0"), record("d0", load=FULL)], 1.0)
    serving = [asyncio.create_task(world.serve(world.request(timeout_s=120.0))) for _ in range(1000)]
    await asyncio.sleep(0.2)
    assert looks < 5
    for now in range(20):
        before = looks
        world.view.update([record("p0"), record("d0", load=FULL)], 2.0 + now)
        async with asyncio.timeout(60):
            while looks == before:
                await asyncio.sleep(0.005)
    assert looks < 30 and world.workers.calls == []
    world.view.update([record("p0"), record("d0")], 30.0)
    assert all(seen == truth(request) for request, seen in await asyncio.gather(*serving))
    world.check()


async def test_when_no_worker_is_left_all_who_wait_are_refused_at_once() -> None:
    world = World()
    world.view.update([record("p0"), record("d0", load=FULL)], 1.0)
    serving = [asyncio.create_task(world.refused()) for _ in range(3)]
    await asyncio.sleep(0.05)
    world.view.members.mark_down("d0", world.view.members.record("d0").incarnation)
    async with asyncio.timeout(2):
        answers = await asyncio.gather(*serving)
    assert [error.reason for error, _ in answers] == [Reason.NO_WORKER] * 3
    world.check()


async def test_the_deadline_ends_the_wait_for_room() -> None:
    world = World()
    world.view.update([record("p0"), record("d0", load=FULL)], 1.0)
    error, seen = await world.refused(world.request(timeout_s=1.0))
    assert error.reason is Reason.DEADLINE and "decode worker with room" in error.message and loop_time() == 1.0
    assert seen == [] and world.workers.calls == []
    world.check()


async def test_when_the_last_decode_worker_comes_back_the_prompt_goes_to_a_prefill_worker() -> None:
    """Only the decode worker was missing: bypassing the prefill workers would be wrong, and so would the recorded reason."""
    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=5))
    fail(world, "d0", tokens=3)
    back = asyncio.create_task(come_back(world, "d0", 0.15))
    request, seen = await world.serve()
    assert back.done() and seen == truth(request) and request.trace.bypasses == []
    assert world.kinds()[-2:] == [("prefill", "p0", 44), ("decode", "d0", 45)]
    world.check()


async def test_the_numbers_in_the_view_are_undone_after_any_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for role, prompt in (("prefill", PROMPT), ("decode", SHORT)):
        world = World()

        def broken(*_: object) -> None:
            raise RuntimeError("a bug in the router")

        monkeypatch.setattr(world.view.models[MODEL].index, "predict", broken)
        with pytest.raises(RuntimeError):
            await world.serve(world.request(prompt))
        assert world.view.members.prefill_tokens("p0", 0.0) == 0 == world.view.members.unreported_decode_tokens("d0"), role


async def test_a_restarted_worker_is_tried_again() -> None:
    """The new process is not the one that failed the request."""
    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=5))
    fail(world, "p0", error=BatonError(Reason.INTERNAL, "no"))
    fail(world, "d0", tokens=2)

    def restart(stage: str) -> None:
        world.view.update([replace(record("p0"), incarnation=2), record("d0"), record("d1")], 1.0)

    world.workers.tick = restart
    request, seen = await world.serve()
    assert seen == truth(request)
    assert world.kinds()[0] == ("prefill", "p0", 40) and ("prefill", "p0", 42) in world.kinds()


async def test_a_worker_that_reports_saturation_is_tried_a_limited_number_of_times() -> None:
    world = World("d0")
    fail(world, "d0", error=BatonError(Reason.SATURATED, "256 wait"), times=100)
    error, _ = await world.refused()
    assert error.reason is Reason.SATURATED and len(world.workers.calls) == 1 + world.config.max_retries
    world.check()


# Cancellation


def undisturbed() -> World:
    return World()


def bypassed() -> World:
    return World("d0")


def prefill_lost() -> World:
    world = World("p0 p1 d0")
    fail(world, "p0")
    return world


def decode_lost_before_the_kv() -> World:
    world = World("p0 d0 d1")
    fail(world, "d0")
    return world


def decode_lost_after_three() -> World:
    world = World("p0 d0 d1")
    fail(world, "d0", tokens=3)
    return world


def last_worker_comes_back() -> World:
    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=5))
    fail(world, "d0")
    fail(world, "d0", tokens=1)

    async def heal() -> None:
        for step in itertools.count():
            await asyncio.sleep(0)
            if step % 10 == 0:
                answers(world.view, "d0", 1)

    world.healer = asyncio.create_task(heal())
    return world


def opened(world: World) -> World:
    """Makes prompts long: the decode call starts while they are being computed."""
    world.workers.opens = True
    return world


def live() -> World:
    return opened(World())


def live_reader_ends_the_lease() -> World:
    world = opened(World())
    world.workers.lent_live = False
    return world


def live_prefill_lost() -> World:
    world = opened(World("p0 p1 d0"))
    fail(world, "p0")
    return world


def live_decode_lost_before_the_kv() -> World:
    world = opened(World("p0 d0 d1"))
    fail(world, "d0")
    return world


def live_decode_lost_after_three() -> World:
    world = opened(World("p0 d0 d1"))
    fail(world, "d0", tokens=3)
    return world


LIVE = [live, live_reader_ends_the_lease, live_prefill_lost, live_decode_lost_before_the_kv, live_decode_lost_after_three]
WORLDS = [undisturbed, bypassed, prefill_lost, decode_lost_before_the_kv, decode_lost_after_three, last_worker_comes_back, *LIVE]


@pytest.mark.parametrize("make", LIVE)
async def test_a_live_decode_call_produces_the_same_tokens(make: Callable[[], World]) -> None:
    world = make()
    request, seen = await world.serve()
    assert seen == truth(request) and world.workers.calls[1].kind == "live decode"
    world.check()


async def test_a_live_decode_call_receives_the_first_token_and_is_not_started_again() -> None:
    world = live()
    request, _ = await world.serve()
    assert world.workers.calls == [Call("prefill", "p0", 40), Call("live decode", "d0", 40, b"lease 1")]
    assert request.trace.cached_tokens == 16 and request.trace.handoff.blocks == 3 and world.workers.released == []
    world.check()


async def test_after_a_failed_attempt_its_workers_are_not_expected_to_cache_the_prompt() -> None:
    """Otherwise the retry would treat the prompt as cached on a worker that received only part of it, and skip the prefill worker."""
    world = live_prefill_lost()
    request, _ = await world.serve()
    kinds = [(call.kind, call.worker) for call in world.workers.calls]
    assert kinds == [("prefill", "p0"), ("live decode", "d0"), ("prefill", "p1"), ("live decode", "d0")]
    assert request.trace.choices[-2] == ("prefill", "least work")
    world.check()


async def test_a_first_token_that_is_also_the_last_ends_the_live_decode_call() -> None:
    world = live()
    request, seen = await world.serve(world.request(params=replace(PARAMS, max_tokens=1)))
    assert seen == truth(request) and request.finish == "length"
    assert world.workers.calls[1].kind == "live decode" and world.workers.ends["cancelled"] == 1
    world.check()


async def test_no_live_decode_call_starts_without_a_worker_that_has_room() -> None:
    """The call would wait there and hold a lease open. Instead, the worker is chosen after the prompt is computed, as usual."""
    world = live()
    world.view.update([record("p0"), replace(record("d0"), load=Load(credit_tokens=10))], 1.0)
    request, seen = await world.serve()
    assert seen == truth(request) and [call.kind for call in world.workers.calls] == ["prefill", "decode"]
    world.check()


async def test_the_prefill_worker_is_told_which_worker_caches_most_of_the_prompt() -> None:
    world = World("p0 d0 d1", RouterConfig(bypass_tokens=0, fetch_tokens=20, recover_wait_s=0.2))
    first, _ = await world.serve(world.request(list(range(100, 180))))
    holder = first.trace.decode_worker
    # The holder has no room, so the other worker decodes.
    full = replace(record(holder), load=Load(credit_tokens=10))
    world.view.update([record("p0"), full, record("d1" if holder == "d0" else "d0")], 1.0)
    world.view.models[MODEL].index.forget("p0")
    request, seen = await world.serve(world.request([*first.tokens, *PROMPT]))
    assert seen == truth(request) and world.workers.sources == [None, (holder, 5)]
    assert request.trace.choices[0] == ("prefill", "fetched prefix")
    world.check()


@pytest.mark.parametrize("make", WORLDS)
async def test_a_request_can_be_cancelled_at_every_await(make: Callable[[], World]) -> None:
    """The task is cancelled after 0, 1, 2, … turns of the event loop, until it finishes first."""
    cancelled = 0
    for turns in itertools.count():
        world = make()
        request = world.request()
        task = asyncio.create_task(world.serve(request))
        for _ in range(turns):
            await asyncio.sleep(0)
        ended, before = world.workers.ends.total(), world.workers.ends["cancelled"]
        finished = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        world.stop_healer()
        cut = world.workers.ends["cancelled"] - before
        own = world.workers.ends.total() - ended - cut  # of two busy workers, one may have ended or met its fault in that same turn
        assert cut + own == len(world.workers.calls) - ended and own <= 1, "every busy worker saw the cancellation"
        assert request.output == truth(request)[: len(request.output)]
        world.check()
        if finished:
            break
        cancelled += 1
    assert cancelled >= 10


@pytest.mark.parametrize("make", WORLDS)
@pytest.mark.parametrize("taken", range(OUTPUT + 1))
async def test_a_stream_can_be_closed_between_any_two_tokens(make: Callable[[], World], taken: int) -> None:
    world = make()
    request = world.request()
    stream = world.dispatcher.generate(request)
    seen = [token.id for _ in range(taken) for token in await anext(stream)]
    await stream.aclose()
    world.stop_healer()
    assert seen == truth(request)[:taken]
    # The dispatcher may not know yet that a live reader ended the lease. It then releases the lease again, which changes nothing.
    if taken == 0 or world.workers.calls[-1].kind != "live decode":
        nobody_took = taken > 0 and world.workers.calls[-1].kind == "prefill"
        assert len(world.workers.released) == nobody_took, "the router ends a lease that no decode worker took"
    world.check()


async def test_a_stream_whose_end_is_cancelled_releases_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing it ends the live decode call first, which takes a moment here."""
    world = live()

    async def slow(*arguments: Any) -> AsyncGenerator[DecodeEvent, None]:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
        yield ()

    monkeypatch.setattr(world.workers, "decode", slow)
    stream = world.dispatcher.generate(world.request())
    await anext(stream)
    assert world.workers.leases
    closing = asyncio.create_task(stream.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    assert closing.cancelled() and world.workers.released == [b"lease 1"] and not world.workers.leases


async def test_a_lease_that_is_not_released_is_detected() -> None:
    """Negative control for the sweeps."""
    world = World()
    world.workers.release = lambda worker, handle, request_id: None  # type: ignore[method-assign]
    tokens = world.dispatcher.generate(world.request())
    await anext(tokens)
    await tokens.aclose()
    with pytest.raises(AssertionError):
        world.check()


async def test_cancelling_while_waiting_for_workers_releases_the_lease() -> None:
    world = World("p0 d0", RouterConfig(bypass_tokens=8, recover_wait_s=60))
    fail(world, "d0")
    task = asyncio.create_task(world.serve())
    while not world.workers.ends["error"]:
        await asyncio.sleep(0.01)
    assert world.workers.leases
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and world.workers.released == [b"lease 1"]
    world.check()


# Random faults


@pytest.mark.parametrize("seed", range(8))
async def test_random_faults_never_change_a_stream(seed: int) -> None:
    rng = random.Random(seed)
    reasons = [reason for reason in Reason if reason.value.retry_elsewhere]
    world = World("p0 p1 d0 d1 d2", RouterConfig(bypass_tokens=8, recover_wait_s=0.05, max_retries=4))
    world.workers.joins = 1 + seed % 3
    names = [worker.name for worker in world.view.members.records()]
    for name in names:
        for _ in range(12):
            error = BatonError(rng.choice(reasons), "no")
            world.workers.faults[name].append(Fault(error, rng.choice([None, 0, 1, 2, 5, 99, 99, 99])))

    async def heal() -> None:
        while True:
            await asyncio.sleep(0.01)
            answers(world.view, rng.choice(names), 1)

    async def one(number: int) -> str:
        prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 60))]
        request = world.request(prompt, replace(PARAMS, seed=number, max_tokens=rng.randrange(1, 12)), name=f"r{number % 7}")
        leave = rng.choice([None, None, rng.randrange(0, 12)])
        seen: list[int] = []
        stream = world.dispatcher.generate(request)
        try:
            async for tokens in stream:
                seen.extend(token.id for token in tokens)
                if leave is not None and len(seen) > leave:
                    return "left"
            assert seen == truth(request) and request.finish == "length"
            return "done"
        except BatonError as error:
            assert error.reason in (Reason.RETRIES_SPENT, Reason.SATURATED) and error.metadata["tokens_emitted"] == str(len(seen))
            return "refused"
        finally:
            assert seen == truth(request)[: len(seen)]
            await stream.aclose()

    healer = asyncio.create_task(heal())
    ends = await asyncio.gather(*(one(number) for number in range(40)))
    healer.cancel()
    assert ends.count("done") > 10
    world.check()


# Time


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        (PROMPT, {"queue": 5.0, "prefill": 3.0, "transfer": 2.0, "decode": 0.5 * (OUTPUT - 1)}),
        (SHORT, {"queue": 5.0, "prefill": 3.0, "transfer": 0.0, "decode": 0.5 * (OUTPUT - 1)}),
    ],
    ids=["handoff", "bypass"],
)
async def test_stages_add_up_exactly_to_the_total_time(prompt: list[int], want: dict[str, float]) -> None:
    world, clock = World(), Clock()
    world.dispatcher = Dispatcher(world.view.models[MODEL], world.workers, world.config, clock)
    takes = {"prefill": 3.0, "transfer": 2.0, "decode": 0.5}

    def tick(stage: str) -> None:
        clock.now += takes[stage]

    world.workers.tick = tick
    request = replace(world.request(prompt), deadline=2000.0, trace=Trace(Stopwatch(clock)))
    clock.now += 5.0  # before dispatch
    await world.serve(request)
    request.trace.watch.stop()
    assert request.trace.watch.seconds == want and sum(want.values()) == clock.now - 1000.0


async def test_stages_add_up_when_workers_fail() -> None:
    world, clock = World("p0 p1 d0 d1"), Clock()
    world.dispatcher = Dispatcher(world.view.models[MODEL], world.workers, world.config, clock)
    fail(world, "p0")
    fail(world, "d0", tokens=2)

    def tick(stage: str) -> None:
        clock.now += 0.25

    world.workers.tick = tick
    request = replace(world.request(), deadline=2000.0, trace=Trace(Stopwatch(clock)))
    await world.serve(request)
    request.trace.watch.stop()
    assert request.trace.retries == 2 and sum(request.trace.watch.seconds.values()) == clock.now - 1000.0


async def test_an_output_never_continues_on_another_model() -> None:
    """The only decode worker dies in the middle of an output, and its replacement serves other weights."""
    world = World("p0 d0")
    fail(world, "d0", tokens=3)
    request = world.request()
    seen: list[int] = []
    stream = world.dispatcher.generate(request)
    with pytest.raises(BatonError) as caught:
        async for tokens in stream:
            seen.extend(token.id for token in tokens)
            if len(seen) == 3:
                other = [replace(record(name), incarnation=99, model_fingerprint="other weights") for name in ("p0", "d0")]
                world.view.update(other, loop_time())
    assert caught.value.reason is Reason.RETRIES_SPENT and "another model" in caught.value.message
    assert seen == truth(request)[: len(seen)]
    world.check()


# A request that kills workers


async def test_a_request_that_kills_two_workers_is_ended_and_its_prompt_refused() -> None:
    world = World("d0 d1 d2")
    for name in ("d0", "d1", "d2"):
        fail(world, name, error=Died("connection reset"))
    error, seen = await world.refused(world.request(SHORT))
    assert error.reason is Reason.POISONOUS and not error.reason.value.retry_elsewhere and seen == []
    assert len(world.workers.calls) == 2, "the third worker is spared"
    error, _ = await world.refused(world.request(SHORT))
    assert error.reason is Reason.POISONOUS and len(world.workers.calls) == 2
    for name in ("d0", "d1"):
        answers(world.view, name, 1)
    world.workers.faults.clear()
    await world.serve(world.request([9, *SHORT]))
    world.check()


@dataclass(frozen=True)
class Pause(Fault):
    """The worker goes on when it is told to."""

    going: asyncio.Event = field(default_factory=asyncio.Event)

    async def strike(self) -> None:
        await self.going.wait()


class Trials:
    """Suspects of the same deaths. The first one's worker pauses before its first token."""

    def __init__(self, count: int) -> None:
        self.world = World("d0")
        self.world.dispatcher = Dispatcher(self.world.view.models[MODEL], self.world.workers, self.world.config, loop_time)
        self.pause = Pause(None, tokens=0)
        self.world.workers.faults["d0"].append(self.pause)
        self.first, *self.others = [replace(self.world.request(SHORT, name=f"r{i}"), deadline=5000.0 + i) for i in range(count)]
        self.first.deadline = 9000.0
        for request in (self.first, *self.others):
            request.suspicion = Suspicion(len(request.tokens), deaths=2, without_token=2)
        self.looks, self.served = 0, list[str]()
        poison = self.world.dispatcher._poison
        self._may_try, poison.may_try = poison.may_try, self._counted  # type: ignore[method-assign]

    def _counted(self, request: Request) -> bool:
        self.looks += 1
        return self._may_try(request)

    async def serve(self, request: Request) -> None:
        _, seen = await self.world.serve(request)
        assert seen == truth(request)
        self.served.append(request.id)

    async def wait(self) -> list["asyncio.Task[None]"]:
        """The others come, and wait for long."""
        await asyncio.sleep(1)
        waiting = [asyncio.create_task(self.serve(request)) for request in self.others]
        await asyncio.sleep(1)
        self.looks = 0
        await asyncio.sleep(1000)
        assert self.looks == 0 and len(self.world.workers.calls) == 1
        return waiting

    async def check(self, waiting: list["asyncio.Task[None]"]) -> None:
        """They are tried one after the other."""
        await asyncio.gather(*waiting)
        assert self.served == [request.id for request in self.others] and self.looks <= 2 * len(waiting)


async def test_the_next_suspect_is_tried_when_one_has_a_token() -> None:
    """And nobody has asked in the meantime."""
    trials = Trials(20)
    stream = trials.world.dispatcher.generate(trials.first)
    token = asyncio.create_task(anext(stream))
    waiting = await trials.wait()
    trials.pause.going.set()
    await token
    await trials.check(waiting)
    assert trials.first.output_len == 1, "it is still there"
    await stream.aclose()
    trials.world.check()


async def test_the_next_suspect_is_tried_when_one_gives_up() -> None:
    trials = Trials(20)
    first = asyncio.create_task(trials.serve(trials.first))
    waiting = await trials.wait()
    first.cancel()
    await trials.check(waiting)
    trials.world.check()


async def test_a_suspect_that_is_not_tried_in_time_is_refused() -> None:
    trials = Trials(3)
    first = asyncio.create_task(trials.serve(trials.first))
    waiting = await trials.wait()
    for number, task in enumerate(waiting, 1):
        with pytest.raises(BatonError) as caught:
            await task
        assert caught.value.reason is Reason.DEADLINE and loop_time() == 5000.0 + number
    first.cancel()


async def test_lost_connections_to_workers_that_live_do_not_condemn_the_request() -> None:
    """A router that was stopped for a while finds all its connections closed."""
    world = World("d0 d1 d2")
    for name in ("d0", "d1"):
        fail(world, name, error=Died("ping_timeout"))
        world.workers.alive[name] = 0.0
    request, seen = await world.serve(world.request(SHORT))
    assert seen == truth(request) and request.trace.retries == 2
    world.check()


async def test_workers_whose_engines_hang_of_a_request_condemn_it() -> None:
    world = World("d0 d1 d2")
    for name in ("d0", "d1"):
        fail(world, name, error=Died("is gone"))
        world.workers.alive[name] = world.config.hang_s
    error, _ = await world.refused(world.request(SHORT))
    assert error.reason is Reason.POISONOUS
    world.check()


async def test_workers_lost_before_a_call_reached_them_do_not_condemn_the_request() -> None:
    """Negative control: the two workers were already gone."""
    world = World("d0 d1 d2")
    for name in ("d0", "d1"):
        fail(world, name, error=LOST)
    request, seen = await world.serve(world.request(SHORT))
    assert seen == truth(request) and request.trace.retries == 2
    world.check()
