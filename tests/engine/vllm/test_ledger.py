"""The ledger beside a small vLLM: admission, loads, chunks, preemption, and aborts at any time, with several steps under way.

Blocks have contents here. The saves of a plan are done when its step ends, its loads at any time after that: a copy that comes too early,
too late or from the wrong block puts wrong KV somewhere.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.vllm.ledger import JobLedger, Order, StepNews, StepPlan

BLOCK = 4
THEIRS = 14  # blocks of vLLM
Content = list[tuple[str, int] | None]  # for each position in a block: whose KV, of which position


@dataclass(eq=False)
class Request:
    id: str
    order: Order
    known: int
    to_sample: int
    computed: int = 0  # also by the steps under way
    blocks: list[int] = field(default_factory=list)
    runs: int = 0  # how often it was admitted
    matched: tuple[int, int] = (0, 0)  # positions from the prefix cache and from staged blocks
    loading: list[tuple[int, int]] = field(default_factory=list)
    last: int = 0  # the last step that saves for it
    done_in: int = 0  # the step with which nothing more is to be copied
    first_step: int = 0
    saved: list[int] = field(default_factory=list)  # staged blocks that were copied out, in a plan
    gone: bool = False

    @property
    def job(self) -> str:
        return self.order.job

    def staged(self, positions: int) -> tuple[int, ...]:
        return self.order.blocks[: -(-positions // BLOCK)]


@dataclass
class Chunk:
    request: Request
    run: int
    begin: int
    end: int
    blocks: list[int]
    cached: int | None  # positions that the prefix cache gave, if the request was admitted in this step


@dataclass
class Step:
    plan: StepPlan
    chunks: list[Chunk]
    loading: list[Request]  # whose loads begin with it


class LedgerMachine(RuleBasedStateMachine):
    @initialize(under_way=st.integers(1, 3))
    def start(self, under_way: int) -> None:
        self.most = under_way
        self.ledger = JobLedger(BLOCK)
        self.numbers = self.planned = 0
        self.starts: dict[str, tuple[int, int]] = {}
        self.staged: dict[int, Content] = {}
        self.theirs: dict[int, Content] = {block: [None] * BLOCK for block in range(THEIRS)}
        self.free = set(range(THEIRS))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.remote: list[Request] = []  # loading, or aborted while they did: vLLM keeps their blocks
        self.everyone: dict[str, Request] = {}  # by job
        self.steps: list[Step] = []  # under way, oldest first
        self.closed: set[str] = set()

    # --- vLLM's blocks ---

    def grow(self, request: Request, end: int) -> bool:
        needed = -(-end // BLOCK) - len(request.blocks)
        if needed > len(self.free):
            return False
        request.blocks = [*request.blocks, *(self.free.pop() for _ in range(needed))]
        return True

    def drop(self, request: Request) -> None:
        self.free |= set(request.blocks)
        request.blocks, request.computed = [], 0

    def block_ids(self, request_id: str) -> list[int]:
        return next(request.blocks for request in self.running if request.id == request_id)

    # --- what happens ---

    @rule(data=st.data(), tokens=st.integers(1, 3 * BLOCK + 1), save=st.booleans())
    def arrive(self, data: st.DataObject, tokens: int, save: bool) -> None:
        self.numbers += 1
        count = -(-tokens // BLOCK)
        load = data.draw(st.integers(0, tokens - 1))
        blocks = tuple(range(self.numbers * 100, self.numbers * 100 + count)) if load or save else ()
        order = Order(f"job {self.numbers}", blocks, load, tokens if save else 0)
        request = Request(f"r{self.numbers}", order, tokens, 1 if save else data.draw(st.integers(1, 3)))
        for i, block in enumerate(blocks):
            self.staged[block] = [(request.job, p) if p < load else None for p in range(i * BLOCK, (i + 1) * BLOCK)]
        self.everyone[request.job] = request
        self.ledger.arrived(request.id, Order.unpack(order.pack()))
        self.waiting.append(request)

    @precondition(lambda self: len(self.steps) < self.most)
    @rule(data=st.data(), budget=st.integers(1, 9))
    def plan(self, data: st.DataObject, budget: int) -> None:
        chunks: list[Chunk] = []
        loads: dict[str, list[tuple[int, int]]] = {}
        loading: list[Request] = []
        for request in list(self.running):
            n = min(budget, request.known - request.computed)
            if n and self.grow(request, request.computed + n):
                chunks.append(self.chunk(request, n, None))
                budget -= n
        while self.waiting and budget:
            request = self.waiting[0]
            if request.computed:  # it has been loaded
                n = min(budget, request.known - request.computed)
                if not self.grow(request, request.computed + n):
                    break
                self.ledger.allocated(request.id, request.blocks, 0)
                self.running.append(self.waiting.pop(0))
                self.expect_start(request, *request.matched)
                chunks.append(self.chunk(request, n, None))
                budget -= n
                continue
            cached = data.draw(st.integers(0, (request.known - 1) // BLOCK)) * BLOCK
            matched = self.ledger.matched(request.id, cached)
            assert matched == self.ledger.matched(request.id, cached), "the answer changes from one attempt to the next"
            assert matched == (0 if request.runs else max(0, request.order.load - cached))
            n = 0 if matched else min(budget, request.known - cached)
            if not self.grow(request, cached + matched + n):
                break
            self.ledger.allocated(request.id, request.blocks, matched)
            self.waiting.remove(request)
            request.runs += 1
            request.computed = cached + matched
            if matched:
                lacking = range(cached // BLOCK, -(-(cached + matched) // BLOCK))
                request.matched = cached, matched
                request.loading = [(request.order.blocks[i], request.blocks[i]) for i in lacking]
                loads[request.id] = list(request.loading)
                loading.append(request)
                self.remote.append(request)
                continue
            self.running.append(request)
            self.expect_start(request, cached, 0)
            chunks.append(self.chunk(request, n, cached))
            budget -= n
        plan = self.ledger.step({chunk.request.id: chunk.end for chunk in chunks}, self.block_ids)
        assert plan.number == self.planned + 1
        self.planned += 1
        assert plan.loads == loads, "loads are what the prefix cache lacked, once"
        touched = {block for pairs in (*plan.loads.values(), plan.saves) for block, _ in pairs}
        for job in self.closed:
            assert not touched & set(self.everyone[job].order.blocks), "a copy for a closed job"
        self.expect_saves(plan, chunks)
        self.steps.append(Step(plan, chunks, loading))

    def chunk(self, request: Request, n: int, cached: int | None) -> Chunk:
        begin, request.computed = request.computed, request.computed + n
        return Chunk(request, request.runs, begin, request.computed, list(request.blocks), cached)

    def expect_start(self, request: Request, cached: int, loaded: int) -> None:
        if request.first_step:
            return
        request.first_step = self.planned + 1
        self.starts[request.job] = (cached, loaded)
        if not request.order.save:
            request.done_in = self.planned + 1

    def expect_saves(self, plan: StepPlan, chunks: list[Chunk]) -> None:
        saves = [block for block, _ in plan.saves]
        for chunk in chunks:
            request, order = chunk.request, chunk.request.order
            due = request.staged(order.save) if chunk.end >= order.save else order.blocks[: chunk.end // BLOCK]
            new = [block for block in due if order.save and block not in request.saved]
            assert [block for block in saves if block in order.blocks] == new
            request.saved += new
            if new:
                request.last = plan.number
                if len(request.saved) == len(request.staged(order.save)):
                    request.done_in = plan.number
        assert len(saves) == sum(block in chunk.request.order.blocks for chunk in chunks for block in saves), "nobody's block"

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        step = self.steps[0]
        self.compute(step)
        ended = []
        for chunk in step.chunks:
            request = chunk.request
            if not request.gone and chunk.run == request.runs and chunk.end == request.known:
                request.known += 1
                request.to_sample -= 1
                if not request.to_sample:
                    ended.append(request)
        # vLLM ends requests before it hands on what the ranks say.
        before = data.draw(st.sampled_from([True, True, False]))
        if before:
            self.end(ended)
        self.steps.pop(0)
        news = self.ledger.landed(step.plan.number)
        self.check(step.plan.number, news)
        if not before:
            self.end(ended)

    def compute(self, step: Step) -> None:
        """What the ranks do."""
        for chunk in step.chunks:
            if chunk.cached is not None:
                self.begin(chunk.request, chunk.blocks, chunk.cached)
        for request in step.loading:
            self.begin(request, request.blocks, request.matched[0])
        for chunk in step.chunks:
            here = [self.theirs[chunk.blocks[p // BLOCK]][p % BLOCK] for p in range(chunk.begin)]
            assert here == [(chunk.request.job, p) for p in range(chunk.begin)], "the step computes with wrong KV"
            self.write(chunk.request, chunk.blocks, chunk.begin, chunk.end)
        for ours, block in step.plan.saves:
            self.staged[ours] = list(self.theirs[block])

    def begin(self, request: Request, blocks: list[int], cached: int) -> None:
        for block in blocks:
            self.theirs[block] = [None] * BLOCK
        self.write(request, blocks, 0, cached)

    def write(self, request: Request, blocks: list[int], begin: int, end: int) -> None:
        for p in range(begin, end):
            self.theirs[blocks[p // BLOCK]][p % BLOCK] = (request.job, p)

    @property
    def begun(self) -> list[Request]:
        """Whose loads the ranks have begun."""
        planned = [request for step in self.steps for request in step.loading]
        return [request for request in self.remote if request not in planned]

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        self.load(data.draw(st.sampled_from(self.begun)))

    def load(self, request: Request) -> None:
        for ours, block in request.loading:
            self.theirs[block] = list(self.staged[ours])
        request.loading = []
        self.remote.remove(request)
        said = self.ledger.received([request.id])
        if request.gone:
            self.closes({request.job}, said)
            self.drop(request)
        else:
            assert not said
            self.waiting.insert(0, request)

    def readable(self, request: Request, positions: int) -> bool:
        here = [kv for block in request.staged(positions) for kv in self.staged[block]]
        return here[:positions] == [(request.job, p) for p in range(positions)]

    def check(self, number: int, news: StepNews) -> None:
        starting = [request for request in self.everyone.values() if request.first_step == number]
        assert sorted(news.started) == sorted((request.job, *self.starts[request.job]) for request in starting)
        for job, full in news.staged:
            request = self.everyone[job]
            assert full * BLOCK < request.order.save and self.readable(request, full * BLOCK)
        self.closes(
            {
                request.job
                for request in self.everyone.values()
                if request.job not in self.closed and (request.done_in == number or (request.gone and request.last == number))
            },
            news.closed,
        )

    def closes(self, expected: set[str], said: list[str]) -> None:
        assert set(said) - self.closed == expected and len(set(said)) == len(said)
        for job in expected:
            request = self.everyone[job]
            under_way = [block for step in self.steps for block, _ in step.plan.saves] + [block for block, _ in request.loading]
            assert not set(under_way) & set(request.order.blocks), "a plan that copies for the job has not landed"
            if request.order.save and not request.gone:
                assert self.readable(request, request.order.save)
        self.closed |= expected

    def end(self, requests: list[Request]) -> None:
        for request in requests:
            self.finish(request)

    def finish(self, request: Request) -> None:
        """The request leaves vLLM, which knows nothing of the steps under way then."""
        request.gone = True
        if request not in self.remote:
            (self.running if request in self.running else self.waiting).remove(request)
            self.drop(request)
        copying = request in self.remote or any(step.plan.number == request.last for step in self.steps)
        self.closes(set() if copying or request.job in self.closed else {request.job}, self.ledger.finished(request.id))
        assert self.ledger.finished(request.id) == []

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.drop(request)
        self.waiting.insert(0, request)

    @property
    def alive(self) -> list[Request]:
        return [*self.running, *self.waiting, *(request for request in self.remote if not request.gone)]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.finish(data.draw(st.sampled_from(self.alive)))

    @invariant()
    def nobody_is_forgotten(self) -> None:
        leaving = [
            request
            for request in self.everyone.values()
            if request.gone and (request in self.remote or any(step.plan.number == request.last for step in self.steps))
        ]
        assert len(self.ledger) == len(self.alive) + len(leaving)

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.end(self.alive)
        while self.steps:
            step = self.steps.pop(0)
            self.compute(step)
            self.check(step.plan.number, self.ledger.landed(step.plan.number))
        for request in list(self.remote):
            self.load(request)
        assert len(self.ledger) == 0 and not self.ledger._under_way and self.closed == set(self.everyone)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# --- one request, by hand ------------------------------------------------------------------------------------------------------------


def started(order: Order, cached: int = 0, blocks: tuple[int, ...] = (50, 51, 52)) -> JobLedger:
    ledger = JobLedger(BLOCK)
    ledger.arrived("r", order)
    ledger.allocated("r", blocks, ledger.matched("r", cached))
    return ledger


def step(ledger: JobLedger, end: int, blocks: tuple[int, ...] = (50, 51, 52)) -> StepPlan:
    return ledger.step({"r": end}, lambda request_id: blocks)


def test_an_order_survives_its_journey() -> None:
    order = Order("7", (3, 1, 2), 9, 12)
    assert Order.unpack(order.pack()) == order


@pytest.mark.parametrize(
    ("cached", "matched", "pairs"),
    [
        (0, 10, [(7, 50), (8, 51), (9, 52)]),
        (4, 6, [(8, 51), (9, 52)]),
        (8, 2, [(9, 52)]),
        (12, 0, []),
    ],
)
def test_only_what_the_prefix_cache_lacks_is_loaded(cached: int, matched: int, pairs: list[tuple[int, int]]) -> None:
    ledger = JobLedger(BLOCK)
    ledger.arrived("r", Order("j", (7, 8, 9), load=10, save=0))
    assert ledger.matched("r", cached) == matched
    ledger.allocated("r", (50, 51, 52, 53), matched)
    first = ledger.step({}, lambda request_id: ())
    assert first.loads == ({"r": pairs} if pairs else {}) and first.saves == []
    assert ledger.landed(first.number) == StepNews() and ledger.received(["r"]) == []
    second = step(ledger, 13)
    assert ledger.landed(second.number) == StepNews([("j", cached, matched)], [], ["j"])


def test_an_attempt_that_found_no_room_loads_nothing() -> None:
    ledger = JobLedger(BLOCK)
    ledger.arrived("r", Order("j", (7, 8), load=8, save=0))
    assert ledger.matched("r", 0) == 8
    assert ledger.step({}, lambda request_id: ()).loads == {}
    assert ledger.matched("r", 4) == 4, "the prefix cache has more now"
    ledger.allocated("r", (50, 51, 52), 4)
    assert ledger.step({}, lambda request_id: ()).loads == {"r": [(8, 51)]}


def test_a_load_is_planned_once() -> None:
    ledger = started(Order("j", (7, 8), load=8, save=0))
    assert len(ledger.step({}, lambda request_id: ()).loads["r"]) == 2
    assert ledger.received(["r"]) == []
    ledger.allocated("r", (50, 51, 52), 0)  # vLLM says so again when it admits the request
    assert step(ledger, 9).loads == {} == step(ledger, 10).loads


def test_a_preempted_request_is_not_loaded_again() -> None:
    """Its staged blocks were given back, and may hold another sequence's KV."""
    ledger = started(Order("j", (7, 8), load=8, save=0))
    ledger.received(["r"])
    assert ledger.landed(step(ledger, 9).number).closed == ["j"]
    assert ledger.matched("r", 0) == 0
    ledger.allocated("r", (60, 61, 62), 0)
    plan = step(ledger, 9)
    assert plan.loads == {} and ledger.landed(plan.number) == StepNews()


