"""What a text turns out to be, piece by piece, and the whole that the pieces make."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    index: int  # among the calls of the answer, from 0
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the arguments of call `index`. All pieces together are one JSON object."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegin | Arguments


@dataclass(slots=True)
class MessageCall:
    name: str
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class Message:
    """An answer as a whole."""

    content: str = ""
    reasoning: str = ""
    calls: list[MessageCall] = field(default_factory=list)

    def add(self, deltas: Iterable[Delta]) -> "Message":
        for delta in deltas:
            match delta:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegin(_, name, id_):
                    self.calls.append(MessageCall(name, id=id_))
                case Arguments(index, text):
                    self.calls[index].arguments += text
        return self
