"""A batch as tensors at fixed addresses, filled without waiting for the device and without Python work per token.

Every sequence in a step has a *seat*, a row of the tables that live on the device: its block table, the token it sampled last, and what the
sampler keeps for it. A seat is kept from step to step, so a decode step sends a few numbers per sequence and a block id now and then.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, chain, count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.core.protocol import Chunk
from baton.engine.gpu.device import upload
from baton.engine.gpu.graphs import GUESSED
from baton.engine.gpu.overlap import UNKNOWN
from baton.engine.model.attention import Span

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_len: int  # tokens of one sequence
    branches: int = 1  # guesses of one sequence that begin with different tokens
    guesses: int = 0  # of one sequence

    @property
    def most_rows(self) -> int:
        """Decodes in a step up to which graphs are of use: a guess is one."""
        guessed = min(GUESSED, self.max_num_seqs * (1 + self.guesses), self.max_num_batched_tokens)
        return max(self.max_num_seqs, guessed)


@dataclass(eq=False, slots=True)
class Seat:
    """A row of the tables on the device, and who has it: mostly a sequence."""

    index: int
    key: object = None
    blocks: Seq[int] | None = None  # the sequence's own list: another list is another allocation
    sent: int = 0  # blocks in the table on the device
    used: int = -1  # step in which it was last used


class TokenRun(NamedTuple):
    """Neighbours of one sequence in a step, with one block table."""

    key: object  # whose seat it has; None: a branch, which has one for this step
    start: int
    tokens: Seq[int]
    blocks: Seq[int]
    apart: bool  # each token is computed as a decode of its own
    written: int  # the first position that the step writes in these blocks

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A batch on the device: decodes (one token each), then padding, or else longer spans.

    A guess is a decode, too: it sees the tokens before it, which the same step stores first. So what verifies guesses is a step of decodes,
    of a size that graphs know. Padding consists of decodes of a dummy sequence, which has its own seat and its own block. Tensors are views
    of those of `Inputs`, valid until the next step is prepared.
    """

    batch: Seq[Chunk]
    order: list[int]  # indices into `batch`: a chunk's rows are neighbours
    seated: list[Seat]  # without padding, like `spans`
    spans: list[Span]  # one for each decode, then the longer ones
    decodes: int
    size: int  # decodes with padding
    captured: bool  # whether a graph of this size computes it
    lengths: npt.NDArray[np.int32]  # [B], `lens` on the host
    rows: npt.NDArray[np.int32]  # [B + 1], `firsts` on the host
    tokens: Tensor  # [T] int64, UNKNOWN if it is the last token in the seat
    positions: Tensor  # [T] int64
    slots: Tensor  # [E] int64, block · bs + offset
    tails: Tensor  # [E] int64, number of slots to zero after the token
    seats: Tensor  # [B] int32
    lens: Tensor  # [B] int32, keys that a sequence's last query sees
    firsts: Tensor  # [B + 1] int32, first token of each
    again: list[tuple[int, Span]]  # rows whose keys and values are stored in a branch's block, too, and where
    sources: Tensor | None  # [E] int64, the row that each of `slots` and `tails` is of; None: E is T, in order


class Following(NamedTuple):
    """What a step of a chain of drafts computes, and how far each sequence may go: `[S]` each."""

    tokens: Tensor  # int64
    positions: Tensor  # int64
    slots: Tensor  # int64
    tails: Tensor  # int64
    lens: Tensor  # int32
    seats: Tensor  # int32
    limits: Tensor  # int64


class TokenFacts(NamedTuple):
    """What a step sends of its tokens."""

    tokens: Ints  # [2, T]: ids, positions
    stores: Ints  # [3, E]: slots, tails, and the token that each is of
    again: list[tuple[int, Span]]  # see `DeviceStep`


