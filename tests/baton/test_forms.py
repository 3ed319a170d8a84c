"""The form of an answer, as the client's caller says it."""

from typing import Any

import pytest

from baton.client import build_request


@pytest.mark.parametrize(
    "given, kind, text",
    [
        ({"json_schema": {"type": "null"}}, "json_schema", '{"type": "null"}'),
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ("a", "b")}, "choice", '["a", "b"]'),
        ({"structured": {"kind": "ebnf", "text": "x"}, "regex": None}, "ebnf", "x"),
    ],
)
def test_each_way_to_ask_for_a_form(given: dict[str, Any], kind: str, text: str) -> None:
    form = build_request("hi", **given).sampling.structured
    assert (form.kind, form.text, form.HasField("strict")) == (kind, text, False)


def test_an_answer_has_one_form_or_none() -> None:
    assert not build_request("hi").sampling.HasField("structured")
    with pytest.raises(TypeError, match="one of"):
        build_request("hi", regex="a", choice=["a"])
    with pytest.raises(TypeError, match="one of"):
        build_request("hi", regex="a", structured={"kind": "regex", "text": "a"})
