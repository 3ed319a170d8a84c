"""The generated texts: reproducible from the seed, many different ones, in correct English, and with correct answers."""

import json
import re
from collections import Counter
from itertools import islice
from random import Random

import pytest
from jinja2 import Environment

from baton.cli.chat_tools import Toolbox
from baton.models.train import tool_talk, words
from baton.models.train.corpus import BOS, CHAT_TEMPLATE, EOS, document, documents, render
from baton.models.train.dialogues import Message, conversation, distinct_facts, fact, long_document
from baton.models.train.stories import story
from router.conversation import Aside, PastCall, Setting
from router.conversation import Tool as Offered
from router.tools import generic

STORIES = [story(Random(f"test {i}"), 1 + i % 4) for i in range(400)]
SIZES = (40, 150, 350, 1250)


def test_a_document_is_a_function_of_seed_split_size_and_number() -> None:
    for size in SIZES:
        first = list(islice(documents(7, "a", size), 5))
        assert first == list(islice(documents(7, "a", size), 5))
        assert first[3:] == list(islice(documents(7, "a", size, start=3), 2)), "a document does not depend on those before it"
        assert not set(first) & set(islice(documents(8, "a", size), 5)) and not set(first) & set(islice(documents(7, "b", size), 5))


def test_there_are_more_than_ten_million_stories() -> None:
    """Among n texts drawn from N equally likely ones, n²/2N pairs are expected to be equal: 80 for N = 10⁷."""
    texts = Counter(story(Random(i), 1).text for i in range(40_000))
    assert len(texts) == 40_000, "even the shortest kind of story must not repeat itself"


@pytest.mark.parametrize("size", SIZES)
def test_documents_have_about_the_requested_size(size: int) -> None:
    sizes = [len(text.split()) for text in islice(documents(1, "size", size), 60)]
    assert 0.6 * size < sum(sizes) / len(sizes) < max(200, 1.6 * size)


def test_stories_are_in_correct_english() -> None:
    for told in STORIES:
        for text in (told.text, *(f"{q} {answer}" for q, answer in told.questions)):
            assert not re.search(r"\ba [aeiou]", text, re.IGNORECASE), text
            assert not re.search(r"\ban [^aeiou]", text, re.IGNORECASE), text
            assert not re.search(r"  | [.,?!]|\.\.|\b(\w+) \1\b(?! kept)", text), text
        for sentence in told.sentences:
            assert re.fullmatch(r'("?[A-Z].*[.?!]"?)', sentence), sentence
            assert sentence.count('"') % 2 == 0, sentence


def test_the_hero_keeps_one_name_and_one_pronoun() -> None:
    for told in STORIES:
        first, last = told.sentences[0], told.sentences[-4:]
        assert told.hero.kind in first and any(told.hero.name in sentence for sentence in last)
        opening = " ".join(told.sentences[:3])
        wrong = r"\b(she|her)\b" if told.hero.he == "he" else r"\b(he|his|him)\b"
        assert not re.search(wrong, opening), opening


def test_numbers_in_stories_add_up() -> None:
    counted = 0
    for told in STORIES:
        found = re.search(
            r"(?:had|picked) (\d+) (\w+)\. (?:\w+ found|There were) (\d+) more .*?(?:Now \w+ had|That made) (\d+) \2\."
            r" \w+ gave (\d+) of them .*?(?:had|kept) (\d+)",
            told.text,
        )
        if found:
            had, _, more, total, given, left = (int(part) if part.isdigit() else 0 for part in found.groups())
            assert had + more == total and total - given == left >= 0
            counted += 1
    assert counted > 50


def test_every_answer_can_be_found_in_the_story() -> None:
    """Every person, thing, place and number that an answer names occurs in the text."""
    things = {*words.QUALITIES, *words.OBJECTS, *words.SHELTERS, *words.LANDMARKS, *words.CONTAINERS, *words.FOODS, *words.ANIMALS}
    checked = 0
    for told in STORIES:
        known = set(re.findall(r"\w+", told.text))
        for _, answer in told.questions:
            for i, word in enumerate(re.findall(r"\w+", answer)):
                if word in things or word.isdigit() or (word[0].isupper() and i):
                    assert word in known, (answer, word, told.text)
                    checked += 1
    assert checked > 5000


def test_arithmetic_in_conversations_is_right() -> None:
    checked = 0
    for i in range(300):
        for message in conversation(Random(i), 150):
            if found := re.fullmatch(r"(\d+) (plus|minus|times) (\d+) is (\d+)\.", message.content):
                x, kind, y, result = found.groups()
                assert {"plus": int(x) + int(y), "minus": int(x) - int(y), "times": int(x) * int(y)}[kind] == int(result)
                checked += 1
    assert checked > 100