def test_a_prompt_is_copied_out_block_by_block() -> None:
    ledger = started(Order("j", (7, 8, 9), load=0, save=10))
    said = []
    for end, saves in ((3, []), (6, [(7, 50)]), (7, []), (10, [(8, 51), (9, 52)]), (11, [])):
        plan = step(ledger, end)
        assert plan.saves == saves
        said.append(ledger.landed(plan.number))
    assert [news.staged for news in said] == [[], [("j", 1)], [], [], []]
    assert [news.closed for news in said] == [[], [], [], ["j"], []]
    assert said[0].started == [("j", 0, 0)]


def test_a_preemption_does_not_copy_a_block_twice() -> None:
    ledger = started(Order("j", (7, 8, 9), load=0, save=10))
    assert step(ledger, 9).saves == [(7, 50), (8, 51)]
    assert ledger.matched("r", 4) == 0
    ledger.allocated("r", (60, 61, 62), 0)
    assert step(ledger, 8, (60, 61, 62)).saves == []
    assert step(ledger, 10, (60, 61, 62)).saves == [(9, 62)]


def test_a_prompt_with_fetched_kv_is_copied_out_whole() -> None:
    ledger = started(Order("j", (7, 8, 9), load=6, save=10), cached=4)
    assert ledger.step({}, lambda request_id: ()).loads == {"r": [(8, 51)]}
    ledger.received(["r"])
    assert step(ledger, 10).saves == [(7, 50), (8, 51), (9, 52)]


