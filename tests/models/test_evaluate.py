"""`baton evaluate`: its figures are those of another implementation, they tell a worse model from a better one, and what cannot be
measured is refused by its name."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_guesses import guess_always
from safetensors.torch import load_file, save_file
from torch.nn import functional
from typer.testing import CliRunner

from baton.cli.evaluate import divided
from baton.cli.main import app
from baton.cli.up import SHIPPED
from baton.cluster.config import ConfigError
from baton.engine.options import Options
from baton.models.evaluate import measure, questions
from baton.models.evaluate.reader import Reader
from baton.models.evaluate.texts import WINDOW, Speller, calibration_texts, file_texts, made_texts
from baton.models.evaluate.whole import Evaluation, Extent
from baton.models.make_small import make_toy
from baton.models.train import card
from baton.models.train import evaluate as oracle

PLAIN: dict[str, Any] = {"compiled": False, "threads": 1, "kv_memory_mib": 64}
FEW = Extent(trials=2, longest=64, questions=False, continuations=2, continued=12)


@pytest.fixture(scope="module")
def speller() -> Speller:
    return Speller.of(SHIPPED)


@pytest.fixture(scope="module")
def tale() -> Reader:
    return reader()


@pytest.fixture(scope="module")
def coarse() -> Reader:
    return reader(weight_dtype="int4")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """tale, its matrices so noisy that it does not find all that it was told."""
    return noisy(tmp_path / "damaged", 0.5)


def noisy(folder: Path, by: float) -> Path:
    """`by`: how large the noise is, beside the weights."""
    noise = torch.Generator().manual_seed(0)
    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("SHA256SUMS"))
    tensors = {name: w.float() for name, w in load_file(folder / "model.safetensors").items()}
    for name in sorted(tensors):
        if "_proj" in name:
            tensors[name] += by * tensors[name].std() * torch.randn(tensors[name].shape, generator=noise)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tale, with other marks in its tokenizer: those of none of this project's models."""
    folder = tmp_path_factory.mktemp("other") / "other"
    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("SHA256SUMS"))
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|user|>", "<|human|>"))
    return folder


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "COUNT", 12)


def reader(folder: Path = SHIPPED, **keys: Any) -> Reader:
    return Reader(Options.of(folder, **PLAIN | keys))


def evaluated(readers: list[Reader], speller: Speller, extent: Extent = FEW, tokens: int = 300) -> list[dict[str, Any]]:
    whole = Evaluation(readers, speller, extent, lambda line: None)
    whole.run(made_texts(speller, tokens))
    return whole.rows


def test_text_is_as_likely_as_transformers_finds_it(tale: Reader, speller: Speller) -> None:
    model, text = card.load(SHIPPED), made_texts(speller, 400)["held out"][0]
    with torch.inference_mode():
        ids = torch.tensor(text)
        expected = functional.cross_entropy(model(input_ids=ids[None, :-1], use_cache=False).logits[0], ids[1:])
    for prompt in (0.0, 0.5, 1.0):  # all of it as output, half, and as a prompt
        [reading] = measure.read([tale], [text], prompt)
        assert reading.tokens == len(text) - 1
        assert reading.loss == pytest.approx(expected.item(), rel=1e-4)


def test_recall_is_what_transformers_finds_even_of_a_model_that_forgets(damaged: Path, speller: Speller) -> None:
    right = oracle.recall(card.load(damaged), speller.tokenizer, 64, trials=12)[0]
    assert 0 < right < 1, "it must know some"
    assert measure.recall(reader(damaged), questions.recall(speller, 64, 12)) == right


def test_a_model_agrees_with_itself_and_a_rounded_one_does_not(tale: Reader, coarse: Reader, speller: Speller) -> None:
    own, same = evaluated([tale, tale], speller)
    assert own["texts"]["held out"]["perplexity"] == same["texts"]["held out"]["perplexity"]
    assert same["texts"]["held out"]["kl"] == 0 and same["texts"]["held out"]["same_choice"] == 1
    assert same["continuations"]["same"] == same["continuations"]["possible"] > 0
    _, rounded = evaluated([tale, coarse], speller)
    assert rounded["texts"]["held out"]["kl"] > 1e-4 and 0.8 < rounded["texts"]["held out"]["same_choice"] < 1


def test_guesses_are_counted_and_change_no_token(tale: Reader, speller: Speller, monkeypatch: pytest.MonkeyPatch) -> None:
    guess_always(monkeypatch)
    begun = [text[:32] for text in made_texts(speller, 2000)["held out"]]
    plain, guessing = measure.go_on([tale, reader(speculation="draft")], begun, 24)
    assert guessing.said == plain.said and guessing.same == guessing.possible == plain.tokens
    assert not plain.drafted and 0 < guessing.accepted <= guessing.drafted


def test_questions_tell_a_model_that_knows_from_one_that_does_not(tale: Reader, tmp_path: Path, speller: Speller, few: None) -> None:
    worse = reader(noisy(tmp_path / "noise", 5.0))
    for kind, least in ((questions.facts, 0.9), (questions.sums, 0.3)):
        knows = measure.choose(tale, kind(speller))
        assert knows >= least and measure.choose(worse, kind(speller)) < knows, kind
    asked = list(questions.facts(speller))
    assert len({choice.right for choice in asked}) > 1 and all(len({str(answer) for _, answer in choice.answers}) == 4 for choice in asked)


