"""The desk against a vLLM that answers in any legal order, and closes its jobs as late as it likes."""

import math
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.core.beams import Beams
from baton.engine.core.engine import Malformed, QueueFull, SequenceRefused, TooLong
from baton.engine.core.grammar import Grammar
from baton.engine.core.sampling import Sampled, SamplingParams
from baton.engine.core.sequence import Finish, Sequence, State
from baton.engine.vllm.desk import Desk, EngineBounds, Job
from baton.moves import IllegalMove

BLOCK = 4
EOS = 9
NAMES = ("a", "b", "c", "d", "e", "f")


def make_desk(blocks: int = 16, *, seqs: int = 4, queue: int = 8, max_len: int = 32) -> Desk:
    return Desk(blocks, BLOCK, EngineBounds(seqs, queue, max_len, vocab_size=10, eos_token_ids=frozenset({EOS})))


def make_seq(name: str, length: int = 6, hold: bool = False, expires_at: float = math.inf, **params: Any) -> Sequence:
    values: dict[str, Any] = {"max_tokens": 4, **params}
    return Sequence(name, [1] * length, length, SamplingParams(**values), b"root", hold, expires_at=expires_at)


def admit(desk: Desk, *seqs: Sequence) -> list[Job]:
    for seq in seqs:
        desk.add(seq)
    jobs = desk.admit(0.0).jobs
    assert [job.seq for job in jobs] == list(seqs)
    return jobs


def adopted(desk: Desk, seq: Sequence) -> Job:
    assert desk.reserve(seq)
    return desk.adopt(seq, len(seq.tokens) - 1, None)


def free(desk: Desk) -> int:
    desk.staged.check()
    return desk.staged.available


