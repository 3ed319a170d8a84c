"""The tokenizer of a GGUF file as the files of a Hugging Face folder. llama.cpp knows the steps from text to tokens by a name, which
`STEPS` translates; a name that is not there is refused, because no other field says what the steps are."""

from typing import Any

from baton.models.gguf.source import GgufFile

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type
NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
ENDS = ("eos", "eot", "eom")
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_Json = dict[str, Any]


def _bytes(by_words: bool) -> _Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": by_words}


def _words(digits: str) -> list[_Json]:
    pattern = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}|{_REST}"
    return [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}, _bytes(False)]


# tokenizer.ggml.pre → what cuts a text before merges
STEPS = {
    "gpt-2": [_bytes(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes(True)],
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "qwen2": _words(r"\p{N}"),
}
WHOLE_WORDS = ("llama-bpe",)  # a word that is a token is that token, whatever merges say
BEGINS = ("llama-bpe",)  # a prompt begins with bos unless the file says otherwise


def files_of(source: GgufFile, vocab: int) -> dict[str, Any]:
    """tokenizer.json, tokenizer_config.json and generation_config.json by name. Raises CheckpointError."""
    tokens, kinds = _tokens(source, vocab)
    model = source.get("tokenizer.ggml.model", str)
    if model == "gpt2":
        begins, tree, name = _byte_level(source, tokens)
    elif model == "llama":
        begins, tree, name = True, _sentencepiece(source, tokens, kinds), "LlamaTokenizer"
    else:
        raise source.error("tokenizer.ggml.model", f"{model!r} is not supported; supported: gpt2, llama")
    added = [
        {"id": id_, "content": tokens[id_], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind == CONTROL}
        for id_, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)
    ]  # fmt: skip
    settings: _Json = {"tokenizer_class": name}
    settings["added_tokens_decoder"] = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in added}
    settings |= {NAMED[role]: tokens[id_] for role in NAMED if (id_ := _id(source, role, vocab)) is not None}
    if name == "LlamaTokenizer":
        settings |= {"add_prefix_space": source.get("tokenizer.ggml.add_space_prefix", bool, True), "legacy": False}
    if source.get("tokenizer.chat_template", str, ""):
        settings["chat_template"] = source.fields["tokenizer.chat_template"]
    ends = sorted({id_ for role in ENDS if (id_ := _id(source, role, vocab)) is not None})
    base: _Json = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None}
    tree = base | tree | {"post_processor": _around(source, tokens, begins)}
    return {
        "tokenizer.json": tree,
        "tokenizer_config.json": settings,
        "generation_config.json": {"eos_token_id": ends} if ends else {},
    }


def _tokens(source: GgufFile, vocab: int) -> tuple[list[str], list[int]]:
    tokens = source.get("tokenizer.ggml.tokens", list)
    kinds = source.get("tokenizer.ggml.token_type", list, [NORMAL] * len(tokens))
    if len(tokens) != vocab or len(kinds) != vocab:
        raise source.error("tokenizer.ggml.tokens", f"{len(tokens)} tokens of {len(kinds)} types, but the embedding has {vocab} rows")
    if len(set(tokens)) != vocab:
        raise source.error("tokenizer.ggml.tokens", "a token is there twice")
    return tokens, kinds


def _id(source: GgufFile, role: str, vocab: int) -> int | None:
    field = f"tokenizer.ggml.{role}_token_id"
    if field not in source.fields:
        return None
    if not 0 <= (id_ := source.get(field, int)) < vocab:
        raise source.error(field, f"{id_} is no token: there are {vocab}")
    return int(id_)


def _byte_level(source: GgufFile, tokens: list[str]) -> tuple[bool, _Json, str]:
    pre = source.get("tokenizer.ggml.pre", str)
    if pre not in STEPS:
        raise source.error("tokenizer.ggml.pre", f"{pre!r} is not supported; supported: {', '.join(STEPS)}")
    known, merges = set(tokens), [merge.split(" ") for merge in source.get("tokenizer.ggml.merges", list)]
    for i, merge in enumerate(merges):
        if len(merge) != 2 or not {*merge, "".join(merge)} <= known:
            raise source.error(f"tokenizer.ggml.merges[{i}]", f"{merge!r} does not join two tokens to a third")
    steps = STEPS[pre]
    tree = {
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": _bytes(True),
        "model": _bpe(tokens, merges, fallback=False, whole=pre in WHOLE_WORDS),
    }
    return pre in BEGINS, tree, "Qwen2Tokenizer" if pre == "qwen2" else "PreTrainedTokenizerFast"


def _sentencepiece(source: GgufFile, tokens: list[str], kinds: list[int]) -> _Json:
    """SentencePiece's BPE joins the two neighbours whose token has the highest score: merges in the order of scores."""
    if source.fields.get("tokenizer.ggml.precompiled_charsmap"):
        raise source.error("tokenizer.ggml.precompiled_charsmap", "text is not changed before it is cut here")
    scores = source.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise source.error("tokenizer.ggml.scores", f"{len(scores)} scores for {len(tokens)} tokens")
    ids = {token: id_ for id_, token in enumerate(tokens) if kinds[id_] in (NORMAL, USER_DEFINED)}
    found = []
    for token, id_ in ids.items():
        if kinds[id_] == NORMAL:
            halves = ((token[:at], token[at:]) for at in range(1, len(token)))
            found += [(-scores[id_], ids[a], ids[b]) for a, b in halves if a in ids and b in ids]
    merges = [[tokens[a], tokens[b]] for _, a, b in sorted(found)]
    return {"pre_tokenizer": None, "decoder": None, "model": _bpe(tokens, merges, fallback=True, whole=False)}


def _bpe(tokens: list[str], merges: list[list[str]], fallback: bool, whole: bool) -> _Json:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": fallback,
        "byte_fallback": fallback,
        "ignore_merges": whole,
        "vocab": {token: id_ for id_, token in enumerate(tokens)},
        "merges": merges,
    }


def _around(source: GgufFile, tokens: list[str], begins: bool) -> _Json | None:
    """What is put around a prompt."""
    before = _put(source, tokens, "bos", begins)
    after = _put(source, tokens, "eos", False)
    if not before and not after:
        return None
    one, two = ({"Sequence": {"id": id_, "type_id": 0}} for id_ in "AB")
    put = [[{"SpecialToken": {"id": token, "type_id": 0}} for token in side] for side in (before, after)]
    special = {token: {"id": token, "ids": [id_], "tokens": [token]} for side in (before, after) for token, id_ in side.items()}
    single, pair = [*put[0], one, *put[1]], [*put[0], one, two, *put[1]]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _put(source: GgufFile, tokens: list[str], role: str, default: bool) -> dict[str, int]:
    field = f"tokenizer.ggml.add_{role}_token"
    if not source.get(field, bool, default):
        return {}
    id_ = _id(source, role, len(tokens))
    if id_ is None:
        raise source.error(field, f"is true, but there is no tokenizer.ggml.{role}_token_id")
    return {tokens[id_]: id_}