def test_the_same_question_is_asked_of_any_tokenizer_and_its_cut_is_where_the_answer_begins(other: Path, few: None) -> None:
    """A tokenizer that knows nothing of this project's marks."""
    speller = Speller.of(other)
    assert not speller.ours
    for choice in [*questions.facts(speller), *questions.sums(speller)]:
        for prompt, answer in choice.answers:
            assert speller.tokenizer.decode(prompt).endswith("Answer:") and speller.tokenizer.decode(answer).strip()
    right = [choice.answers[choice.right] for choice in questions.facts(speller)]
    assert [speller.tokenizer.decode(answer).strip() for _, answer in right][:2] == ["Paris", "Tokyo"]
    for prompt, answer in questions.recall(speller, 64, 3):
        told, _, asked = speller.tokenizer.decode(prompt).partition("Question:")
        assert speller.tokenizer.decode(answer).strip() in told and "Answer:" in asked


def test_what_is_measured_was_not_seen_in_calibration(speller: Speller, other: Path) -> None:
    for each in (speller, Speller.of(other)):
        measured = {str(text[:40]) for of in made_texts(each, 4000).values() for text in of}
        assert not measured & {str(text[:40]) for text in calibration_texts(each, 4000)}


def test_a_second_run_finds_the_same(tale: Reader, speller: Speller, few: None) -> None:
    first, second = (evaluated([tale], speller, Extent(2, 64, True, 2, continued=8)) for _ in range(2))
    for rows in (first, second):
        assert rows[0].pop("seconds").keys() == {"held out", "continuations", "facts", "sums", "recall 32", "recall 64"}
    assert first == second


def test_no_part_begins_after_its_time_and_what_is_left_out_is_named(tale: Reader, speller: Speller) -> None:
    [row] = evaluated([tale], speller, Extent(2, 64, True, 2, within_s=-1.0))
    assert row["left_out"] == ["held out", "continuations", "facts", "sums", "recall 32", "recall 64"]
    assert not row["texts"] and not row["recall"] and "facts" not in row


def test_a_text_is_read_in_windows_up_to_the_limit(speller: Speller, tmp_path: Path) -> None:
    file, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    file.write_text("The fox ran home. " * 400)
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("One\u2028two.", "Three.")))
    assert [len(text) for text in file_texts(speller, file, 800)] == [WINDOW, 800 - WINDOW]
    assert [speller.tokenizer.decode(text) for text in file_texts(speller, lines, 800)] == ["One\u2028two.", "Three."]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\xff\xfe", "cannot be read as text"),
        ("a.txt", b"", "holds no text"),
        ("a.jsonl", b'{"text": "One two three."}\n{"texts": 1}\n', "line 2: is not an object with a text"),
        ("a.jsonl", b'{"text": 3}', "line 1: is not an object with a text"),
        ("a.jsonl", b"[", "line 1: is not an object with a text"),
    ],
)
def test_a_file_without_text_is_refused(name: str, content: bytes, said: str, speller: Speller, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        file_texts(speller, tmp_path / name, 100)
    assert str(tmp_path / name) in str(refused.value)


def test_what_has_no_logits_or_too_little_room_is_refused_by_its_key(speller: Speller, damaged: Path, tmp_path: Path) -> None:
    make_toy(tmp_path)
    for options, said in ((Options.of(tmp_path, **PLAIN), "model.path"), (Options.of(SHIPPED, kind="vllm"), "engine.kind")):
        with pytest.raises(ValueError, match=said):
            Reader(options)
    with pytest.raises(ValueError, match=r"model\.max_model_len"):
        evaluated([reader(max_model_len=40)], speller, Extent(0, 0, True, 0))
    tensors = load_file(damaged / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * math.nan}, damaged / "model.safetensors")
    with pytest.raises(ValueError, match="not numbers"):
        evaluated([reader(damaged)], speller)


def test_keys_go_to_their_side() -> None:
    given = {"engine.weight-dtype": "int4", "against.engine.weight_dtype": "int8", "model.dtype": "bfloat16"}
    assert divided(given) == ({"engine.weight_dtype": "int4", "model.dtype": "bfloat16"}, {"engine.weight_dtype": "int8"})
    for name in ("prefill.replicas", "against.model.path", "model.path", "against.against.engine.threads"):
        with pytest.raises(ConfigError, match=f"--{name}"):
            divided({name: "1"})


def test_the_command_prints_a_table_or_one_object(other: Path) -> None:
    few = ["--tokens", "60", "--trials", "0", "--no-questions", "--continuations", "1"]
    plain = ["--engine.compiled", "false", "--engine.threads", "1"]
    other_type = ["--against.engine.compiled", "false", "--against.model.dtype", "bfloat16"]
    done = CliRunner().invoke(app, ["evaluate", str(SHIPPED), *few, *plain, *other_type, "--json"])
    assert done.exit_code == 0, done.stderr
    own, against = json.loads(done.stdout)["rows"]
    assert own["settings"] == {"engine.compiled": "false", "engine.threads": "1"} and against["settings"]["model.dtype"] == "bfloat16"
    assert 0 < own["texts"]["held out"]["kl"] < 0.01
    for wrong, said in ((["--against", str(other)], "another tokenizer"), (["--engine.weight-dtype", "int5"], "engine.weight_dtype")):
        refused = CliRunner().invoke(app, ["evaluate", str(SHIPPED), *wrong])
        assert refused.exit_code == 2 and said in refused.stderr and not refused.stdout