class DeskMachine(RuleBasedStateMachine):
    """The model keeps what vLLM and the fetches may touch, and who waits for room since when."""

    @initialize(blocks=st.integers(4, 9), seqs=st.integers(1, 4), queue=st.integers(1, 4))
    def start(self, blocks: int, seqs: int, queue: int) -> None:
        self.blocks, self.limit, self.queue = blocks, seqs, queue
        self.desk = make_desk(blocks, seqs=seqs, queue=queue, max_len=4 * BLOCK)
        self.now = 0.0
        self.places: dict[Sequence, int] = {}
        self.queued: list[Sequence] = []
        self.claims: list[Sequence] = []
        self.fetching: list[Sequence] = []
        self.jobs: list[Job] = []  # in vLLM or not closed
        self.touched: dict[Job, tuple[int, ...]] = {}  # staged blocks of the jobs that are not closed
        self.in_vllm: set[Job] = set()
        self.started: set[Job] = set()
        self.kept: dict[Job, tuple[int, ...]] = {}  # of closed jobs, for a reader
        self.filling: list[list[int]] = []
        self.past: list[Job] = []

    # --- the model ---

    def arrives(self, seq: Sequence) -> None:
        self.places.setdefault(seq, len(self.places))

    def is_next(self, seq: Sequence) -> bool:
        return all(self.places[seq] <= self.places[other] for other in (*self.queued, *self.claims))

    def active(self) -> int:
        return len(self.fetching) + sum(job.seq.state is State.RUNNING for job in self.in_vllm)

    def available(self) -> int:
        return self.blocks - sum(map(len, self.owned()))

    def owned(self) -> list[tuple[int, ...]]:
        return [
            *self.touched.values(),
            *self.kept.values(),
            *(tuple(seq.blocks) for seq in self.fetching),
            *(tuple(blocks) for blocks in self.filling),
        ]

    def needs(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // BLOCK)

    def opened(self, job: Job) -> None:
        assert job.id not in {other.id for other in self.past}
        self.past.append(job)
        self.jobs.append(job)
        self.touched[job] = tuple(job.blocks)
        self.in_vllm.add(job)

    def ended(self, seq: Sequence) -> None:
        """The sequence is no more. vLLM may not know it yet."""
        self.kept = {job: blocks for job, blocks in self.kept.items() if job.seq is not seq}

    # --- commands ---

    def free_names(self) -> list[str]:
        return [name for name in NAMES if name not in self.desk.sequences and name not in {seq.id for seq in self.claims}]

    def draw_seq(self, data: st.DataObject) -> Sequence | None:
        if not (names := self.free_names()):
            return None
        return make_seq(
            data.draw(st.sampled_from(names)),
            data.draw(st.integers(1, 3 * BLOCK)),
            data.draw(st.booleans()),
            self.now + data.draw(st.sampled_from([1.0, 3.0, math.inf, math.inf])),
            max_tokens=data.draw(st.integers(1, 3)),
        )

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        if (seq := self.draw_seq(data)) is None:
            return
        if len(self.queued) >= self.queue:
            with pytest.raises(QueueFull):
                self.desk.add(seq)
            assert seq.id not in self.desk.sequences
            return
        self.desk.add(seq)
        self.arrives(seq)
        self.queued.append(seq)

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        again: bool = data.draw(st.booleans())
        if self.claims and again:
            seq = data.draw(st.sampled_from(self.claims))
        elif (drawn := self.draw_seq(data)) is not None:
            seq = drawn
            if len(self.queued) >= self.queue:
                with pytest.raises(QueueFull):
                    self.desk.reserve(seq)
                return
        else:
            return
        self.arrives(seq)
        room = self.active() < self.limit and self.is_next(seq) and self.needs(seq) <= self.available()
        assert self.desk.reserve(seq) == room
        if seq in self.claims:
            self.claims.remove(seq)
        (self.fetching if room else self.claims).append(seq)
        assert not room or len(seq.blocks) == self.needs(seq)

    @precondition(lambda self: self.fetching)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.fetching))
        # A token for a sequence that is staged for a reader could need a block more than was reserved. No worker does that.
        first = data.draw(st.sampled_from([None, 2])) if not seq.hold and seq.remaining > 1 else None
        end = data.draw(st.none() | st.integers(0, len(seq.tokens) - (first is None)))
        blocks = list(seq.blocks)
        job = self.desk.adopt(seq, end, first)
        self.fetching.remove(seq)
        assert job.blocks == blocks and job.loaded == (end or 0) and job.save_to == (seq.arrived_with if seq.hold else 0)
        self.opened(job)

    @precondition(lambda self: self.fetching or self.claims)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from([*self.fetching, *self.claims]))
        if seq in self.claims:
            if len(self.queued) >= self.queue:
                with pytest.raises(QueueFull):
                    self.desk.give_up(seq, None)
                self.desk.abort(seq.id)
                self.claims.remove(seq)
                return
            assert self.desk.give_up(seq, None) == []
            self.claims.remove(seq)
        else:
            blocks = list(seq.blocks)
            self.fetching.remove(seq)
            self.filling.append(self.desk.give_up(seq, None))
            assert self.filling[-1] == blocks and not seq.blocks
        self.queued.append(seq)

    @rule(name=st.sampled_from(NAMES))
    def abort(self, name: str) -> None:
        seq = self.desk.sequences.get(name)
        state = seq.state if seq is not None else None
        blocks, job = self.desk.abort(name)
        self.claims = [other for other in self.claims if other.id != name]
        if seq is None:
            assert (blocks, job) == ([], None)
            return
        assert seq.state is State.DONE and (job is not None) == (state is State.RUNNING)
        if seq in self.queued:
            self.queued.remove(seq)
        if seq in self.fetching:
            self.fetching.remove(seq)
            self.filling.append(blocks)
        self.ended(seq)

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def the_fetch_ends(self, data: st.DataObject) -> None:
        self.desk.release(self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1))))

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0]))
    def admit(self, seconds: float) -> None:
        self.now += seconds
        plan = self.desk.admit(self.now)
        late = [seq for seq in self.queued if seq.expires_at <= self.now]
        assert {output.seq for output in plan.expired} == set(late) and all(output.expired for output in plan.expired)
        self.queued = [seq for seq in self.queued if seq not in late]
        for job in plan.jobs:
            assert job.seq in self.queued and self.is_next(job.seq) and self.active() < self.limit
            assert len(job.blocks) == (self.needs(job.seq) if job.seq.hold else 0)
            self.queued.remove(job.seq)
            self.opened(job)
        if self.queued:
            head = min(self.queued, key=lambda seq: self.places[seq])
            lacks = head.hold and self.needs(head) > self.available()
            assert self.active() >= self.limit or not self.is_next(head) or lacks, "there is room for the next"

    # --- what vLLM says ---

    def pick(self, data: st.DataObject) -> Job | None:
        jobs = [job for job in self.jobs if job in self.in_vllm]
        return data.draw(st.sampled_from(jobs)) if jobs else None

    @rule(data=st.data())
    def vllm_starts(self, data: st.DataObject) -> None:
        job = self.pick(data)
        if job is not None and job not in self.started:
            self.started.add(job)
            self.desk.started(job.id, 0, job.loaded, self.now)

    @rule(data=st.data())
    def vllm_preempts(self, data: st.DataObject) -> None:
        if (job := self.pick(data)) is not None:
            before, count = job.seq.preemptions, self.desk.counts.preemptions
            known = job.id in self.desk.jobs
            self.desk.preempted(job.id)
            assert job.seq.preemptions == before + known and self.desk.counts.preemptions == count + 1

    @rule(data=st.data())
    def vllm_stages(self, data: st.DataObject) -> None:
        if (job := self.pick(data)) is not None:
            full = data.draw(st.integers(1, 3))
            output = self.desk.staged_up_to(job.id, full)
            if job.seq.hold and job.seq.state is State.RUNNING:
                assert output is not None and output.sampled is None and output.full == tuple(job.blocks[:full])
            else:
                assert output is None

    @rule(data=st.data(), token=st.sampled_from([3, 4, EOS]))
    def vllm_samples(self, data: st.DataObject, token: int) -> None:
        if (job := self.pick(data)) is None:
            return
        seq, before = job.seq, len(job.seq.tokens)
        running = seq.state is State.RUNNING
        output = self.desk.sampled(job, Sampled(token))
        if not running:
            assert output is None and len(seq.tokens) == before
        else:
            assert output is not None and output.seq is seq and seq.tokens[before:] == [token]
            assert (output.finish is not None) == (seq.state is State.DONE) == (token == EOS or seq.remaining == 0)
        if seq.hold or seq.state is State.DONE:
            self.in_vllm.discard(job)  # vLLM computes one token of a sequence that is held
        if seq.state is State.DONE:
            self.ended(seq)

    @rule(data=st.data())
    def vllm_fails(self, data: st.DataObject) -> None:
        if (job := self.pick(data)) is None:
            return
        running = job.seq.state is State.RUNNING
        output = self.desk.failed(job, "no reason")
        assert (output is not None and output.failure == "no reason") == running
        self.in_vllm.discard(job)
        if running:
            self.ended(job.seq)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def vllm_closes(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.jobs))
        if job in self.started or job not in self.in_vllm or job.seq.state is State.DONE:
            self.close(job)

    def close(self, job: Job) -> None:
        self.desk.closed(job.id)
        if (blocks := self.touched.pop(job, None)) is not None and job.seq.hold and job.seq.state is not State.DONE:
            self.kept[job] = blocks
        if job not in self.in_vllm:
            self.jobs.remove(job)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def vllm_says_again_that_a_job_is_closed(self, data: st.DataObject) -> None:
        again = data.draw(st.sampled_from(self.past))
        if again not in self.touched:
            self.desk.closed(again.id)

    # --- what always holds ---

    @invariant()
    def no_staged_block_has_two_owners_and_none_is_lost(self) -> None:
        self.desk.staged.check()
        blocks = [block for owner in self.owned() for block in owner]
        assert len(set(blocks)) == len(blocks), "two owners"
        assert self.desk.staged.num_owned == len(blocks)

    @invariant()
    def the_load_is_counted(self) -> None:
        running = [job for job in self.in_vllm if job.seq.state is State.RUNNING]
        assert self.desk.running == len(self.fetching) + sum(job in self.started for job in running)
        assert self.desk.queued == len(self.queued) + sum(job not in self.started for job in running)
        assert self.desk.waiting == sorted(self.queued, key=lambda seq: self.places[seq])
        assert self.desk.promised_blocks() >= 0 and self.desk.waiting_tokens() >= 0

    @invariant()
    def only_open_and_needed_jobs_are_kept(self) -> None:
        needed = {job for job in self.past if job in self.touched or job.seq.state in (State.RUNNING, State.HELD)}
        assert set(self.desk.jobs.values()) == needed

    def teardown(self) -> None:
        if not hasattr(self, "desk"):
            return
        for name in NAMES:
            self.abort(name)
        for job in list(self.touched):
            self.desk.closed(job.id)
        for blocks in self.filling:
            self.desk.release(blocks)
        assert free(self.desk) == self.blocks, "a staged block is lost"
        assert not (self.desk.jobs or self.desk.sequences or self.desk.waiting or self.desk.fetching)
        assert (self.desk.running, self.desk.queued, self.desk.promised_blocks(), self.desk.waiting_tokens()) == (0, 0, 0, 0)
        assert self.desk.reserve(make_seq("after", 3 * BLOCK)), "somebody is still in the way"


