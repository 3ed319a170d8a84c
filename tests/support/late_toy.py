"""A toy that computes each step as late as it can: when its result is read. So a block that leaves too early is written to afterwards,
and a token that is not known yet does not exist anywhere."""

import threading
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace

from baton.engine.core.kvcache import KvPool
from baton.engine.core.protocol import Chunk, NothingAllowed, Tokens, path
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import ToyRunner
from baton.engine.gpu.overlap import UNKNOWN, OverlapEngine, Pending, StepResult


class LatePool(KvPool):
    """Host memory that stands for a device's, as `baton.engine.gpu.staged_pool` does. While `bus` is not set, what crosses it waits."""

    waits = True

    def __init__(self, device: KvPool) -> None:
        super().__init__(device.layout, device.num_blocks)
        self._device = device
        self.bus = threading.Event()
        self.bus.set()
        self.waiting = 0
        self.exposed: list[int] = []
        self.damages = False  # a bit, on the way in

    def expose(self, blocks: Seq[int]) -> None:
        self._cross()
        self.exposed += blocks
        self.array[blocks] = self._device.array[blocks]

    def take_in(self, blocks: Seq[int]) -> None:
        self._cross()
        self._device.array[blocks] = self.array[blocks]
        if self.damages:
            self._device.flip(blocks[-1])

    def digests(self, blocks: Seq[int]) -> bytes:
        return self._device.digests(blocks)

    def _cross(self) -> None:
        self.waiting += 1
        assert self.bus.wait(60)
        self.waiting -= 1


class LateToy(ToyRunner):
    """Computes a step only when its result is read. Like a device, it remembers the last token that each sequence sampled."""

    def __init__(self, blocks: int, config: dict[str, int], block_size: int) -> None:
        super().__init__(config, "toy", block_size)
        self.device = KvPool(self.layout, blocks)
        self.attach(self.device)
        self.pool = LatePool(self.device)  # in host memory
        self.last: dict[str, int] = {}
        self.queue: deque[LateStep] = deque()
        self.poisoned: set[str] = set()  # sequences whose logits are not finite

    def submit(self, batch: Seq[Chunk]) -> Pending:
        assert len(self.queue) < 2, "more than one step in flight"
        step = LateStep(self, batch)
        self.queue.append(step)
        return step

    def copy(self, source: int, target: int) -> None:
        """Behind the steps that were submitted."""
        if self.queue:
            self.queue[-1].copies.append((source, target))
        else:
            self.device.array[target] = self.device.array[source]


class LateStep:
    def __init__(self, toy: LateToy, batch: Seq[Chunk]) -> None:
        # A device's mask is made when the step is submitted.
        assert not any(chunk.seq.matcher and UNKNOWN in chunk.seq.tokens for chunk in batch), "a mask depends on the token before"
        self.toy = toy
        self.copies: list[tuple[int, int]] = []
        self.work = [(c, list(c.seq.tokens), c.seq.computed, list(c.seq.blocks)) for c in batch]

    def result(self) -> StepResult:
        assert self.toy.queue.popleft() is self, "results must be read in order"
        answers: list[Tokens] = []
        denied = set()
        for i, work in enumerate(self.work):
            try:
                answers.append(self.compute(*work))
            except NothingAllowed:
                answers.append(())
                denied.add(i)
        for source, target in self.copies:
            self.toy.device.array[target] = self.toy.device.array[source]
        failed = frozenset(i for i, (chunk, *_) in enumerate(self.work) if answers[i] and chunk.seq.id in self.toy.poisoned)
        return StepResult([() if i in failed else answer for i, answer in enumerate(answers)], failed, frozenset(denied))

    def compute(self, submitted: Chunk, tokens: list[int], computed: int, blocks: list[int]) -> Tokens:
        assert UNKNOWN not in tokens[:-1]
        seq = submitted.seq
        if tokens[-1] == UNKNOWN:
            tokens[-1] = self.toy.last[seq.id]
        shadow = Sequence(seq.id, tokens, seq.prompt_len, seq.params, b"", computed=computed, blocks=blocks, matcher=seq.matcher)
        chunk = replace(submitted, seq=shadow)
        answer = self.toy.run([chunk])[0]
        sampled = answer[chunk.scored :]
        if sampled:
            self.toy.last[seq.id] = sampled[path(chunk, sampled)[1][-1]].token
        return answer


class LateEngine(OverlapEngine):
    runner: LateToy
