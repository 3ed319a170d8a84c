"""The official JSON Schema test suite, draft 2020-12 (MIT licence). `json_schema_suite` has a line for each schema, with its instances as
[document, valid]. Under a schema that is accepted, no invalid document may be."""

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import baton.models
from baton.engine.core.grammar import Grammar, GrammarRefused
from baton.engine.core.masks import allows
from baton.engine.grammars.library import Vocabulary, compile_grammar

SUITE = Path(__file__).parent / "json_schema_suite" / "draft2020-12.jsonl"
EOS = 1
# Of the suite's optional formats, as assertions: the shape is enforced, see docs/structured.md. Format → invalid documents accepted.
SHAPES_ONLY = {"hostname": 24, "time": 10, "date": 3, "date-time": 2}


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.load(Path(baton.models.__file__).parent / "tale", 2048, [EOS])


def measured(strict: bool, formats: bool = False) -> tuple[Counter[str], Counter[str], list[str]]:
    """What happened, wrong acceptances by file, and schemas whose refusal has no path."""
    counts, wrong, pathless = Counter[str](), Counter[str](), list[str]()
    for line in SUITE.read_text().splitlines():
        case = json.loads(line)
        if case["file"].startswith("optional/format/") is not formats:
            continue
        try:
            form = compile_grammar(vocabulary(), Grammar("json_schema", json.dumps(case["schema"]), strict))
        except GrammarRefused as refused:
            counts["refused"] += 1
            if not refused.path.startswith("$"):
                pathless.append(case["description"])
            continue
        counts["accepted"] += 1
        if form.relaxed:
            counts["relaxed"] += 1
            continue
        for document, valid in case["tests"]:
            right = fits(form, document) is valid
            counts["right" if right else "wrongly rejected" if valid else "wrongly accepted"] += 1
            wrong[case["file"].rsplit("/")[-1]] += not right and not valid
    return counts, +wrong, pathless


def fits(form: Any, document: Any) -> bool:
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
    words = form.matcher().mask(vocabulary().tokens.tokenize_str(text))
    return words is not None and words.any() and allows(words, EOS)


@pytest.mark.parametrize("strict", [True, False])
def test_no_invalid_document_is_accepted_under_an_accepted_schema(strict: bool) -> None:
    counts, wrong, pathless = measured(strict)
    assert not wrong and not pathless
    assert counts["accepted"] >= 140 and counts["wrongly rejected"] <= 30, counts


def test_formats_are_enforced_as_the_page_says() -> None:
    counts, wrong, pathless = measured(True, formats=True)
    assert wrong == SHAPES_ONLY and not pathless and counts["right"] > 250


def test_a_wrong_acceptance_is_noticed() -> None:
    """Negative control: with what is dropped taken for enforced, there are many."""
    text = json.dumps({"not": {"type": "integer"}})
    assert fits(compile_grammar(vocabulary(), Grammar("json_schema", text, strict=False)), 3)