TestDesk = DeskMachine.TestCase
TestDesk.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# --- staged blocks -------------------------------------------------------------------------------------------------------------------


def test_what_the_staging_memory_can_never_hold_is_refused() -> None:
    desk = make_desk(2, max_len=32)
    for command, seq in ((desk.add, make_seq("held", 12, hold=True)), (desk.reserve, make_seq("fetched", 12))):
        with pytest.raises(TooLong, match=r"engine\.staging_mib"):
            command(seq)
    desk.add(make_seq("neither", 12))  # its KV stays in vLLM
    assert [job.seq.id for job in desk.admit(0.0).jobs] == ["neither"]


def test_blocks_of_an_aborted_job_stay_its_own_until_it_is_closed() -> None:
    desk = make_desk(2, max_len=12)
    job = adopted(desk, make_seq("a"))
    assert desk.abort("a") == ([], job) and job.over and free(desk) == 0
    assert not desk.reserve(make_seq("b"))
    desk.closed(job.id)
    assert free(desk) == 2 and not desk.jobs


def test_an_adopted_sequence_gives_its_staged_blocks_back_while_it_runs() -> None:
    desk = make_desk(2)
    job = adopted(desk, make_seq("a"))
    desk.closed(job.id)
    assert free(desk) == 2 and not job.seq.blocks and job.id in desk.jobs
    for token in (2, 3, 4, 5):
        output = desk.sampled(job, Sampled(token))
    assert output is not None and output.finish is Finish.LENGTH
    assert not desk.jobs and not desk.sequences and free(desk) == 2


