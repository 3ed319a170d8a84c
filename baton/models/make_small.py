"""Makes untrained models of any size: `python -m baton.models.make_small OUT` writes a seeded random Llama with a real tokenizer.

The weights are noise, so the text is word salad, but every part is real: a byte-level BPE trained on generated texts, a chat template,
grouped-query attention, safetensors. The same arguments produce the same bytes.
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from baton.models.folder import EOS_ID, Shape, tokenizer_config, write, write_json
from baton.models.train.corpus import EOS, SPECIAL
from baton.models.train.tokenizer import train_tokenizer

TOKENIZER_DOCUMENTS = 2000
TOY_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


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
    """Writes a Llama (5.7 million parameters by default) in Hugging Face format to the folder `path`. Raises ValueError for sizes that do
    not fit together."""
    shape = Shape(hidden, 3 * hidden, layers, heads, kv_heads, vocab, context, tied=False)
    write(path, shape, train_tokenizer(vocab, seed, TOKENIZER_DOCUMENTS), dtype="float32", temperature=1.0)
    save_file(_weights(shape, np.random.default_rng(seed)), path / "model.safetensors", metadata={"format": "pt"})


def make_toy(
    path: Path,
    *,
    vocab: int = 257,
    context: int = 4096,
    step_delay_ms: float = 0,
    token_delay_us: float = 0,
    poison_token: int | None = None,
) -> None:
    """Writes a folder for the toy runner: no weights, and a tokenizer in which a byte is its own token id and 256 ends the text.

    A worker that computes the `poison_token` dies.
    """
    if vocab < 257:
        raise ValueError(f"vocab must hold 256 bytes and <|eos|>, got {vocab}")
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(BPE({char: byte for byte, char in enumerate(byte_characters())}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
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
    if poison_token is not None:
        config["poison_token"] = poison_token
    write_json(path / "config.json", config)
    write_json(path / "tokenizer_config.json", tokenizer_config(context, TOY_CHAT_TEMPLATE))


def byte_characters() -> list[str]:
    """The character that byte-level BPE (GPT-2) writes for each byte: printable ones are kept, the others are moved past 255."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    moved = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def _weights(shape: Shape, rng: np.random.Generator) -> dict[str, npt.NDArray[np.float32]]:
    """Normal noise, wide enough that layers affect the next token more than the last token does: with narrow noise, the text repeats."""
    hidden, inner, vocab, kv = shape.hidden, shape.inner, shape.vocab, shape.kv_heads * shape.head_dim

    def normal(rows: int, columns: int, gain: float) -> npt.NDArray[np.float32]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden, hidden**0.5), "model.norm.weight": np.ones(hidden, np.float32)}
    for i in range(shape.layers):
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
    head[[i for i in range(len(SPECIAL)) if i != EOS_ID]] = 0  # the only special token that it produces is the one that ends the text
    weights["lm_head.weight"] = head
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder to write")
    for name, value in (make.__kwdefaults__ or {}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help="default %(default)s")
    arguments = vars(parser.parse_args())
    make(arguments.pop("out"), **arguments)


if __name__ == "__main__":
    main()
