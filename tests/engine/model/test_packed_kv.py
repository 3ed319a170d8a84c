"""KV that is stored in another type than the model computes in is one more layout: the runner, the pool and a handoff are the same."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import quality
import torch
from eager_guesses import guess_always
from families import loaded
from tokenizers import Tokenizer

from baton.cluster.errors import BatonError
from baton.engine.build import BuildError, build, pool_bytes
from baton.engine.choice import load_runner
from baton.engine.core.int5_rows import row_bytes
from baton.engine.core.kvcache import DraftKv, KvLayout, KvPool
from baton.engine.core.protocol import Chunk, NonFiniteLogits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.model import attention, int5_rows
from baton.engine.model.kv_views import views
from baton.engine.model.ops import Ops
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


def test_a_row_of_int5_has_five_bits_for_each_number_of_whole_groups_and_a_scale() -> None:
    assert [row_bytes(dim) for dim in (32, 64, 96, 128, 576)] == [20, 40, 60, 80, 360] and row_bytes(33) == 40
    packed = replace(PLAIN, stored="int5")
    kv, scales = packed.views.values()
    assert (kv.dtype, kv.shape, kv.offset) == ("uint8", (3, 2, 2, BLOCK, 20), 0)
    assert (scales.dtype, scales.shape) == ("bfloat16", (3, 2, 2, BLOCK))
    sizes = [replace(PLAIN, num_layers=30, head_dim=64, block_size=16, stored=stored).block_bytes for stored in ("", "int8", "int5")]
    assert sizes[0] == 128 / 42 * sizes[2] and sizes[1] < 0.55 * sizes[0], "of so many layers, nothing is padded"
    assert packed.difference(replace(packed, stored="int8")) == "stored: 'int5' here, 'int8' there"
    assert packed.difference(replace(packed, stored="int4")) == "stored: 'int5' here, 'int4' there", "as older workers have it"
    assert len({replace(PLAIN, stored=stored).fingerprint for stored in ("", "int8", "int4", "int5")}) == 4


@pytest.mark.parametrize("dim", [1, 12, 32, 33, 64, 576])
def test_a_number_of_int5_is_at_most_half_a_step_off(dim: int) -> None:
    """But one of the sign of the greatest magnitude's opposite has one level less. And as far as bfloat16 moves the scale."""
    x = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim)) * torch.logspace(-4, 3, 50)[:, None]
    x[7] = 0
    rows, scales = int5_rows.pack(x)
    found = int5_rows.unpack(rows, dim) * scales[:, None]
    step = x.abs().amax(1, keepdim=True) / 16
    clipped = x * scales[:, None].float().sign() > 14.5 * step
    assert ((found - x).abs() <= step * torch.where(clipped, 1.07, 0.57)).all() and not found[7].any() and not rows[7].any()
    assert (found[:, :].abs().amax(1) >= 0.99 * x.abs().amax(1)).all() and clipped.float().mean() < 0.1


def test_what_is_stored_of_a_token_follows_from_that_token_alone() -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    for whole, alone in zip(int5_rows.pack(x), int5_rows.pack(x[4:5]), strict=True):
        assert torch.equal(whole[4], alone[0])


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
@pytest.mark.parametrize("stored", ["", "int8", "int5"])
def test_views_of_the_memory_do_not_overlap_and_stay_in_their_block(stored: str, draft: DraftKv | None) -> None:
    layout = replace(PLAIN, stored=stored, draft=draft)
    memory = torch.zeros(3, layout.block_bytes, dtype=torch.uint8)
    for view in views(layout, memory).values():
        before = memory.clone()
        view[1].view(torch.uint8).fill_(255)
        assert not (memory[[0, 2]] != before[[0, 2]]).any()
        assert (before[1][memory[1] != before[1]] == 0).all() and (memory[1] != before[1]).sum() == view[1].numel() * view.element_size()


@pytest.mark.parametrize(("stored", "size", "off"), [("int8", 0.45, 0.05), ("int5", 1 / 6, 0.2)])
def test_packed_kv_gives_nearly_the_same_logits(stored: str, size: float, off: float) -> None:
    prompt = list(range(40, 85))
    plain, packed = runner(""), runner(stored)
    assert packed.layout.block_bytes <= size * plain.layout.block_bytes
    expected, found = (compute(made, sequence(prompt, [5, 3, 9, 1, 7, 2, 0]), 45, 1, 1) for made in (plain, packed))
    for a, b in zip(expected, found, strict=True):
        assert 0 < (a - b).abs().max() < off * a.abs().max()