def test_held_blocks_stay_for_their_reader_after_vllm_is_done_with_them() -> None:
    desk = make_desk(2)
    (job,) = admit(desk, make_seq("a", hold=True))
    desk.closed(job.id)
    assert desk.sampled(job, Sampled(2)) is not None
    assert job.seq.state is State.HELD and free(desk) == 0 and job.seq.blocks == job.blocks
    assert desk.abort("a") == ([], None)
    assert free(desk) == 2 and not desk.jobs


def test_a_held_sequence_that_is_let_go_early_frees_its_blocks_when_vllm_is_done_with_them() -> None:
    desk = make_desk(2)
    (job,) = admit(desk, make_seq("a", hold=True))
    desk.sampled(job, Sampled(2))
    desk.abort("a")
    assert free(desk) == 0
    desk.closed(job.id)
    assert free(desk) == 2


def test_a_sequence_that_is_not_held_and_computes_its_own_kv_takes_no_staged_block() -> None:
    desk = make_desk(2)
    (job,) = admit(desk, make_seq("a"))
    assert job.blocks == [] and (job.loaded, job.save_to) == (0, 0) and free(desk) == 2


def test_a_prompt_with_fetched_kv_that_will_be_held_is_loaded_and_saved_in_the_same_blocks() -> None:
    desk = make_desk(2)
    seq = make_seq("a", hold=True)
    assert desk.reserve(seq)
    job = desk.adopt(seq, BLOCK, None)
    assert (job.loaded, job.save_to, job.blocks) == (BLOCK, 6, seq.blocks)


def test_blocks_of_an_abandoned_fetch_are_the_callers() -> None:
    desk = make_desk(2)
    for end in ("abort", "give_up"):
        seq = make_seq("a")
        assert desk.reserve(seq)
        blocks = list(seq.blocks)
        filling = desk.abort("a")[0] if end == "abort" else desk.give_up(seq, None)
        assert filling == blocks and free(desk) == 0
        desk.release(filling)
        assert free(desk) == 2


def test_a_name_may_return_while_the_job_of_its_predecessor_is_open() -> None:
    desk = make_desk(4)
    old = adopted(desk, make_seq("a"))
    desk.abort("a")
    new = adopted(desk, make_seq("a"))
    assert not set(old.blocks) & set(new.blocks)
    assert desk.sampled(old, Sampled(2)) is None and desk.failed(old, "") is None
    desk.closed(old.id)
    output = desk.sampled(new, Sampled(2))
    assert output is not None and output.seq is new.seq and free(desk) == 2
    assert desk.abort("a") == ([], new)


