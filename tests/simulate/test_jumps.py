"""A large cluster whose steps are jumped over does what it does step by step, to the last bit."""

import asyncio
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError
from baton.engine.core.block_key import DISK, HOST
from baton.engine.core.colder import TierPolicy
from baton.engine.core.engine import Output
from baton.engine.core.limits import Batching
from baton.engine.core.sampling import Sampled, SamplingParams
from baton.engine.core.sequence import Finish, Sequence
from baton.profile.file import Profile
from baton.profile.models import Fitted, Form, Work, decode_seconds, step_seconds
from baton.simulate import jumps as jumping
from baton.simulate.cluster import SimulatedCluster, SimulatedRouter, Sizes
from baton.simulate.engine import ProfiledPace, StepPace, Told
from baton.simulate.flight import Flight
from baton.simulate.guesses import GuessChances
from baton.simulate.jumps import VOCABULARY, Jump, ids
from baton.simulate.tiers import TierPace, TierSizes
from baton.simulate.virtual_time import run, until
from baton.simulate.workers import Times

NUMBERS = {
    "step": 1.3e-3, "read": 7.1e-3, "tokens": 4.7e-5, "pairs": 1.1e-8, "decodes": 3.1e-4, "context": 1.7e-6, "mixed": 2e-4,
    "guess": 9e-5, "draft": 1e-5,
}  # fmt: skip


@dataclass(frozen=True)
class Ask:
    at: float
    prompt: int
    output: int
    prefix: int = 0  # prompts of one number begin alike
    timeout_s: float = 60.0
    priority: int = 0


@dataclass(frozen=True)
class Scene:
    asks: tuple[Ask, ...]
    sizes: Sizes
    times: Times
    looks: tuple[float, ...] = ()  # when somebody asks for all that has come
    routers: int = 1
    bypass_tokens: int = 0


@dataclass
class Seen:
    """All that can be seen of a run."""

    tokens: dict[int, list[float]] = field(default_factory=dict)  # of each request: when they came
    ends: dict[int, Any] = field(default_factory=dict)
    decisions: list[Any] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)  # what was told of loads, and when
    looks: list[Any] = field(default_factory=list)
    engines: list[Any] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    totals: list[Any] = field(default_factory=list)
    tiers: list[Any] = field(default_factory=list)  # what each worker's say, hold and have seen return
    jumped: int = 0


def note(seen: Seen, router: SimulatedRouter) -> None:
    """Notes what the router decides and is told."""
    loop, policy, members = asyncio.get_running_loop(), router._dispatcher.policy, router.view.members

    def noted(name: str, of: Any) -> Any:
        def decide(*args: Any) -> Any:
            seen.decisions.append((loop.time(), name, found := of(*args)))
            return found

        return decide

    for name in ("prefill", "decode"):
        setattr(policy, name, noted(name, getattr(policy, name)))
    answered = members.note_answer

    def note_answer(*args: Any) -> None:
        seen.answers.append((loop.time(), args))
        answered(*args)

    setattr(members, "note_answer", note_answer)  # noqa: B010 - a method


