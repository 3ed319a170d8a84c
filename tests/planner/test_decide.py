"""What the planner promises, each promise with a mutation of its rule that breaks it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_world import CHAT, EVERY_S, MODEL, RULES, World, heavy

from baton.cluster.records import Pools
from baton.planner import decide as deciding
from baton.planner import planner as planning
from baton.planner.capacity import PoolSizes
from baton.planner.change import Change, ChangeState, Flip, Resize
from baton.planner.demand import Demand
from baton.planner.memory import Memory, Need, PlannerRules
from baton.planner.planner import Planner

SEEDS = range(2)
FEW = settings(max_examples=12, deadline=None)


def planner(rules: PlannerRules = RULES) -> Planner:
    return Planner(MODEL, rules, EVERY_S)


def steps(*parts: Demand, every_s: float = 200.0) -> Callable[[float], Demand]:
    return lambda now: parts[int(now // every_s) % len(parts)]


demands = st.builds(
    Demand,
    rate=st.floats(0, 40),
    prompt=st.floats(100, 3000),
    uncached=st.floats(50, 3000),
    output=st.floats(2, 300),
)
worlds = st.builds(
    World,
    st.builds(
        lambda flips, least, cold_s, spares: planner(replace(RULES, flips=flips, least=least, cold_s=cold_s, spares=spares)),
        st.booleans(),
        st.builds(PoolSizes, st.integers(0, 2), st.integers(1, 2)),
        st.sampled_from([5.0, 20.0]),
        st.integers(0, 2),
    ),
    st.builds(lambda parts: steps(*parts), st.lists(demands, min_size=1, max_size=4)),
    st.builds(Pools, st.integers(1, 4), st.integers(1, 4)),
    noise=st.floats(0, 0.5),
    seed=st.integers(0, 1000),
    start_s=st.floats(1, 80),
    drain_s=st.floats(1, 50),
    starts=st.booleans(),
    flips=st.booleans(),
    truth=st.sampled_from([1.0, 2.0]),
    stale=st.none() | st.tuples(st.floats(0, 400), st.floats(200, 700)),
    naps=st.frozensets(st.integers(1, 60), max_size=3),
)


@FEW
@given(worlds)
def test_all_promises_hold_whatever_comes(world: World) -> None:
    assert not world.run(600).broken


@FEW
@given(worlds)
def test_a_cluster_that_nobody_asks_goes_to_its_floor(world: World) -> None:
    world.starts, world.start_s, world.stale = True, min(world.start_s, 50.0), None
    world.run(300)
    world.demand = lambda now: replace(CHAT, rate=0.0)
    world.run(1500)
    rules = world.planner.rules
    kept = PoolSizes(rules.least.prefill + (rules.spares if rules.least.prefill else 0), rules.least.decode + rules.spares)
    assert world.sizes[-1] == kept and world.alive == kept.total and not world.broken


def test_a_spent_budget_goes_to_the_role_that_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may flip: what one role needs no more must go before the other can grow."""

    def world(seconds: float = 590) -> World:
        load = steps(heavy("prefill", 30.0), heavy("decode", 20.0), every_s=300.0)
        return World(planner(replace(RULES, flips=False)), load, Pools(2, 2)).run(seconds)

    assert world().sizes[-1].decode >= 4 and not world().broken
    longer = world(2990)
    assert longer.sizes[-1].decode >= 4 and not longer.planner.memory.holds, "giving is not regretted"
    monkeypatch.setattr(deciding, "_surplus", lambda *args: 0)  # negative control: nobody ever goes
    assert world().sizes[-1].decode == 2


def shifting(rules: PlannerRules, seed: int, **more: object) -> World:
    """Needs all of the budget, in one role and then in the other."""
    return World(planner(rules), steps(heavy("prefill", 20.0), heavy("decode", 20.0)), Pools(4, 4), 0.1, seed, **more)  # type: ignore[arg-type]


