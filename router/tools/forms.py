"""How a served model writes calls and thinking: what its chat template says, or the configuration."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any

from baton.cluster.errors import invalid
from baton.engine.core.grammar import Grammar, GrammarRefused
from baton.engine.core.thinking import Marks, ThinkingBudget
from baton.engine.grammars.keywords import SchemaReading, read_schema
from router.conversation import Setting, Tool, named
from router.tokenizer import Tokenizer
from router.tools import families, thinking
from router.tools.families import GENERIC, ModelFamily
from router.tools.grammar import after_thinking, lark
from router.tools.reading import AnswerFormat
from router.tools.thinking import Thinking, is_open

TAIL = 8  # ids at the end of a prompt, among which the mark that opens the thinking is
MISTRAL_ID = 9  # characters: its templates accept no other number


@dataclass(frozen=True, slots=True)
class Forms:
    family: ModelFamily | None = GENERIC  # None: in a form that is not read here
    thinking: Thinking | None = None
    templated: bool = False  # the chat template tells the model of its tools
    marks: Mapping[int, bytes] = field(default_factory=dict)  # control tokens of the two, with their spelling
    tokens: Mapping[str, int] = field(default_factory=dict)  # of the two, spelling → what no text of a grammar matches

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_format: str = "auto", reasoning_format: str = "auto") -> "Forms":
        template = tokenizer.template
        family = families.family_of(template) if tool_format == "auto" else families.BY_NAME[tool_format]
        thinks = thinking.thinking_of(template) if reasoning_format == "auto" else thinking.BY_NAME.get(reasoning_format)
        spelled = "\n".join((*_literals(family), *((thinks.begin, thinks.end) if thinks else ())))
        names = {id_: name for id_ in tokenizer.added_ids if len(name := tokenizer.name(id_)) > 2 and name in spelled}
        marks = {id_: name.encode() for id_, name in names.items() if id_ in tokenizer.special_ids}
        # The library takes every added token in angle brackets for a control token, as Qwen's `</think>`, which is none to the tokenizer.
        tokens = {name: id_ for id_, name in names.items() if id_ in marks or name[0] + name[-1] == "<>"}
        return cls(family, thinks, families.writes_tools(template), marks, tokens)

    def check(self, setting: Setting) -> None:
        """Raises INVALID_FIELD for what this model, or this cluster, cannot do."""
        if setting.max_thinking is not None and self.thinking is None:
            raise invalid("max_thinking_tokens", "has no effect: this model does not think")
        if setting.max_thinking is not None and not setting.splits_reasoning:
            raise invalid("max_thinking_tokens", "needs separate_reasoning")
        if not setting.offered:
            return
        if self.family is None:
            raise invalid("tools", "this model's chat template writes calls in a form that is not read here; see model.tool_format")
        self.demand(setting)

    def demand(self, setting: Setting, prompt_end: str = "") -> "GrammarDemand | None":
        """What an answer is held to: if calls are demanded, or a tool is strict. None: to nothing. `prompt_end`: as in `format`. Raises
        INVALID_FIELD."""
        if self.family is None or not demands(setting):
            return None
        one, tools, relaxed = named(setting), dict[str, Any](), list[str]()
        for i, tool in enumerate(setting.tools):
            if one in (None, tool.name):
                reading = _read(tool, f"tools[{i}].function.parameters")
                tools[tool.name] = reading.schema
                relaxed += (f"tools[{i}].function.parameters {sentence}" for sentence in reading.dropped)
        opened = self.thinking is not None and is_open(self.thinking, prompt_end)
        required = setting.choice != "auto"
        text = lark(
            self.family, tools, self.tokens, required=required, parallel=setting.parallel, thinking=self.thinking, opened=opened
        )  # fmt: skip
        if text is None:
            strict = next((i for i, tool in enumerate(setting.tools) if tool.strict), 0)
            field = "tool_choice" if required else f"tools[{strict}].function.strict"
            raise invalid(field, f"calls in this model's form ({self.family.name}) cannot be demanded with these tools")
        return GrammarDemand(Grammar("lark", text), tuple(relaxed))

    def beside_thinking(self, form: Grammar, setting: Setting, prompt_end: str) -> Grammar:
        """The form that the whole output has, if `form` is that of the answer. Raises INVALID_FIELD."""
        if self.thinking is None or not setting.splits_reasoning:
            return form
        found = after_thinking(form, self.thinking, is_open(self.thinking, prompt_end), self.tokens)
        if found is None:
            raise invalid("sampling.structured", f"kind {form.kind} has no place after this model's thinking; switch that off")
        return found

    def budget(self, setting: Setting, prompt_end: str, encode: Callable[[str], Sequence[int]]) -> ThinkingBudget | None:
        """When the thinking is closed by force; None: never. `encode`: text with control tokens → ids. What it takes for thinking is what
        a reader of `format` takes for it."""
        if setting.max_thinking is None or self.thinking is None:
            return None
        first, other = self.thinking, self.thinking.other
        calls = self.family.ends_thinking if self.family is not None and setting.offered else ()
        marks = [Marks(first.begin, (first.end, *calls), tuple(encode(first.closing)))]
        if other is not None:
            marks.append(Marks(other.begin, (other.end,), tuple(encode(other.closing))))
        return ThinkingBudget(setting.max_thinking, tuple(marks), is_open(first, prompt_end))

    def format(self, setting: Setting, prompt_end: str, id_of: Callable[[int], str]) -> AnswerFormat | None:
        """What is told apart in an answer; None: nothing. `prompt_end`: text of the last TAIL ids of the prompt."""
        thinks = self.thinking if setting.splits_reasoning else None
        if not setting.offered and thinks is None:
            return None
        one = named(setting)
        tools = {tool.name: tool.parameters or {} for tool in setting.offered if one in (None, tool.name)}
        opened = thinks is not None and is_open(thinks, prompt_end)
        live = bool(tools) and self.family is not None and demands(setting)
        return AnswerFormat(self.family, tools, thinks, opened, live, setting.parallel, id_of)

    def call_id(self, request_id: str, prompt: bytes) -> Callable[[int], str]:
        """The ids of an answer's calls: the same in a continued stream, others in any other answer. `prompt`: its digest."""

        def id_of(index: int) -> str:
            digest = blake2b(f"{request_id}/{index}".encode(), digest_size=12, key=prompt).hexdigest()
            short = self.family is not None and self.family.name.startswith("mistral")
            return digest[:MISTRAL_ID] if short else f"call_{digest}"

        return id_of


def _literals(family: ModelFamily | None) -> Iterator[str]:
    for style in family.styles if family is not None else ():
        for part in fields(style):
            value = getattr(style, part.name)
            yield from (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()


@dataclass(frozen=True, slots=True)
class GrammarDemand:
    grammar: Grammar
    relaxed: tuple[str, ...]  # what of the tools' schemas is not enforced; sentences with paths


def demands(setting: Setting) -> bool:
    """Whether an answer must call, or a call that it makes must fit a schema."""
    return bool(setting.offered) and (setting.choice != "auto" or any(tool.strict for tool in setting.offered))


def _read(tool: Tool, path: str) -> SchemaReading:
    """Raises INVALID_FIELD."""
    if not tool.parameters:
        return SchemaReading({})
    try:
        return read_schema(json.dumps(tool.parameters), tool.strict)
    except GrammarRefused as refused:
        raise invalid(path, str(refused)) from None
