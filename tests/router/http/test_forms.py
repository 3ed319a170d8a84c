"""The form of an answer, in OpenAI's and vLLM's words."""

import json
from typing import Any

import pytest

from baton.engine.core.grammar import Grammar
from router.http import openai_in
from router.http.errors import HttpError
from router.http.forms import written
from router.http.openai_in import Asked, Caller

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)


def asked(**fields: Any) -> Asked:
    return openai_in.chat(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), Caller("r"))


def form(**fields: Any) -> Grammar | None:
    return asked(**fields).asks[0].sampling.structured


@pytest.mark.parametrize(
    "fields, grammar",
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json", "")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, Grammar("json_schema", TEXT, False)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
            Grammar("json_schema", TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA, "backend": "auto", "disable_any_whitespace": True}}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"json": TEXT, "strict": False}}, Grammar("json_schema", TEXT, False)),
        ({"structured_outputs": {"json_object": True, "regex": None}}, Grammar("json", "")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": "start: x"}}, Grammar("ebnf", "start: x")),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
        ({"guided_grammar": "x"}, Grammar("ebnf", "x")),
        ({"guided_grammar": "x", "response_format": {"type": "text"}}, Grammar("ebnf", "x")),
    ],
)
def test_each_way_to_ask_for_a_form(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert form(**fields) == grammar
    completion = openai_in.completion(json.dumps({"prompt": "hi", **fields}).encode(), Caller("r"))
    assert completion.asks[0].sampling.structured == grammar
    if grammar is not None:
        assert form(structured_outputs=written(grammar)) == grammar, "what an answer names can be asked for again"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, "response_format.json_schema.strict"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": 1}}}, "response_format.json_schema.strickt"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": 3}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
    ],
)
def test_what_is_no_form_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        form(**fields)
    assert caught.value.status == 400 and caught.value.param == param


def test_a_refusal_names_the_parameter_of_the_request() -> None:
    assert asked(guided_json={}).names["structured"] == "guided_json"
    assert asked(response_format={"type": "json_object"}).names["structured"].startswith("response_format")