@pytest.mark.parametrize(("stored", "off"), [("int8", 1e-2), ("int5", 0.1)])
def test_chunks_prefixes_and_copied_blocks_are_those_of_one_prompt(stored: str, off: float) -> None:
    prompt = list(range(40, 85))
    whole, cut, moved = (runner(stored) for _ in range(3))
    blocks = [5, 3, 9, 1, 7, 2, 0]
    expected = compute(whole, sequence(prompt, blocks), 45, 1)
    found = compute(cut, sequence(prompt, blocks[::-1]), 16, 24, 5, 1)
    assert (expected[0] - found[2]).abs().max() < off * expected[0].abs().max()
    source, target = whole.pool.array, moved.pool.array
    target[[11, 12, 13, 14, 15, 16]] = source[blocks[:6]]
    handed = sequence([*prompt, int(expected[0].argmax())], [11, 12, 13, 14, 15, 16, 17])
    handed.computed = 45
    assert torch.equal(compute(moved, handed, 1)[0], expected[1])


@pytest.mark.parametrize("stored", ["int8", "int5"])
def test_the_bytes_of_a_last_block_depend_on_its_tokens_alone(stored: str) -> None:
    used, fresh = runner(stored), runner(stored)
    used.pool.array[:] = np.random.default_rng(0).integers(0, 127, used.pool.array.shape, dtype=np.uint8)
    size = sum(view.nbytes for view in used.layout.views.values())
    for made in (used, fresh):
        compute(made, sequence(list(range(40, 61)), [2, 4, 6]), 21)
    assert np.array_equal(used.pool.array[6, :size], fresh.pool.array[6, :size])


@pytest.mark.parametrize(("stored", "dtype", "off"), [("int8", "float32", 0.02), ("int8", "bfloat16", 0.05), ("int5", "float32", 0.1)])
def test_kernels_compute_the_logits_of_plain_torch(stored: str, dtype: str, off: float) -> None:
    """A last bit of a key may round it up or down."""
    made = [runner(stored, compiled=compiled, dtype=dtype) for compiled in (False, True)]
    assert [each.paged.kernels is None for each in made] == [True, False]
    logits = [compute(each, sequence(list(range(40, 85)), [5, 3, 9, 1, 7, 2, 0]), 45, 1, 1) for each in made]
    for plain, compiled in zip(*logits, strict=True):
        assert (plain - compiled).abs().max() < off * plain.abs().max()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Phi3ForCausalLM", "DeepseekV2ForCausalLM"])
def test_turned_heads_change_nothing_but_last_bits(family: str, compiled: bool) -> None:
    """In float32, where nothing is rounded. Where only what goes to attention is turned, and not what comes back, everything changes."""
    plain, turned, half = (loaded(family, "float32", compiled, scale=4) for _ in range(3))
    for made in (turned, half):
        made.model.turn_heads()
    turn = half.model.ops.turn_
    half.model.ops.turn_ = lambda x, size: None if x.shape[1] == half.model.config.heads else turn(x, size)  # type: ignore[method-assign]
    blocks = [5, 3, 9, 1, 7, 2, 0]
    expected, found, wrong = (compute(made, sequence(list(range(40, 85)), blocks), 45, 1, 1) for made in (plain, turned, half))
    for logits, same, other in zip(expected, found, wrong, strict=True):
        most = logits.abs().max()
        assert 0 < (logits - same).abs().max() < 1e-4 * most < 1e-2 * most < (logits - other).abs().max()


def test_numbers_that_stand_out_cost_the_others_less_if_heads_are_turned() -> None:
    """Keys of which one channel is large for every token, as real models have them."""
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 200, 64, generator=generator) for _ in range(2))
    k[..., 9] += 12
    scores, off = q[0] @ k[0].T, []
    for turns in (False, True):
        given = [x.clone() for x in (q, k)]
        for x in given if turns else ():
            Ops().turn_(x, 64)
        rows, scales = int5_rows.pack(given[1][0])
        off.append((given[0][0] @ (int5_rows.unpack(rows, 64) * scales[:, None]).T - scores).square().mean())
    assert off[1] < off[0] / 4


def test_a_pool_of_int8_holds_up_to_four_times_as_many_tokens_and_one_of_int5_up_to_six() -> None:
    blocks = {}
    for dtype in ("float32", "bfloat16"):
        for kind in ("auto", "int8", "int5"):
            asked = Options.of(TALE, dtype=dtype, kv_dtype=kind, kv_memory_mib=32, max_num_seqs=64)
            layout = load_runner(ModelRunner, TALE, dtype=dtype, kv_dtype=kind, compiled=False).layout
            assert pool_bytes(asked) % layout.block_bytes == 0
            blocks[dtype, kind] = pool_bytes(asked) // layout.block_bytes
    assert blocks["float32", "int8"] == blocks["bfloat16", "int8"]
    assert blocks["float32", "int5"] == blocks["bfloat16", "int5"]
    assert blocks["bfloat16", "int5"] >= 3 * blocks["bfloat16", "auto"]
    assert blocks["float32", "int8"] > 3.5 * blocks["float32", "auto"] and blocks["bfloat16", "int8"] > 1.75 * blocks["bfloat16", "auto"]