def test_the_budget_counts_those_that_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without flips, one pool shrinks and the other grows; a sum of wanted sizes forgets those that are still there."""
    rules = replace(RULES, flips=False, cooldown_s=5.0, hold_s=10.0)
    assert not any(shifting(rules, seed, drain_s=40.0).run(800).broken for seed in SEEDS)

    def mutated(action: object, seen: object, rules: PlannerRules) -> str:
        return "" if not isinstance(action, Resize) or action.pools.prefill + action.pools.decode <= rules.budget else "no"

    monkeypatch.setattr(deciding, "_over_budget", mutated)
    monkeypatch.setattr(deciding, "_room", lambda seen, pool, rules: 8)
    # The change is over, for this mutant, before its workers have gone.
    monkeypatch.setattr(Change, "done", lambda change, seen: True)
    assert any("of 8" in line for seed in SEEDS for line in shifting(rules, seed, drain_s=40.0).run(800).broken)


def test_one_routable_pair_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the load needs prefill alone, and the only proven decode worker would be flipped."""

    def world() -> World:
        return World(planner(replace(RULES, budget=2)), lambda now: replace(heavy("prefill", 12.0), output=1.0), Pools(1, 1))

    assert not world().run(400).broken
    monkeypatch.setattr(deciding, "_unroutable", lambda *args: "")
    monkeypatch.setattr(deciding, "_out_of_bounds", lambda *args: "")
    monkeypatch.setattr(deciding, "_surplus", lambda *args: 1)
    assert world().run(400).broken


def test_a_cold_worker_is_no_pair() -> None:
    """Negative control: of two decode workers, one has just come."""
    seen = World(planner(), lambda now: CHAT, Pools(1, 2)).seen()
    young = replace(seen, workers=tuple(replace(w, since=-1.0) if w.name == "decode-1" else w for w in seen.workers))
    flip = Flip("decode-0", "prefill", "decode")
    assert not deciding.forbidden(flip, seen, RULES, 0.0)
    assert "decode" in deciding.forbidden(flip, young, RULES, 0.0)


@FEW
@given(
    st.floats(0, 0.1), st.integers(0, 10_000), st.floats(2, 30), st.sampled_from([CHAT, heavy("prefill"), heavy("decode")]),
    st.integers(0, 2),
)  # fmt: skip
def test_noise_swings_nothing(noise: float, seed: int, rate: float, demand: Demand, spares: int) -> None:
    world = World(planner(replace(RULES, spares=spares)), lambda now: replace(demand, rate=rate), Pools(2, 2), noise, seed).run(900)
    late = [each for each in world.actions if each[0] > 300]
    assert not world.reversals(RULES.hold_s)
    assert len(late) <= 1, late


