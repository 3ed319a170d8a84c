"""Who waits for vLLM, who runs in it, and which staged blocks are whose. Decides and does nothing else.

A *job* is one stay of a sequence in vLLM. vLLM may copy to or from the staged blocks of a job until it says that the job is closed, also
after its sequence was aborted. Only then are they given to others.
"""

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from baton.engine.core.arrivals import Arrivals
from baton.engine.core.blocks import BlockPool
from baton.engine.core.counts import Counts
from baton.engine.core.engine import Malformed, Output, QueueFull, TooLong, check, check_forks, learn
from baton.engine.core.sampling import RAW, Sampled
from baton.engine.core.sequence import Sequence, State, finish_reason


@dataclass(eq=False, slots=True)
class Job:
    id: str
    seq: Sequence
    blocks: list[int]  # staged: those that the prompt is copied to, or the sequence's KV comes from
    loaded: int = 0  # positions whose KV is in `blocks` when the job begins
    started: bool = False
    closed: bool = False
    over: bool = False  # its sequence needs it no more

    @property
    def save_to(self) -> int:
        """Positions that are to be copied to `blocks`."""
        return self.seq.arrived_with if self.seq.hold else 0


@dataclass(slots=True)
class AdmittedJobs:
    jobs: list[Job] = field(default_factory=list)
    expired: list[Output] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EngineBounds:
    max_num_seqs: int
    max_queue: int
    max_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]