@pytest.mark.parametrize("stored", ["int8", "int5"])
def test_a_scale_that_is_no_number_fails_its_sequence_alone(stored: str) -> None:
    made = runner(stored, compiled=True)
    seqs = [sequence(list(range(40, 61)), blocks) for blocks in ([0, 1, 2], [3, 4, 5])]
    made.run([Chunk(seq, 21) for seq in seqs])
    for seq in seqs:
        seq.computed = 21
        seq.tokens.append(50)
    found = views(made.layout, torch.from_numpy(made.pool.array))
    found["scales"][4, 0, 0, 0, 3] = torch.nan
    with pytest.raises(NonFiniteLogits) as caught:
        made.run([Chunk(seq, 1) for seq in seqs])
    assert caught.value.sequence_ids == ["3"]


@pytest.mark.parametrize("stored", ["int8", "int5"])
def test_what_drafts_keeps_its_kv_in_its_own_type_and_changes_no_token(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guess_always(monkeypatch)
    prompt, said = list(range(40, 85)), []
    for method in ("none", "draft"):
        engine = build(Options.of(TALE, kv_dtype=stored, speculation=method, kv_memory_mib=32, max_num_seqs=2, threads=1)).engine
        seq = Sequence("a", list(prompt), len(prompt), SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True), b"")
        engine.add(seq)
        while not engine.idle:
            engine.step()
        said.append(seq.tokens)
    layout = engine.runner.layout
    assert layout.draft is not None and (layout.stored, layout.draft.dtype) == (stored, "float32")
    assert said[0] == said[1] and engine.counts.accepted_tokens > 0


def reader(**keys: Any) -> ModelRunner:
    made = load_runner(ModelRunner, TALE, block_size=quality.BLOCK, **keys)
    made.attach(KvPool(made.layout, 130))
    return made


def lost(rounded: ModelRunner, texts: list[list[int]]) -> tuple[float, float]:
    """KL divergence from float KV, per token, and the share of greedy choices that differ."""
    sums = quality.compare({"float": reader(), "rounded": rounded}, texts)["rounded"]
    return sums["kl"] / sums["count"], 1 - sums["same"] / sums["count"]


@pytest.mark.parametrize(
    ("stored", "most", "of", "levels", "few"), [("int8", 5e-4, attention, "INT8", 3.0), ("int5", 1e-3, int5_rows, "LEVELS", 4)]
)
def test_rounding_changes_hardly_a_prediction_and_forgets_nothing(
    stored: str, most: float, of: ModuleType, levels: str, few: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_file(str(TALE / "tokenizer.json"))
    texts = [ids.tolist()[:400] for ids in islice(held_out(tokenizer), 2)]
    kl, changed = lost(reader(kv_dtype=stored), texts)
    assert kl < most and changed < 0.03
    asked = [recall_question(tokenizer, 1800, trial)[:2] for trial in range(4)]
    plain, rounded = ([quality.recalls(made, *each) for each in asked] for made in (reader(), reader(kv_dtype=stored)))
    assert rounded == plain and sum(plain) >= 2
    monkeypatch.setattr(of, levels, few)  # control: seven levels are too few, or eight
    assert lost(reader(kv_dtype=stored, compiled=False), texts)[0] > 10 * most


@pytest.mark.parametrize("kind", ["int8", "int5"])
def test_the_toy_refuses_kv_that_is_rounded(kind: str, tmp_path: Path) -> None:
    make_toy(tmp_path)
    with pytest.raises(BuildError, match=r"^engine\.kv_dtype: the toy"):
        build(Options.of(tmp_path, kv_dtype=kind, kv_memory_mib=4))


def test_workers_with_unlike_kv_name_the_field() -> None:
    layouts = [load_runner(ModelRunner, TALE, kv_dtype=kind, compiled=False).layout for kind in ("auto", "int8", "int5")]
    assert len({layout.model_fingerprint for layout in layouts}) == 3, "a router takes only one of them"
    for mine, theirs in ((0, 1), (1, 2), (2, 0)):
        stored = [layouts[i].stored for i in (mine, theirs)]
        with pytest.raises(BatonError, match="stored: {!r} here, {!r} there".format(*stored)) as caught:
            check_layout(layouts[mine], layouts[theirs])
        assert caught.value.metadata == {"field": "stored"}