def test_workers_that_were_missed_stay_longer_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes of load, and as much with little. When such waves are over, workers go as soon as they used to."""

    def world() -> World:
        load = steps(heavy("prefill", 20.0), replace(CHAT, rate=1.0), every_s=120.0)
        return World(planner(replace(RULES, flips=False)), load, Pools(1, 1), start_s=20.0).run(1800)

    def late(world: World) -> int:
        return sum(at > 600 for at, _ in world.actions)

    kept = world()
    assert not late(kept) and kept.sizes[-1].prefill == 6 and not kept.broken
    assert kept.planner.memory.hold_s("prefill", RULES) == 2 * RULES.hold_s
    kept.demand = steps(heavy("prefill", 20.0), replace(CHAT, rate=1.0), every_s=1500.0)
    kept.run(6000)
    assert late(kept) and kept.planner.memory.hold_s("prefill", RULES) == RULES.hold_s and not kept.broken
    monkeypatch.setattr(deciding, "_regret", lambda memory, *args: memory)  # negative control: they go and come with each wave
    assert late(world()) >= 10


def test_a_spare_serves_while_others_start() -> None:
    """The load doubles, and a worker takes 50 s to start."""

    def served(spares: int) -> float:
        load = steps(replace(CHAT, rate=14.0), replace(CHAT, rate=28.0), every_s=300.0)
        world = World(planner(replace(RULES, spares=spares)), load, Pools(3, 3), start_s=50.0)
        world.run(350)
        shares = [world.effect(load(300.0), sizes).attainment for sizes in world.sizes[-10:]]
        assert not world.broken
        return sum(shares) / 10

    assert served(1) > served(0) + 0.2


def test_spares_are_within_the_budget_and_no_role_waits_for_one() -> None:
    rules = replace(RULES, spares=2, most=PoolSizes(4, 8))
    for need, kept in (((1, 1), (3, 3)), ((3, 1), (4, 3)), ((2, 4), (3, 5)), ((4, 4), (4, 4)), ((0, 2), (0, 4))):
        assert deciding.with_spares(PoolSizes(*need), deciding.spares_of(PoolSizes(*need), rules), rules) == PoolSizes(*kept)
    assert deciding.spares_of(PoolSizes(2, 1), replace(rules, costs=(2.0, 1.0))) == 1, "by what a worker costs"
    world = World(
        planner(replace(rules, most=RULES.most)), steps(heavy("prefill", 30.0), heavy("decode", 20.0), every_s=300.0), Pools(2, 2)
    )
    assert world.run(590).sizes[-1].decode >= 4 and not world.broken


def test_a_worker_goes_if_none_was_needed_and_half_of_the_time_none_with_the_margin() -> None:
    def surplus(needs: list[tuple[int, int]]) -> int:
        """`needs`: without and with the margin, at looks that end now."""
        sizes = [(PoolSizes(grow, 1), PoolSizes(shrink, 1)) for grow, shrink in needs]
        noted = tuple(Need(40.0 - 10.0 * ago, *each) for ago, each in enumerate(sizes[::-1]))[::-1]
        return deciding._surplus(Memory(needs=noted), "prefill", 3, 40.0, 40.0)

    assert surplus([(2, 2)] * 5) == 1
    assert surplus([(2, 2), (2, 3), (2, 2), (2, 3), (2, 2)]) == 1, "chance"
    assert surplus([(2, 3), (2, 3), (2, 2), (2, 3), (2, 2)]) == 0, "more than that"
    assert surplus([(2, 2), (2, 2), (2, 2), (3, 3), (2, 2)]) == 0, "one was needed"
    assert surplus([(1, 1)] * 5) == 2 and surplus([(2, 2)] * 4) == 0, "not looked at for so long"


def test_without_hysteresis_noise_swings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def late() -> int:
        rates = (14.0, 22.0, 30.0)
        runs = [World(planner(), lambda now, rate=rate: replace(CHAT, rate=rate), Pools(2, 2), 0.1, 1).run(800) for rate in rates]  # type: ignore[misc]
        return max(len([at for at, _ in run.actions if at > 300]) for run in runs)

    assert late() <= 1
    surplus = deciding._surplus
    monkeypatch.setattr(deciding, "_surplus", lambda memory, role, size, within, now, spares=0: surplus(
        replace(memory, needs=tuple(replace(each, shrink=each.grow) for each in memory.needs[-1:])), role, size, 0.0, now))  # fmt: skip
    monkeypatch.setattr(deciding, "waits", lambda *args: "")
    assert late() > 3


def test_capacity_that_does_not_come_is_given_up() -> None:
    """The request for it is taken back, and what there is serves on: a flip is still found."""
    world = World(planner(replace(RULES, flips=False)), lambda now: heavy("decode", 12.0), Pools(2, 2), starts=False).run(70)
    asked = [action for _, action in world.actions if isinstance(action, Resize)]
    assert asked[0].grows and asked[1].pools == asked[0].before, "it timed out and was taken back"
    assert world.alive == 4
    world.planner.rules = RULES
    world.run(200)
    assert any(isinstance(action, Flip) for _, action in world.actions), "the plan goes on with what there is"
    waits = [at for at, action in world.actions if isinstance(action, Resize) and action.grows]
    assert not waits[1:] or waits[1] - waits[0] > RULES.start_timeout_s


def test_without_a_timeout_pending_capacity_holds_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def world() -> World:
        return World(planner(), lambda now: heavy("decode", 12.0), Pools(3, 1), starts=False).run(600)

    assert not world().broken
    begin = deciding.begin
    monkeypatch.setattr(planning, "begin", lambda memory, decision, rules, now: begin(
        memory, decision, replace(rules, start_timeout_s=1e9), now))  # fmt: skip
    held = world()
    growths = [action for _, action in held.actions if isinstance(action, Resize)]
    assert len(growths) == 1 and held.planner.memory.change is not None and held.planner.memory.change.state is ChangeState.ACTING
    assert any("the decode pool waits" in line for line in held.broken)


@pytest.mark.parametrize("least", [1, 0])
def test_an_idle_pool_goes_to_its_floor_and_comes_back(least: int) -> None:
    rules = replace(RULES, least=PoolSizes(least, 1))
    world = World(planner(rules), lambda now: replace(CHAT, rate=0.0) if 400 < now < 1200 else heavy("prefill", 12.0), Pools(2, 2))
    world.run(400)
    assert world.sizes[-1].total >= 5
    world.run(800)
    assert world.sizes[-1] == PoolSizes(least, 1)
    world.run(300)
    assert world.sizes[-1].total >= 5 and not world.broken


def test_a_floor_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the floor."""

    def world() -> World:
        return World(planner(replace(RULES, least=PoolSizes(2, 2))), lambda now: replace(CHAT, rate=0.0), Pools(3, 3)).run(600)

    assert world().sizes[-1] == PoolSizes(2, 2)
    monkeypatch.setattr(deciding, "_out_of_bounds", lambda *args: "")
    monkeypatch.setattr(deciding, "needed", lambda *args: PoolSizes(0, 1))
    assert world().sizes[-1].total < 4