# --- order ---------------------------------------------------------------------------------------------------------------------------


def test_sequences_start_in_the_order_in_which_they_arrived() -> None:
    desk = make_desk(seqs=2)
    seqs = [make_seq(name) for name in "abc"]
    for seq in seqs:
        desk.add(seq)
    first = desk.admit(0.0).jobs
    assert [job.seq for job in first] == seqs[:2]
    desk.failed(first[0], "")
    assert [job.seq for job in desk.admit(0.0).jobs] == seqs[2:]


def test_a_claim_holds_back_those_who_arrived_later_until_it_is_met() -> None:
    desk = make_desk(2, seqs=8, max_len=12)
    early = make_seq("early")
    blocker = adopted(desk, make_seq("blocker"))
    assert not desk.reserve(early)
    desk.add(make_seq("later"))
    assert not desk.reserve(make_seq("last", 1)) and desk.admit(0.0).jobs == []
    desk.closed(blocker.id)
    assert not desk.reserve(make_seq("latest", 1)), "it overtakes"
    assert desk.reserve(early)
    assert [job.seq.id for job in desk.admit(0.0).jobs] == ["later"]


def test_a_claim_that_was_given_up_no_longer_holds_others_back() -> None:
    desk = make_desk(2, max_len=12)
    adopted(desk, make_seq("blocker"))
    assert not desk.reserve(make_seq("early"))
    desk.add(make_seq("later"))
    assert desk.admit(0.0).jobs == []
    desk.abort("early")
    assert [job.seq.id for job in desk.admit(0.0).jobs] == ["later"]


def test_the_queue_goes_before_a_later_reservation() -> None:
    desk = make_desk(2, max_len=12)
    adopted(desk, make_seq("blocker", 1))
    desk.add(make_seq("held", 8, hold=True))
    assert desk.admit(0.0).jobs == [], "one block is not enough"
    assert not desk.reserve(make_seq("later", 1)), "the one that is free is not for it"


def test_a_sequence_whose_fetch_failed_waits_in_its_old_place() -> None:
    desk = make_desk(seqs=1)
    early = make_seq("early")
    assert desk.reserve(early)
    desk.add(make_seq("later"))
    assert desk.admit(0.0).jobs == []
    desk.release(desk.give_up(early, 7))
    assert early.tokens[-1] == 7 and early.computed == 0
    assert [seq.id for seq in desk.waiting] == ["early", "later"]
    assert [job.seq for job in desk.admit(0.0).jobs] == [early]


def test_an_expired_sequence_is_not_started_and_leaves_nothing() -> None:
    desk = make_desk()
    late, other = make_seq("late", expires_at=5.0), make_seq("other")
    desk.add(late)
    desk.add(other)
    plan = desk.admit(5.0)
    assert [(output.seq, output.expired) for output in plan.expired] == [(late, True)] and late.state is State.DONE
    assert [job.seq for job in plan.jobs] == [other] and set(desk.sequences) == {"other"}


def test_held_sequences_take_no_place_of_those_that_run() -> None:
    desk = make_desk(seqs=1)
    (job,) = admit(desk, make_seq("a", hold=True))
    desk.add(make_seq("b"))
    assert desk.admit(0.0).jobs == []
    desk.sampled(job, Sampled(2))
    assert [job.seq.id for job in desk.admit(0.0).jobs] == ["b"]


# --- refusals ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq", "kind"),
    [
        (Sequence("x", [], 0, SamplingParams(1), b""), Malformed),
        (Sequence("x", [1], 0, SamplingParams(1), b""), Malformed),
        (Sequence("x", [1], 2, SamplingParams(1), b""), Malformed),
        (make_seq("x", beams=Beams(2)), Malformed),
        (Sequence("x", [1, 10], 2, SamplingParams(1), b""), Malformed),
        (Sequence("x", [1, -1], 2, SamplingParams(1), b""), Malformed),
        (make_seq("x", 29, max_tokens=4), TooLong),
        (Sequence("x", [1] * 32, 31, SamplingParams(1), b""), TooLong),
    ],
    ids=["empty", "no-prompt", "long-prompt", "beams", "unknown-token", "negative-token", "too-long", "no-room-for-one-token"],
)
def test_what_cannot_run_is_refused_and_not_kept(seq: Sequence, kind: type[SequenceRefused]) -> None:
    desk = make_desk()
    for command in (desk.add, desk.reserve):
        with pytest.raises(kind):
            command(seq)
    assert not desk.sequences and not desk.waiting and desk.reserve(make_seq("other"))