def watch(scene: Scene, jumps: bool) -> Seen:
    async def main() -> Seen:
        seen, loop = Seen(), asyncio.get_running_loop()
        config = RouterConfig(bypass_tokens=scene.bypass_tokens, queue_timeout_s=5.0)
        slo = SloConfig(ttft_s=1.0, tpot_s=0.05)
        cluster = SimulatedCluster(scene.sizes, scene.times, config, slo, scene.routers, large=True, jumps=jumps)
        for router in cluster.routers:
            note(seen, router)

        async def one(number: int, ask: Ask) -> None:
            await until(ask.at)
            tokens = seen.tokens[number] = []
            prompt = [ask.prefix, *range(1, ask.prompt)]

            def told(count: int, times: Any) -> None:
                tokens.extend(times or [loop.time()] * count)

            try:
                request = await cluster.ask(prompt, ask.output, ask.timeout_s, ask.priority, number % scene.routers, told)
            except BatonError as error:
                seen.ends[number] = loop.time(), error.reason.name, error.metadata, len(tokens)
                return
            trace = request.trace
            laps = [(lap.stage, lap.worker, lap.start, lap.end) for lap in trace.watch.laps]
            seen.ends[number] = loop.time(), request.finish, list(request.tokens), laps, trace.cached_tokens, trace.prefill_worker
            assert request.tokens == [*prompt, *range(ask.prompt, ask.prompt + ask.output)]

        async def look(at: float) -> None:
            await until(at)
            await cluster.fleet.ask()
            entries = [entry.request for router in cluster.routers for entry in router.journal.open_entries]
            open_ = {request.id: request.output_len for request in entries if request is not None}
            loads = [asdict(worker.load_now()) for worker in cluster.fleet.workers.values()]
            seen.looks.append((loop.time(), open_, loads))

        async with cluster.watched(), asyncio.TaskGroup() as group:
            for number, ask in enumerate(scene.asks):
                group.create_task(one(number, ask))
            for at in scene.looks:
                group.create_task(look(at))
        for worker in cluster.fleet.workers.values():
            engine = worker.engine._engine
            engine.pool.check()
            seen.jumped += worker.engine.activity()[0] - worker.engine.touches
            seen.engines.append((worker.engine.facts(), engine.pool._free, list(engine.pool._cached.items()), engine.pool._key_of))
            if worker.tiers is not None and (colder := engine.colder) is not None:
                seen.tiers.append((worker.tiers.told(), colder.held, colder.ghosts._balance, list(colder.ghosts._keys)))
        for router in cluster.routers:
            index = router.view.models["model"].index
            index.overlap([], loop.time())
            seen.caches.append(({key: mask for table in index._tables for key, mask in table.items() if mask}, index.entries))
            totals = asdict(router.journal.totals)
            seen.totals.append((totals, [record.times for record in router.journal.last(100)], router.journal._counters._itl.counts))
        return seen

    return run(main())


def assert_same(scene: Scene) -> Seen:
    jumped, stepped = watch(scene, jumps=True), watch(scene, jumps=False)
    for name in ("tokens", "ends", "decisions", "answers", "looks", "engines", "caches", "totals", "tiers"):
        assert getattr(jumped, name) == getattr(stepped, name), name
    return jumped


PLAIN = Times(ProfiledPace(Profile("measured", "", "m", {}, 1.0, "sum", {"step": Fitted(NUMBERS)})), handoff_s=0.004)


def test_a_long_answer_is_a_few_jumps_and_the_same() -> None:
    scene = Scene((Ask(0.1, 100, 400), Ask(0.35, 200, 300, 1)), Sizes(1, 2), PLAIN, looks=(1.03, 2.217))
    seen = assert_same(scene)
    assert seen.jumped > 600 and sum(map(len, seen.tokens.values())) == 700


chance = st.sampled_from([0.0, 0.6, 1.0])
moments = st.floats(0.0, 3.0, allow_nan=False)


