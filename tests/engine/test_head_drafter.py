"""A head guesses what plain torch says that it would guess: the one that ships, and DeepSeek's. Whatever it guesses, what is said stays."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from host_pool import carry, on_host
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

from baton.cli.up import SHIPPED
from baton.engine.build import BuildError, build, pool_bytes
from baton.engine.choice import load_runner
from baton.engine.core.beams import Beams
from baton.engine.core.drafting import Chosen, Drafter, DraftRequest, Paced
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence, State
from baton.engine.core.step_costs import Line
from baton.engine.facts.fields import CheckpointError
from baton.engine.head_drafter import FEW, KEPT, HeadDrafter
from baton.engine.options import Options
from baton.engine.runner import ModelRunner
from baton.models.make_small import make_toy
from baton.models.train.__main__ import export_head
from baton.models.train.head import TrainedHead, new_head
from baton.models.train.recipe import HEAD

MOST = 4
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 199,
    "max_position_embeddings": 512,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "kv_lora_rank": 24,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "attn_implementation": "eager",
}
# (hidden states before the tokens [T, H], tokens [T]) → (those at them, as the head guesses, [T, H], logits of what follows [T, V])
Naive = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random DeepSeek-V3 with a layer of multi-token prediction, whose names are those of the real files."""
    torch.manual_seed(3)
    folder, config = tmp_path_factory.mktemp("deepseek"), DeepseekV3Config(**DEEPSEEK)
    model = AutoModelForCausalLM.from_config(config)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=1.0 if "embed" in name else 2 / p.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    weights, layer = load_file(folder / "model.safetensors"), config.num_hidden_layers
    copied = {name.replace("layers.2.", f"layers.{layer}."): w.flip(0).clone() for name, w in weights.items() if "layers.2." in name}
    for name, size in {"enorm": 64, "hnorm": 64, "shared_head.norm": 64}.items():
        copied[f"model.layers.{layer}.{name}.weight"] = torch.rand(size) + 0.5
    copied[f"model.layers.{layer}.eh_proj.weight"] = torch.randn(64, 128) / 8
    for name, same in {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}.items():
        copied[f"model.layers.{layer}.{name}.weight"] = weights[f"{same}.weight"].clone()
    save_file(weights | copied, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_nextn_predict_layers": 1}))
    return folder


@pytest.fixture(scope="module")
def tale_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained head of tale."""
    folder = tmp_path_factory.mktemp("tale-head")
    export_head(new_head(HEAD, transformers_model(SHIPPED)), folder)
    return folder


def transformers_model(path: Path, **config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **config).train(False)


def naive_tale(model: Any, folder: Path) -> Naive:
    head = TrainedHead(model, HEAD.inner)
    prefix = f"model.layers.{head.after}."
    head.load_state_dict({name.removeprefix(prefix): w.float() for name, w in load_file(folder / "model.safetensors").items()})

    def compute(before: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        turns = model.model.rotary_emb(before[None], torch.arange(len(tokens))[None])
        guessed = model.model.norm(head(model.model.embed_tokens(tokens)[None], before[None], turns, [])[0])
        return guessed, model.lm_head(guessed)

    return compute


def naive_deepseek(model: Any, folder: Path) -> Naive:
    c, prefix = model.config, f"model.layers.{model.config.num_hidden_layers}."
    weights = {name.removeprefix(prefix): w for name, w in load_file(folder / "model.safetensors").items() if name.startswith(prefix)}
    layer = transformers_model(folder, num_hidden_layers=c.num_hidden_layers + 1).model.layers[-1]

    def norm(name: str, x: Tensor) -> Tensor:
        made = DeepseekV3RMSNorm(c.hidden_size, c.rms_norm_eps)
        made.weight.data = weights[f"{name}.weight"]
        return cast(Tensor, made(x))

    def compute(before: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        embedded = norm("enorm", weights["embed_tokens.weight"][tokens])
        x = (torch.cat((embedded, norm("hnorm", before)), dim=-1) @ weights["eh_proj.weight"].T)[None]
        positions = torch.arange(len(tokens))[None]
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        found = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=model.model.rotary_emb(x, positions))
        guessed = norm("shared_head.norm", (found[0] if isinstance(found, tuple) else found)[0])
        return guessed, guessed @ weights["shared_head.head.weight"].T

    return compute


@torch.inference_mode()
def naive_guesses(model: Any, naive: Naive, tokens: list[int], count: int) -> list[int]:
    states = torch.nn.functional.pad(model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0], (0, 0, 1, 0))[: len(tokens)]
    whole = list(tokens)
    for _ in range(count):
        guessed, logits = naive(states, torch.tensor(whole))
        whole.append(int(logits[-1].argmax()))
        states = torch.cat((states, guessed[-1:]))
    return whole[len(tokens) :]


def engine_of(runner: ModelRunner, drafter: Drafter | None, blocks: int = 60) -> Engine:
    made = ModelRunner(runner.model, runner.layout, runner.device)
    inner = drafter.drafter if isinstance(drafter, Paced) else drafter
    if isinstance(inner, HeadDrafter):
        made.pair(inner)
    made.attach(KvPool(made.layout, blocks))
    return Engine(made, Limits(max_num_seqs=4, max_num_batched_tokens=24, reserve_growth=0.0), 160, drafter=drafter)


def sequence(name: str, prompt: list[int], **params: Any) -> Sequence:
    return Sequence(name, list(prompt), len(prompt), SamplingParams(**{"max_tokens": 30, "ignore_eos": True, **params}), b"")


class Once(HeadDrafter):
    """Is asked at every so many tokens, and keeps what it guesses: (tokens that were known, guesses)."""

    every = 1

    def propose(self, asks: Any) -> Any:
        asked = [DraftRequest(ask.seq, min(ask.most, MOST)) for ask in asks if ask.seq.output_len % self.every == 0]
        drafts = super().propose(asked) if asked else []
        self.kept = [*getattr(self, "kept", []), *((list(ask.seq.tokens), list(draft)) for ask, draft in zip(asked, drafts, strict=True))]
        found = dict(zip((ask.seq for ask in asked), drafts, strict=True))
        return [found.get(ask.seq, ()) for ask in asks]


@pytest.mark.parametrize(("family", "every"), [("tale", 1), ("deepseek", 1), ("tale", 7), ("deepseek", 7), ("tale", FEW + 4)])
def test_it_guesses_what_plain_torch_guesses(family: str, every: int, deepseek: Path, tale_head: Path) -> None:
    """After a prompt in chunks, after right and wrong guesses, and after a while without any: so KV and states of every step are those of
    what became known."""
    path, folder = (SHIPPED, tale_head) if family == "tale" else (deepseek, deepseek)
    runner = load_runner(ModelRunner, path, products="baton")
    drafter, rng = Once.load(runner, path, folder, "auto", 8), random.Random(1)
    drafter.every, drafter._unasked = every, 0  # as after a guess
    model = transformers_model(path)
    naive = (naive_tale if family == "tale" else naive_deepseek)(model, folder)
    engine = engine_of(runner, drafter)
    for i, length in enumerate((3, 16, 40)):
        engine.add(sequence(f"s{i}", [rng.randrange(5, 199) for _ in range(length)], max_tokens=13 + 4 * every, temperature=0.0))
    while not engine.idle:
        engine.step()
    same = [naive_guesses(model, naive, known, len(draft)) == draft for known, draft in drafter.kept]
    assert len(same) >= 10 and same.count(True) >= len(same) - 1, "two tokens may be nearly equally likely"
    assert drafter.remembered == 0


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 40, "seed": 3}])
def test_several_steps_in_one_call_guess_what_single_steps_guess(way: dict[str, Any]) -> None:
    """One sequence with one to several tokens that wait, and several. Steps after the first read the hidden states of the one before."""
    runner, told = load_runner(ModelRunner, SHIPPED, products="baton"), []
    folder = SHIPPED.with_name(f"{SHIPPED.name}-head")
    for chained in (True, False):
        drafter, calls = HeadDrafter.load(runner, SHIPPED, folder, "auto", MOST), [0]
        drafter._unasked = 0
        engine = engine_of(runner, drafter)
        steps = drafter._steps
        assert steps is not None
        guesses = steps.guesses

        def counting(*given: Any, calls: list[int] = calls, guesses: Any = guesses) -> Any:
            calls[0] += (found := guesses(*given)) is not None
            return found

        steps.guesses = counting  # type: ignore[assignment,method-assign]
        drafter._steps = steps if chained else None
        said = []
        for crowd in (1, 3):
            seqs = [sequence(f"{crowd}{i}", [5 + (7 * i + k) % 190 for k in range(9)], max_tokens=50, **way) for i in range(crowd)]
            for seq in seqs:
                engine.add(seq)
            while not engine.idle:
                engine.step()
            said.append(([seq.tokens for seq in seqs], engine.counts.copy().guesses))
        assert (calls[0] > 20) == chained
        told.append(said)
    (alone, several), (plain, plain_several) = told
    assert alone == plain and several[0] == plain_several[0]
    right = [sum(each.accepted for each in counted.values()) for _, counted in (alone, several, plain_several)]
    assert right[0] > 10 and 0.8 * right[2] < right[1], "a chain has as many steps for each"


def test_a_step_in_which_nothing_is_guessed_computes_nothing_for_it(tale_head: Path) -> None:
    """And after a while, it keeps nothing for the next guess either."""
    runner, calls = load_runner(ModelRunner, SHIPPED, products="baton"), list[int]()
    drafter = Once.load(runner, SHIPPED, tale_head, "auto", 8)
    drafter.every, keys = 10**6, drafter._head.keys

    def counted(tokens: Tensor, *given: Tensor) -> Tensor:
        calls.append(len(tokens))
        return keys(tokens, *given)

    drafter._head.keys = counted  # type: ignore[method-assign, assignment]
    engine = engine_of(runner, Paced(drafter, 8, Line(((1, 1.0), (2, 3.0)))))
    drafter._unasked = 0
    for i in range(4):
        engine.add(sequence(f"s{i}", [9 + i] * 9, max_tokens=100))
    while not engine.idle:
        engine.step()
        assert drafter._kept_rows == sum(len(each.states) for each in drafter._kept) <= KEPT
    assert sum(calls) == 4 * 9 and engine.drafter.remembered == 0
    drafter._unasked = KEPT - 20
    engine.add(sequence("a", [9] * 9, max_tokens=40))
    while not engine.idle:
        engine.step()
    assert not drafter._kept


@pytest.mark.parametrize("family", ["tale", "deepseek"])
def test_no_token_depends_on_it_nor_on_what_it_has_forgotten(family: str, deepseek: Path, tale_head: Path) -> None:
    path, folder = (SHIPPED, tale_head) if family == "tale" else (deepseek, deepseek)
    runner, said = load_runner(ModelRunner, path, products="baton"), {}
    for forgets in (None, False, True):
        drafter, rng = None if forgets is None else HeadDrafter.load(runner, path, folder, "auto", 8), random.Random(2)
        engine = engine_of(runner, drafter, blocks=11)
        for i in range(6):
            prompt = [rng.randrange(5, 199) for _ in range(rng.randint(2, 40))]
            engine.add(sequence(f"s{i}", prompt, temperature=0.7 * (i % 2), seed=i, logprobs=2))
        found: dict[str, list[Any]] = {}
        while not engine.idle:
            for output in engine.step():
                found.setdefault(output.seq.id, []).append(output.sampled)
            if forgets and drafter is not None and rng.random() < 0.5:
                for seq in engine.sequences.values():
                    drafter.forget(seq)
        said[forgets] = found
        assert engine.counts.drafted_tokens > 50 or drafter is None
    assert said[None] == said[False] == said[True] and len(said[None]) == 6


def test_its_kv_is_handed_over_with_the_models(tale_head: Path) -> None:
    """The state before the first token that the other computes is not: the slot of that token is a hole, and what is said stays."""
    runner, prompt = load_runner(ModelRunner, SHIPPED, products="baton"), [7 * i % 190 + 5 for i in range(37)]
    alone = engine_of(runner, None)
    whole, held = sequence("a", prompt, seed=3), sequence("a", prompt, seed=3)
    alone.add(whole)
    while not alone.idle:
        alone.step()
    prefill, decode = (engine_of(runner, HeadDrafter.load(runner, SHIPPED, tale_head, "auto", 8)) for _ in range(2))
    held.hold = True
    prefill.add(held)
    while held.state is not State.HELD:
        prefill.step()
    seq = Sequence("a", list(held.tokens), len(prompt), held.params, b"")
    assert decode.reserve(seq)
    carry(prefill.runner.pool, held.blocks[: len(seq.blocks)], decode.runner.pool, seq.blocks[: len(held.blocks)])
    decode.arrive(seq, len(prompt))
    decode.adopt(seq)
    view = decode.runner.layout.views["draft"]
    drafts = [on_host(e.runner.pool).array[s.blocks[1], view.offset :][: view.nbytes].copy() for e, s in ((prefill, held), (decode, seq))]
    assert (drafts[0] == drafts[1]).all() and drafts[0].any()
    while not decode.idle:
        decode.step()
    assert seq.tokens == whole.tokens and decode.counts.drafted_tokens > 10


def test_kv_of_other_bytes_has_another_fingerprint() -> None:
    """A rounded head writes other KV than the same head as it is: no worker, and no tier, takes one for the other."""
    runner = load_runner(ModelRunner, SHIPPED, products="baton")
    kinds = {kind: HeadDrafter.load(runner, SHIPPED, SHIPPED.with_name("tale-head"), kind, 8).kv for kind in ("auto", "int8", "int4")}
    assert len({replace(runner.layout, draft=kv).fingerprint for kv in kinds.values()}) == len(kinds)


def test_a_search_finds_the_same_and_nothing_of_its_beams_is_remembered(tale_head: Path) -> None:
    """Also when it is preempted; beside it runs a sequence that is guessed for."""
    runner, said = load_runner(ModelRunner, SHIPPED, products="baton"), []
    for drafter in (None, HeadDrafter.load(runner, SHIPPED, tale_head, "auto", 8)):
        engine = engine_of(runner, drafter, blocks=11)
        engine.add(sequence("plain", [9 + i for i in range(44)], temperature=0.0, max_tokens=110))
        search = sequence("search", [5 + i for i in range(30)], max_tokens=34, beams=Beams(3, 3))
        engine.add(search)
        found = []
        while not engine.idle:
            found += [[one.tokens for one in output.found] for output in engine.step() if output.found]
        said.append((found, search.preemptions > 0))
        assert drafter is None or drafter.remembered == 0
    assert said[0] == said[1] and len(said[0][0][0]) == 3 and said[0][1]


def test_what_does_not_fit_is_refused_by_name(deepseek: Path, tale_head: Path, tmp_path: Path) -> None:
    runner = load_runner(ModelRunner, SHIPPED, products="baton")
    with pytest.raises(CheckpointError, match=r"config.json: architectures: must be \['BatonHead'\]"):
        HeadDrafter.load(runner, SHIPPED, deepseek, "auto", 8)
    weights = load_file(tale_head / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BatonHead"], "intermediate_size": 96}))
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mlp.*shape \[256, 256\], config.json implies \[256, 96\]|implies \[96, 256\]"):
        HeadDrafter.load(runner, SHIPPED, tmp_path, "auto", 8)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BatonHead"], "intermediate_size": 256}))
    weights.pop("model.layers.4.eh_proj.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.4.eh_proj.weight: missing"):
        HeadDrafter.load(runner, SHIPPED, tmp_path, "auto", 8)
    config = json.loads((deepseek / "config.json").read_text())
    bare = tmp_path / "bare"
    transformers_model(deepseek).save_pretrained(bare)
    (bare / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"model.layers.3.*missing"):
        HeadDrafter.load(load_runner(ModelRunner, bare, products="baton"), bare, bare, "auto", 8)


def test_an_engine_has_the_head_that_the_options_name(tmp_path: Path) -> None:
    """That beside the model; the pool has room for it. The head that ships is right more often than not."""
    options = Options.of(SHIPPED, kv_memory_mib=8, max_model_len=256, products="baton", speculation="heads", speculation_tokens=1)
    engine = build(options).engine
    assert pool_bytes(options) == engine.runner.pool.nbytes
    assert isinstance(engine.drafter, Chosen)
    paced = engine.drafter._methods["heads"]
    assert isinstance(paced, Paced) and isinstance(paced.drafter, HeadDrafter) and paced.drafter.drafting(1).begin > 0
    engine.drafter = engine.scheduler._drafter = paced.drafter
    prompt = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode("Once upon a time there was a little girl.").ids
    engine.add(sequence("a", prompt, max_tokens=100, temperature=0.0))
    while not engine.idle:
        engine.step()
    assert engine.counts.accepted_tokens > 0.5 * engine.counts.drafted_tokens > 20
    make_toy(tmp_path / "toy")
    for path, why in (
        (tmp_path / "toy", "the toy has none"),
        (SHIPPED.with_name("tale-draft"), "needs one; there is no .*tale-draft-head"),
    ):
        with pytest.raises(BuildError, match=f"engine\\..*{why}"):
            build(options.but(path=str(path)))
    with pytest.raises(BuildError, match=r"engine\.draft_model: needs engine\.speculation draft or heads"):
        build(options.but(speculation="lookahead", draft_model="x"))