def test_nothing_is_told_before_the_step_has_landed() -> None:
    ledger = started(Order("j", (7, 8, 9), load=0, save=10))
    first, second = step(ledger, 8), step(ledger, 10)
    assert ledger.landed(first.number) == StepNews([("j", 0, 0)], [("j", 2)], [])
    assert ledger.landed(second.number) == StepNews([], [], ["j"])


def test_a_job_that_ends_under_a_copy_closes_when_the_copy_has_landed() -> None:
    ledger = started(Order("j", (7, 8, 9), load=0, save=10))
    first, second = step(ledger, 4), step(ledger, 8)
    assert ledger.finished("r") == []
    assert ledger.landed(first.number).closed == []
    assert ledger.landed(second.number).closed == ["j"] and len(ledger) == 0


def test_a_job_without_a_copy_under_way_closes_when_its_request_ends() -> None:
    ledger = started(Order("j", (7, 8, 9), load=0, save=10))
    ledger.landed(step(ledger, 4).number)
    second = step(ledger, 5)
    assert second.saves == [] and ledger.finished("r") == ["j"] and len(ledger) == 0
    assert ledger.landed(second.number).closed == []


def test_a_request_that_ends_in_the_queue_closes_its_job() -> None:
    ledger = JobLedger(BLOCK)
    ledger.arrived("r", Order("j", (7, 8), load=8, save=0))
    ledger.matched("r", 0)
    assert ledger.finished("r") == ["j"] and len(ledger) == 0


@pytest.mark.parametrize("landed", [False, True])
def test_a_request_that_ends_while_it_loads_closes_its_job_when_the_copy_is_over(landed: bool) -> None:
    ledger = started(Order("j", (7, 8), load=8, save=0))
    plan = ledger.step({}, lambda request_id: ())
    if landed:
        assert ledger.landed(plan.number) == StepNews()
    assert ledger.finished("r") == []
    if not landed:
        assert ledger.landed(plan.number) == StepNews()
    assert ledger.received(["r"]) == ["j"] and len(ledger) == 0


def test_requests_without_an_order_are_left_alone() -> None:
    ledger = JobLedger(BLOCK)
    assert ledger.matched("x", 0) == 0 and ledger.finished("x") == []
    ledger.allocated("x", (1, 2), 0)
    plan = ledger.step({"x": 8}, lambda request_id: (1, 2))
    assert plan == StepPlan(1) and ledger.landed(1) == StepNews()
