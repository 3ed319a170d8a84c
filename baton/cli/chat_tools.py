"""The tools of `baton chat --tools`, which run on this machine: a calculator, the time, and a look-up in a file of facts.

What a model writes is never run as code: the calculator knows numbers, signs and the operators of arithmetic.
"""

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

MAX_EXPRESSION = 500  # characters
MAX_POWER = 1000  # bits of a result, about
_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, power: _power(base, power),
}


class Toolbox:
    def __init__(self, facts: Mapping[str, Any] | None = None, now: Callable[[ZoneInfo | None], datetime] = datetime.now) -> None:
        """`facts`: what `look_up` finds, by name; without them there is no such tool."""
        self._facts = {name.casefold(): fact for name, fact in (facts or {}).items()}
        self._now = now
        text = {"type": "string"}
        self._offered: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Any]], str]]] = {
            "calculate": ("Computes an arithmetic expression.", {"expression": text}, lambda given: calculate(str(given["expression"]))),
            "time": ("The date and the time, here or in an IANA time zone.", {"zone": text}, self._time),
        }
        if facts is not None:
            self._offered["look_up"] = ("Looks up a fact by its name.", {"name": text}, self._look_up)

    @classmethod
    def read(cls, path: Path | None) -> "Toolbox":
        """`path`: JSON, an object of names and facts. Raises ValueError, OSError."""
        if path is None:
            return cls()
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError(f"{path}: must be a JSON object of names and facts")
        return cls(facts)

    @property
    def definitions(self) -> list[dict[str, str]]:
        """The tools in the form that `baton.Client.generate` takes."""
        return [
            {"name": name, "description": what, "parameters": json.dumps({"type": "object", "properties": properties})}
            for name, (what, properties, _) in self._offered.items()
        ]

    def run(self, name: str, arguments: str) -> str:
        """The result of a call. What goes wrong is a result, too: the model may try again."""
        try:
            return self._offered[name][2](json.loads(arguments))
        except (KeyError, TypeError, ValueError, ArithmeticError, SyntaxError, RecursionError, MemoryError) as error:
            return f"error: {error}"

    def _time(self, given: dict[str, Any]) -> str:
        zone = given.get("zone")
        try:
            return self._now(ZoneInfo(str(zone)) if zone else None).isoformat(" ", "seconds")
        except ZoneInfoNotFoundError:
            raise ValueError(f"{zone!r} is no time zone") from None

    def _look_up(self, given: dict[str, Any]) -> str:
        name = str(given["name"])
        if name.casefold() not in self._facts:
            raise ValueError(f"nothing is known about {name!r}")
        fact = self._facts[name.casefold()]
        return fact if isinstance(fact, str) else json.dumps(fact, ensure_ascii=False)


def calculate(expression: str) -> str:
    """Raises ValueError, ArithmeticError, SyntaxError."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"more than {MAX_EXPRESSION} characters")
    value = _value(ast.parse(expression.replace("^", "**").strip(), mode="eval").body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53 else str(value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            made: int | float = _OPERATORS[type(sign)](_value(left), _value(right))
            return made
    raise ValueError("only numbers and + - * / // % ** and brackets are known")


def _power(base: int | float, power: int | float) -> int | float:
    if isinstance(base, int) and isinstance(power, int) and abs(power) * math.log2(abs(base) + 2) > MAX_POWER:
        raise ValueError("the result is too large")
    made = base**power
    if isinstance(made, complex):
        raise ValueError("the result is not a real number")
    return made
