"""Model folders without weights, in the combinations of files that real repositories have.

A folder is a choice for each of `CHOICES`. `pairwise` makes few folders in which every two choices of different kinds meet.
"""

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog, doesn't it? 12 345", "user system assistant\n\nhello, world! é 你好 😀"] * 3
CHATML = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "<|im_start|>assistant\n{{ image_token }}{{ pad_token }}"
)
ADDED = ("<|im_start|>", "<|im_end|>", "<think>", "<|tool|>")
NAMED = ("<unk>", "<s>", "</s>")
ROWS = 2000  # of the model's embedding

Choice = Mapping[str, Any]


@cache
def _bytes_bpe(kind: str, post: bool) -> str:
    tokenizer = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "qwen")
    if kind == "qwen":
        tokenizer.normalizer = normalizers.NFC()
        words = Regex(r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), bytes_])
    elif kind == "digits":  # SmolLM
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    else:
        tokenizer.pre_tokenizer = bytes_
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=list(NAMED), show_progress=False)
    )
    return _finished(tokenizer, post)


@cache
def _spaces_bpe(kind: str, post: bool) -> str:
    """With bytes for what the vocabulary lacks, and a mark for the space."""
    words = [*NAMED, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz<>|_:!,?", "▁t", "he", "▁the"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocabulary = {word: id_ for id_, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    strip = [decoders.Strip(" ", 1, 0)]
    if kind == "llama2":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        strip = []
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return _finished(tokenizer, post)


@cache
def _unigram(post: bool) -> str:
    words = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((char, -3.0) for char in "▁abcdefghijklmnopqrstuvwxyz<>|_"), ("▁the", -1.0)]
    tokenizer = Tokenizer(models.Unigram(words, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return _finished(tokenizer, post)


def _finished(tokenizer: Tokenizer, post: bool) -> str:
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in NAMED])
    if post:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


