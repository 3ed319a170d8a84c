"""Tool calls as models of each family write them."""

import json
from collections.abc import Iterable
from typing import Any


def written(family: str, calls: Iterable[tuple[str, Any]]) -> str:
    """Calls as a model of the family writes them."""
    dumps: Any = lambda value: json.dumps(value, ensure_ascii=False)  # noqa: E731
    tags: Any = lambda value: value if isinstance(value, str) else dumps(value)  # noqa: E731
    calls = list(calls)
    objects = [dumps({"name": name, "arguments": told}) for name, told in calls]
    match family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "json":
            return "\n".join(objects)
        case "llama_json":
            return "; ".join(dumps({"name": name, "parameters": told}) for name, told in calls)
        case "mistral_list":
            return f"[TOOL_CALLS] [{', '.join(objects)}]"
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(told)}" for name, told in calls)
        case "llama_pythonic":
            each = [f"{name}({', '.join(f'{key}={value!r}' for key, value in told.items())})" for name, told in calls]
            return f"[{', '.join(each)}]"
        case "qwen3_xml":
            each = ["".join(f"<parameter={key}>\n{tags(value)}\n</parameter>\n" for key, value in told.items()) for _, told in calls]
            heads = [f"<tool_call>\n<function={name}>\n" for name, _ in calls]
            return "\n".join(f"{head}{one}</function>\n</tool_call>" for head, one in zip(heads, each, strict=True))
        case "deepseek_v3" | "deepseek_v31":
            form = "function<｜tool▁sep｜>{}\n```json\n{}\n```" if family == "deepseek_v3" else "{}<｜tool▁sep｜>{}"
            each = [f"<｜tool▁call▁begin｜>{form.format(name, dumps(told))}<｜tool▁call▁end｜>" for name, told in calls]
            return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"
    section, space = {"deepseek_v32": ("function_calls", ""), "deepseek_v4": ("tool_calls", ""), "deepseek_v41": ("calls", " ")}[family]
    tag = f"｜DSML｜{space}"
    each = []
    for name, told in calls:
        values = [f'{key}" string="{str(isinstance(value, str)).lower()}">{tags(value)}' for key, value in told.items()]
        inner = "".join(f'<{tag}parameter name="{value}</{tag}parameter>\n' for value in values)
        each.append(f'<{tag}invoke name="{name}">\n{inner}</{tag}invoke>\n')
    return f"<{tag}{section}>\n{''.join(each)}</{tag}{section}>"
