"""Folders as people have them: the tokenizer of each is that of `transformers`, token for token, or the folder is refused with the file and
the field."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import model_folders
import pytest
from model_folders import ADDED, CHATML, CHOICES, NAMED, pairwise
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from baton.engine.facts.fields import CheckpointError
from baton.engine.facts.tokenizer_class import AS_THE_FILE_SAYS, OTHER_CLASSES, REBUILT, REGISTERED
from baton.engine.facts.tokenizer_files import TokenizerFiles
from router.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "the quick fox"}, {"role": "assistant", "content": "doesn't 12 345"}]
TEXTS = [
    "the quick brown fox doesn't jump 12 345é",
    " the  the\n\n the",
    "".join(f"a {token} b" for token in (*ADDED, *NAMED, "<|more|>", "<|audio|>", "<|image|>", "<|pad|>", "<|endoftext|>")),
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>",
    "a<s>b</s> c",
]
FOLDERS = pairwise(CHOICES)


def compare(path: Path) -> None:
    """Raises AssertionError where ours differs from `transformers`; ValueError if ours refuses the folder."""
    ours = Tokenizer.load(path)
    files = TokenizerFiles.read(path)
    theirs = AutoTokenizer.from_pretrained(path)
    beyond = {told.content for told in files.beyond}
    known = {id_: token for id_, token in theirs.added_tokens_decoder.items() if token.content not in beyond}
    assert {id_: repr(token) for id_, token in ours._plain.get_added_tokens_decoder().items()} == {id_: repr(t) for id_, t in known.items()}
    for text in TEXTS:
        if any(token in text for token in beyond):  # a model without embeddings for them would fail
            continue
        for added in (True, False):
            assert ours.encode(text, add_special_tokens=added) == theirs.encode(text, add_special_tokens=added), text
    end = files.end_token
    assert (end and end[0]) == (theirs.eos_token_id if theirs.eos_token not in beyond else None)
    assert {name: told.content for name, told in files.named.items()} == theirs.special_tokens_map
    if files.template is not None:
        assert files.template == theirs.get_chat_template() == CHATML
        ids = theirs.encode(theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True), add_special_tokens=False)
        if not set(ids) & {id_ for id_, token in theirs.added_tokens_decoder.items() if token.content in beyond}:
            assert ours.render([(message["role"], message["content"]) for message in CHAT]) == ids
    assert (files.template is None) == (theirs.chat_template is None)
    assert ours.decode(range(ours.vocab_size)) == theirs.decode(list(range(ours.vocab_size)), skip_special_tokens=True)


def test_every_combination_of_files_is_read_as_by_transformers(tmp_path: Path) -> None:
    refused: Counter[str] = Counter()
    for number, choice in enumerate(FOLDERS):
        path = model_folders.write(tmp_path / str(number), choice)
        try:
            compare(path)
        except AssertionError as error:
            raise AssertionError(f"{choice}: {error}") from error
        except CheckpointError as error:
            assert error.file.parent == path
            refused[error.field.rstrip("0123456789")] += 1
            if error.field.startswith("added_tokens_decoder"):  # `transformers` gives the token another id than the file says, silently
                id_, token = (
                    error.field.split(".")[1],
                    json.loads(error.file.read_text())["added_tokens_decoder"][error.field.split(".")[1]],
                )
                assert AutoTokenizer.from_pretrained(path).added_tokens_encoder[token["content"]] != int(id_)
    assert set(refused) == {"added_tokens_decoder.", "model.type"}  # a wrong id; a class that makes a BPE, with a Unigram
    assert sum(refused.values()) < len(FOLDERS) / 3


def test_the_classes_are_those_of_transformers() -> None:
    names = {(name or "").removesuffix("Fast") for name in TOKENIZER_MAPPING_NAMES.values()} | {"LlamaTokenizer", "GPT2Tokenizer"}
    kinds = {name: tokenizer_class_from_name(name) for name in names if name}
    backends = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, TokenizersBackend)}
    as_they_are = {name for name in backends if kinds[name] is TokenizersBackend or "__init__" not in vars(kinds[name])}
    assert set(kinds) - as_they_are - REBUILT.keys() - {"MistralCommonBackend"} <= OTHER_CLASSES
    assert not OTHER_CLASSES & (as_they_are | REBUILT.keys())
    for model_type in (
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "gemma2",
        "gemma3_text",
        "phi3",
        "deepseek_v2",
        "deepseek_v3",
    ):
        registered = TOKENIZER_MAPPING_NAMES.get(model_type)
        assert (registered if registered != "MistralCommonBackend" else AS_THE_FILE_SAYS) == REGISTERED.get(model_type)


BASE: dict[str, Any] = {name: values[0] for name, values in CHOICES.items()} | {"in tokenizer.json": "special", "decoder": "same"}


def changed(path: Path, name: str, **fields: Any) -> Path:
    """A folder of which one file has other fields."""
    model_folders.write(path, BASE)
    content = json.loads((path / name).read_text()) if (path / name).exists() else {}
    (path / name).write_text(json.dumps(content | fields))
    return path


@pytest.mark.parametrize(
    ("file", "fields", "field"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "GPTNeoXTokenizerFast"}, "tokenizer_class"),
        ("config.json", {"tokenizer_class": "BertTokenizer"}, "tokenizer_class"),
        ("tokenizer_config.json", {"tokenizer_class": 7}, "tokenizer_class"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Own", None]}}, "auto_map"),
        ("tokenizer_config.json", {"split_special_tokens": True}, "split_special_tokens"),
        ("tokenizer_config.json", {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, "fast_tokenizer_files"),
        ("tokenizer_config.json", {"bos_token": {"lstrip": True}}, "bos_token"),
        ("tokenizer_config.json", {"eos_token": 2}, "eos_token"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<a>"}}}, "added_tokens_decoder.x"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": "<a>"}}, "added_tokens_decoder.7"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"7": {"content": "<a>", "lstrip": 1}}}, "added_tokens_decoder.7.lstrip"),
        ("tokenizer_config.json", {"additional_special_tokens": "<a>"}, "additional_special_tokens"),
        ("tokenizer_config.json", {"extra_special_tokens": ["<a>", 3]}, "extra_special_tokens[1]"),
        ("tokenizer_config.json", {"chat_template": 1}, "chat_template"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default"}]}, "chat_template"),
        ("tokenizer.json", {"added_tokens": [{"id": 1}]}, "added_tokens[0]"),
        ("tokenizer.json", {"model": None}, "model"),
    ],
)
def test_what_cannot_be_read_exactly_is_refused_with_file_and_field(tmp_path: Path, file: str, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(changed(tmp_path, file, **fields))
    assert (caught.value.file, caught.value.field) == (tmp_path / file, field)


def test_without_the_change_the_folder_is_read(tmp_path: Path) -> None:
    """Negative control of the test above, and the templates that are in the oldest and in no ordinary place."""
    compare(changed(tmp_path, "tokenizer_config.json"))
    only = changed(tmp_path, "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "no"}])
    assert TokenizerFiles.read(only).template is None  # `transformers` asks for a name
    older = changed(tmp_path, "chat_template.json", chat_template="of a processor")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert (TokenizerFiles.read(older).template, TokenizerFiles.read(older).template_place) == (
        "of a processor",
        "chat_template.json: chat_template",
    )
    (tmp_path / "special_tokens_map.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"special_tokens_map.json: is not a JSON object"):
        Tokenizer.load(tmp_path)