def test_a_conversation_alternates_and_ends_with_an_answer() -> None:
    for i in range(200):
        messages = conversation(Random(i), 120)
        roles = [message.role for message in messages if message.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and all(message.content.strip() for message in messages)


def test_the_question_about_a_fact_does_not_reveal_its_value() -> None:
    for i in range(500):
        told = fact(Random(i))
        assert told.value in told.statement and told.value in told.answer and told.value not in told.question
        assert told.statement != told.question
    questions = [told.question for told in distinct_facts(Random(1), 60)]
    assert len(set(questions)) == 60


def test_only_the_beginning_of_a_long_document_holds_its_answers() -> None:
    for i in range(50):
        long = long_document(Random(i), 800, facts=6)
        assert sum(len(message.content.split()) for message in long.messages) > 800
        head, rest = long.messages[0].content, " ".join(message.content for message in long.messages[1:])
        for told in long.facts:
            assert told.statement[1:] in head
            assert told.statement[1:] not in rest and told.answer not in rest


def test_rendering_matches_the_chat_template() -> None:
    messages = [Message("system", "Be kind."), Message("user", "Hello"), Message("assistant", "Hi."), Message("user", "Bye")]
    template = Environment().from_string(CHAT_TEMPLATE)
    plain = [{"role": message.role, "content": message.content} for message in messages]
    for reply in (False, True):
        assert render(messages, reply) == template.render(messages=plain, bos_token=BOS, eos_token=EOS, add_generation_prompt=reply)


def test_documents_begin_with_bos_and_end_with_eos() -> None:
    for size in SIZES:
        for i in range(40):
            text = document(Random(i), size)
            assert text.startswith(BOS) and text.endswith(EOS) and text.count(BOS) == 1


# --- tools ----------------------------------------------------------------------------------------------------------------------------

USES = [(tool, make(Random(f"{make.__name__} {i}"))) for tool, make, _ in tool_talk.USES for i in range(100)]


@pytest.mark.parametrize("seed", range(30))
def test_tools_are_offered_called_and_answered_as_the_router_writes_them(seed: int) -> None:
    """What a model reads and writes when it serves is what it was trained on."""
    rng = Random(seed)
    tools = tool_talk._offered(rng)
    use = rng.choice([use for tool, use in USES if tool.name in {offered.name for offered in tools}])
    system = rng.choice(("", "You are Tale."))
    calls = tuple(PastCall(f"c{i}", name, json.dumps(arguments)) for i, (name, arguments) in enumerate(use.calls))
    asides = [Aside(), Aside(calls), *(Aside(call_id=call.id) for call in calls), Aside()]
    messages = [("user", use.question), ("assistant", ""), *(("tool", result) for result in use.results), ("assistant", use.answer)]
    if system:
        messages, asides = [("system", system), *messages], [Aside(), *asides]
    offered = tuple(Offered(tool.name, tool.description, json.loads(tool.line)["parameters"]) for tool in tools)
    shown = generic.told(messages, Setting(asides=tuple(asides), tools=offered))
    trained = [tool_talk.offer(tools, system), *use.messages]
    assert list(shown) == [(message.role, message.content) for message in trained]


def test_the_tools_are_those_of_the_chat_and_the_results_are_right() -> None:
    box = Toolbox({})
    definitions = {tool["name"]: (tool["description"], json.loads(tool["parameters"])["properties"]) for tool in box.definitions}
    for tool in (tool_talk.CALCULATE, tool_talk.TIME, tool_talk.LOOK_UP):
        assert definitions[tool.name] == (tool.description, {name: {"type": kind} for name, kind in tool.arguments.items()})
    for zone, _ in tool_talk.ZONES.values():
        assert not box.run("time", json.dumps({"zone": zone})).startswith("error")
    for _, use in USES:
        for (name, arguments), result in zip(use.calls, use.results, strict=True):
            if name == "calculate":
                assert box.run(name, json.dumps(arguments)) == result and result in use.answer
            if name in ("add", "multiply"):
                x, y = (int(arguments[each]) for each in "xy")
                assert result == str(x + y if name == "add" else x * y) and result in use.answer


def test_a_conversation_with_tools_offers_what_it_calls() -> None:
    count = 0
    for i in range(200):
        messages = tool_talk.conversation(Random(i), 60)
        offered = re.findall(r'^{"name": "(\w+)"', messages[0].content, re.MULTILINE)
        called = [name for m in messages if m.role == "assistant" for name in re.findall(r'^{"name": "(\w+)"', m.content, re.MULTILINE)]
        assert set(called) <= set(offered)
        count += len(called)
    assert count > 200
