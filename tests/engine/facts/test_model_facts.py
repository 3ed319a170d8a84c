"""Facts that stand in several files of a model's folder: the same as `transformers` gathers from them."""

import itertools
import json
from pathlib import Path
from typing import Any

import model_folders
import pytest
from model_folders import CHOICES
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from baton.engine.build import BuildError, build
from baton.engine.facts.fields import CheckpointError, Fields
from baton.engine.facts.model_facts import CONFIG, GENERATION, NOT_DONE, Fact, context_length, end_tokens, recommended
from baton.engine.model.config_json import read_config
from baton.engine.options import Options
from baton.models.make_small import make

BASE = {name: values[0] for name, values in CHOICES.items()} | {
    "in tokenizer.json": "special",
    "decoder": "same",
    "named as": "decoder only",
}


def edit(file: Path, **fields: Any) -> None:
    """ "absent" removes a field."""
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({name: value for name, value in (content | fields).items() if value != "absent"}))


def as_set(ids: Any) -> set[int]:
    return set() if ids is None else set(ids) if isinstance(ids, list) else {ids}


IN_CONFIG: list[Any] = ["absent", None, 5, [5, 6]]
IN_TOKENIZER = ["absent", "<|im_end|>", {"__type": "AddedToken", "content": "</s>"}, "<not in the vocabulary>"]


@pytest.mark.parametrize(("config", "generation", "named"), itertools.product(IN_CONFIG, [*IN_CONFIG, [7, 2], "no file"], IN_TOKENIZER))
def test_the_end_tokens_of_all_files_count(tmp_path: Path, config: Any, generation: Any, named: Any) -> None:
    model_folders.write(tmp_path, BASE | {"rows": 2000})
    edit(tmp_path / CONFIG, eos_token_id=config, model_type="llama")
    edit(tmp_path / "tokenizer_config.json", eos_token=named)
    if generation != "no file":
        edit(tmp_path / GENERATION, eos_token_id=generation)
    theirs = as_set(AutoTokenizer.from_pretrained(tmp_path).eos_token_id)
    theirs |= as_set(config if config != "absent" else None)
    if generation != "no file":
        theirs |= as_set(GenerationConfig.from_pretrained(tmp_path).eos_token_id)
    found = end_tokens(tmp_path)
    assert set(found) == theirs
    for id_, places in found.items():
        assert (f"{CONFIG}: eos_token_id" in places) == (config != "absent" and id_ in as_set(config))
        assert ("tokenizer_config.json: eos_token" in places) == (id_ == AutoTokenizer.from_pretrained(tmp_path).eos_token_id)


def test_an_end_token_without_an_embedding_does_not_count(tmp_path: Path) -> None:
    model_folders.write(tmp_path, BASE | {"rows": 1})
    edit(tmp_path / "tokenizer_config.json", eos_token="<not in the vocabulary>")
    assert set(end_tokens(tmp_path)) == {2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path, vocab=300, hidden=32, layers=1, heads=2, kv_heads=1, context=64)
    return tmp_path


def test_the_engine_ends_where_only_the_tokenizer_says_so(folder: Path) -> None:
    """As do fine-tuned models whose makers changed nothing but the tokenizer."""
    edit(folder / CONFIG, eos_token_id=5)
    (folder / GENERATION).unlink()
    assert read_config(folder).eos_token_ids == {5, 1}
    edit(folder / "tokenizer_config.json", eos_token="absent")
    assert read_config(folder).eos_token_ids == {5}