class Inputs:
    """The tables, and the tensors that a captured graph reads."""

    def __init__(self, capacity: Capacity, block_size: int, scratch_block: int, device: torch.device) -> None:
        """`scratch_block` belongs to no sequence: the dummy sequence writes there."""
        seats, tokens = capacity.max_num_seqs, capacity.max_num_batched_tokens
        self.capacity = capacity
        self.block_size = block_size
        self.device = device
        self.dummy = seats
        self.width = -(-capacity.max_len // block_size)  # blocks of one table
        self.branches = [Seat(seats + 1 + i) for i in range(seats * (capacity.branches - 1))]
        self.tables = torch.full((seats + 1 + len(self.branches), self.width), scratch_block, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(len(self.tables), dtype=torch.int64, device=device)
        self._seats = [Seat(i) for i in range(seats)]
        self._seat_of: dict[object, Seat] = {}
        self._steps = count()
        self.scratch_slot = scratch_block * block_size
        self._token_rows = torch.zeros(2, tokens, dtype=torch.int64, device=device)  # tokens, positions
        entries = tokens * (2 if self.branches else 1)
        self._store_rows = torch.zeros(3, entries, dtype=torch.int64, device=device)  # slots, tails, sources
        self._seat_rows = torch.zeros(3, tokens + 1, dtype=torch.int32, device=device)  # seats, lens, firsts

    def prepare(self, batch: Seq[Chunk], sizes: Seq[int] = ()) -> DeviceStep:
        """Sends the batch to the device; padded up to one of `sizes`, ascending, if all are decodes and a size is large enough.

        Raises ValueError for a batch beyond the capacity.
        """
        order = sorted(range(len(batch)), key=lambda i: (batch[i].n > 1, batch[i].seq.computed))
        return self.prepare_runs([run for i in order for run in runs_of(batch[i], self.block_size)], sizes, batch, order)

    def prepare_runs(self, runs: Seq[TokenRun], sizes: Seq[int] = (), batch: Seq[Chunk] = (), order: Seq[int] = ()) -> DeviceStep:
        """The same for runs, those that are `apart` first, each followed by its branches."""
        tokens, owners = sum(len(run.tokens) for run in runs), sum(run.key is not None for run in runs)
        if owners > self.capacity.max_num_seqs or tokens > self.capacity.max_num_batched_tokens:
            raise ValueError(f"a batch of {owners} sequences and {tokens} tokens; the runner was made for {self.capacity}")
        if any(len(run.blocks) > self.width for run in runs):  # they would run over into the next table
            raise ValueError(f"a sequence of more than {self.width} blocks; the runner was made for {self.capacity}")
        taken = self._take_seats(runs)
        self._send_tables(taken, runs)
        rows = sum(len(run.tokens) for run in runs if run.apart)
        rung = next((size for size in sizes if size >= rows), None) if rows == tokens else None
        spans, seated = list[Span](), list[Seat]()
        for run, seat in zip(runs, taken, strict=True):
            own = [Span(at, 1, run.blocks) for at in range(run.start, run.end)] if run.apart else [_span(run)]
            spans += own
            seated += [seat] * len(own)
        return self._step((batch, [*order]), seated, spans, rung or rows, rung is not None, self._facts(runs))

    def dummies(self, size: int) -> DeviceStep:
        """A step of padding alone, to capture a graph with."""
        return self._step(([], []), [], [], size, True, TokenFacts(np.empty((2, 0), np.int64), np.empty((3, 0), np.int64), []))

    def _step(
        self, whose: tuple[Seq[Chunk], list[int]], seated: list[Seat], spans: list[Span], size: int, captured: bool, facts: TokenFacts
    ) -> DeviceStep:
        """Sends the facts of tokens, slots and sequences, each followed by padding."""
        decodes = sum(span.n == 1 for span in spans)
        padding, scratch = size - decodes, self.scratch_slot
        self._fill(self._token_rows, np.concatenate((facts.tokens, np.zeros((2, padding), np.int64)), axis=1))
        tokens = facts.tokens.shape[1] + padding
        entries = facts.stores.shape[1] + padding
        if self.branches and captured:  # always as many, so that one graph serves all
            entries = 2 * size
        unused = np.array([[scratch], [0], [0]]).repeat(entries - facts.stores.shape[1], axis=1)
        self._fill(self._store_rows, np.concatenate((facts.stores, unused), axis=1))
        seats = [seat.index for seat in seated] + [self.dummy] * padding
        lengths = np.array([span.start + span.n for span in spans] + [1] * padding, dtype=np.int32)
        rows = np.array([*accumulate((span.n for span in spans), initial=0)] + [0] * padding, dtype=np.int32)
        rows[len(spans) + 1 :] = rows[len(spans)] + np.arange(1, padding + 1)
        self._fill(self._seat_rows, np.stack((np.append(seats, self.dummy), np.append(lengths, 1), rows)).astype(np.int32))
        seat_row, lens, firsts = self._seat_rows[:, : len(rows)]
        slots, tails, sources = self._store_rows[:, :entries]
        return DeviceStep(
            batch=whose[0],
            order=whose[1],
            seated=seated,
            spans=spans,
            decodes=decodes,
            size=size,
            captured=captured,
            lengths=lengths,
            rows=rows,
            tokens=self._token_rows[0, :tokens],
            positions=self._token_rows[1, :tokens],
            slots=slots,
            tails=tails,
            seats=seat_row[:-1],
            lens=lens[:-1],
            firsts=firsts,
            again=facts.again,
            sources=sources if entries > tokens else None,
        )

    def seats(self, runs: Seq[TokenRun]) -> list[int]:
        """Those of runs that take part in a step which is prepared elsewhere; the device has their block tables."""
        taken = self._take_seats(runs)
        self._send_tables(taken, runs)
        return [seat.index for seat in taken]

    def seat(self, key: object) -> Seat:
        """The seat of a sequence of the step that was prepared last."""
        return self._seat_of[key]

    def remember(self, seated: Seq[Seat], tokens: Tensor) -> None:
        """Keeps what these sequences sampled, `[R]`: their next step may need it."""
        self.last_tokens.index_copy_(0, self.upload([seat.index for seat in seated]), tokens)

    def upload(self, values: Seq[int]) -> Tensor:
        """int64 on the device."""
        return upload(np.array(values, dtype=np.int64), self.device)

    def ids(self, step: DeviceStep) -> Tensor:
        """Token ids `[T]`. A token that the host does not know yet is read from its seat."""
        asked = step.tokens[: step.size]
        known = torch.where(asked == UNKNOWN, self.last_tokens.index_select(0, step.seats[: step.size]), asked)
        return torch.cat((known, step.tokens[step.size :])) if len(step.tokens) > step.size else known

    def _take_seats(self, runs: Seq[TokenRun]) -> list[Seat]:
        """Sequences keep the seat they have; the others get the seats that were used longest ago. A branch gets one for this step."""
        now, branches = next(self._steps), iter(self.branches)
        for run in runs:
            if seat := self._seat_of.get(run.key):
                seat.used = now
        if any(run.key is not None and run.key not in self._seat_of for run in runs):
            idle = iter(sorted(self._seats, key=lambda seat: seat.used))  # those of this step come last: there are enough seats
            for key in (run.key for run in runs if run.key is not None):
                if key not in self._seat_of:
                    seat = next(idle)
                    if seat.key is not None:
                        del self._seat_of[seat.key]
                    seat.key, seat.blocks, seat.used = key, None, now
                    self._seat_of[key] = seat
        return [next(branches) if run.key is None else self._seat_of[run.key] for run in runs]

    def _send_tables(self, taken: list[Seat], runs: Seq[TokenRun]) -> None:
        """Sends the blocks that the device's tables lack."""
        places: list[int] = []
        values: list[int] = []
        for seat, run in zip(taken, runs, strict=True):
            if seat.blocks is not run.blocks:
                seat.blocks, seat.sent = run.blocks, 0
            if len(run.blocks) > seat.sent:
                places += range(seat.index * self.width + seat.sent, seat.index * self.width + len(run.blocks))
                values += run.blocks[seat.sent :]
                seat.sent = len(run.blocks)
        if places:
            what = upload(np.array([places, values]), self.device)
            self.tables.view(-1).index_copy_(0, what[0], what[1].int())

    def _facts(self, runs: Seq[TokenRun]) -> TokenFacts:
        size = self.block_size
        starts, ns, written = np.array([(run.start, len(run.tokens), run.written) for run in runs]).T
        ends, befores = starts + ns, np.cumsum(ns) - ns
        owners = np.repeat(np.arange(len(runs)), ns)
        positions = np.arange(len(owners)) + (starts - befores)[owners]
        touched = [run.blocks[run.start // size : (run.end - 1) // size + 1] for run in runs]
        bases = np.cumsum([0] + [len(blocks) for blocks in touched])[:-1]
        blocks = np.fromiter(chain.from_iterable(touched), dtype=np.int64)
        slots = blocks[(bases - starts // size)[owners] + positions // size] * size + positions % size
        tails = np.zeros_like(slots)
        # Only who writes the first slot of a block zeroes the slots after it: for what follows later they are already zero.
        tails[befores + ns - 1] = np.where((ends - 1) // size * size >= written, -ends % size, 0)
        stores, again = [slots, tails, np.arange(len(slots))], list[tuple[int, Span]]()
        own = 0  # the row of the last known token of the sequence whose branches follow
        for run, before in zip(runs, befores.tolist(), strict=True):
            if run.key is not None:
                own = before
            elif run.written < run.start:
                again.append((own, Span(run.written, 1, run.blocks)))
        if again:
            more = [(span.blocks[span.start // size] * size + span.start % size, 0, row) for row, span in again]
            stores = [*np.concatenate((np.stack(stores), np.array(more).T), axis=1)]
        ids = np.fromiter(chain.from_iterable(run.tokens for run in runs), dtype=np.int64)
        return TokenFacts(np.stack((ids, positions)), np.stack(stores), again)

    def _fill(self, into: Tensor, values: npt.NDArray[np.generic]) -> None:
        into[:, : values.shape[1]].copy_(upload(values, self.device))


def runs_of(chunk: Chunk, block_size: int) -> list[TokenRun]:
    """A chunk's own, and one for each of its branches."""
    seq, start = chunk.seq, chunk.seq.computed
    own = [*seq.tokens[start : start + chunk.n], *chunk.drafts]
    runs = [TokenRun(seq, start, own, seq.blocks, chunk.n == 1, start)]
    for branch in chunk.branches:  # the last known token, too, unless the block that it is in is shared
        written = start + (branch.shared > start // block_size)
        runs.append(TokenRun(None, start + 1, branch.drafts, branch.blocks, True, written))
    return runs


def _span(run: TokenRun) -> Span:
    return Span(run.start, len(run.tokens), run.blocks)
