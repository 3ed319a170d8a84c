"""Makes the small models that ship with Baton: `python models/make_small.py OUT` writes a seeded random Llama with a real tokenizer.

The weights are noise, so the text is word salad, but every part is the real thing: a byte-level BPE trained on generated sentences, a chat
template, grouped-query attention, safetensors. The same arguments give the same bytes.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

SPECIAL = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>")  # token ids 0 to 4
BOS, EOS = 0, 1
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOY_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

# ruff: noqa: SIM905 - lists of words read better as text
NOUNS = (
    "river mountain garden lantern harbour window letter bridge captain farmer teacher painter doctor merchant soldier village forest "
    "island castle market kitchen library engine clock compass blanket basket bottle ladder hammer mirror pocket ribbon saddle shadow "
    "silver copper thunder winter summer morning evening stranger neighbour daughter brother cousin kitten sparrow falcon otter badger "
    "orchard meadow valley desert ocean current signal message promise question answer number pattern measure balance memory journey"
).split()
VERBS = (
    "carry follow gather handle invite join keep listen mention notice offer paint question remember scatter travel unfold visit wander "
    "answer borrow collect deliver enter finish greet hammer improve launch measure open polish repair search trust watch whisper wonder "
    "cross climb balance count draw explain forget guard hold imagine"
).split()
ADJECTIVES = (
    "quiet bright hollow gentle ancient broken careful distant eager faithful golden heavy honest hungry idle jolly lonely modest narrow "
    "orange patient plain quick restless rough silent simple slender steady stubborn sudden tender tiny upper velvet violet warm weary "
    "wooden yellow young foreign familiar frozen crooked curious clever brave blue"
).split()
ADVERBS = "slowly quickly often never always almost perhaps together quietly early later soon again twice gladly barely".split()
LINKS = "and but because while although before after until unless whenever".split()
PLACES = "near behind beyond above under across inside beside between around through towards".split()
NAMES = "Ada Bruno Clara Dmitri Elena Farid Greta Hiro Ines Jonas Keiko Lars Mira Nadia Oscar Petra Quentin Rosa Samir Tilda".split()

STEMS = (
    "Ash Barn Black Brad Brom Chel Clay Cold Crom Dun East Elm Fair Green Hart Hazel High Kings Lang Lin Mar Mill New North Oak Old Raven "
    "Red Rock Salt Sand Shep Stan Stone Swan Thorn West Whit Wil Wood"
).split()
ENDINGS = "borough bourne bridge bury by combe dale field ford ham haven hurst ley mere mouth ridge stead ton wick worth".split()
TOWNS = [stem + ending for stem in STEMS for ending in ENDINGS]


def make(
    path: Path,
    *,
    seed: int = 0,
    hidden: int = 256,
    layers: int = 6,
    heads: int = 8,
    kv_heads: int = 4,
    vocab: int = 2048,
    context: int = 2048,
) -> None:
    """A Llama (5.7 million parameters by default) in Hugging Face format in the folder `path`. ValueError for sizes that do not fit."""
    if hidden % heads or (hidden // heads) % 2 or heads % kv_heads:
        raise ValueError(f"hidden {hidden} must be an even multiple of heads {heads}, and heads a multiple of kv_heads {kv_heads}")
    path.mkdir(parents=True, exist_ok=True)
    train_tokenizer(vocab, seed).save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    _write(path / "config.json", config)
    _write(path / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "do_sample": True, "temperature": 1.0})
    _write(path / "tokenizer_config.json", _tokenizer_config(context, CHAT_TEMPLATE, bos_token="<|bos|>"))
    save_file(_weights(config, np.random.default_rng(seed)), path / "model.safetensors", metadata={"format": "pt"})


def make_toy(path: Path, *, vocab: int = 257, context: int = 4096, step_delay_ms: float = 0, token_delay_us: float = 0) -> None:
    """A folder for the toy runner: no weights, and a tokenizer in which a byte is its own token id and 256 ends the text."""
    if vocab < 257:
        raise ValueError(f"vocab must hold 256 bytes and <|eos|>, got {vocab}")
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(BPE({char: byte for byte, char in enumerate(byte_characters())}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken("<|eos|>", special=True, normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["BatonToyForCausalLM"],
        "vocab_size": vocab,
        "eos_token_id": 256,
        "max_position_embeddings": context,
        "kv_width": 8,
        "step_delay_ms": step_delay_ms,
        "token_delay_us": token_delay_us,
    }
    _write(path / "config.json", config)
    _write(path / "tokenizer_config.json", _tokenizer_config(context, TOY_CHAT_TEMPLATE))


def train_tokenizer(vocab: int, seed: int) -> Tokenizer:
    """A byte-level BPE of exactly `vocab` entries, special tokens first. ValueError where the sentences do not yield that many."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = BpeTrainer(vocab_size=vocab, special_tokens=special, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(sentences(20000, seed), trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"vocab {vocab} cannot be reached, the sentences give {tokenizer.get_vocab_size()}")
    tokenizer.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", BOS)])
    return tokenizer