def tiers_of(memory: int, disk: int, at_once: bool, keeps_all: bool) -> TierSizes:
    return TierSizes(((HOST, memory), (DISK, disk)), 1000, TierPolicy(at_once, keeps_all=keeps_all))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    block = draw(st.sampled_from([4, 16]))
    sizes = Sizes(
        prefill=draw(st.integers(0, 2)),
        decode=draw(st.integers(1, 3)),
        max_num_seqs=draw(st.sampled_from([1, 3, 16])),
        kv_blocks=draw(st.sampled_from([480, 960, 4096])) // block,
        max_num_batched_tokens=draw(st.sampled_from([16, 64, 512])),
        block_size=block,
        max_model_len=400,
        batching=draw(st.sampled_from(["continuous", "continuous", "dynamic", "static"])),
        batch_wait_s=0.1,
        speculation=draw(st.sampled_from(["none", "none", "prompt_lookup"])),
        speculation_tokens=draw(st.sampled_from([1, 8])),
        speculation_batch_tokens=draw(st.sampled_from([3, 256])),
        tiers=draw(st.one_of(st.none(), st.builds(tiers_of, st.integers(0, 60), st.integers(0, 200), st.booleans(), st.booleans()))),
    )
    form: Form = draw(st.sampled_from(["sum", "roof"]))
    pace: Any = draw(st.sampled_from([StepPace(), ProfiledPace(Profile("measured", "", "m", {}, 1.0, form, {"step": Fitted(NUMBERS)}))]))
    travel_s = draw(st.sampled_from([0.0, 0.0003, 0.05]))
    chances = draw(st.builds(GuessChances, chance, st.sampled_from([0.0, 40.0]), chance, chance))
    moving = draw(st.sampled_from([TierPace(), TierPace(0.0003, 1e-6, 1e-6), TierPace(0.01, 1e-4, 1e-4)]))
    costs = draw(st.sampled_from([(0.0, 0.0), (0.001, 6e-5)]))
    times = Times(pace, 0.004, 1e-5, travel_s, costs, guesses=chances, tiers={HOST: moving, DISK: moving})
    ask = st.builds(
        Ask,
        st.one_of(moments, st.sampled_from([0.5, 1.0])),
        st.integers(1, 150),
        st.integers(1, 200),
        st.integers(0, 2),
        st.sampled_from([60.0, 60.0, 60.0, 1.37]),
        st.integers(0, 1),
    )
    asks = draw(st.lists(ask, min_size=1, max_size=14))
    looks = draw(st.lists(moments.map(lambda at: at + 0.1234567), max_size=3))
    return Scene(tuple(asks), sizes, times, tuple(looks), draw(st.integers(1, 2)), draw(st.sampled_from([0, 32])))


@settings(max_examples=100, deadline=None)
@given(scenes())
def test_any_load_is_the_same_with_jumps_and_without(scene: Scene) -> None:
    assert_same(scene)


def test_a_command_that_is_seen_one_step_too_late_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    under_way = Jump.under_way
    monkeypatch.setattr(Jump, "under_way", lambda self, now: min(under_way(self, now) + 1, self.steps))
    with pytest.raises(AssertionError):
        assert_same(Scene((Ask(0.1, 100, 200), Ask(0.35, 200, 100, 1)), Sizes(0, 1), PLAIN))


def test_many_that_come_and_end_on_few_blocks_are_preempted_alike() -> None:
    """Without room for growth sequences are preempted, within what would have been a jump."""
    asks = tuple(Ask(0.1 + 0.05 * i, 40, 150, i) for i in range(12))
    sizes = Sizes(0, 1, max_num_seqs=8, kv_blocks=40, max_model_len=400)
    seen = assert_same(Scene(asks, sizes, PLAIN))
    assert seen.engines[0][0].counts.preemptions > 0 and seen.jumped > 50


RETURNING = tuple(Ask(0.1 + 0.15 * i, 60 + i % 3, 60, i % 9) for i in range(36))  # a pool has room for three of these


@pytest.mark.parametrize("at_once", [False, True])
def test_what_tiers_save_and_load_between_jumps_is_the_same(at_once: bool) -> None:
    sizes = Sizes(1, 1, kv_blocks=24, max_model_len=380, tiers=tiers_of(12, 500, at_once, False))
    seen = assert_same(Scene(RETURNING, sizes, replace(PLAIN, tiers={HOST: TierPace(0.0003, 1e-6, 1e-6)})))
    assert [sum(worker[0][tier].tally.hits > 2 for worker in seen.tiers) for tier in (0, 1)] == [1, 1] and seen.jumped > 200


def test_an_engine_whose_tiers_watch_jumps_as_far_as_one_without() -> None:
    """They keep nothing, as nothing returns, and there are free blocks."""
    asks = (*(Ask(0.1 + i, 300, 4, i) for i in range(20)), Ask(30.0, 40, 1000, 99))
    scene = Scene(asks, Sizes(0, 1, kv_blocks=128, max_model_len=2000, tiers=tiers_of(4, 0, False, False)), PLAIN)
    seen = assert_same(scene)
    assert seen.tiers[0][2] == 0, "what has left has not come back"
    plain = assert_same(replace(scene, sizes=replace(scene.sizes, tiers=None)))
    assert seen.jumped > 0.9 * plain.jumped