def test_stale_figures_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def world() -> World:
        idle = replace(CHAT, rate=0.0)
        return World(planner(), steps(heavy("decode", 14.0), idle, every_s=100.0), Pools(2, 3), stale=(130.0, 1e9)).run(600)

    held = world()
    assert not [at for at, _ in held.actions if at > 130 + RULES.stale_s] and "old" in held.decisions[-1].why
    monkeypatch.setattr(deciding, "hindrance", lambda *args: "")  # negative control: an old load is taken for the present one
    assert any("on figures from" in line for line in world().broken)


def test_a_planner_that_was_late_looks_before_it_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped for a while, and the load has changed."""

    def world() -> World:
        return World(planner(), steps(CHAT, heavy("decode", 14.0), every_s=60.0), Pools(2, 2), naps=frozenset({10})).run(110)

    held = world()
    assert "did not look" in held.decisions[9].why and not held.broken
    assert [at for at, _ in held.actions if at > 90]
    monkeypatch.setattr(planning, "LATE", 1e9)  # negative control
    assert any("after a nap" in line for line in world().broken)


def test_cold_workers_teach_nothing() -> None:
    """While workers are cold everybody misses, and the model is not blamed."""

    def world(cold_s: float) -> World:
        rules = replace(RULES, cold_s=cold_s)
        load = steps(CHAT, replace(CHAT, rate=24.0), every_s=100.0)
        return World(planner(rules), load, Pools(2, 2), start_s=30.0, flips=False, cold_s=30.0).run(900)

    held, hasty = world(cold_s=30.0), world(cold_s=0.0)
    assert held.planner.memory.raised == 0 and not held.broken
    # Negative control: what they do counts from the first moment.
    assert hasty.planner.memory.raised > 0 and any("a cold worker taught" in line for line in hasty.broken)


def test_a_model_that_is_wrong_is_corrected() -> None:
    """Tokens take twice as long as the profile says: the planner sees misses that it did not foresee, and sizes for more."""
    right, wrong = (World(planner(), lambda now: CHAT, Pools(1, 1), truth=truth).run(2000) for truth in (1.0, 2.0))
    assert max(right.planner.memory.pressure) == 1.0 < max(wrong.planner.memory.pressure)
    assert wrong.effect(CHAT, wrong.sizes[-1]).attainment > RULES.target - 0.1
    assert wrong.effect(CHAT, right.sizes[-1]).attainment < RULES.target - 0.1
    assert not wrong.reversals(1000), "what was learned is not forgotten at once"


def test_a_phase_that_shifts_flips_a_worker_and_says_why() -> None:
    world = World(planner(replace(RULES, budget=4)), steps(heavy("prefill", 12.0), heavy("decode", 12.0), every_s=300.0), Pools(2, 2)).run(
        590
    )
    flips = [action for _, action in world.actions if isinstance(action, Flip)]
    assert [flip.to for flip in flips][-1] == "decode" and world.sizes[-1].decode == 3
    told = next(each for each in world.decisions if each.action == flips[-1])
    assert "decode" in told.why and told.now is not None and told.expected is not None
    assert told.expected.attainment > told.now.attainment and len(told.alternatives) > 1


def test_a_flip_goes_on_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load moves from one role to the other. To go on in one direction is no swing."""

    def took() -> float:
        rules = replace(RULES, cooldown_s=30.0)
        load = steps(heavy("prefill", 20.0), heavy("decode", 26.0), every_s=300.0)
        world = World(planner(rules), load, Pools(4, 4)).run(590)
        flips = [at for at, action in world.actions if isinstance(action, Flip) and action.to == "decode" and at > 300]
        assert len(flips) >= 3 and not world.broken
        return flips[-1] - flips[0]

    quick = took()
    monkeypatch.setattr(deciding, "_goes_on", lambda *args: False)  # negative control
    assert took() > 2 * quick