def sentences(count: int, seed: int) -> list[str]:
    """English by a small grammar."""
    rng = random.Random(seed)

    def noun_phrase() -> str:
        if rng.random() < 0.2:
            return rng.choice(NAMES)
        noun = rng.choice(NOUNS) + rng.choice(("", "", "s"))
        described = f"{rng.choice(ADJECTIVES)} {noun}" if rng.random() < 0.5 else noun
        return f"{rng.choice(('the', 'the', 'a', 'this', 'every', 'our', 'her', 'his'))} {described}"

    def verb() -> str:
        return rng.choice(VERBS) + rng.choice(("s", "s", "ed", "ing", ""))

    def clause() -> str:
        words = [noun_phrase(), verb(), noun_phrase()]
        if rng.random() < 0.4:
            words += [rng.choice(PLACES), noun_phrase()]
        if rng.random() < 0.3:
            words.append(rng.choice(ADVERBS))
        return " ".join(words)

    def sentence() -> str:
        text = clause()
        if rng.random() < 0.3:
            text += f"{rng.choice((' ', ', '))}{rng.choice(LINKS)} {clause()}"
        if rng.random() < 0.4:
            text += f" in {rng.choice(TOWNS)}"
        if rng.random() < 0.1:
            text += f" at {rng.randrange(1, 25)}"
        return text[0].upper() + text[1:] + rng.choice(".....?!")

    return [sentence() for _ in range(count)]


def byte_characters() -> list[str]:
    """The character that byte-level BPE (GPT-2) writes for each byte: printable ones stand for themselves, the rest move past 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def _weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """Normal noise, wide enough that a layer says more about the next token than the last token does: narrow noise repeats itself."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def normal(rows: int, columns: int, gain: float) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden, hidden**0.5), "model.norm.weight": np.ones(hidden, np.float32)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows, columns, gain in (
            ("self_attn.q_proj", hidden, hidden, 1.0),
            ("self_attn.k_proj", kv, hidden, 1.0),
            ("self_attn.v_proj", kv, hidden, 2.0),
            ("self_attn.o_proj", hidden, hidden, 2.0),
            ("mlp.gate_proj", inner, hidden, 2.0),
            ("mlp.up_proj", inner, hidden, 2.0),
            ("mlp.down_proj", hidden, inner, 2.0),
        ):
            weights[f"{layer}.{name}.weight"] = normal(rows, columns, gain)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    head = normal(vocab, hidden, 3.0)
    head[[i for i in range(len(SPECIAL)) if i != EOS]] = 0  # the only special token that it says is the one that ends the text
    weights["lm_head.weight"] = head
    return weights


def _tokenizer_config(context: int, chat_template: str, **tokens: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "eos_token": "<|eos|>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": chat_template,
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder to write")
    for name, value in (make.__kwdefaults__ or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="default %(default)s")
    arguments = vars(parser.parse_args())
    make(arguments.pop("out"), **arguments)


if __name__ == "__main__":
    main()
