"""What a step sends to the device: positions, slots and tails, checked by slow calculation, and seats that remember what the device has."""

import random

import pytest
import torch

from baton.engine.core.protocol import Chunk
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.gpu.device import Mark
from baton.engine.gpu.inputs import Capacity, DeviceStep, Inputs
from baton.engine.gpu.overlap import UNKNOWN

SCRATCH = 500


def inputs(device: torch.device, seqs: int = 6, block_size: int = 4) -> Inputs:
    return Inputs(Capacity(seqs, 64, 80), block_size, SCRATCH, device)


def sequence(name: str, length: int, computed: int, blocks: list[int]) -> Sequence:
    tokens = [ord(name[0]) + i for i in range(length)]
    return Sequence(name, tokens, length, SamplingParams(max_tokens=5), root=b"", computed=computed, blocks=blocks)


def blocks_of(found: Inputs, step: DeviceStep, b: int, count: int) -> list[int]:
    return found.tables[step.seats[b], :count].tolist()


def test_a_mixed_batch_has_its_decodes_first(device: torch.device) -> None:
    """A tail is nonzero only where a block begins in this step."""
    found = inputs(device)
    long = Chunk(sequence("a", 9, 2, [3, 8, 5]), 7)  # positions 2..8: begins block 5 with its last token
    short = Chunk(sequence("m", 7, 6, [9, 2]), 1)
    fresh = Chunk(sequence("s", 5, 4, [1, 0]), 1)
    step = found.prepare([long, short, fresh])
    assert (step.decodes, step.size, step.captured) == (2, 2, False)
    assert [step.batch[i].seq.id for i in step.order] == ["s", "m", "a"]
    assert step.tokens.tolist() == [ord("s") + 4, ord("m") + 6, *range(ord("a") + 2, ord("a") + 9)]
    assert step.positions.tolist() == [4, 6, *range(2, 9)]
    assert step.slots.tolist() == [0, 2 * 4 + 2, 14, 15, *range(32, 36), 20]
    assert step.tails.tolist() == [3, 0, 0, 0, 0, 0, 0, 0, 3]
    assert step.lens.tolist() == step.lengths.tolist() == [5, 7, 9]
    assert step.firsts.tolist() == step.rows.tolist() == [0, 1, 2, 9]
    assert [blocks_of(found, step, b, n) for b, n in ((0, 2), (1, 2), (2, 3))] == [[1, 0], [9, 2], [3, 8, 5]]


def test_tokens_unknown_on_the_host_are_filled_in_on_the_device(device: torch.device) -> None:
    found = inputs(device)
    a, b = sequence("a", 6, 5, [1, 2]), sequence("b", 6, 5, [3, 4])
    a.tokens[-1] = UNKNOWN
    step = found.prepare([Chunk(a, 1), Chunk(b, 1)])
    found.remember([step.seated[0], step.seated[1]], torch.tensor([77, 88], device=device))
    assert found.ids(step).tolist() == [77, b.tokens[-1]]
    mixed = found.prepare([Chunk(a, 1), Chunk(sequence("c", 3, 0, [5]), 3)])
    assert found.ids(mixed).tolist() == [77, *(ord("c") + i for i in range(3))]


def test_padding_consists_of_decodes_of_the_dummy_sequence(device: torch.device) -> None:
    found = inputs(device)
    step = found.prepare([Chunk(sequence("a", 6, 5, [1, 2]), 1)], sizes=(2, 4))
    assert (step.decodes, step.size, step.captured) == (1, 2, True)
    assert step.slots.tolist() == [2 * 4 + 1, SCRATCH * 4] and step.tails.tolist() == [0, 0]
    assert step.lens.tolist() == [6, 1] and step.firsts.tolist() == [0, 1, 2]
    assert blocks_of(found, step, 1, found.width) == [SCRATCH] * found.width
    dummies = found.dummies(4)
    assert dummies.captured and len(dummies.seats) == 4 and set(dummies.slots.tolist()) == {SCRATCH * 4}
    assert step.tokens.data_ptr() == dummies.tokens.data_ptr() and step.lens.data_ptr() == dummies.lens.data_ptr()


def test_a_mixed_or_too_large_batch_is_not_captured(device: torch.device) -> None:
    found = inputs(device)
    decodes = [Chunk(sequence(name, 6, 5, [i, i + 10]), 1) for i, name in enumerate("abc")]
    assert not found.prepare(decodes, sizes=(1, 2)).captured
    assert not found.prepare([*decodes, Chunk(sequence("d", 6, 0, [7, 8]), 6)], sizes=(8,)).captured


def test_a_batch_beyond_the_capacity_is_refused(device: torch.device) -> None:
    found = inputs(device, seqs=2)
    with pytest.raises(ValueError, match="3 sequences and 3 tokens"):
        found.prepare([Chunk(sequence(name, 6, 5, [1, 2]), 1) for name in "abc"])
    with pytest.raises(ValueError, match="65 tokens"):
        found.prepare([Chunk(sequence("a", 65, 0, list(range(17))), 65)])
    with pytest.raises(ValueError, match="more than 20 blocks"):
        found.prepare([Chunk(sequence("a", 9, 8, list(range(21))), 1)])


def test_tables_follow_sequences_that_change_at_random(device: torch.device) -> None:
    """Sequences grow, lose all their blocks, end, and come back with other blocks: the device's tables are always those of the batch."""
    rng, found = random.Random(1), inputs(device)
    seqs: list[Sequence] = []
    for step_number in range(200):
        if len(seqs) < 9 and rng.random() < 0.3:
            seqs.append(sequence(f"{step_number}", rng.randint(1, 12), 0, [rng.randrange(400) for _ in range(3)]))
        if seqs and rng.random() < 0.1:
            seqs.pop(rng.randrange(len(seqs)))
        if seqs and rng.random() < 0.2:
            victim = rng.choice(seqs)
            victim.blocks, victim.computed = [rng.randrange(400) for _ in range(len(victim.blocks))], 0
        batch = []
        for seq in rng.sample(seqs, min(len(seqs), rng.randint(0, 6))):
            if seq.pending == 0:
                seq.tokens.append(0)
                if len(seq.tokens) > 4 * len(seq.blocks):
                    seq.blocks += [rng.randrange(400)]
            batch.append(Chunk(seq, rng.randint(1, seq.pending)))
        if not batch or any(len(seq.tokens) > 76 for seq in seqs):
            seqs = [seq for seq in seqs if len(seq.tokens) <= 76]
            continue
        step = found.prepare(batch)
        for b, i in enumerate(step.order):
            seq = batch[i].seq
            assert blocks_of(found, step, b, len(seq.blocks)) == seq.blocks
            rows = range(int(step.rows[b]), int(step.rows[b + 1]))
            expected = [seq.blocks[p // 4] * 4 + p % 4 for p in range(seq.computed, seq.computed + batch[i].n)]
            assert [int(step.slots[row]) for row in rows] == expected
        for chunk in batch:
            chunk.seq.computed += chunk.n


def test_who_waits_for_a_device_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default CUDA spins: each worker would keep a core busy while it waits."""
    made: list[dict[str, bool]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: made.append(how))
    Mark(torch.device("cuda"))
    assert made == [{"blocking": True}]
