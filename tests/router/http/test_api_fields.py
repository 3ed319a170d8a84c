"""The tables of docs/apis.md say what becomes of a field: here it does."""

import json
from typing import Any

import pytest
from api_fields import APIS, Api, fate

from router.http.body import read
from router.http.errors import HttpError

FIELDS = [(api, name) for api in APIS for name in sorted(set(api.model.model_fields).union(*api.known.values()))]
HELLO = [{"role": "user", "content": "hi"}]
NEEDED: dict[str, Any] = {"messages": HELLO, "max_tokens": 5, "prompt": "hi", "token_ids": [1], "sampling_params": {}}


def refusal(api: Api, **fields: Any) -> str | None:
    """The parameter that is refused."""
    body = {name: NEEDED[name] for name, told in api.model.model_fields.items() if told.is_required()} | fields
    try:
        read(json.dumps(body).encode(), api.model)
    except HttpError as error:
        assert error.status == 400
        return error.param
    return None


@pytest.mark.parametrize("api, name", FIELDS, ids=lambda each: each if isinstance(each, str) else each.title)
def test_a_field_has_the_fate_that_the_table_tells(api: Api, name: str) -> None:
    told = fate(api, name)
    strange = refusal(api, **{name: {"no": [1, {"such": "value"}]}})
    if told.startswith("refused"):
        assert strange == name
    if told.startswith("harmless"):
        assert strange is None
    if name not in NEEDED:
        assert refusal(api, **{name: None}) is None
    for value in told.removeprefix("refused, except ").split(" or ") if "except" in told else ():
        assert refusal(api, **{name: json.loads(value.strip("`"))}) is None


def test_every_api_has_its_fields_and_a_name_that_is_in_no_table_is_refused() -> None:
    assert len({api.title for api in APIS}) == len(APIS) >= 2
    for api in APIS:
        assert refusal(api) is None and refusal(api, no_such_field=1) == "no_such_field"
        assert any(fate(api, name) == "honoured" for name in api.model.model_fields)
