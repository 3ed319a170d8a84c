"""`baton doctor MODEL` says what is taken from which file, and what would be refused."""

import json
from pathlib import Path
from typing import Any

import model_folders
import pytest
from model_folders import CHOICES
from typer.testing import CliRunner

from baton.cli import doctor
from baton.cli.main import app
from baton.cli.model_facts import examine_model
from baton.cluster.config_layers import load

QWEN = {name: values[0] for name, values in CHOICES.items()} | {"model_type": "qwen2", "tokenizer_class": "Qwen2TokenizerFast"}
QWEN |= {"in tokenizer.json": "nothing", "decoder": "same", "pad": {"pad_token": "<|pad|>"}}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model_folders.write(tmp_path, QWEN | {"rows": 2000})
    edit(tmp_path / "config.json", max_position_embeddings=32768, rope_scaling=YARN)
    edit(tmp_path / "generation_config.json", eos_token_id=[2, 331], temperature=0.7)
    return tmp_path


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))


def told(path: Path, **keys: str) -> dict[str, list[str]]:
    """subject → verdict and detail of each finding."""
    found: dict[str, list[str]] = {}
    for one in examine_model(load([], {}, {"model.path": str(path)} | {f"model.{key}": value for key, value in keys.items()}).config):
        found.setdefault(one.subject, []).append(f"{one.verdict}: {one.detail}")
    return found


def test_every_fact_has_the_place_that_it_was_taken_from(folder: Path) -> None:
    found = told(folder)
    assert found["context"] == [
        "ok: 131072 tokens, from config.json: rope_scaling.original_max_position_embeddings times factor; also said: config.json:"
        " max_position_embeddings 32768"
    ]
    assert found["end"] == [
        "ok: </s> (2), from config.json: eos_token_id, generation_config.json: eos_token_id, tokenizer_config.json: eos_token",
        "ok: <|im_end|> (331), from generation_config.json: eos_token_id",
    ]
    assert found["tokens"][0].endswith("with the steps of Qwen2Tokenizer") and "<|im_start|> (330)" in found["tokens"][2]
    assert "unk_token <|endoftext|> (the default of Qwen2Tokenizer)" in found["tokens"][1]
    assert found["template"] == [f"ok: {len(model_folders.CHATML)} characters, from tokenizer_config.json: chat_template"]
    assert found["sampling"] == ["ok: temperature 0.7, from generation_config.json: temperature"]
    assert told(folder, max_model_len="1000", generation_config="baton")["context"][0].startswith(
        "ok: 1000 tokens, from model.max_model_len"
    )
    assert told(folder, generation_config="baton")["sampling"] == ["ok: Baton's own defaults, from model.generation_config"]


def test_what_would_surprise_is_a_warning(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=None, vocab_size=332)
    edit(folder / "generation_config.json", eos_token_id=None, num_beams=2)
    edit(folder / "tokenizer_config.json", eos_token=None, chat_template=None)
    found = told(folder)
    assert found["end"] == ["warn: no file names an end token: outputs end at max_tokens, a stop token or a stop string"]
    assert any(detail.startswith("warn: <|pad|> is left out") for detail in found["tokens"])
    assert found["template"] == ["warn: no chat template: chats are refused, prompts are served"]
    assert found["sampling"][-1] == "warn: generation_config.json asks for num_beams, which is not done here"
    edit(folder / "config.json", eos_token_id=9999)
    assert told(folder)["end"] == ["warn: 9999, which no token has, from config.json: eos_token_id"]


def test_what_would_be_refused_fails_with_file_and_field(folder: Path) -> None:
    assert told(folder, max_model_len="131073")["context"][0].startswith("fail: model.max_model_len 131073 is more than 131072")
    edit(folder / "tokenizer_config.json", split_special_tokens=True)
    edit(folder / "generation_config.json", top_p=3)
    edit(folder / "config.json", max_position_embeddings="long")
    found = told(folder)
    assert found["tokens"][0].startswith(f"fail: {folder / 'tokenizer_config.json'}: split_special_tokens:")
    assert found["sampling"][0].startswith(f"fail: {folder / 'generation_config.json'}: top_p:")
    assert found["context"][0].startswith(f"fail: {folder / 'config.json'}: max_position_embeddings:")
    assert told(folder / "elsewhere")["tokens"] == [f"fail: model.path: {folder / 'elsewhere'} holds no tokenizer.json"]


def test_doctor_takes_the_model_as_its_argument(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *arguments: [])
    shown = CliRunner().invoke(app, ["doctor", str(folder), "--json"])
    assert shown.exit_code == 0 and "context" in {finding["subject"] for finding in json.loads(shown.output)}
    without = CliRunner().invoke(app, ["doctor", "--json", "--router.port=0"], env={"BATON_MODEL_PATH": ""})
    assert (without.exit_code, json.loads(without.output)) == (0, [])
    edit(folder / "tokenizer_config.json", split_special_tokens=True)
    assert CliRunner().invoke(app, ["doctor", str(folder)]).exit_code == 1