def test_the_longest_sequence_that_fits_is_welcome() -> None:
    desk = make_desk()
    desk.add(make_seq("x", 28, max_tokens=4))
    desk.add(Sequence("y", [0, 9], 1, SamplingParams(31), b""))
    assert len(desk.admit(0.0).jobs) == 2


def test_a_full_queue_refuses_newcomers_but_not_who_comes_back_from_a_fetch() -> None:
    desk = make_desk(seqs=1, queue=1)
    fetching = make_seq("a")
    assert desk.reserve(fetching)
    desk.add(make_seq("b"))
    for command in (desk.add, desk.reserve):
        with pytest.raises(QueueFull):
            command(make_seq("c"))
    assert "c" not in desk.sequences
    desk.give_up(fetching, None)
    assert [seq.id for seq in desk.waiting] == ["a", "b"]


def test_giving_up_a_claim_can_be_refused() -> None:
    desk = make_desk(2, queue=1, max_len=12)
    adopted(desk, make_seq("blocker"))
    claimer = make_seq("a")
    assert not desk.reserve(claimer)
    desk.add(make_seq("b"))
    with pytest.raises(QueueFull):
        desk.give_up(claimer, None)
    assert "a" not in desk.sequences


def test_two_sequences_of_one_name_are_an_error() -> None:
    desk = make_desk()
    desk.add(make_seq("a"))
    for command in (desk.add, desk.reserve):
        with pytest.raises(ValueError, match="already here"):
            command(make_seq("a"))
    assert len(desk.waiting) == 1


def test_positions_that_cannot_be_are_not_adopted() -> None:
    desk = make_desk()
    seq = make_seq("a")
    assert desk.reserve(seq)
    with pytest.raises(ValueError, match="cannot have 7"):
        desk.adopt(seq, 7, None)
    with pytest.raises(ValueError, match="no token could be sampled"):
        desk.adopt(seq, 6, None)
    with pytest.raises(ValueError, match="cannot have 5"):
        desk.adopt(seq, 5, None)
    job = desk.adopt(seq, 6, 3)
    assert seq.tokens[6:] == [3] and seq.arrived_with == 7 and (seq.pending, job.loaded) == (1, 6)
    with pytest.raises(IllegalMove):
        desk.adopt(seq, 6, None)


# --- what vLLM says ------------------------------------------------------------------------------------------------------------------


def test_a_start_tells_what_was_cached_and_what_is_computed() -> None:
    desk = make_desk()
    job = adopted(desk, make_seq("a", 12))
    desk.started(job.id, 4, 3, 17.5)
    seq = job.seq
    assert (seq.started_at, seq.cached, seq.prefilled, seq.began) == (17.5, 4, 12 - 1 - 4 - 3, 11)
    assert (desk.counts.queried_tokens, desk.counts.hit_tokens) == (12, 4)
    (job,) = admit(desk, make_seq("b", 12))
    desk.started(job.id, 12, 0, 17.5)
    assert job.seq.prefilled == 0


@pytest.mark.parametrize(
    ("params", "tokens", "finish"),
    [
        ({"max_tokens": 2}, [1, 2], Finish.LENGTH),
        ({}, [1, EOS], Finish.STOP),
        ({"ignore_eos": True, "max_tokens": 3}, [1, EOS, EOS], Finish.LENGTH),
        ({"stop_token_ids": frozenset({5})}, [1, 5], Finish.STOP),
        ({"min_tokens": 3}, [EOS, EOS, EOS], Finish.STOP),
    ],
)
def test_a_sequence_ends_by_the_rule_of_all_engines(params: dict[str, Any], tokens: list[int], finish: Finish) -> None:
    desk = make_desk()
    (job,) = admit(desk, make_seq("a", **params))
    outputs = [desk.sampled(job, Sampled(token)) for token in tokens]
    assert [output.finish for output in outputs if output] == [None] * (len(tokens) - 1) + [finish]
    assert job.over and not desk.sequences and job.seq.tokens[6:] == tokens
    assert desk.sampled(job, Sampled(1)) is None


