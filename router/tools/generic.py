"""Tools for a model whose chat template knows none: it is told of them in the system message, and its calls and their results are shown
to it as ordinary messages."""

import json
from collections.abc import Sequence

from router.conversation import Setting, aside_of, parsed

HEAD = "You can call these tools:"
RULE = 'To call a tool, answer with nothing but a JSON object for each call, on its own line: {"name": NAME, "arguments": {...}}'


def told(messages: Sequence[tuple[str, str]], setting: Setting) -> tuple[tuple[str, str], ...]:
    """The conversation in messages of the roles system, user and assistant."""
    shown = [_shown(role, content, setting, i) for i, (role, content) in enumerate(messages)]
    if not setting.offered:
        return tuple(shown)
    lines = [HEAD, *(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in setting.offered), RULE]
    if shown and shown[0][0] == "system":
        lines = [shown.pop(0)[1], "", *lines]
    return (("system", "\n".join(lines)), *shown)


def _shown(role: str, content: str, setting: Setting, i: int) -> tuple[str, str]:
    aside = aside_of(setting, i)
    if role == "tool":
        names = [call.name for other in setting.asides for call in other.calls if call.id == aside.call_id]
        return "user", f"Result of {names[0] if names else 'the call'}: {content}"
    calls = (json.dumps({"name": call.name, "arguments": parsed(call.arguments)}, ensure_ascii=False) for call in aside.calls)
    return role, "\n".join([*([content] if content or not aside.calls else []), *calls])
