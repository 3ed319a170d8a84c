"""Every keyword of a schema is enforced, or refused with its path. Sizes are bounded before the library sees anything."""

import json
import time
from typing import Any

import pytest
from turns import within

from baton.engine.core.grammar import GrammarRefused
from baton.engine.grammars.keywords import ANNOTATIONS, ENFORCED, MAX_BYTES, MAX_DEPTH, MAX_LITERAL, MAX_NAMES, MAX_WRITTEN_OUT, read_schema
from baton.engine.grammars.repetition import written_out


def refusal(schema: Any, strict: bool = True) -> GrammarRefused:
    with pytest.raises(GrammarRefused) as caught:
        read_schema(schema if isinstance(schema, str) else json.dumps(schema), strict)
    return caught.value


@pytest.mark.parametrize(
    "keyword, value",
    [
        ("not", {}),
        ("if", {}),
        ("then", {}),
        ("else", {}),
        ("contains", {}),
        ("minContains", 1),
        ("uniqueItems", True),
        ("dependencies", {}),
        ("dependentRequired", {}),
        ("dependentSchemas", {}),
        ("propertyNames", {}),
        ("unevaluatedItems", False),
        ("unevaluatedProperties", False),
        ("$dynamicRef", "#a"),
        ("$dynamicAnchor", "a"),
        ("$recursiveRef", "#"),
        ("nullable", True),
        ("discriminator", {}),
        ("propertis", {}),
        ("format", "regex"),
        ("format", "unknown"),
        ("minProperties", 1),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_where_it_stands(keyword: str, value: Any) -> None:
    """The library ignores names that it does not know, in silence; the others it refuses without a path."""
    schema = {"type": "object", "properties": {"a": {"items": {keyword: value}}}}
    assert refusal(schema).path == f"$.properties.a.items.{keyword}"
    read = read_schema(json.dumps(schema), strict=False)
    assert read.schema == {"type": "object", "properties": {"a": {"items": {}}}}
    assert len(read.dropped) == 1 and read.dropped[0].startswith(f"$.properties.a.items.{keyword}: ")


@pytest.mark.parametrize(
    "schema, path",
    [
        ("{", "$"),
        ("3", "$"),
        ("[]", "$"),
        ("null", "$"),
        ("false", "$"),
        ('{"const": NaN}', "$"),
        ('{"maximum": 1e999}', "$"),
        ({"type": "strng"}, "$.type"),
        ({"type": []}, "$.type"),
        ({"type": ["string", {}]}, "$.type"),
        ({"properties": []}, "$.properties"),
        ({"properties": {"a b": 3}}, '$.properties["a b"]'),
        ({"required": "a"}, "$.required"),
        ({"required": [1]}, "$.required"),
        ({"enum": []}, "$.enum"),
        ({"minLength": -1}, "$.minLength"),
        ({"minLength": 1.0}, "$.minLength"),
        ({"pattern": 3}, "$.pattern"),
        ({"minimum": "1"}, "$.minimum"),
        ({"multipleOf": 0}, "$.multipleOf"),
        ({"anyOf": []}, "$.anyOf"),
        ({"anyOf": [{}, 3]}, "$.anyOf[1]"),
        ({"$ref": "http://elsewhere/x"}, "$.$ref"),
        ({"$defs": {"x": {"$ref": "other.json"}}}, "$.$defs.x.$ref"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$.$schema"),
        ({"$schema": 7}, "$.$schema"),
        ({"allOf": [{"items": [{"not": {}}]}]}, "$.allOf[0].items[0].not"),
        ({"additionalProperties": {"not": {}}}, "$.additionalProperties.not"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "$.maxProperties"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_path(schema: Any, path: str) -> None:
    assert refusal(schema).path == path


@pytest.mark.parametrize(
    "schema, path",
    [
        ('{"items":' * (MAX_DEPTH + 1) + "{}" + "}" * (MAX_DEPTH + 1), "$"),
        ("[" * 30_000, "$"),
        ({"enum": list(range(10_001))}, "$"),
        ({"const": "x" * MAX_BYTES}, "$"),
        ({"required": [f"k{i}" for i in range(MAX_NAMES + 1)]}, "$.required"),
        ({"properties": {f"k{i}": {} for i in range(MAX_NAMES + 1)}}, "$.properties"),
        ({"items": {"pattern": "^(a{1000}){1000}$"}}, "$.items.pattern"),
        ({"pattern": f"^a{{{MAX_WRITTEN_OUT + 1}}}$"}, "$.pattern"),
        ({"pattern": "a{" + "9" * 5000 + "}"}, "$.pattern"),
        ({"patternProperties": {"^(a{200}){100}": {}}}, '$.patternProperties["^(a{200}){100}"]'),
        ({"allOf": [{"pattern": "a{6000}"}, {"pattern": "b{6000}"}]}, "$.allOf[1].pattern"),
        ({"const": "x" * MAX_LITERAL}, "$.const"),
        ({"enum": [1, ["x" * MAX_LITERAL]]}, "$.enum"),
        ({"prefixItems": [{"const": "x" * 5000}, {"enum": ["x", "x" * 5000]}]}, "$.prefixItems[1].enum"),
        ({"properties": {f"{i:0100}": {"const": 1} for i in range(MAX_LITERAL // 100 + 1)}}, "$.properties"),
        ({"properties": {"x" * (MAX_LITERAL + 1): {}}}, "$.properties"),
        ({"required": ["x" * (MAX_LITERAL + 1)]}, "$.required"),
    ],
)
def test_what_is_too_large_is_refused_at_once(schema: Any, path: str) -> None:
    began = time.thread_time()
    assert refusal(schema).path == path
    assert refusal(schema, strict=False).path == path
    within(time.thread_time() - began, 0.2)


def test_annotations_and_switched_off_keywords_say_nothing() -> None:
    schema = {name: "x" for name in ANNOTATIONS - {"$schema"}} | {"x-order": 1, "x-guidance": {"lenient": True}, "uniqueItems": False}
    read = read_schema(json.dumps({**schema, "type": "null"}))
    assert not read.dropped and not {"x-guidance", "uniqueItems", "x-order"} & set(read.schema) and read.schema["type"] == "null"


def test_no_keyword_is_both_enforced_and_an_annotation() -> None:
    assert not ANNOTATIONS & set(ENFORCED)


def test_true_is_any_document() -> None:
    assert read_schema("true").schema == {}


@pytest.mark.parametrize(
    "pattern, size",
    [
        ("abc", 3),
        ("a{3}", 3),
        ("(ab){3}", 6),
        ("((a{10}){10}){10}", 1000),
        ("a{2,5}b", 6),
        ("a{3,}", 3),
        ("[a-z{3}]{4}", 4),
        (r"\{3}", 3),
        (r"[\]]{5}", 5),
        (r"\p{Letter}{7}", 7),
        ("(a|b){5}", 10),
        ("a{0}", 1),
        ("{3}", 0),
        ("", 0),
        ("(a{2}", 2),
        (")", 1),
        ("[]a]{9}", 9),
        ("a{2}{3}", 6),
        ("[", 1),
        ("\\", 1),
    ],
)
def test_the_size_of_an_expression_with_its_repetitions_written_out(pattern: str, size: int) -> None:
    assert written_out(pattern) == size
