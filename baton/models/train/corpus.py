"""Document `i` of a split is a function of (seed, split, size, i): there is no file and no end, and a restart makes the same documents."""

from collections.abc import Iterator, Sequence
from random import Random

from baton.models.train import tool_talk, words
from baton.models.train.dialogues import Message, conversation, distinct_facts, long_document
from baton.models.train.stories import story
from baton.models.train.words import upper

BOS, EOS = "<|bos|>", "<|eos|>"
SPECIAL = (BOS, EOS, "<|user|>", "<|assistant|>", "<|system|>")  # token ids 0 to 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TINY, SHORT, LONG = 30, 130, 300  # words. Below TINY: copying only; below SHORT: no stories alone; from LONG: long enough to forget


def render(messages: Sequence[Message], reply: bool = False) -> str:
    """`messages` as CHAT_TEMPLATE renders them; with `reply`, the assistant speaks next."""
    return BOS + "".join(f"<|{m.role}|>{m.content}{EOS}" for m in messages) + ("<|assistant|>" if reply else "")


def document(rng: Random, size: int) -> str:
    """A text of about `size` words, special tokens spelled out."""
    kind = rng.random()
    if size < TINY:
        return _repeat(rng) if kind < 0.8 else _list_of_facts(rng, 4 * size)
    if size < SHORT:
        return _list_of_facts(rng, size) if kind < 0.5 else render(conversation(rng, size))
    if kind < 0.3:
        return _plain(rng, size)
    if kind < 0.4:
        return _list_of_facts(rng, size)
    if kind < 0.55 and size >= LONG:
        return _long(rng, size)
    return render(conversation(rng, size))


def tool_document(rng: Random, size: int) -> str:
    """A conversation of about `size` words in which tools are offered."""
    return render(tool_talk.conversation(rng, size))


def documents(seed: int, split: str, size: int, start: int = 0) -> Iterator[str]:
    """Documents from number `start` on. No two splits share a document."""
    while True:
        yield document(Random(f"{seed}/{split}/{size}/{start}"), size)
        start += 1


def _plain(rng: Random, size: int) -> str:
    """Stories without a dialogue."""
    stories = []
    count = 0
    while count < size:
        told = story(rng, rng.choice((1, 2, 3, 4)))
        count += len(told.text.split())
        stories.append(told.text)
    return BOS + "\n\n".join(stories) + EOS


def _list_of_facts(rng: Random, size: int) -> str:
    """Many facts, then a question about each in another order: pure recall."""
    count = max(2, min(size // 22, 60))
    told = distinct_facts(rng, count)
    messages = [Message("user", " ".join(f"{upper(f.statement)}." for f in told)), Message("assistant", "I will remember that.")]
    for asked in rng.sample(told, count):
        messages += [Message("user", asked.question), Message("assistant", asked.answer)]
    return render(messages)


def _long(rng: Random, size: int) -> str:
    """Facts, something long to read, and then a question about each fact."""
    long = long_document(rng, int(size * 0.95), rng.randint(2, 8))
    questions = [m for f in rng.sample(long.facts, len(long.facts)) for m in (Message("user", f.question), Message("assistant", f.answer))]
    return render([*long.messages, *questions])


def _repeat(rng: Random) -> str:
    """A meaningless list of things, places and names, and then the same list again: pure copying."""
    parts = [rng.choice((words.thing, words.place, words.invented_name))(rng) for _ in range(rng.randint(4, 30))]
    return render([Message("user", f"Repeat this: {', '.join(parts)}."), Message("assistant", f"{', '.join(parts)}.")])
