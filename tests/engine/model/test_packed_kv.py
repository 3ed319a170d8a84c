"""KV that is stored in another type than the model computes in is one more layout: the runner, the pool and a handoff are the same."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quality
import torch
from eager_guesses import guess_always
from tokenizers import Tokenizer

from baton.cluster.errors import BatonError
from baton.engine.build import BuildError, build, pool_bytes
from baton.engine.choice import load_runner
from baton.engine.core.kvcache import DraftKv, KvLayout, KvPool
from baton.engine.core.protocol import Chunk, NonFiniteLogits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.model import attention
from baton.engine.model.kv_views import views
from baton.engine.options import Options
from baton.engine.runner import ModelRunner
from baton.models.make_small import make_toy
from baton.models.train.evaluate import held_out, recall_question
from kvtransfer.exporter import check_layout

TALE = Path(__file__).resolve().parents[3] / "baton" / "models" / "tale"
BLOCK, BLOCKS = 8, 24
PLAIN = KvLayout("model", "bfloat16", BLOCK, 3, 2, 16)


def runner(stored: str, **keys: Any) -> ModelRunner:
    made = load_runner(ModelRunner, TALE, block_size=BLOCK, kv_dtype=stored or "auto", **({"compiled": False} | keys))
    pool = KvPool(made.layout, BLOCKS)
    pool.array[:] = 0x3C  # what was there before is finite, and no one's
    made.attach(pool)
    return made


def sequence(tokens: list[int], blocks: list[int]) -> Sequence:
    return Sequence(str(blocks[0]), list(tokens), len(tokens), SamplingParams(max_tokens=9), b"", blocks=blocks)


def compute(runner: ModelRunner, seq: Sequence, *chunks: int) -> list[torch.Tensor]:
    found = []
    for n in chunks:
        found.append(runner.run_logits([Chunk(seq, n)]))
        seq.computed += n
        if not seq.pending:
            seq.tokens.append(int(found[-1][0].argmax()))
    return found


def test_a_layout_says_what_a_block_holds() -> None:
    packed = replace(PLAIN, stored="int8")
    numbers = 3 * 2 * 2 * BLOCK * 16
    assert PLAIN.block_bytes == 2 * numbers and list(PLAIN.views) == ["kv"]
    kv, scales = packed.views.values()
    assert (kv.dtype, kv.shape, kv.offset) == ("int8", packed.block_shape, 0)
    assert (scales.dtype, scales.shape, scales.offset) == ("float32", (3, 2, 2, BLOCK), numbers)
    assert packed.block_bytes >= numbers + 4 * 3 * 2 * 2 * BLOCK and packed.block_bytes % (BLOCK * 16) == 0
    assert packed.fingerprint != PLAIN.fingerprint
    other = replace(packed, stored="", model_fingerprint="model of another type of KV")
    assert packed.difference(other) == "stored: 'int8' here, '' there", "and not the fingerprint, which follows from it"
    assert packed.difference(replace(packed, model_fingerprint="other")) == "model_fingerprint: 'model' here, 'other' there"


DRAFT = DraftKv("draft", "float32", 2, 1, 12)


def test_without_a_draft_a_layout_is_that_of_a_worker_that_knows_of_none() -> None:
    """Workers of two versions hand over to each other while one replaces the other."""
    assert replace(PLAIN, block_size=4).fingerprint.hex() == "ae48b935d4c4512545bfd7c00b51fdf5"
    assert replace(PLAIN, block_size=4, draft=DRAFT).fingerprint != replace(PLAIN, block_size=4).fingerprint


def test_a_draft_is_a_part_of_the_block_and_of_what_two_workers_must_agree_on() -> None:
    drafted = replace(PLAIN, draft=DRAFT)
    assert drafted.views["kv"] == PLAIN.views["kv"] and drafted.views["draft"].shape == (2, 2, 1, BLOCK, 12)
    assert drafted.block_bytes % (BLOCK * 16 * 2) == 0 == drafted.block_bytes % (BLOCK * 12 * 4)
    assert drafted.difference(PLAIN) == f"draft: {DRAFT!r} here, None there" and drafted.difference(drafted) is None
    fingerprints = {PLAIN.fingerprint, drafted.fingerprint}
    others: list[tuple[str, Any]] = [("fingerprint", "other"), ("dtype", "bfloat16"), ("num_layers", 3), ("head_dim", 8), ("value_dim", 4)]
    for field, value in others:
        other = replace(drafted, draft=replace(DRAFT, **{field: value}))
        assert drafted.difference(other) == f"draft.{field}: {getattr(DRAFT, field)!r} here, {value!r} there"
        fingerprints.add(other.fingerprint)
    assert len(fingerprints) == 7


@pytest.mark.parametrize("draft", [None, DRAFT])
@pytest.mark.parametrize("stored", ["", "int8"])
def test_views_of_the_memory_do_not_overlap_and_stay_in_their_block(stored: str, draft: DraftKv | None) -> None:
    layout = replace(PLAIN, stored=stored, draft=draft)
    memory = torch.zeros(3, layout.block_bytes, dtype=torch.uint8)
    for view in views(layout, memory).values():
        before = memory.clone()
        view[1].view(torch.uint8).fill_(255)
        assert not (memory[[0, 2]] != before[[0, 2]]).any()
        assert (before[1][memory[1] != before[1]] == 0).all() and (memory[1] != before[1]).sum() == view[1].numel() * view.element_size()


def test_packed_kv_gives_nearly_the_same_logits() -> None:
    prompt = list(range(40, 85))
    plain, packed = runner(""), runner("int8")
    assert packed.layout.block_bytes < 0.45 * plain.layout.block_bytes
    expected, found = (compute(made, sequence(prompt, [5, 3, 9, 1, 7, 2, 0]), 45, 1, 1) for made in (plain, packed))
    for a, b in zip(expected, found, strict=True):
        assert 0 < (a - b).abs().max() < 0.05 * a.abs().max()


def test_chunks_prefixes_and_copied_blocks_are_those_of_one_prompt() -> None:
    prompt = list(range(40, 85))
    whole, cut, moved = (runner("int8") for _ in range(3))
    blocks = [5, 3, 9, 1, 7, 2, 0]
    expected = compute(whole, sequence(prompt, blocks), 45, 1)
    found = compute(cut, sequence(prompt, blocks[::-1]), 16, 24, 5, 1)
    assert (expected[0] - found[2]).abs().max() < 1e-2 * expected[0].abs().max()
    source, target = whole.pool.array, moved.pool.array
    target[[11, 12, 13, 14, 15, 16]] = source[blocks[:6]]
    handed = sequence([*prompt, int(expected[0].argmax())], [11, 12, 13, 14, 15, 16, 17])
    handed.computed = 45
    assert torch.equal(compute(moved, handed, 1)[0], expected[1])


def test_the_bytes_of_a_last_block_depend_on_its_tokens_alone() -> None:
    used, fresh = runner("int8"), runner("int8")
    used.pool.array[:] = np.random.default_rng(0).integers(0, 127, used.pool.array.shape, dtype=np.uint8)
    size = sum(view.nbytes for view in used.layout.views.values())
    for made in (used, fresh):
        compute(made, sequence(list(range(40, 61)), [2, 4, 6]), 21)
    assert np.array_equal(used.pool.array[6, :size], fresh.pool.array[6, :size])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_compute_the_logits_of_plain_torch(dtype: str) -> None:
    made = [runner("int8", compiled=compiled, dtype=dtype) for compiled in (False, True)]
    assert [each.paged.kernels is None for each in made] == [True, False]
    logits = [compute(each, sequence(list(range(40, 85)), [5, 3, 9, 1, 7, 2, 0]), 45, 1, 1) for each in made]
    for plain, compiled in zip(*logits, strict=True):
        assert (plain - compiled).abs().max() < (0.02 if dtype == "float32" else 0.05) * plain.abs().max()


def test_a_pool_of_int8_holds_up_to_four_times_as_many_tokens() -> None:
    blocks = {}
    for dtype in ("float32", "bfloat16"):
        for kind in ("auto", "int8"):
            asked = Options.of(TALE, dtype=dtype, kv_dtype=kind, kv_memory_mib=32, max_num_seqs=64)
            layout = load_runner(ModelRunner, TALE, dtype=dtype, kv_dtype=kind, compiled=False).layout
            assert pool_bytes(asked) % layout.block_bytes == 0
            blocks[dtype, kind] = pool_bytes(asked) // layout.block_bytes
    assert blocks["float32", "int8"] == blocks["bfloat16", "int8"]
    assert blocks["float32", "int8"] > 3.5 * blocks["float32", "auto"] and blocks["bfloat16", "int8"] > 1.75 * blocks["bfloat16", "auto"]


def test_a_scale_that_is_no_number_fails_its_sequence_alone() -> None:
    made = runner("int8", compiled=True)
    seqs = [sequence(list(range(40, 61)), blocks) for blocks in ([0, 1, 2], [3, 4, 5])]
    made.run([Chunk(seq, 21) for seq in seqs])
    for seq in seqs:
        seq.computed = 21
        seq.tokens.append(50)
    scales = views(made.layout, torch.from_numpy(made.pool.array))["scales"]
    scales[4, 0, 0, 0, 3] = torch.nan
    with pytest.raises(NonFiniteLogits) as caught:
        made.run([Chunk(seq, 1) for seq in seqs])
    assert caught.value.sequence_ids == ["3"]


def test_what_drafts_keeps_its_kv_in_its_own_type_and_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    guess_always(monkeypatch)
    prompt, said = list(range(40, 85)), []
    for method in ("none", "draft"):
        engine = build(Options.of(TALE, kv_dtype="int8", speculation=method, kv_memory_mib=32, max_num_seqs=2, threads=1)).engine
        seq = Sequence("a", list(prompt), len(prompt), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), b"")
        engine.add(seq)
        while not engine.idle:
            engine.step()
        said.append(seq.tokens)
    layout = engine.runner.layout
    assert layout.draft is not None and (layout.stored, layout.draft.dtype) == ("int8", "float32")
    assert said[0] == said[1] and engine.counts.accepted_tokens > 0


def reader(**keys: Any) -> ModelRunner:
    made = load_runner(ModelRunner, TALE, block_size=quality.BLOCK, **keys)
    made.attach(KvPool(made.layout, 130))
    return made


def lost(rounded: ModelRunner, texts: list[list[int]]) -> tuple[float, float]:
    """KL divergence from float KV, per token, and the share of greedy choices that differ."""
    sums = quality.compare({"float": reader(), "rounded": rounded}, texts)["rounded"]
    return sums["kl"] / sums["count"], 1 - sums["same"] / sums["count"]


def test_int8_changes_hardly_a_prediction_and_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.from_file(str(TALE / "tokenizer.json"))
    texts = [ids.tolist()[:400] for ids in islice(held_out(tokenizer), 2)]
    kl, changed = lost(reader(kv_dtype="int8"), texts)
    assert kl < 5e-4 and changed < 0.03
    monkeypatch.setattr(attention, "INT8", 3.0)  # control: seven levels are too few
    assert lost(reader(kv_dtype="int8", compiled=False), texts)[0] > 5e-3
    asked = [recall_question(tokenizer, 1800, trial)[:2] for trial in range(4)]
    plain, rounded = ([quality.recalls(made, *each) for each in asked] for made in (reader(), reader(kv_dtype="int8")))
    assert rounded == plain and sum(plain) >= 2


def test_the_toy_refuses_kv_that_is_rounded(tmp_path: Path) -> None:
    make_toy(tmp_path)
    with pytest.raises(BuildError, match=r"^engine\.kv_dtype: the toy"):
        build(Options.of(tmp_path, kv_dtype="int8", kv_memory_mib=4))


def test_workers_with_unlike_kv_name_the_field() -> None:
    layouts = [load_runner(ModelRunner, TALE, kv_dtype=kind, compiled=False).layout for kind in ("auto", "int8")]
    assert layouts[0].model_fingerprint != layouts[1].model_fingerprint, "a router takes only one of them"
    with pytest.raises(BatonError, match="stored: '' here, 'int8' there") as caught:
        check_layout(*layouts)
    assert caught.value.metadata == {"field": "stored"}
