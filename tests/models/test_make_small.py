"""The small models made from a seed: the same seed gives the same bytes, text does not repeat itself, and the tokenizer is a real one."""

import json
from hashlib import blake2b
from pathlib import Path

import pytest
from jinja2 import Environment
from tokenizers import Tokenizer

from baton.engine.choice import load_runner
from baton.engine.core.sampling import SamplingParams
from baton.engine.model.naive import generate
from baton.engine.runner import ModelRunner
from baton.models.make_small import byte_characters, make, make_toy
from baton.models.train.corpus import SPECIAL

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def digests(folder: Path) -> dict[str, str]:
    return {file.name: blake2b(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    make(folder)
    return folder


def template(folder: Path) -> str:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = {name: config[name] for name in ("bos_token", "eos_token") if name in config}
    return Environment().from_string(config["chat_template"]).render(messages=MESSAGES, add_generation_prompt=True, **names)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(small: Path, tmp_path: Path) -> None:
    make(tmp_path / "again")
    make(tmp_path / "other", seed=1)
    assert digests(tmp_path / "again") == digests(small)
    assert digests(tmp_path / "other")["model.safetensors"] != digests(small)["model.safetensors"]


def test_greedy_text_does_not_repeat_itself(small: Path) -> None:
    tokenizer = Tokenizer.from_file(str(small / "tokenizer.json"))
    prompt = tokenizer.encode("The quiet river near Ashford").ids
    answers = generate(load_runner(ModelRunner, small).model, prompt, SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True))
    assert len({answer.token for answer in answers[-50:]}) > 25


def test_the_tokenizer_is_complete_and_round_trips_text(small: Path) -> None:
    tokenizer = Tokenizer.from_file(str(small / "tokenizer.json"))
    text = "The falcon remembered Oakfield — naïve 日本 🙂\n\ttwice."
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert [tokenizer.token_to_id(name) for name in SPECIAL] == [0, 1, 2, 3, 4]
    assert tokenizer.get_vocab_size() == json.loads((small / "config.json").read_text())["vocab_size"]
    assert tokenizer.encode("a").ids[0] == 0, "plain text begins with <|bos|>"


def test_the_chat_template_uses_the_special_tokens(small: Path) -> None:
    text = template(small)
    assert text == "<|bos|><|system|>Be brief.<|eos|><|user|>Hello<|eos|><|assistant|>"
    ids = Tokenizer.from_file(str(small / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert [i for i in ids if i < len(SPECIAL)] == [0, 4, 1, 2, 1, 3]


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of heads"):
        make(tmp_path, hidden=100, heads=8)
    with pytest.raises(ValueError, match="cannot be reached"):
        make(tmp_path, vocab=100000)


def test_a_toy_token_is_a_byte(tmp_path: Path) -> None:
    make_toy(tmp_path, context=128, step_delay_ms=2)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Hi — naïve 日本 🙂\n"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert [tokenizer.id_to_token(byte) for byte in range(256)] == byte_characters()
    assert tokenizer.encode("a<|eos|>").ids == [97, 256]
    assert tokenizer.get_vocab_size() == 257
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["max_position_embeddings"], config["step_delay_ms"]) == (128, 2)
    assert template(tmp_path) == "system: Be brief.\nuser: Hello\nassistant: "