class Desk:
    def __init__(self, staged_blocks: int, block_size: int, bounds: EngineBounds) -> None:
        self.staged = BlockPool(staged_blocks, prefix_caching=False)
        self.bounds = bounds
        self.sequences: dict[str, Sequence] = {}
        self.jobs: dict[str, Job] = {}  # until they are closed and over
        self._arrivals = Arrivals()
        self.waiting, self._claims = self._arrivals.waiting, self._arrivals.claims
        self.fetching: list[Sequence] = []
        self.counts = Counts()
        self._of: dict[str, Job] = {}  # sequence → its job
        self._attached: dict[Sequence, list[Sequence]] = {}  # parent → those that wait until vLLM caches its prompt
        self._size = block_size
        self._numbers = itertools.count(1)

    # --- commands of the contract ---

    def add(self, seq: Sequence, forks: Seq[Sequence] = ()) -> None:
        """`forks` join the queue when vLLM has computed the prompt of `seq`: its prefix cache then has all but the last block."""
        self._claims.pop(seq.id, None)
        self._welcome(seq, staged=seq.hold, forks=forks)
        self._arrivals.enqueue(seq)

    def reserve(self, seq: Sequence) -> bool:
        if seq.id not in self._claims:
            self._welcome(seq, staged=True)
        blocks = None
        if self._running + len(self.fetching) < self.bounds.max_num_seqs and self._arrivals.is_next(seq):
            blocks = self.staged.allocate(self._blocks_for(len(seq.tokens)))
        if blocks is None:
            self._arrivals.claim(seq)
            self.sequences.pop(seq.id, None)
            return False
        self._claims.pop(seq.id, None)
        self.sequences[seq.id] = seq
        seq.blocks, seq.computed = blocks, 0
        seq.move("reserve")
        self.fetching.append(seq)
        return True

    def adopt(self, seq: Sequence, end: int | None, first: int | None, forks: Seq[Sequence] = ()) -> Job:
        """The job that begins now. `forks`: as in `add`."""
        if first is not None and seq.hold:
            raise ValueError(f"sequence {seq.id} is to be held: it samples its first token itself")
        if end is not None:
            if not seq.computed <= end <= len(seq.tokens):
                raise ValueError(f"sequence {seq.id} has {seq.computed} positions of {len(seq.tokens)}: it cannot have {end} now")
            seq.move("arrive")
            seq.computed = end
        if first is not None:
            learn(seq, first)
        if not seq.pending:
            raise ValueError(f"nothing of sequence {seq.id} is left to compute: no token could be sampled")
        self._attach(seq, forks)
        self.fetching.remove(seq)
        seq.move("adopt")
        seq.began = seq.reached = seq.computed
        return self._open(seq, seq.blocks)

    def give_up(self, seq: Sequence, first: int | None, forks: Seq[Sequence] = ()) -> list[int]:
        if first is not None:
            learn(seq, first)
        if seq.state is not State.FETCHING:
            self.add(seq, forks)
            return []
        self._attach(seq, forks)
        filling = self._withdraw(seq, "give_up")
        self._arrivals.enqueue(seq)
        return filling

    def abort(self, seq_id: str) -> tuple[list[int], Job | None]:
        """(reserved blocks that a fetch may still be filling, the job that vLLM should end)."""
        self._claims.pop(seq_id, None)
        seq = self.sequences.pop(seq_id, None)
        if seq is None:
            return [], None
        self.queue_forks(seq)
        match seq.state:
            case State.FETCHING:
                return self._withdraw(seq, "abort"), None
            case State.WAITING:
                self._unqueue(seq)
                seq.move("abort")
            case State.RUNNING:
                seq.move("abort")
                return [], self._leave(seq)
            case State.HELD:
                seq.move("release")
                self._leave(seq)
        return [], None

    def release(self, blocks: Seq[int]) -> None:
        self.staged.release(blocks)

    # --- what vLLM says ---

    def admit(self, now: float) -> AdmittedJobs:
        """The jobs that begin now, in order of arrival, and the sequences that waited too long."""
        plan = AdmittedJobs(expired=[Output(seq, None, expired=True) for seq in self._arrivals.expire(now)])
        for output in plan.expired:
            del self.sequences[output.seq.id]
            self.queue_forks(output.seq)
        while self.waiting and self._running + len(self.fetching) < self.bounds.max_num_seqs and self._arrivals.is_next(self.waiting[0]):
            seq = self.waiting[0]
            blocks = self.staged.allocate(self._blocks_for(len(seq.tokens))) if seq.hold else []
            if blocks is None:
                break
            del self.waiting[0]
            seq.move("admit")
            seq.blocks = blocks
            plan.jobs.append(self._open(seq, blocks))
        return plan

    def started(self, job_id: str, cached: int, loaded: int, now: float) -> None:
        """vLLM has computed the first chunk: `cached` positions were in its prefix cache, `loaded` came from staged blocks."""
        job = self.jobs.get(job_id)
        if job is None:
            return
        job.started, seq = True, job.seq
        seq.started_at, seq.cached = now, cached
        seq.prefilled = max(0, seq.arrived_with - 1 - cached - loaded)
        self.counts.queried_tokens += seq.arrived_with
        self.counts.hit_tokens += cached

    def staged_up_to(self, job_id: str, full: int) -> Output | None:
        """The leading `full` blocks of a prompt are staged, and more will follow."""
        job = self.jobs.get(job_id)
        if job is None or not job.save_to or job.seq.state is not State.RUNNING:
            return None
        return Output(job.seq, None, full=tuple(job.blocks[:full]))

    def queue_forks(self, parent: Sequence) -> bool:
        """Those that wait for its prompt join the queue. Returns whether there were any."""
        forks = self._attached.pop(parent, ())
        for child in forks:
            self._arrivals.enqueue(child)
        return bool(forks)

    def preempted(self, job_id: str) -> None:
        self.counts.preemptions += 1
        if (job := self.jobs.get(job_id)) is not None:
            job.seq.preemptions += 1

    def sampled(self, job: Job, token: Sampled) -> Output | None:
        """None if the sequence was aborted meanwhile. A job whose sequence has ended is `over`."""
        seq = job.seq
        if job.over or seq.state is not State.RUNNING:
            return None
        seq.computed = len(seq.tokens)
        seq.tokens.append(token.token)
        reason = finish_reason(seq, self.bounds.eos_token_ids, self.bounds.max_len)
        if reason is None:
            if seq.hold:
                seq.move("hold")
            return Output(seq, token)
        seq.move("finish")
        del self.sequences[seq.id]
        self._leave(seq)
        return Output(seq, token, reason)

    def failed(self, job: Job, message: str) -> Output | None:
        """vLLM ended the job although its sequence was not finished."""
        seq = job.seq
        if job.over or seq.state is not State.RUNNING:
            return None
        seq.move("abort")
        del self.sequences[seq.id]
        self.queue_forks(seq)
        self._leave(seq)
        return Output(seq, None, failure=message)

    def closed(self, job_id: str) -> None:
        """vLLM touches the staged blocks of this job no more."""
        job = self.jobs.get(job_id)
        if job is None or job.closed:
            return
        job.closed = True
        if not job.seq.hold and not job.over:
            self.staged.release(job.blocks)  # they were copied into vLLM's memory
            job.blocks = []
            job.seq.blocks = []
        self._settle(job)

    # --- load ---

    @property
    def running(self) -> int:
        """Sequences that vLLM computes, or that are about to be given to it."""
        return sum(job.started and job.seq.state is State.RUNNING for job in self._of.values()) + len(self.fetching)

    @property
    def queued(self) -> int:
        return len(self.waiting) + sum(not job.started and job.seq.state is State.RUNNING for job in self._of.values())

    def waiting_tokens(self) -> int:
        active = (job.seq for job in self._of.values() if job.seq.state is State.RUNNING)
        return sum(seq.pending for seq in (*self.waiting, *active) if seq.prefilling)

    def promised_blocks(self) -> int:
        """Blocks of vLLM's cache that the sequences here will take beyond those that they have, if each runs to its last token."""
        total = 0
        for seq in self.sequences.values():
            if seq.state is State.HELD:
                continue
            job = self._of.get(seq.id)
            has = self._blocks_for(len(seq.tokens)) if job is not None and job.started else 0
            total += max(0, self._blocks_for(len(seq.tokens) + (0 if seq.hold else max(0, seq.remaining))) - has)
        return total

    # --- inside ---

    def _open(self, seq: Sequence, blocks: list[int]) -> Job:
        job = Job(str(next(self._numbers)), seq, blocks, loaded=seq.computed)
        self.jobs[job.id] = self._of[seq.id] = job
        return job

    def _leave(self, seq: Sequence) -> Job:
        job = self._of.pop(seq.id)
        job.over = True
        self._settle(job)
        return job

    def _settle(self, job: Job) -> None:
        if job.closed and job.over and self.jobs.pop(job.id, None) is not None:
            self.staged.release(job.blocks)
            job.blocks = []

    def _withdraw(self, seq: Sequence, event: str) -> list[int]:
        self.fetching.remove(seq)
        seq.move(event)
        filling, seq.blocks, seq.computed = seq.blocks, [], 0
        return filling

    def _attach(self, parent: Sequence, forks: Seq[Sequence]) -> None:
        check_forks(parent, forks)
        for child in forks:
            check(child, self.bounds.vocab_size, self.bounds.max_len)
            if child.id in self.sequences:
                raise ValueError(f"sequence {child.id} is already here")
        for seq in (parent, *forks) if forks else ():
            self._arrivals.place(seq)
        if forks:
            self._attached[parent] = list(forks)
            self.sequences |= {child.id: child for child in forks}

    def _unqueue(self, seq: Sequence) -> None:
        for forks in self._attached.values():
            if seq in forks:
                forks.remove(seq)
                return
        self.waiting.remove(seq)

    def _welcome(self, seq: Sequence, staged: bool, forks: Seq[Sequence] = ()) -> None:
        """`staged`: its tokens' KV needs staged blocks, all at once."""
        check(seq, self.bounds.vocab_size, self.bounds.max_len)
        if seq.params.logprobs is not None and seq.params.logprobs_mode != RAW:
            raise Malformed(f"logprobs_mode: this engine, vLLM, tells {RAW} only")
        if seq.params.prompt_logprobs is not None:
            raise Malformed("prompt_logprobs: this engine, vLLM, cannot tell them here")
        if seq.params.beams is not None:
            raise Malformed("beam: the engine vllm does not search with beams here")
        if staged and self._blocks_for(len(seq.tokens)) > self.staged.num_blocks:
            raise TooLong(f"{len(seq.tokens)} tokens; the staging memory holds {self.staged.num_blocks * self._size} (engine.staging_mib)")
        if len(self.waiting) + sum(map(len, self._attached.values())) >= self.bounds.max_queue:
            raise QueueFull(f"{len(self.waiting)} sequences are waiting")
        if seq.id in self.sequences:
            raise ValueError(f"sequence {seq.id} is already here")
        self._attach(seq, forks)
        self.sequences[seq.id] = seq

    @property
    def _running(self) -> int:
        return sum(job.seq.state is State.RUNNING for job in self._of.values())

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)
