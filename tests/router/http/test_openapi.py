"""The OpenAPI document and docs/http.md agree with the parameter models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from router.http.body import Neutral, Rule
from router.http.errors import HttpError
from router.http.openai_in import Caller, Chat, Completion, chat, completion
from router.http.openapi import document
from router.http.responses_in import Response, response
from router.http.tokens_in import Generate, TokenSampling, generate

PAGE = Path(__file__).resolve().parents[3] / "docs" / "http.md"
PARAMETERS = Chat.model_fields | Completion.model_fields
RULES = {name: next((one for one in info.metadata if isinstance(one, Rule)), None) for name, info in PARAMETERS.items()}
READERS: dict[str, Any] = {"Chat": chat, "Completion": completion, "Response": response}
ITEMS = st.lists(
    st.sampled_from(
        [
            {"role": "user", "content": "x"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
            {"type": "function_call", "call_id": "c", "name": "n", "arguments": "{}", "status": "completed"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "item_reference", "id": "x"},
            {"role": "tool", "content": "x"},
            {"type": "function_call"},
            "x",
        ]
    ),
    max_size=3,
)
VALUES = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 0.5, 1 << 70, "", "x", "auto", "none", [], ["a"], [1], [[1], [2]], ["a", [1]], {}, {"5": 1},
        {"type": "text"},
    ]
)  # fmt: skip
MESSAGES = st.sampled_from(
    [
        {"role": "user", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": "x", "tool_calls": [], "refusal": None},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": "user", "content": None},
        {"role": "user", "content": "x", "name": "y"},
        "x",
    ]
)


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document()["components"]})


def test_the_schemas_of_the_document_are_valid() -> None:
    for name, schema in document()["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object", name


@settings(max_examples=400, deadline=None)
@example("Completion", {}, [], ["a", [1]])
@given(
    st.sampled_from([*READERS]),
    st.dictionaries(st.sampled_from([*PARAMETERS, *Response.model_fields, "other"]), VALUES, max_size=4),
    st.lists(MESSAGES, max_size=2),
    VALUES | ITEMS,
)
def test_every_accepted_body_is_valid_by_the_document(name: str, fields: dict[str, Any], messages: list[Any], prompt: Any) -> None:
    body = fields | {"Chat": {"messages": messages}, "Completion": {"prompt": prompt}, "Response": {"input": prompt}}[name]
    try:
        READERS[name](json.dumps(body).encode(), Caller("r"))
    except HttpError:
        return
    validator(name).validate(body)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*Generate.model_fields, "other"]), VALUES, max_size=3),
    st.dictionaries(st.sampled_from([*TokenSampling.model_fields, "other"]), VALUES, max_size=3),
)
def test_every_accepted_list_of_token_ids_is_valid_by_the_document(fields: dict[str, Any], how: dict[str, Any]) -> None:
    body = {"token_ids": [1], "sampling_params": how} | fields
    try:
        generate(json.dumps(body).encode(), Caller("r"))
    except HttpError as error:
        assert error.status == 400
        return
    validator("Generate").validate(body)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("Chat", {}),
        ("Chat", {"messages": []}),
        ("Chat", {"messages": [{"role": "wizard", "content": "x"}]}),
        ("Chat", {"messages": [{"role": "user", "content": "x"}], "other": 1}),
        ("Chat", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}),
        ("Response", {}),
        ("Response", {"input": []}),
        ("Response", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("Response", {"input": [{"type": "function_call", "call_id": "c"}]}),
        ("Response", {"input": [{"role": "tool", "content": "x"}]}),
        ("Response", {"input": "x", "response_format": {}}),
        ("Response", {"input": "x", "background": True}),
        ("Completion", {"prompt": 1}),
        ("Completion", {"prompt": "x", "n": 0}),
        ("Completion", {"prompt": "x", "suffix": "x"}),
        ("Completion", {"prompt": "x", "temperature": "1"}),
        ("Generate", {"token_ids": [], "sampling_params": {}}),
        ("Generate", {"token_ids": [1]}),
        ("Generate", {"token_ids": [1], "sampling_params": {"temperature": "1"}}),
        ("Generate", {"token_ids": [1], "sampling_params": {"allowed_token_ids": [1]}}),
        ("Generate", {"token_ids": [1], "sampling_params": {}, "output_mode": "sound"}),
    ],
)
def test_a_body_refused_for_its_shape_is_invalid_by_the_document(name: str, body: Any) -> None:
    """Negative control."""
    assert not validator(name).is_valid(body)


def test_docs_http_md_lists_every_parameter_in_the_right_row() -> None:
    table = PAGE.read_text().partition("## Parameters")[2].partition("\n- Roles")[0]
    effective, extra, without, neutral = (
        {*re.findall(r"`([a-z_]+)`", row.split("|")[1])} for row in table.splitlines() if row.startswith("| `")
    )
    assert neutral == {name for name, rule in RULES.items() if isinstance(rule, Neutral)}
    assert without == {name for name, rule in RULES.items() if rule is None}
    assert effective | extra == set(PARAMETERS) - neutral - without
