"""What a model's folder says in several files at once, each fact gathered in one place, with the places that say it: which tokens end an
output, how long a sequence may be, and what its makers recommend for sampling.

Standard library only: the router, the workers and `baton doctor` read the same facts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.engine.core.sampling import NUMBERS
from baton.engine.facts.fields import Fields
from baton.engine.facts.tokenizer_files import TOKENIZER, TokenizerFiles

CONFIG, GENERATION = "config.json", "generation_config.json"
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Fields of generation_config.json that would change an answer and that nothing here does, with the values that ask for nothing.
NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,), "typical_p": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "top_h": (), "penalty_alpha": (0.0,),
    "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1.0,), "encoder_no_repeat_ngram_size": (0,), "guidance_scale": (1.0,),
    "length_penalty": (1.0,), "diversity_penalty": (0.0,), "min_length": (0,), "min_new_tokens": (0,), "max_time": (),
    "stop_strings": ([],), "bad_words_ids": ([],), "force_words_ids": ([],), "suppress_tokens": ([],), "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []), "forced_bos_token_id": (), "forced_eos_token_id": (), "exponential_decay_length_penalty": (),
    "watermarking_config": (),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    value: Any
    place: str  # file: field
    also: tuple[str, ...] = ()  # what other places say


@dataclass(frozen=True, slots=True)
class Recommended:
    """What a request gets that does not say otherwise. A field that is None leaves the router's own default."""

    numbers: Mapping[str, Fact] = field(default_factory=dict)  # of `baton.engine.core.sampling.NUMBERS`
    max_tokens: Fact | None = None
    not_done: tuple[str, ...] = ()  # fields that ask for something else


def end_tokens(path: Path) -> dict[int, tuple[str, ...]]:
    """The tokens that end an output, each with the places that name it: those of config.json and generation_config.json, and the
    tokenizer's `eos_token`. Fine-tuned models often change only one of them, so all count. Raises CheckpointError."""
    found: dict[int, tuple[str, ...]] = {}
    for name in (CONFIG, GENERATION):
        f = Fields.read_if_there(path / name)
        value = f.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(id_) is int and id_ >= 0 for id_ in ids):
            raise f.error("eos_token_id", f"must be a token id or a list of them, got {value!r}")
        for id_ in ids:
            found[id_] = (*found.get(id_, ()), f"{name}: eos_token_id")
    if (path / TOKENIZER).is_file() and (end := TokenizerFiles.read(path).end_token) is not None:
        found[end[0]] = (*found.get(end[0], ()), end[1])
    return found


def context_length(f: Fields) -> Fact:
    """The most tokens of a sequence. `f`: config.json. Raises CheckpointError.

    `max_position_embeddings`, except where the positions are stretched: YaRN reaches `factor` times the original length, which a folder to
    which the recipe of a model card was added does not repeat. With longrope it is the original length: beyond it, the keys of all tokens
    change with the length of the sequence, also those in the cache.
    """
    stated, place = f.size("max_position_embeddings"), f"{CONFIG}: max_position_embeddings"
    for given in _stretches(f):
        kind = given.get("rope_type", given.get("type"))
        if kind not in ("yarn", "longrope", "su"):
            continue
        original = f if f.has("original_max_position_embeddings") else given
        length = original.size("original_max_position_embeddings")
        where = f"{CONFIG}: {original.path}original_max_position_embeddings"
        if kind != "yarn" and length < stated:
            return Fact(length, where, (f"{place} {stated}",))
        if kind == "yarn" and given.has("factor") and (reached := int(length * given.number("factor"))) > stated:
            return Fact(reached, f"{where} times factor", (f"{place} {stated}",))
    return Fact(stated, place)


def _stretches(f: Fields) -> Iterator[Fields]:
    """The sets of rotary parameters: one for all layers, or one for each kind of layer."""
    given = f.inner("rope_scaling" if f.get("rope_scaling") else "rope_parameters")
    sets = [name for name, value in given.raw.items() if isinstance(value, dict)]
    yield from (given.inner(name) for name in sets)
    if not sets:
        yield given


def recommended(path: Path) -> Recommended:
    """Reads generation_config.json. `do_sample: false` means greedy. Raises CheckpointError for a value that no request could have."""
    f = Fields.read_if_there(path / GENERATION)
    numbers: dict[str, Fact] = {}
    for name in RECOMMENDED:
        if f.has(name):
            numbers[name] = Fact(_number(f, name), f"{GENERATION}: {name}")
    if f.has("do_sample") and not f.flag("do_sample"):
        also = tuple(f"{fact.place} {fact.value}" for name, fact in numbers.items() if name == "temperature")
        numbers["temperature"] = Fact(0.0, f"{GENERATION}: do_sample", also)
    most = Fact(f.size("max_new_tokens"), f"{GENERATION}: max_new_tokens") if f.has("max_new_tokens") else None
    left = tuple(name for name, neutral in NOT_DONE.items() if f.has(name) and f.raw[name] not in neutral)
    return Recommended(numbers, most, left)


def _number(f: Fields, name: str) -> float:
    number, value = NUMBERS[name], f.get(name)
    if isinstance(value, bool) or not isinstance(value, int if number.integer else int | float):
        raise f.error(name, f"must be {'an integer' if number.integer else 'a number'}, got {value!r}")
    if refusal := number.range.refusal(value):
        raise f.error(name, f"{refusal}, got {value!r}")
    return value if number.integer else float(value)
