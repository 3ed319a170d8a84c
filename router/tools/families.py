"""How each family of models writes tool calls: one description, from which text is read (`router.tools.calls`) and constrained
(`router.tools.grammar`).

A family has styles. The first is the one that a grammar demands; the others are read, too, because models of the family write them.
"""

from dataclasses import dataclass

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Objects:
    """`{"name": …, "arguments": {…}}`, alone or in a list."""

    begin: str = ""  # "": bare, where an answer begins
    end: str = ""
    arguments: str = "arguments"  # as a grammar has it; "parameters" is read, too
    separators: tuple[str, ...] = (",",)
    listed: bool = False  # a grammar writes a list, even of one call


@dataclass(frozen=True, slots=True)
class Named:
    """The name, then the arguments as JSON."""

    begin: str
    between: str
    end: str = ""
    id_mark: str = ""  # before `between` there may be this and an id
    section: tuple[str, str] = ("", "")  # around all calls


@dataclass(frozen=True, slots=True)
class Pythonic:
    """`[name(key=value), …]`, in Python's literals."""

    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Tagged:
    """A tag for the call and one for each argument, whose value is text or JSON."""

    begin: str  # up to the name
    after_name: str
    end: str
    parameter: str  # up to its name
    after_parameter: str  # of a value that has the type of the tool's schema, or is text
    parameter_end: str
    after_json: str = ""  # of a value that is JSON; "": there is no such mark
    newlines: bool = False  # around a value
    section: tuple[str, str] = ("", "")
    empty: str = ""  # instead of `after_name`, for a call without arguments


Style = Objects | Named | Pythonic | Tagged


@dataclass(frozen=True, slots=True)
class ModelFamily:
    name: str
    styles: tuple[Style, ...]
    marks: tuple[str, ...] = ()  # a chat template that has all of them writes this family's calls
    ends_thinking: tuple[str, ...] = ()  # calls begin even inside the thinking


def begin_of(style: Style) -> str:
    """The text with which the style's calls begin; empty for bare ones."""
    match style:
        case Named() | Tagged() if style.section[0]:
            return style.section[0]
    return style.begin.partition("\n")[0]


def bare_of(style: Style) -> str:
    """The characters with which an answer begins that is a bare call."""
    match style:
        case Objects(begin=""):
            return "{["
        case Pythonic(begin=""):
            return "["
    return ""


def _dsml(section: str, space: str = "") -> Tagged:
    tag = f"｜DSML｜{space}"
    return Tagged(
        begin=f'<{tag}invoke name="',
        after_name='">',
        end=f"</{tag}invoke>",
        parameter=f'<{tag}parameter name="',
        after_parameter='" string="true">',
        parameter_end=f"</{tag}parameter>",
        after_json='" string="false">',
        section=(f"<{tag}{section}>", f"</{tag}{section}>"),
        empty='"/>',
    )


_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_TAGGED = Tagged(f"{BEGIN}\n<function=", ">", f"</function>\n{END}", "<parameter=", ">", "</parameter>", newlines=True)
_OPEN_TAGGED = Tagged("<function=", ">", f"</function>\n{END}", "<parameter=", ">", "</parameter>", newlines=True)
_HERMES = Objects(BEGIN, END)

FAMILIES = (
    ModelFamily("qwen3_xml", (_TAGGED, _OPEN_TAGGED, _HERMES), ("<function=", "<parameter="), (f"{BEGIN}\n<function=",)),
    ModelFamily("hermes", (_HERMES,), (BEGIN, END)),
    ModelFamily(
        "mistral",
        (Named("[TOOL_CALLS]", "[ARGS]", id_mark="[CALL_ID]"), Objects("[TOOL_CALLS]", listed=True)),
        ("[TOOL_CALLS]", "[ARGS]"),
    ),
    ModelFamily(
        "mistral_list",
        (Objects("[TOOL_CALLS]", listed=True), Named("[TOOL_CALLS]", "[ARGS]", id_mark="[CALL_ID]")),
        ("[TOOL_CALLS]",),
    ),
    ModelFamily("deepseek_v41", (_dsml("calls", " "), _dsml("tool_calls"), _dsml("function_calls")), ("｜DSML｜ ",)),
    ModelFamily("deepseek_v4", (_dsml("tool_calls"), _dsml("function_calls"), _dsml("calls", " ")), ("｜DSML｜", "tool_calls>")),
    ModelFamily("deepseek_v32", (_dsml("function_calls"), _dsml("tool_calls"), _dsml("calls", " ")), ("｜DSML｜",)),
    ModelFamily(
        "deepseek_v3",
        (
            Named("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", section=_CALLS),
            Named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", section=_CALLS),
        ),
        ("<｜tool▁calls▁begin｜>", "```json"),
    ),
    ModelFamily(
        "deepseek_v31",
        (
            Named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", section=_CALLS),
            Named("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", section=_CALLS),
        ),
        ("<｜tool▁calls▁begin｜>",),
    ),
    ModelFamily("llama_pythonic", (Pythonic(), Pythonic("<|python_start|>", "<|python_end|>")), ("<|python_start|>",)),
    ModelFamily(
        "llama_json",
        (
            Objects(arguments="parameters", separators=(";", ",")),
            Objects("<|python_tag|>", arguments="parameters", separators=(";", ",")),
        ),
        ("<|python_tag|>",),
    ),
    ModelFamily("json", (Objects(separators=(",", ";")), _HERMES)),
)
BY_NAME = {family.name: family for family in FAMILIES}
GENERIC = BY_NAME["json"]
_FOREIGN = ("<arg_key>", "<|tool_calls_section_begin|>", "<|channel|>", "<|tool_call>")  # of GLM, Kimi, gpt-oss, Gemma 4


def family_of(template: str | None) -> ModelFamily | None:
    """The family whose calls a chat template writes. A template that knows no tools gets the generic one; None: they are in a form that is
    not read here."""
    if template is None or "tools" not in template:
        return GENERIC
    if any(mark in template for mark in _FOREIGN):
        return None
    fit = [family for family in FAMILIES if family.marks and all(mark in template for mark in family.marks)]
    if fit:
        return fit[0]
    if "pythonic" in template or "(param" in template:
        return BY_NAME["llama_pythonic"]
    return BY_NAME["llama_json"] if '"parameters": ' in template and "<|eot_id|>" in template else GENERIC


def writes_tools(template: str | None) -> bool:
    """Whether a chat template tells the model of its tools."""
    return template is not None and "tools" in template
