"""The message of a chat that differs from an earlier prompt is told by its index, and only if a message differs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_workers import MODEL, FakeWorkers, record
from grpc_door import serving
from http_door import CHAT, House
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cli.up import SHIPPED
from baton.cluster.config_router import RouterConfig
from baton.engine.facts.tokenizer_files import TokenizerFiles
from baton.v1 import generation_pb2 as pb
from router import chat_map
from router.chat_map import ChatMap
from router.conversation import Setting, Tool
from router.dispatch import Dispatcher
from router.tokenizer import Tokenizer

BLOCK = 16
# The tools follow the first message, in one text with it.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.role }}\n{{ m.content | trim }}\n"
    "{% if loop.first and tools %}# Tools\n{% for t in tools %}{{ t | tojson }}{% endfor %}\n{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FILES = TokenizerFiles.read(SHIPPED)
TALE, TOOLED, BARE = (
    Tokenizer(replace(FILES, template=template), "fingerprint")
    for template in (FILES.template, TEMPLATE, "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
)
SYSTEM = " You tell a story of a fox and an owl, in ten sentences, for a child who does not want to sleep. "
MESSAGES = (("system", SYSTEM), ("user", "Who is Ida? " * 20), ("assistant", "An owl. " * 20), ("user", "Where does she live? " * 10))
TOOLS = (Tool("find", "Finds a tree. " * 20),)


def laid_out(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]], setting: Setting = Setting()) -> tuple[list[int], ChatMap]:  # noqa: B008
    places = ChatMap([content for _, content in messages], lambda text, at, encode: encode(), tokenizer.decode)
    return tokenizer.render(messages, setting=setting, known=places.ids), places


def told(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]], other: Sequence[tuple[str, str]], tools: Any = ((), ())) -> int | None:
    """The message of `messages` at the block in which its prompt begins to differ from that of `other`."""
    ids, places = laid_out(tokenizer, messages, Setting(tools=tools[0]))
    before, _ = laid_out(tokenizer, other, Setting(tools=tools[1]))
    same = next(i for i, (one, two) in enumerate(zip(ids, before, strict=False)) if one != two) // BLOCK * BLOCK
    return places.message(ids, same, same + BLOCK)


@pytest.mark.parametrize("tokenizer", [TALE, TOOLED, BARE], ids=["tale", "tooled", "bare"])
@pytest.mark.parametrize("index", range(4))
def test_it_is_told_wherever_the_texts_stand(tokenizer: Tokenizer, index: int) -> None:
    role, content = MESSAGES[index]
    other = [*MESSAGES[:index], (role, f"{content[:60]}§{content[60:]}"), *MESSAGES[index + 1 :]]
    assert told(tokenizer, MESSAGES, other) == index


def test_tools_and_words_of_the_template_are_no_message() -> None:
    other = (Tool("find", "Finds a tree. " * 10 + "Cuts it. " + "Finds a tree. " * 10),)
    for messages in (MESSAGES, MESSAGES[:1]):
        assert told(TOOLED, messages, messages, (TOOLS, other)) is None
    assert told(TOOLED, MESSAGES, [*MESSAGES[:2], ("assistant", "An owl. " * 10 + "A fox.")], (TOOLS, TOOLS)) == 2


def test_contents_that_the_template_changes_and_long_texts_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    upper = Tokenizer(replace(FILES, template="{% for m in messages %}{{ m.content | upper }}{% endfor %}"))
    ids, places = laid_out(upper, MESSAGES)
    assert len(ids) > 4 * BLOCK and places.message(ids, BLOCK, 2 * BLOCK) is None
    ids, places = laid_out(BARE, MESSAGES)
    assert places.message(ids, 6 * BLOCK, 7 * BLOCK) == 1
    monkeypatch.setattr(chat_map, "MAX_LOCATED", 5 * BLOCK)
    assert places.message(ids, 6 * BLOCK, 7 * BLOCK) is None


@given(st.lists(st.text("aeiou rst"), min_size=1, max_size=6), st.integers(0, 200), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_it_is_the_message_whose_tokens_are_there(contents: list[str], start: int, block: int) -> None:
    messages = [("user", f"{letter}{content}{letter}") for letter, content in zip("ABCDEF", contents, strict=False)]
    ids, places = laid_out(TALE, messages)
    expected, begin = None, 2  # a token begins the prompt; one stands before each message, and one behind it
    for index, (_, content) in enumerate(messages):
        end = begin + len(TALE.encode_output(content, "chat"))
        if expected is None and begin < start + block and start < end:
            expected = index
        begin = end + 2
    assert start >= len(ids) or places.message(ids, start, start + block) == expected


def body(user: str = "Who is Ida? " * 20, tools: str = "") -> pb.GenerateRequest:
    chat = [pb.ChatMessage(role="system", content=SYSTEM), pb.ChatMessage(role="user", content=user)]
    return pb.GenerateRequest(
        chat=pb.Chat(messages=chat, tools=[pb.Tool(name="find", description=tools)]),
        sampling=pb.SamplingParams(max_tokens=2, ignore_eos=True),
    )


def house_with_workers(tokenizer: Tokenizer) -> House:
    house = House(tokenizer, config=RouterConfig(bypass_tokens=8))
    model = house.view.models[MODEL]
    house.view.update([record(name, tokenizer_fingerprint=tokenizer.fingerprint) for name in ("p0", "d0")], 1.0)
    house.service._dispatcher = Dispatcher(model, FakeWorkers(), house.config)
    return house


async def test_both_doors_and_the_trace_tell_it() -> None:
    house = house_with_workers(TOOLED)
    seen = list[int | None]()
    async with serving(house, None) as stub:
        other = "Who is Ida? " * 10 + "Or Ana? " * 20
        for asked in (body(tools="Cuts. " * 30), body(other, "Cuts. " * 30), body(tools="Cuts. " * 15 + "Fells. " * 15)):
            *_, last = [response async for response in stub.Generate(asked)]
            cache = last.finished.usage.cache
            record_ = house.journal.last(1)[0].to_json()["cache"]
            assert (record_["changed_at"] is not None) == cache.HasField("changed_at") == (len(seen) > 0)
            assert pb.CacheReport(**record_) == cache and "Ida" not in str(record_)
            seen.append(record_["changed_message"])
    assert seen == [None, 1, None]
    for user in ("Who is Ida? " * 20, other):
        asked_ = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}], "max_tokens": 2}
        answer = await house.post(CHAT, asked_, headers={"x-baton-explain": "cache"})
    assert answer.json["usage"]["prompt_tokens_details"]["changed_message"] == 1


async def test_a_text_and_token_ids_have_no_message() -> None:
    house = house_with_workers(TALE)
    async with serving(house, None) as stub:
        for text in ("Who is Ida? " * 20, "Who is Ida? " * 10 + "Or Ana? " * 20):
            *_, last = [response async for response in stub.Generate(pb.GenerateRequest(text=text))]
    cache = last.finished.usage.cache
    assert cache.HasField("changed_at") and not cache.HasField("changed_message")
