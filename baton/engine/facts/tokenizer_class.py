"""What `tokenizer_class` means. `transformers` 5 takes most tokenizers as tokenizer.json says. But some classes keep only its vocabulary
and what is put around a prompt, and bring the steps from text to tokens themselves. Which class it is depends on the model type too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.engine.facts.fields import CheckpointError, Fields

AS_THE_FILE_SAYS = "TokenizersBackend"  # also called PreTrainedTokenizerFast
# The class that a model type is registered with, of the types that the engine serves; others have none.
REGISTERED = {
    "mistral": AS_THE_FILE_SAYS,
    "mixtral": AS_THE_FILE_SAYS,
    "phi3": AS_THE_FILE_SAYS,
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
}
WRONGLY_DECLARED = {"qwen2", "phi3"}  # types whose folders on the hub name another class than the right one
# Classes that replace the steps → the names that they give to tokens if no file does.
REBUILT: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GPT2Tokenizer": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
# Classes of `transformers` that replace the steps with others, or that are not read from tokenizer.json at all.
_OTHERS = (
    "Albert Bart Barthez Bartpho Bert BertJapanese Bertweet BigBird BioGpt Blenderbot BlenderbotSmall ByT5 CLIP CTRL Camembert Canine"
    " Clvp CodeLlama Cohere Cpm CpmAnt DPRQuestionEncoder Deberta DebertaV2 Dia Esm Esmc FSMT Flaubert Funnel GPTNeoX GPTNeoXJapanese"
    " Herbert LED Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke Lxmert MBart MBart50 MPNet MarkupLM Mgpstr MobileBert Mvp MyT5 Nllb Nougat"
    " OpenAIGPT PLBart Pegasus Perceiver Phobert ProphetNet Qwen3_5 Rag Reformer RemBert RoCBert RoFormer Roberta SeamlessM4T Siglip2"
    " Splinter T5 Tapas Udop VideoPrism Vits Wav2Vec2CTC Wav2Vec2PhonemeCTC Whisper XGLM XLM XLMRoberta XLNet"
)
OTHER_CLASSES = frozenset(f"{name}Tokenizer" for name in _OTHERS.split())
_WORDS = (  # Qwen's: contractions, words, single digits, punctuation, line ends, spaces
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_SPACES = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
_Json = dict[str, Any]


def chosen_class(settings: Fields, config: Fields, definition: str) -> str:
    """The class that `transformers` makes of a folder with these files. `definition`: the text of tokenizer.json.

    Raises CheckpointError for a class that is neither one of `REBUILT` nor takes tokenizer.json as it is.
    """
    place = settings if settings.has("tokenizer_class") else config
    declared = place.get("tokenizer_class", "")
    if not isinstance(declared, str):
        raise place.error("tokenizer_class", f"must be a string, got {declared!r}")
    declared, kind = declared.removesuffix("Fast"), config.get("model_type", "")
    registered = REGISTERED.get(kind if isinstance(kind, str) else "")
    if _has_code(settings) and declared not in REBUILT:
        raise settings.error("auto_map", "names code of a tokenizer in the folder, which is not run here")
    if declared == "LlamaTokenizer" and kind not in WRONGLY_DECLARED and '"ByteLevel"' in definition:
        return AS_THE_FILE_SAYS
    name = declared or registered or AS_THE_FILE_SAYS
    if declared and registered and registered != declared:
        if registered == AS_THE_FILE_SAYS:
            return AS_THE_FILE_SAYS
        name = registered if kind in WRONGLY_DECLARED else declared
    if name in OTHER_CLASSES:
        raise place.error(
            "tokenizer_class",
            f"{name} makes tokens in its own way, which is not known here; known: {', '.join(REBUILT)}, and PreTrainedTokenizerFast for the"
            " way of tokenizer.json",
        )
    return name if name in REBUILT else AS_THE_FILE_SAYS


def _has_code(settings: Fields) -> bool:
    given = settings.get("auto_map")
    return bool(given.get("AutoTokenizer") if isinstance(given, dict) else given)


def rebuilt(tree: _Json, name: str, settings: Fields, file: Path) -> _Json:
    """tokenizer.json as the class `name` (one of `REBUILT`) makes it. Raises CheckpointError if it has not the vocabulary for that."""
    model = tree["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict) or not isinstance(model.get("merges"), list):
        raise CheckpointError(
            file, "model.type", f"tokenizer_class {name} needs a BPE with a vocabulary and merges, got {model.get('type')!r}"
        )
    plain = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": name in ("LlamaTokenizer", "GemmaTokenizer"),
        "byte_fallback": name in ("LlamaTokenizer", "GemmaTokenizer"),
        "ignore_merges": False,
        "vocab": model["vocab"],
        "merges": model["merges"],
    }
    if name == "GemmaTokenizer":
        unknown = settings.raw.get("unk_token", REBUILT[name]["unk_token"])
        plain["unk_token"] = unknown.get("content") if isinstance(unknown, dict) else unknown
    return tree | {"added_tokens": [], "model": plain} | _STEPS[name](settings)


def _llama(settings: Fields) -> _Json:
    spaced = settings.flag("add_prefix_space", True)
    # `legacy: null` is not the same as no `legacy`, but both mean false.
    scheme = ("always" if settings.flag("legacy") else "first") if spaced else "never"
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if spaced else []
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False},
        "decoder": {"type": "Sequence", "decoders": [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }


def _gpt2(settings: Fields) -> _Json:
    spaced = settings.flag("add_prefix_space")
    return {"normalizer": None, "pre_tokenizer": _BYTES | {"add_prefix_space": spaced}, "decoder": _BYTES}


def _qwen2(settings: Fields) -> _Json:
    split = {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Isolated", "invert": False}
    then = _BYTES | {"add_prefix_space": settings.flag("add_prefix_space"), "use_regex": False}
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, then]},
        "decoder": _BYTES,
    }


def _gemma(settings: Fields) -> _Json:
    return {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "decoder": {"type": "Sequence", "decoders": [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    }


_STEPS = {"LlamaTokenizer": _llama, "GPT2Tokenizer": _gpt2, "Qwen2Tokenizer": _qwen2, "GemmaTokenizer": _gemma}