def test_a_flip_back_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what goes the other way nor what follows a flip that did not come about goes on."""
    there, back = Flip("decode-0", "prefill", "decode"), Flip("prefill-0", "decode", "prefill")
    settled, undone = (Change(1, there, PoolSizes(3, 1), 20.0, 0.0, state) for state in (ChangeState.SETTLED, ChangeState.UNDONE))
    again = replace(there, worker="decode-1")
    memory = Memory(change=settled, ended=10.0)
    effect = MODEL.effect(PoolSizes(2, 2), CHAT)
    assert not deciding.waits(again, effect, memory, RULES, 11.0)
    for action, after in ((back, settled), (again, undone), (Resize(Pools(3, 2), Pools(2, 2)), settled)):
        assert "ago" in deciding.waits(action, effect, replace(memory, change=after), RULES, 11.0)


def test_both_pools_grow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would wait for a start of the other, and for the pause after that."""

    def served() -> float:
        load = steps(replace(CHAT, rate=8.0), replace(CHAT, rate=26.0), every_s=100.0)
        world = World(planner(replace(RULES, flips=False)), load, Pools(1, 1), start_s=30.0)
        world.run(190)
        assert not world.broken
        return sum(world.effect(load(150.0), sizes).attainment for sizes in world.sizes[20:]) / len(world.sizes[20:])

    together = served()
    monkeypatch.setattr(deciding, "_both", lambda *args: None)  # negative control
    assert together > served() + 0.2


def test_only_the_pool_whose_workers_did_not_come_is_blocked() -> None:
    world = World(planner(), lambda now: CHAT, Pools(3, 2))
    grown = Resize(Pools(3, 3), Pools(2, 2))
    world.wanted = grown.pools
    late = Memory(change=Change(1, grown, PoolSizes(3, 3), 60.0, 0.0, ChangeState.ACTING), changes=1)
    decision = deciding.decide(replace(world.seen(), at=60.0, starting={"decode": 1}), CHAT, MODEL, late, RULES, 60.0)
    assert decision.action == Resize(Pools(3, 2), Pools(3, 3)) and decision.undoes
    assert [who for who, _, _ in decision.memory.blocked] == ["decode"]


@pytest.mark.parametrize("liars", [frozenset({"decode-0"}), frozenset({"decode-0", "decode-1", "decode-2"})])
def test_who_does_not_prove_itself_is_not_asked_again_and_another_is(liars: frozenset[str]) -> None:
    world = World(planner(replace(RULES, budget=4)), lambda now: heavy("prefill", 12.0), Pools(1, 3), liars=liars).run(200)
    flips = [action.worker for _, action in world.actions if isinstance(action, Flip)]
    assert len(flips) == len(set(flips)) and set(flips) >= liars
    assert world.sizes[-1].prefill == 3, "if all lie, the pools' sizes are changed instead"


def test_who_died_in_between_is_not_undone() -> None:
    """A growth that timed out is taken back to what there was, though a worker is just being started again: the launcher would otherwise
    take one that serves."""
    world = World(planner(), lambda now: heavy("decode", 14.0), Pools(2, 2), starts=False).run(20)
    del world._workers["decode-0"]
    world.run(100)
    assert min(pools.pools.decode for _, pools in world.actions if isinstance(pools, Resize)) >= 2


def orphaned(**how: object) -> World:
    """A planner asks for workers, which do not come, and dies."""
    world = World(planner(replace(RULES, flips=False)), lambda now: heavy("decode", 12.0), Pools(2, 2), starts=False, **how)  # type: ignore[arg-type]
    while not world.actions:
        world.step()
    assert world.wanted != Pools(2, 2)
    return world


