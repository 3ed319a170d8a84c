"""The form that an output must have, as a request asks for it: plain data, standard library.

Only the text travels. Where a document stands is a function of the output so far (`baton.engine.core.masks`), so an output goes on
elsewhere, after a preemption, a handoff, a retry or at another router, with the masks that it would have had here, and guesses need no
state of their own.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["json_schema", "json", "regex", "ebnf", "choice", "lark", "structural"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Grammar:
    """`kind` says what `text` is:

    json_schema   a JSON Schema
    json          "" for any JSON object
    regex         a regular expression that the whole output matches (Rust's syntax)
    ebnf          GBNF or Lark
    choice        a JSON list of strings, of which the output is one
    lark          Lark as llguidance reads it, in which `<name>` is a control token
    structural    a JSON object: {"tags": [{"trigger", "begin", "grammar", "end"}]}: free text, in which each trigger begins one of the
                  tags, whose `grammar` is a JSON Schema or Lark

    `strict`: a keyword of a schema that cannot be enforced is refused; else it is dropped, and the answer says so.
    """

    kind: str
    text: str
    strict: bool = True

    def told(self) -> dict[str, Any]:
        """The fields, by their names in generation.proto."""
        return {"kind": self.kind, "text": self.text, "strict": self.strict}


class GrammarRefused(ValueError):
    """`path`: JSON path in a schema, "$" for all of it, empty if the text has no paths."""

    def __init__(self, why: str, path: str = "") -> None:
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path
        self.why = why


class GrammarsBusy(RuntimeError):
    """Too many grammars wait to be compiled, or this one was not compiled in time."""
