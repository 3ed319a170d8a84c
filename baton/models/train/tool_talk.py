"""Conversations in which tools are offered: those of `baton chat --tools`, and a few like them.

A call, its result and the offer have the form that `router.tools.generic` gives every model whose chat template knows no tools.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random

from baton.models.train import words
from baton.models.train.dialogues import UNKNOWN, Message, Talk, distinct_facts, recall_later, small_sum, tell_story
from baton.models.train.stories import character
from baton.models.train.words import a, upper

HEAD = "You can call these tools:"
RULE = 'To call a tool, answer with nothing but a JSON object for each call, on its own line: {"name": NAME, "arguments": {...}}'
# city → its IANA time zone, and an offset that this has in some part of the year
ZONES = {
    "Paris": ("Europe/Paris", "+01:00"), "London": ("Europe/London", "+00:00"), "Berlin": ("Europe/Berlin", "+02:00"),
    "Rome": ("Europe/Rome", "+01:00"), "Madrid": ("Europe/Madrid", "+02:00"), "Tokyo": ("Asia/Tokyo", "+09:00"),
    "Sydney": ("Australia/Sydney", "+10:00"), "New York": ("America/New_York", "-05:00"), "Cairo": ("Africa/Cairo", "+03:00"),
}  # fmt: skip
SIGNS = {"plus": "+", "minus": "-", "times": "*"}


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    arguments: dict[str, str]  # name → type

    @property
    def line(self) -> str:
        properties = {name: {"type": kind} for name, kind in self.arguments.items()}
        return json.dumps({"name": self.name, "description": self.description, "parameters": {"type": "object", "properties": properties}})


CALCULATE = Tool("calculate", "Computes an arithmetic expression.", {"expression": "string"})
TIME = Tool("time", "The date and the time, here or in an IANA time zone.", {"zone": "string"})
LOOK_UP = Tool("look_up", "Looks up a fact by its name.", {"name": "string"})
ADD = Tool("add", "Adds two numbers.", {"x": "number", "y": "number"})
MULTIPLY = Tool("multiply", "Multiplies two numbers.", {"x": "number", "y": "number"})
WEATHER = Tool("weather", "The weather in a city.", {"city": "string"})
TOOLS = (CALCULATE, TIME, LOOK_UP, ADD, MULTIPLY, WEATHER)


@dataclass(frozen=True, slots=True)
class Use:
    """A question, the calls that it needs, with their results, and the answer that follows from these."""

    question: str
    calls: tuple[tuple[str, Mapping[str, str | int]], ...]
    results: tuple[str, ...]
    answer: str

    @property
    def written(self) -> str:
        return "\n".join(json.dumps({"name": name, "arguments": arguments}) for name, arguments in self.calls)

    @property
    def told(self) -> list[Message]:
        return [Message("user", f"Result of {name}: {result}") for (name, _), result in zip(self.calls, self.results, strict=True)]

    @property
    def messages(self) -> list[Message]:
        return [Message("user", self.question), Message("assistant", self.written), *self.told, Message("assistant", self.answer)]


def offer(tools: Sequence[Tool], system: str = "") -> Message:
    """The system message."""
    return Message("system", "\n".join([*([system, ""] if system else []), HEAD, *(tool.line for tool in tools), RULE]))


def _number(rng: Random) -> int:
    return rng.randint(0, rng.choice((20, 20, 99, 99, 999)))


def _sum(rng: Random) -> tuple[str, str, int]:
    """A sum as said and as an expression, and its value."""
    x, y, word = _number(rng), _number(rng), rng.choice(("plus", "plus", "minus", "times"))
    if word == "minus":
        x, y = max(x, y), min(x, y)
    expression = f"{x} {SIGNS[word]} {y}"
    result = {"plus": x + y, "minus": x - y, "times": x * y}[word]
    said = rng.choice((f"{x} {word} {y}", f"{x} {word} {y}", expression))
    return said, expression, result


def _ask(rng: Random, said: str) -> str:
    text = f"{rng.choice(('What is', 'What is', 'How much is', 'Please tell me what is', 'Compute'))} {said}"
    return text + ("." if text.startswith("Compute") else "?")


def calculation(rng: Random) -> Use:
    said, expression, result = _sum(rng)
    return Use(_ask(rng, said), (("calculate", {"expression": expression}),), (str(result),), f"{upper(said)} is {result}.")


def two_calculations(rng: Random) -> Use:
    one, other = _sum(rng), _sum(rng)
    calls = tuple(("calculate", {"expression": expression}) for _, expression, _ in (one, other))
    answer = f"{upper(one[0])} is {one[2]}, and {other[0]} is {other[2]}."
    return Use(_ask(rng, f"{one[0]}, and what is {other[0]}"), calls, (str(one[2]), str(other[2])), answer)


def addition(rng: Random) -> Use:
    x, y = _number(rng), _number(rng)
    said = rng.choice((f"{x} plus {y}", f"{x} + {y}"))
    return Use(_ask(rng, said), (("add", {"x": x, "y": y}),), (str(x + y),), f"{said} is {x + y}.")


def multiplication(rng: Random) -> Use:
    x, y = _number(rng), _number(rng)
    said = rng.choice((f"{x} times {y}", f"{x} * {y}"))
    return Use(_ask(rng, said), (("multiply", {"x": x, "y": y}),), (str(x * y),), f"{said} is {x * y}.")


def clock(rng: Random) -> Use:
    now = datetime(2024, 1, 1) + timedelta(seconds=rng.randrange(10 * 365 * 86400))
    city = rng.choice(list(ZONES)) if rng.random() < 0.5 else ""
    zone, offset = ZONES.get(city, ("", ""))
    calls = (("time", {"zone": zone} if zone else {}),)
    where = f" in {city}" if city else ""
    at = now.isoformat(" ", "seconds") + offset
    if rng.random() < 0.3:
        question = rng.choice((f"What is the date{where}?", f"What day is it{where}?"))
        return Use(question, calls, (at,), f"The date{where} is {at[:10]}.")
    question = rng.choice((f"What time is it{where}?", f"What time is it{where}?", f"Please tell me the time{where}."))
    return Use(question, calls, (at,), f"The time{where} is {at[11:16]}.")


def look_up(rng: Random) -> Use:
    name = words.invented_name(rng) if rng.random() < 0.6 else character(rng).name
    match rng.randrange(4):
        case 0:
            question, asked = rng.choice((f"Who is {name}?", f"Tell me about {name}.", f"What do you know about {name}?")), name
            found = f"{name} is {a(rng.choice(words.TRAITS))} {rng.choice(words.ANIMALS)} who lives near the {rng.choice(words.HOMES)}."
            answer = found
        case 1:
            asked = f"capital of {name}"
            found = words.invented_name(rng)
            question, answer = f"What is the {asked}?", f"The {asked} is {found}."
        case 2:
            asked = f"{rng.choice(words.COLOURS)} {rng.choice(words.OBJECTS)}"
            found = words.place(rng)
            question, answer = f"Where is the {asked}?", f"The {asked} is {found}."
        case _:
            asked = f"age of {name}"
            found = str(rng.randint(1, 99))
            question, answer = f"What is the {asked}?", f"The {asked} is {found}."
    if rng.random() < 0.15:
        found, answer = f"error: nothing is known about '{asked}'", f"I found nothing about {asked}."
    return Use(question, (("look_up", {"name": asked}),), (found,), answer)


def weather(rng: Random) -> Use:
    city = rng.choice((*ZONES, words.invented_name(rng)))
    found = f"{rng.choice(('sunny', 'cloudy', 'rain', 'snow', 'windy'))}, {rng.randint(-9, 35)} degrees"
    question = rng.choice((f"What is the weather in {city}?", f"How is the weather in {city}?"))
    return Use(question, (("weather", {"city": city}),), (found,), f"The weather in {city}: {found}.")


USES: tuple[tuple[Tool, Callable[[Random], Use], int], ...] = (
    (CALCULATE, calculation, 6), (CALCULATE, two_calculations, 2), (ADD, addition, 2), (MULTIPLY, multiplication, 2), (TIME, clock, 4),
    (LOOK_UP, look_up, 4), (WEATHER, weather, 2),
)  # fmt: skip


def _offered(rng: Random) -> list[Tool]:
    """Mostly those of `baton chat`, which a calculator that can do more would make useless."""
    if rng.random() < 0.6:
        return [CALCULATE, TIME, *([LOOK_UP] if rng.random() < 0.5 else [])]
    tools = rng.sample([tool for tool in TOOLS if tool is not CALCULATE], rng.randint(1, 3))
    return [Tool(tool.name, tool.description if rng.random() < 0.6 else "", tool.arguments) for tool in tools]


def _without_a_tool(talk: Talk, rng: Random, tools: set[str]) -> None:
    """A turn that needs none of the tools."""
    match rng.randrange(5):
        case 0 if not tools & {"calculate", "add", "multiply"}:
            small_sum(talk, rng)
        case 1 if "time" not in tools:
            talk.say("What time is it?", UNKNOWN)
        case 0 | 1 | 2:
            told = distinct_facts(rng, rng.choice((1, 2)), talk.open_facts)
            talk.say("Please remember this: " + " ".join(f"{upper(f.statement)}." for f in told), "I will remember that.")
            talk.open_facts += told
        case 3:
            talk.say(rng.choice(("Hello!", "Hi!", "Hello.")), "Hello! Shall I tell you a story?")
        case _:
            tell_story(talk, rng)


def conversation(rng: Random, size: int) -> list[Message]:
    """A conversation of about `size` words after the offer; most turns need a tool."""
    tools = _offered(rng)
    names = {tool.name for tool in tools}
    talk = Talk([offer(tools, rng.choice(("", "", "", "You are Tale.", "Be kind.")))])
    makers, weights = zip(*((make, weight) for tool, make, weight in USES if tool.name in names), strict=True)
    while talk.words < size:
        if rng.random() < 0.25:
            _without_a_tool(talk, rng, names)
        elif talk.open_facts and "look_up" not in names and rng.random() < 0.3:
            recall_later(talk, rng)
        else:
            use = rng.choices(makers, weights)[0](rng)
            talk.messages += use.messages
            talk.words += len(use.question.split()) + len(use.written.split()) + len(use.answer.split())
    return talk.messages