def test_tiers_that_are_asked_only_after_a_jump_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr("baton.simulate.jumps._still_steps", lambda engine, colder, most: most)
    with pytest.raises(AssertionError):
        assert_same(Scene(RETURNING, Sizes(1, 1, kv_blocks=24, max_model_len=380, tiers=tiers_of(12, 500, False, False)), PLAIN))


@pytest.mark.parametrize("batching", ["dynamic", "static"])
def test_those_that_wait_for_a_whole_batch_do_not_stop_jumps(batching: Batching) -> None:
    asks = tuple(Ask(0.1 * i, 40, 150, i) for i in range(12))
    seen = assert_same(Scene(asks, Sizes(0, 1, max_num_seqs=4, batching=batching, batch_wait_s=0.2), PLAIN))
    assert seen.jumped > 200


GUESSED = Scene(
    tuple(Ask(0.1 + 0.4 * i, 60 + i, 150, i) for i in range(4)),
    Sizes(0, 1, speculation="prompt_lookup", speculation_batch_tokens=3),
    replace(PLAIN, guesses=GuessChances(0.8, 0.0, 0.6, 0.8)),
    looks=(0.333, 1.217),
)


def test_steps_that_guess_are_not_jumped_over_and_larger_ones_are() -> None:
    seen = assert_same(GUESSED)
    assert seen.jumped > 20, "three sequences fill a step"
    assert any(told.counts.accepted_tokens > 50 for told, *_ in seen.engines)


def test_a_jump_over_steps_that_guess_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(jumping, "may_guess", lambda engine: False)
    with pytest.raises(AssertionError):
        assert_same(GUESSED)


numbers = st.fixed_dictionaries(dict.fromkeys(NUMBERS, st.floats(1e-9, 1.0)))


@given(numbers, st.sampled_from(["sum", "roof"]), st.integers(1, 300), st.integers(1, 10**6))
def test_seconds_of_decodes_are_those_of_each_step(numbers: dict[str, float], form: Form, decodes: int, context: int) -> None:
    one_by_one = [step_seconds(numbers, form, Work(0, 0.0, decodes, context + decodes * step)) for step in range(7)]
    assert decode_seconds(numbers, form, decodes, context, 7) == one_by_one


def test_modelled_tokens_are_their_positions_and_never_leave_the_vocabulary() -> None:
    assert ids(5, 9) == (5, 6, 7, 8)
    assert ids(VOCABULARY - 2, VOCABULARY + 3) == (VOCABULARY - 2, VOCABULARY - 1, 0, 1, 2)
    assert len(ids(3, 3 * VOCABULARY)) == 3 * VOCABULARY - 3


SEQ = Sequence("s", [1], 1, SamplingParams(max_tokens=9), b"root")


def flown(ends: list[float], travel_s: float, together: int) -> list[float]:
    """When each token lands, if so many are told at once, with the end of the last."""
    flight, landed, now, left = Flight(7, travel_s), list[float](), 0.0, list(ends)
    while left or flight:
        if left and (not flight or left[min(together, len(left)) - 1] <= flight.lands):
            now = max(now, left[min(together, len(left)) - 1])
            flight.add(Told(SEQ, left[:together], Output(SEQ, Sampled(0), Finish.LENGTH if len(left) <= together else None)), now)
            del left[:together]
        else:
            now = max(now, flight.lands)
        for tokens in flight.land(now):
            landed += getattr(tokens, "times", [now] * len(tokens))
    assert flight.finish is Finish.LENGTH
    return landed


@given(st.lists(st.floats(1e-3, 0.1), min_size=1, max_size=20), st.sampled_from([0.0, 1e-4, 0.03, 0.2]), st.integers(2, 20))
def test_tokens_that_are_told_together_land_when_each_would_have(steps: list[float], travel_s: float, together: int) -> None:
    ends = [sum(steps[: i + 1]) for i in range(len(steps))]
    assert flown(ends, travel_s, together) == flown(ends, travel_s, 1)