def test_what_a_dead_planner_asked_for_is_taken_back_when_it_does_not_come() -> None:
    first = orphaned()
    at = first._looks
    world = orphaned(deaths=frozenset({at})).run(90)
    asked = [action for _, action in world.actions if isinstance(action, Resize)]
    assert asked[0].grows and asked[1] == Resize(asked[0].before, asked[0].pools) and world.wanted.decode == 2
    assert world.planner.memory.changes == len(asked) - 1, "numbers go on; who takes back makes no change of its own"
    forgetful = orphaned(deaths=frozenset({at}), takes_up=False).run(600)
    assert forgetful.wanted.decode > 2, "negative control: nobody takes it back"


def test_what_a_dead_planner_had_not_asked_for_yet_is_no_matter() -> None:
    """It noted the change and died: the next one decides anew."""
    world = World(
        planner(replace(RULES, flips=False)), lambda now: heavy("decode", 12.0), Pools(2, 2), deaths=frozenset(range(1, 5)), dies="before"
    )
    world.run(120)
    assert world.sizes[-1].decode > 2 and not world.broken


def test_a_worker_that_a_dead_planner_flips_is_flipped_by_nobody_else() -> None:
    def world(takes_up: bool) -> World:
        load = steps(CHAT, heavy("prefill", 12.0), every_s=60.0)
        rules = replace(RULES, budget=4, flip_timeout_s=60)
        return World(planner(rules), load, Pools(1, 3), flips=False, deaths=frozenset(range(1, 200, 3)), takes_up=takes_up).run(400)

    assert not world(True).broken
    assert any("another flip" in line for line in world(False).broken), "negative control"


@settings(max_examples=25, deadline=None)
@given(worlds, st.frozensets(st.integers(1, 60), max_size=12), st.sampled_from(["before", "after"]))
def test_whatever_planners_die_when_the_promises_hold(world: World, deaths: frozenset[int], dies: str) -> None:
    world.deaths, world.dies = deaths, dies
    assert not world.run(600).broken


def test_workers_that_somebody_asked_for_are_not_asked_for_again() -> None:
    """An operator has just doubled the pool, and the workers start."""
    world = World(planner(replace(RULES, flips=False)), lambda now: heavy("decode", 12.0), Pools(2, 2), start_s=40.0)
    world._obey(Resize(Pools(2, 4), Pools(2, 2)))
    world.run(35)
    assert not world.actions
    world.run(100)
    assert world.sizes[-1].decode >= 3 and not world.broken


def test_a_note_of_a_change_is_read_as_it_was_written() -> None:
    for action in (Resize(Pools(2, 4), Pools(2, 2)), Flip("decode-0", "prefill", "decode")):
        change = Change(7, action, PoolSizes(3, 4), deadline=100.0, began=20.0, state=ChangeState.ACTING)
        again = Change.of_note(change.noted(40.0), 1000.0)
        assert (again.number, again.action, again.sizes, again.state) == (7, action, PoolSizes(3, 4), ChangeState.ACTING)
        assert (again.deadline, again.began) == (1060.0, 980.0), "on the clock of who reads it"
    for wrong in (b"", b"{}", b"null", change.noted(40.0).replace(b"decode-0", b"").replace(b'"to"', b'"two"')):
        with pytest.raises(ValueError, match="no note of a change"):
            Change.of_note(wrong, 0.0)


def test_an_operators_wish_stands() -> None:
    """Who scales by hand while a growth is under way is not overruled when it times out."""
    world = World(planner(), lambda now: heavy("decode", 14.0), Pools(2, 2), starts=False).run(20)
    world.wanted = Pools(3, 3)
    world.run(50)
    assert world.wanted == Pools(3, 3)


def test_a_stopped_cluster_is_left_alone() -> None:
    world = World(planner(), lambda now: heavy("decode", 14.0), Pools(2, 2))
    world.wanted = Pools(2, 2, stop=True)
    assert not world.run(100).actions and "stopped" in world.decisions[-1].why


def test_memory_is_bounded() -> None:
    world = World(planner(), lambda now: CHAT, noise=0.1).run(2000)
    assert len(world.planner.memory.needs) <= RULES.hold_s / EVERY_S + 2
    assert Memory().change is None