ORIGINAL = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 32768}
STATED = "max_position_embeddings"
BY_LAYER = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("fields", "tokens", "place"),
    [
        ({}, 32768, STATED),
        ({"rope_scaling": YARN}, 131072, f"rope_scaling.{ORIGINAL} times factor"),
        ({"rope_scaling": YARN | {"type": "yarn", "rope_type": None}}, 131072, f"rope_scaling.{ORIGINAL} times factor"),
        ({STATED: 40960, "rope_scaling": YARN}, 131072, f"rope_scaling.{ORIGINAL} times factor"),
        ({"rope_parameters": YARN}, 131072, f"rope_parameters.{ORIGINAL} times factor"),
        ({"rope_parameters": BY_LAYER}, 131072, f"rope_parameters.full_attention.{ORIGINAL} times factor"),
        ({"rope_scaling": YARN, ORIGINAL: 16384}, 65536, f"{ORIGINAL} times factor"),
        ({STATED: 163840, "rope_scaling": YARN}, 163840, STATED),
        ({"rope_scaling": {**YARN, "factor": None}}, 32768, STATED),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 32768, STATED),
        ({"rope_scaling": {**YARN, "rope_type": "llama3", "factor": 8.0}}, 32768, STATED),
        ({"rope_scaling": {"type": "su", ORIGINAL: 4096}}, 4096, f"rope_scaling.{ORIGINAL}"),
    ],
)
def test_the_context_is_what_the_positions_reach(fields: dict[str, Any], tokens: int, place: str) -> None:
    found = context_length(Fields(Path(CONFIG), {STATED: 32768} | fields))
    assert (found.value, found.place) == (tokens, f"{CONFIG}: {place}")
    assert bool(found.also) == (place != STATED)


def test_the_recipe_of_a_model_card_lengthens_the_context(folder: Path) -> None:
    edit(folder / CONFIG, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, rope_theta=10000.0)
    assert read_config(folder).max_positions == 256
    theirs = AutoConfig.from_pretrained(folder)
    reached = theirs.rope_parameters["factor"] * theirs.rope_parameters["original_max_position_embeddings"]
    assert read_config(folder).max_positions == reached
    with pytest.raises(BuildError, match=r"257 is more than .* 256 tokens \(config.json: rope_scaling.original_max_position_embeddings"):
        build(Options.of(folder, max_model_len=257, threads=1, compiled=False))


@pytest.mark.parametrize(
    "fields",
    [
        {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},  # Qwen2.5
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9},  # Llama 3
        {"temperature": 0.6, "min_p": 0.05, "max_new_tokens": 2048},
        {"temperature": None, "top_k": 0},
        {},
    ],
)
def test_sampling_is_as_the_makers_of_the_model_recommend(tmp_path: Path, fields: dict[str, Any]) -> None:
    edit(tmp_path / GENERATION, **fields)
    theirs = GenerationConfig.from_pretrained(tmp_path)
    found = recommended(tmp_path)
    assert {name: fact.value for name, fact in found.numbers.items()} == {
        name: getattr(theirs, name) for name, value in fields.items() if value is not None and name not in ("do_sample", "max_new_tokens")
    }
    assert (found.max_tokens and found.max_tokens.value) == theirs.max_new_tokens and not found.not_done


def test_no_sampling_means_greedy(tmp_path: Path) -> None:
    edit(tmp_path / GENERATION, do_sample=False, temperature=0.6)
    assert recommended(tmp_path).numbers == {"temperature": Fact(0.0, f"{GENERATION}: do_sample", (f"{GENERATION}: temperature 0.6",))}


def test_what_is_not_done_is_named(tmp_path: Path) -> None:
    edit(tmp_path / GENERATION, num_beams=4, no_repeat_ngram_size=0, suppress_tokens=[3], pad_token_id=1, transformers_version="5")
    assert recommended(tmp_path).not_done == ("num_beams", "suppress_tokens")
    known = set(vars(GenerationConfig()))
    assert {name for name in NOT_DONE if name not in known} <= {"force_words_ids", "penalty_alpha", "diversity_penalty", "top_h"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "0.7"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 2.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"do_sample": "no"}, "do_sample"),
    ],
)
def test_a_recommendation_that_no_request_could_have_is_refused(tmp_path: Path, fields: dict[str, Any], field: str) -> None:
    edit(tmp_path / GENERATION, **fields)
    with pytest.raises(CheckpointError) as caught:
        recommended(tmp_path)
    assert (caught.value.file, caught.value.field) == (tmp_path / GENERATION, field)
