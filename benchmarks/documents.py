"""JSON documents that a random load asks for, and whether an answer is one: judged by another library than the one that makes the masks."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from baton.engine.core.grammar import Grammar
from baton.engine.core.masks import Matcher
from baton.engine.grammars.library import Compiled, Vocabulary, compile_grammar

TEXT = {"type": "string", "maxLength": 12}
TAGS = {"type": "array", "items": TEXT, "maxItems": 3}
PERSON = {
    "type": "object",
    "properties": {"name": TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "tags": TAGS},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    PERSON,
    {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"enum": [None, "é", 7]}]}, "maxItems": 9},
    {"type": "object", "properties": {"at": {"type": "string", "format": "ipv4"}, "who": {"$ref": "#/$defs/p"}}, "required": ["at", "who"],
     "additionalProperties": False, "$defs": {"p": PERSON}},
    {"type": "string", "pattern": "^[a-f]{2,20}-[0-9]{1,9}$"},
)  # fmt: skip


class Documents:
    def __init__(self, model: Path, vocab_size: int, eos: frozenset[int]) -> None:
        self._vocabulary, self._eos = Vocabulary.load(model, vocab_size, sorted(eos)), eos
        self._compiled = cache(self._compile)

    def draw(self, rng: random.Random) -> Grammar:
        return Grammar("json_schema", json.dumps(rng.choice(SCHEMAS)))

    def matcher(self, form: Grammar | None) -> Matcher | None:
        return None if form is None else self._compiled(form).matcher()

    def ended(self, tokens: list[int]) -> bool:
        """Whether the output ended by itself. Else it was cut, and half a document is what was asked for."""
        return bool(tokens) and tokens[-1] in self._eos

    def valid(self, form: Grammar, tokens: list[int]) -> bool:
        """Whether an output that ended by itself is a document of the form."""
        text = b"".join(self._vocabulary.spelled(token, "") for token in tokens[:-1])
        try:
            document = json.loads(text)
        except ValueError:
            return False
        return bool(Draft202012Validator(json.loads(form.text)).is_valid(document))

    def _compile(self, form: Grammar) -> Compiled:
        return compile_grammar(self._vocabulary, form)
