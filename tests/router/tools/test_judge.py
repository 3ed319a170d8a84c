"""`canitoolcall` judges the readers: texts that models wrote, with the calls, content and reasoning that a correct server finds in them.

It has nine families. Those of GLM, Kimi, gpt-oss and Gemma 4 are not read here, and a request with tools to such a model is refused.
"""

import json
import random
from collections import Counter
from importlib.resources import files
from typing import Any

from each import for_each

from router.tools.delta import Message
from router.tools.families import BY_NAME
from router.tools.reading import AnswerFormat, Reader, read
from router.tools.thinking import BY_NAME as MARKS
from router.tools.thinking import THINK, is_open

JUDGED = {"qwen3-hermes": 50, "qwen3-xml": 54, "mistral": 47, "llama": 34, "deepseek": 85}
# Here white space before a call belongs to nothing; there it is content, in this family alone.
DIFFERENT = {"llama/l3-sglang-text-before-python-tag"}
BY_MODEL = {
    "Mistral-7B": "mistral_list", "Llama-3": "llama_json", "Llama-4": "llama_pythonic", "DeepSeek-V4.1": "deepseek_v41",
    "DeepSeek-V4": "deepseek_v4", "DeepSeek-V3.2": "deepseek_v32", "DeepSeek-V3.1": "deepseek_v31", "DeepSeek": "deepseek_v3",
    "Qwen3-Coder": "qwen3_xml", "Qwen3.": "qwen3_xml", "Qwen3": "hermes",
}  # fmt: skip


def format_of(text: dict[str, Any]) -> AnswerFormat:
    model = text["models"][0].partition("/")[2]
    family = next((name for part, name in BY_MODEL.items() if part in model), "mistral")
    thinking = {"llama": None, "mistral": MARKS["mistral"]}.get(text["family"], THINK)
    if text["family"] == "mistral" and not any(kind in model for kind in ("Magistral", "Reasoning")):
        thinking = None
    tools = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in text["tools"]}
    opened = thinking is not None and is_open(thinking, text.get("generation_prompt") or "")
    return AnswerFormat(BY_NAME[family], tools, thinking, opened)


def texts(family: str) -> list[dict[str, Any]]:
    folder = files("canitoolcall") / "_data" / "fixtures" / family
    lines = [line for file in folder.iterdir() if file.name.endswith(".jsonl") for line in file.read_text("utf-8").splitlines()]
    return [json.loads(line) for line in lines]


def told(message: Message) -> tuple[str | None, str | None, list[tuple[str, Any]]]:
    return message.content or None, message.reasoning or None, [(call.name, json.loads(call.arguments)) for call in message.calls]


def cut_somewhere(text: str, format: AnswerFormat, seed: int, cut_off: bool) -> Message:
    reader, message, at, draw = Reader(format), Message(), 0, random.Random(seed)
    while at < len(text):
        size = draw.randint(1, 8) if seed else 1
        message.add(reader.push(text[at : at + size]))
        at += size
    return message.add(reader.flush(cut_off))


@for_each(JUDGED)
def test_the_judge_finds_what_we_find(family: str) -> None:
    outcomes: Counter[str] = Counter()
    for text in texts(family):
        raw, format, cut_off = text["raw_output"], format_of(text), "truncated" in text["tags"]
        message = read(raw, format, cut_off)
        for seed in range(4):
            assert cut_somewhere(raw, format, seed, cut_off) == message, text["id"]
        if (expected := text.get("expected")) is None:
            assert message.calls == [], text["id"]
        else:
            calls = [(call["name"], call["arguments"]) for call in expected["tool_calls"]]
            same = told(message) == (expected["content"] or None, expected["reasoning_content"] or None, calls)
            assert same != (text["id"] in DIFFERENT), (text["id"], told(message))
        outcomes["judged"] += 1
    assert outcomes["judged"] == JUDGED[family]
