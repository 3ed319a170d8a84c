"""A batch as tensors at fixed addresses, filled without waiting for the device and without Python work per token.

Every sequence in a step has a *seat*, a row of the tables that live on the device: its block table, the token it sampled last, and what the
sampler keeps for it. A seat is kept from step to step, so a decode step sends a few numbers per sequence and a block id now and then.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.core.protocol import Chunk
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.device import upload
from baton.engine.gpu.overlap import UNKNOWN
from baton.engine.model.attention import Span, batch_order

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The most that one step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_len: int  # tokens of one sequence


@dataclass(eq=False, slots=True)
class Seat:
    """A row of the tables on the device, and the sequence that has it."""

    index: int
    seq: Sequence | None = None
    blocks: Seq[int] | None = None  # the sequence's own list: another list is another allocation
    sent: int = 0  # blocks in the table on the device
    used: int = -1  # step in which it was last used


@dataclass(frozen=True, slots=True)
class Step:
    """A batch on the device, in `order`: decodes (one token each), then padding, or else longer spans.

    Padding consists of decodes of a dummy sequence, which has its own seat and its own block. Tensors are views of those of `Inputs`, valid
    until the next step is prepared.
    """

    batch: Seq[Chunk]
    order: list[int]  # indices into `batch`
    seated: list[Seat]  # without padding, like `spans`
    spans: list[Span]
    decodes: int
    size: int  # decodes with padding
    captured: bool  # whether a graph of this size computes it
    lengths: npt.NDArray[np.int32]  # [B], `lens` on the host
    rows: npt.NDArray[np.int32]  # [B + 1], `firsts` on the host
    tokens: Tensor  # [T] int64, UNKNOWN if it is the last token in the seat
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64, block · bs + offset
    tails: Tensor  # [T] int64, number of slots to zero after the token
    seats: Tensor  # [B] int32
    lens: Tensor  # [B] int32, keys that a sequence's last query sees
    firsts: Tensor  # [B + 1] int32, first token of each


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
        self.tables = torch.full((seats + 1, self.width), scratch_block, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(seats + 1, dtype=torch.int64, device=device)
        self._seats = [Seat(i) for i in range(seats)]
        self._seat_of: dict[Sequence, Seat] = {}
        self._steps = count()
        self._scratch_slot = scratch_block * block_size
        self._token_rows = torch.zeros(4, tokens, dtype=torch.int64, device=device)  # tokens, positions, slots, tails
        self._seat_rows = torch.zeros(3, seats + 1, dtype=torch.int32, device=device)  # seats, lens, firsts

    def prepare(self, batch: Seq[Chunk], sizes: Seq[int] = ()) -> Step:
        """Sends the batch to the device; padded up to one of `sizes`, ascending, if all are decodes and a size is large enough.

        Raises ValueError for a batch beyond the capacity.
        """
        spans = [Span(chunk.seq.computed, chunk.positions, chunk.seq.blocks) for chunk in batch]
        tokens = sum(span.n for span in spans)
        if len(batch) > self.capacity.max_num_seqs or tokens > self.capacity.max_num_batched_tokens:
            raise ValueError(f"a batch of {len(batch)} sequences and {tokens} tokens; the runner was made for {self.capacity}")
        if any(len(span.blocks) > self.width for span in spans):  # they would run over into the next table
            raise ValueError(f"a sequence of more than {self.width} blocks; the runner was made for {self.capacity}")
        order = batch_order(spans)
        seated = self._take_seats([batch[i].seq for i in order])
        spans = [spans[i] for i in order]
        self._send_tables(seated, spans)
        decodes = sum(span.n == 1 for span in spans)
        rung = next((size for size in sizes if size >= decodes), None) if decodes == len(batch) else None
        facts = self._token_facts(batch, order, spans)
        return self._step(batch, order, seated, spans, decodes, rung or decodes, rung is not None, facts)

    def dummies(self, size: int) -> Step:
        """A step of padding alone, to capture a graph with."""
        return self._step([], [], [], [], 0, size, True, np.empty((4, 0), dtype=np.int64))

    def _step(
        self,
        batch: Seq[Chunk],
        order: list[int],
        seated: list[Seat],
        spans: list[Span],
        decodes: int,
        size: int,
        captured: bool,
        facts: Ints,
    ) -> Step:
        """Sends `facts` `[4, T]` and the facts of the sequences, each followed by padding."""
        padding = size - decodes
        dummies = np.array([[0], [0], [self._scratch_slot], [0]]).repeat(padding, axis=1)
        self._fill(self._token_rows, np.concatenate((facts, dummies), axis=1))
        seats = [seat.index for seat in seated] + [self.dummy] * padding
        lengths = np.array([span.start + span.n for span in spans] + [1] * padding, dtype=np.int32)
        rows = np.cumsum([0] + [span.n for span in spans] + [1] * padding, dtype=np.int32)
        self._fill(self._seat_rows, np.stack((np.append(seats, self.dummy), np.append(lengths, 1), rows)).astype(np.int32))
        seat_row, lens, firsts = self._seat_rows[:, : len(rows)]
        tokens, positions, slots, tails = self._token_rows[:, : rows[-1]]
        return Step(
            batch=batch,
            order=order,
            seated=seated,
            spans=spans,
            decodes=decodes,
            size=size,
            captured=captured,
            lengths=lengths,
            rows=rows,
            tokens=tokens,
            positions=positions,
            slots=slots,
            tails=tails,
            seats=seat_row[:-1],
            lens=lens[:-1],
            firsts=firsts,
        )

    def remember(self, seated: Seq[Seat], tokens: Tensor) -> None:
        """Keeps what these sequences sampled, `[R]`: their next step may need it."""
        self.last_tokens.index_copy_(0, self.upload([seat.index for seat in seated]), tokens)

    def upload(self, values: Seq[int]) -> Tensor:
        """int64 on the device."""
        return upload(np.array(values, dtype=np.int64), self.device)

    def ids(self, step: Step) -> Tensor:
        """Token ids `[T]`. A token that the host does not know yet is read from its seat."""
        asked = step.tokens[: step.size]
        known = torch.where(asked == UNKNOWN, self.last_tokens.index_select(0, step.seats[: step.size]), asked)
        return torch.cat((known, step.tokens[step.size :])) if len(step.tokens) > step.size else known

    def _take_seats(self, seqs: list[Sequence]) -> list[Seat]:
        """Sequences keep the seat they have; the others get the seats that were used longest ago."""
        now = next(self._steps)
        for seq in seqs:
            if seat := self._seat_of.get(seq):
                seat.used = now
        if any(seq not in self._seat_of for seq in seqs):
            idle = iter(sorted(self._seats, key=lambda seat: seat.used))  # those of this step come last: there are enough seats
            for seq in seqs:
                if seq not in self._seat_of:
                    seat = next(idle)
                    if seat.seq is not None:
                        del self._seat_of[seat.seq]
                    seat.seq, seat.blocks, seat.used = seq, None, now
                    self._seat_of[seq] = seat
        return [self._seat_of[seq] for seq in seqs]

    def _send_tables(self, seated: list[Seat], spans: list[Span]) -> None:
        """Sends the blocks that the device's tables lack."""
        places: list[int] = []
        values: list[int] = []
        for seat, span in zip(seated, spans, strict=True):
            if seat.blocks is not span.blocks:
                seat.blocks, seat.sent = span.blocks, 0
            if len(span.blocks) > seat.sent:
                places += range(seat.index * self.width + seat.sent, seat.index * self.width + len(span.blocks))
                values += span.blocks[seat.sent :]
                seat.sent = len(span.blocks)
        if places:
            what = upload(np.array([places, values]), self.device)
            self.tables.view(-1).index_copy_(0, what[0], what[1].int())

    def _token_facts(self, batch: Seq[Chunk], order: list[int], spans: list[Span]) -> Ints:
        """Tokens, positions, slots and tails, `[4, T]`."""
        size, ids = self.block_size, [batch[i].tokens for i in order]
        starts, ns = np.array([(span.start, span.n) for span in spans]).T
        ends, befores = starts + ns, np.cumsum(ns) - ns
        owners = np.repeat(np.arange(len(spans)), ns)
        positions = np.arange(len(owners)) + (starts - befores)[owners]
        touched = [span.blocks[span.start // size : (span.start + span.n - 1) // size + 1] for span in spans]
        bases = np.cumsum([0] + [len(blocks) for blocks in touched])[:-1]
        blocks = np.fromiter(chain.from_iterable(touched), dtype=np.int64)
        slots = blocks[(bases - starts // size)[owners] + positions // size] * size + positions % size
        tails = np.zeros_like(slots)
        # Only the span that writes the first slot of a block zeroes the slots after it: for later spans they are already zero.
        tails[befores + ns - 1] = np.where((ends - 1) // size * size >= starts, -ends % size, 0)
        return np.stack((np.fromiter(chain.from_iterable(ids), dtype=np.int64), positions, slots, tails))

    def _fill(self, into: Tensor, values: npt.NDArray[np.generic]) -> None:
        into[:, : values.shape[1]].copy_(upload(values, self.device))
