"""What every request body of the HTTP API is made of: models, and rules that say what a value must be."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema

from router.http.errors import HttpError, bad_value
from router.http.json_body import parse

UNSUPPORTED = "unsupported_parameter"


@dataclass(frozen=True)
class Rule:
    """What a client is told when its value is refused."""

    must: str | Callable[[Any], str]
    code: str = "invalid_value"


@dataclass(frozen=True)
class Neutral(Rule):
    """An unsupported parameter that would change the answer. Only `values` and null are accepted: they ask for nothing."""

    code: str = UNSUPPORTED
    values: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [*self.values, None]}

    def _check(self, value: Any) -> Any:
        if value is not None and not any(type(value) is type(known) and value == known for known in self.values):
            raise ValueError
        return value


def neutral(*values: Any) -> Neutral:
    written = " or ".join(json.dumps(value) for value in values or (None,))
    return Neutral(f"is not supported here (only {written} is accepted)", values=values)


class Body(BaseModel):
    """Strict: neither `true` nor `"1"` is a number. null is the same as absent, also where the name is unknown: clients send the names of
    other servers' parameters with null."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, json_schema_extra={"additionalProperties": {"type": "null"}})

    @model_validator(mode="before")
    @classmethod
    def _nulls_are_absent(cls, given: Any) -> Any:
        if type(given) is dict and None in given.values():
            return {name: value for name, value in given.items() if value is not None}
        return given


def sized(most: int, what: str, otherwise: str) -> Callable[[Any], str]:
    """Distinguishes a list or an object that is refused for its size."""

    def must(value: Any) -> str:
        if not isinstance(value, list | dict) or 0 < len(value) <= most:
            return otherwise
        return f"must be at most {most} {what} (got {len(value)})" if value else "must not be empty"

    return must


Whatever = Any  # cannot change the answer
Integer = Annotated[int | None, Rule("must be an integer")]
Number = Annotated[float | None, Rule("must be a number")]
Boolean = Annotated[bool | None, Rule("must be a boolean")]
String = Annotated[str | None, Rule("must be a string")]


B = TypeVar("B", bound=Body)


def read(body: bytes, model: type[B]) -> B:
    """Raises HttpError."""
    tree = parse(body)
    try:
        return model.model_validate(tree)
    except ValidationError as refused:
        raise refusal(model, tree, refused) from None


def refusal(model: type[Body], tree: Any, refused: ValidationError) -> HttpError:
    """The first thing that is wrong with `tree`, with its path.

    pydantic's path goes through fields, indices and the tags of unions. Where several models may stand, the tag is the name of one.
    """
    where, value, rule, models = "", tree, Rule("must be an object"), {model.__name__: model}
    for step in refused.errors(include_url=False, include_context=False, include_input=False)[0]["loc"]:
        if isinstance(step, int):
            where, value, rule = f"{where}[{step}]", value[step], Rule("must be an object")
        elif not isinstance(value, dict):
            continue
        elif len(models) > 1:
            models = {str(step): models[str(step)]}
        else:
            (here,) = models.values()
            where = f"{where}.{step[:80]}" if where else step[:80]
            if step not in here.model_fields:
                return bad_value(where, "is not a known parameter", "unknown_parameter")
            rule = next(one for one in here.model_fields[step].metadata if isinstance(one, Rule))
            value = value.get(step)
            if value is None:
                return bad_value(where, "must be given", "missing_required_parameter")
            if not (models := _within(here, step)):
                break
    must = rule.must if isinstance(rule.must, str) else rule.must(value)
    return bad_value(where, must, rule.code)


@cache
def _within(model: type[Body], field: str) -> dict[str, type[Body]]:
    """The models that may stand in a field, by their names."""

    def found(annotation: Any) -> dict[str, type[Body]]:
        if isinstance(annotation, type) and issubclass(annotation, Body):
            return {annotation.__name__: annotation}
        return {name: one for argument in get_args(annotation) for name, one in found(argument).items()}

    return found(model.model_fields[field].annotation)