def test_a_first_token_that_ends_the_output_leaves_nothing_to_hold() -> None:
    desk = make_desk()
    (job,) = admit(desk, make_seq("a", hold=True))
    output = desk.sampled(job, Sampled(EOS))
    assert output is not None and output.finish is Finish.STOP and job.over and not desk.sequences
    desk.closed(job.id)
    assert free(desk) == 16 and not desk.jobs


def test_a_job_that_vllm_ends_too_early_has_failed_once() -> None:
    desk = make_desk()
    (job,) = admit(desk, make_seq("a"))
    output = desk.failed(job, "gone")
    assert output is not None and output.failure == "gone" and job.seq.state is State.DONE and not desk.sequences
    assert desk.failed(job, "again") is None


def test_a_held_sequence_does_not_fail_when_vllm_ends_its_job() -> None:
    desk = make_desk()
    (job,) = admit(desk, make_seq("a", hold=True))
    desk.sampled(job, Sampled(2))
    assert desk.failed(job, "ended") is None and job.seq.state is State.HELD


def test_staged_blocks_are_told_while_a_prompt_that_will_be_held_is_computed() -> None:
    desk = make_desk()
    held, plain = admit(desk, make_seq("a", 10, hold=True), make_seq("b", 10))
    output = desk.staged_up_to(held.id, 2)
    assert output is not None and output.full == tuple(held.blocks[:2]) and output.sampled is None and output.finish is None
    assert desk.staged_up_to(plain.id, 2) is None
    desk.sampled(held, Sampled(2))
    assert desk.staged_up_to(held.id, 2) is None


def test_news_of_unknown_jobs_is_ignored() -> None:
    desk = make_desk()
    desk.started("7", 1, 1, 0.0)
    desk.closed("7")
    assert desk.staged_up_to("7", 1) is None and desk.counts.queried_tokens == 0
    desk.preempted("7")
    assert desk.counts.preemptions == 1
    assert desk.abort("nobody") == ([], None)


# --- load ----------------------------------------------------------------------------------------------------------------------------


def test_a_sequence_runs_once_vllm_has_started_it() -> None:
    desk = make_desk()
    (job,) = admit(desk, make_seq("a", 6))
    assert (desk.running, desk.queued, desk.waiting_tokens()) == (0, 1, 6)
    desk.started(job.id, 0, 0, 0.0)
    assert (desk.running, desk.queued) == (1, 0)
    desk.sampled(job, Sampled(2))
    assert desk.waiting_tokens() == 0, "one token a step is no prompt"
    assert desk.reserve(make_seq("b"))
    desk.add(make_seq("c", 9))
    assert (desk.running, desk.queued, desk.waiting_tokens()) == (2, 1, 9)


def test_blocks_are_promised_to_the_last_token_of_each_sequence() -> None:
    desk = make_desk()
    desk.add(make_seq("plain", 6, max_tokens=8))
    assert desk.promised_blocks() == 4
    desk.add(make_seq("held", 6, max_tokens=8, hold=True))
    assert desk.promised_blocks() == 4 + 2
    plain, held = desk.admit(0.0).jobs
    assert desk.promised_blocks() == 4 + 2
    desk.started(plain.id, 0, 0, 0.0)
    assert desk.promised_blocks() == 2 + 2, "it has those of its prompt"
    desk.started(held.id, 0, 0, 0.0)
    assert desk.promised_blocks() == 2
    desk.sampled(held, Sampled(2))
    assert desk.promised_blocks() == 2, "vLLM holds nothing for a reader"
    assert desk.reserve(make_seq("fetched", 5, max_tokens=1))
    assert desk.promised_blocks() == 2 + 2


def test_a_held_sequence_promises_no_block_even_if_the_news_of_its_start_is_late() -> None:
    desk = make_desk()
    (job,) = admit(desk, make_seq("held", hold=True))
    assert desk.promised_blocks() == 2
    desk.sampled(job, Sampled(2))
    assert desk.promised_blocks() == 0


def test_an_output_that_must_have_a_form_is_refused_by_name() -> None:
    """vLLM runs our sampler in a process of its own, which holds no output to a grammar yet."""
    desk = make_desk()
    for enter in (desk.add, desk.reserve):
        with pytest.raises(Malformed, match="structured"):
            enter(make_seq("s", structured=Grammar("regex", "a+")))
    assert free(desk) == 16