_STEPS: Mapping[str, Callable[[bool], str]] = {
    "bytes": lambda post: _bytes_bpe("gpt", post),
    "qwen": lambda post: _bytes_bpe("qwen", post),
    "digits": lambda post: _bytes_bpe("digits", post),
    "llama2": lambda post: _spaces_bpe("llama2", post),
    "gemma": lambda post: _spaces_bpe("gemma", post),
    "metaspace": lambda post: _spaces_bpe("metaspace", post),
    "unigram": _unigram,
}
CHOICES: Mapping[str, Sequence[Any]] = {
    "steps": list(_STEPS),
    "model_type": ["llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "deepseek_v3", None],
    "tokenizer_class": [
        *(None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer"),
        *("Qwen2Tokenizer", "Qwen2TokenizerFast", "GemmaTokenizer", "SomeoneElsesTokenizer", "PreTrainedTokenizer"),
    ],
    "class_in": ["tokenizer_config.json", "config.json"],
    "post": [True, False],
    "in tokenizer.json": ["nothing", "special", "plain", "stripping", "some"],
    "decoder": ["none", "none", "same", "stripping", "plain", "some", "wrong id"],
    "named as": ["string", "object", "decoder only", "nothing", "null"],
    "extra": ["none", "older", "list", "dict", "empty"],
    "map": ["none", "strings", "objects", "with list"],
    "added_tokens.json": [False, False, True],
    "flags": [{}, {}, {"legacy": True}, {"legacy": False, "add_prefix_space": False}, {"add_prefix_space": True}],
    "bos and eos": [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}],
    "own name": [{}, {"image_token": "<|image|>"}],
    "pad": [{}, {"pad_token": "<|pad|>"}],
    "rows": [ROWS, ROWS, 1],  # 1: none for added tokens
    "template": ["tokenizer_config.json", "list", "chat_template.jinja", "none"],
}


def pairwise(choices: Mapping[str, Sequence[Any]], seed: int = 1) -> list[Choice]:
    """Greedily: of some random folders, the one in which the most pairs meet for the first time."""
    draw = random.Random(seed)
    names, missing = list(choices), set()
    for a, b in itertools.combinations(names, 2):
        missing |= {(a, i, b, j) for i in range(len(choices[a])) for j in range(len(choices[b]))}
    made: list[Choice] = []

    def pairs(picked: Mapping[str, int]) -> set[tuple[str, int, str, int]]:
        return {(a, picked[a], b, picked[b]) for a, b in itertools.combinations(names, 2)}

    while missing:
        must = min(missing)
        drawn = [{name: draw.randrange(len(choices[name])) for name in names} for _ in range(30)]
        for one in drawn:
            one[must[0]], one[must[2]] = must[1], must[3]
        best = max(drawn, key=lambda one: len(pairs(one) & missing))
        missing -= pairs(best)
        made.append({name: choices[name][best[name]] for name in names})
    return made


def _object(content: str, **flags: bool) -> dict[str, Any]:
    special = flags.get("special", True)
    plain = {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": not special, "special": special}
    return {**plain, **flags}


def write(path: Path, choice: Choice) -> Path:
    """Writes the folder of a choice: tokenizer.json and everything beside it, and config.json."""
    path.mkdir(parents=True, exist_ok=True)
    tree = json.loads(_STEPS[choice["steps"]](choice["post"]))
    size = len(tree["model"]["vocab"])
    tree["added_tokens"] += [
        {"id": size + i, **_object(token, special=kind != "plain", rstrip=kind == "stripping")}
        for i, token in enumerate(ADDED)
        if (kind := choice["in tokenizer.json"]) != "nothing" and (kind != "some" or i < 2)
    ]
    settings, beside = _settings(choice, size)
    config: dict[str, Any] = {"vocab_size": choice["rows"] if choice["rows"] > 1 else size, "eos_token_id": 2}
    if choice["model_type"]:
        config["model_type"] = choice["model_type"]
    if choice["tokenizer_class"]:
        known = choice["tokenizer_class"] not in ("SomeoneElsesTokenizer", "PreTrainedTokenizer")  # in config.json, `transformers` fails
        (config if known and choice["class_in"] == "config.json" else settings)["tokenizer_class"] = choice["tokenizer_class"]
    files = {"tokenizer.json": tree, "tokenizer_config.json": settings, "config.json": config, **beside}
    if choice["template"] == "list":
        settings["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    elif choice["template"] == "tokenizer_config.json":
        settings["chat_template"] = CHATML
    elif choice["template"] == "chat_template.jinja":
        settings["chat_template"] = "no"
        (path / "chat_template.jinja").write_text(CHATML)
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def _settings(choice: Choice, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer_config.json, and the older files beside it."""
    settings: dict[str, Any] = {**choice["flags"], **choice["bos and eos"], **choice["own name"], **choice["pad"], "model_max_length": 4096}
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    decoder, as_ = choice["decoder"], choice["named as"]
    if decoder != "none":
        flags = {"stripping": {"lstrip": True, "rstrip": True}, "plain": {"special": False}}.get(decoder, {})
        tokens: list[tuple[int, str, dict[str, bool]]] = [(id_, token, {}) for id_, token in enumerate(NAMED)]
        tokens += [(size + i, token, flags) for i, token in enumerate(ADDED) if decoder != "some" or i != 1]
        settings["added_tokens_decoder"] = {
            str(id_ + (decoder == "wrong id" and token == ADDED[-1])): _object(token, **given) for id_, token, given in tokens
        }
    for name, content in names.items():
        if as_ == "string":
            settings[name] = content
        elif as_ == "object":
            settings[name] = {"__type": "AddedToken", **_object(content, lstrip=True)}
        elif as_ == "null":
            settings[name] = None
    if choice["extra"] in ("older", "list", "empty"):
        key = "additional_special_tokens" if choice["extra"] == "older" else "extra_special_tokens"
        settings[key] = [] if choice["extra"] == "empty" else ["<|im_start|>", "<|more|>"]
    elif choice["extra"] == "dict":
        settings["extra_special_tokens"] = {"audio_token": "<|audio|>"}
    beside: dict[str, Any] = {}
    if choice["map"] != "none":
        as_object = choice["map"] == "objects"
        beside["special_tokens_map.json"] = {name: _object(token, rstrip=True) if as_object else token for name, token in names.items()}
        if choice["map"] == "with list":
            beside["special_tokens_map.json"]["additional_special_tokens"] = ["<|im_end|>", "<|tool|>"]
    if choice["added_tokens.json"]:
        beside["added_tokens.json"] = {token: size + i for i, token in enumerate(ADDED)}
    return settings, beside
