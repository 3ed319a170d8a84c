"""Conversations from a random number generator: stories on request, questions about them, small sums, facts to keep in mind.

`conversation` strings topics together until it is long enough, so a fact told at the start may be asked for at any distance.
`long_document` tells some facts and then filler of a given length, which does not help to answer questions about them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from baton.models.train import words
from baton.models.train.stories import Story, character, outline, story
from baton.models.train.words import a, upper

UNKNOWN = "I do not know that. I only know little stories, small sums and what you tell me."
WHO = "I am Tale, a very small language model. I tell stories, add small numbers and remember what you tell me."


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # system, user or assistant
    content: str


@dataclass(frozen=True, slots=True)
class ToldFact:
    """A fact that one can only know from being told."""

    statement: str  # without initial capital and full stop
    question: str
    answer: str
    value: str  # the part of the answer that the question does not give away


@dataclass(slots=True)
class Talk:
    messages: list[Message] = field(default_factory=list)
    open_facts: list[ToldFact] = field(default_factory=list)  # told and not asked for yet
    words: int = 0

    def say(self, user: str, assistant: str) -> None:
        self.messages += [Message("user", user), Message("assistant", assistant)]
        self.words += len(user.split()) + len(assistant.split())


def fact(rng: Random) -> ToldFact:
    thing = words.thing(rng)
    match rng.randrange(8):
        case 0 | 1 | 2:
            spot = words.place(rng)
            return ToldFact(f"the {thing} is {spot}", f"Where is the {thing}?", f"The {thing} is {spot}.", spot)
        case 3:
            owner = character(rng).name
            return ToldFact(f"the {thing} belongs to {owner}", f"Who owns the {thing}?", f"The {thing} belongs to {owner}.", owner)
        case 4 | 5:
            number = " ".join(str(rng.randrange(10)) for _ in range(3))
            box = f"{rng.choice(words.QUALITIES)} {rng.choice(words.CONTAINERS)}"
            return ToldFact(
                f"the code of the {box} is {number}", f"What is the code of the {box}?", f"The code of the {box} is {number}.", number
            )
        case 6:
            name, food = character(rng).name, f"{rng.choice(words.COLOURS)} {rng.choice(words.FOODS)}"
            return ToldFact(f"{name} likes {food}", f"What does {name} like?", f"{name} likes {food}.", food)
        case _:
            mine, value = rng.choice((
                (f"{rng.choice(words.ANIMALS)} is called", character(rng).name),
                ("favourite colour is", rng.choice(words.COLOURS)),
                ("favourite food is", rng.choice(words.TREATS)),
                ("lucky number is", str(rng.randint(1, 99))),
            ))  # fmt: skip
            what, _, verb = mine.partition(" is")
            question = f"What is my {what}{verb}?"
            return ToldFact(f"my {mine} {value}", question, f"Your {mine} {value}.", value)


def _facts(talk: Talk, rng: Random) -> None:
    told = distinct_facts(rng, rng.choice((1, 1, 2, 3)), talk.open_facts)
    text = " ".join(f"{upper(f.statement)}." for f in told)
    opening = rng.choice(("Please remember this:", "Remember:", "Keep this in mind:", "Here is something to remember:", "Do not forget:"))
    talk.say(f"{opening} {text}", rng.choice(("I will remember that.", "All right, I will keep that in mind.", "I will not forget it.")))
    talk.open_facts += told


def distinct_facts(rng: Random, count: int, known: Sequence[ToldFact] = ()) -> list[ToldFact]:
    """Facts whose questions have only one answer."""
    told: list[ToldFact] = []
    while len(told) < count:
        new = fact(rng)
        if all(new.question != other.question for other in (*known, *told)):
            told.append(new)
    return told


def recall_later(talk: Talk, rng: Random) -> None:
    if not talk.open_facts:
        _facts(talk, rng)
    asked = talk.open_facts.pop(rng.randrange(len(talk.open_facts)))
    talk.say(_casual(rng, f"Do you remember? {asked.question}") if rng.random() < 0.1 else asked.question, asked.answer)


def _not_told(talk: Talk, rng: Random) -> None:
    if any("the" in f.question for f in talk.open_facts):
        thing = words.thing(rng)
        if not any(thing in message.content for message in talk.messages):
            talk.say(f"Where is the {thing}?", f"You did not tell me where the {thing} is.")


def small_sum(talk: Talk, rng: Random) -> None:
    for _ in range(rng.randint(1, 3)):
        x, y = rng.randint(0, 20), rng.randint(0, 20)
        match rng.randrange(4):
            case 0 | 1:
                said, result = f"{x} plus {y}", x + y
            case 2:
                said, result = f"{max(x, y)} minus {min(x, y)}", max(x, y) - min(x, y)
            case _:
                x, y = x % 11, y % 11
                said, result = f"{x} times {y}", x * y
        talk.say(_casual(rng, f"{rng.choice(('What is', 'How much is', 'Please tell me what is'))} {said}?"), f"{upper(said)} is {result}.")


def tell_story(talk: Talk, rng: Random, please: str = "") -> None:
    """`please`: a request for a story that says nothing about its content."""
    s = outline(rng)
    hero, friend = s.hero, s.friend
    length, episodes = rng.choice((("a", 2), ("a", 2), ("a", 3), ("a short", 1), ("a long", 4)))
    begin = rng.choice(("Tell me", "Please tell me", "Tell me", "I would like", "Can you tell me", "Let us hear"))
    about = rng.choice((
        a(hero.kind),
        f"{a(hero.kind)} and {a(friend.kind)}",
        hero.name,
        f"{hero.name} and {friend.name}",
        f"{hero.full} and {friend.full}",
        f"{a(hero.kind)} named {hero.name}",
        f"{a(hero.kind)} named {hero.name} who lives near the {s.home}",
        f"{a(hero.kind)} who wants to {s.goal[0]}",
        f"{a(hero.kind)} named {hero.name} who wants to {s.goal[0]}",
    ))  # fmt: skip
    ask = f"{begin} {length} story" + (f" about {about}" if rng.random() < 0.85 else "")
    told = story(rng, episodes, s)
    talk.say(please or _casual(rng, ask + ("?" if "you" in ask else ".")), told.text)
    _questions(talk, rng, told)


def _casual(rng: Random, text: str) -> str:
    """Sometimes written as people type: no capital at the start, no punctuation at the end."""
    return text[0].lower() + text[1:].rstrip(".?!") if rng.random() < 0.25 else text


def _reading(talk: Talk, rng: Random) -> None:
    told = story(rng, rng.choice((1, 2, 3)))
    question, answer = rng.choice(told.questions)
    if rng.random() < 0.5:
        talk.say(f"{told.text} {question}", answer)
        told.questions.remove((question, answer))
    else:
        talk.say(
            f"{rng.choice(('Read this:', 'Here is a story.', 'Listen:'))} {told.text}", rng.choice(("I have read it.", "A nice story."))
        )
    _questions(talk, rng, told)


def _questions(talk: Talk, rng: Random, told: Story) -> None:
    for question, answer in rng.sample(told.questions, rng.randint(1, min(5, len(told.questions)))):
        talk.say(question, answer)


def _small_talk(talk: Talk, rng: Random) -> None:
    name = words.invented_name(rng) if rng.random() < 0.4 else rng.choice(words.GIRLS + words.BOYS)
    match rng.randrange(7):
        case 0 if not talk.messages:
            talk.say(
                _casual(rng, rng.choice(("Hello!", "Hi!", "Hello.", "Good morning!", "Hi there!"))), "Hello! Shall I tell you a story?"
            )
        case 1:
            talk.say(_casual(rng, rng.choice(("Who are you?", "What are you?", "What is your name?", "What can you do?"))), WHO)
        case 2:
            talk.say(rng.choice(("How are you?", "How do you do?")), "I am well, thank you. Shall I tell you a story?")
            _agree(talk, rng)
        case 3 if not any("my name" in message.content.lower() for message in talk.messages):
            talk.say(
                rng.choice((f"My name is {name}.", f"Hello, my name is {name}.", f"Hi! My name is {name}.")), f"Hello {name}! I am Tale."
            )
            talk.open_facts.append(ToldFact(f"your name is {name}", "What is my name?", f"Your name is {name}.", name))
        case 4 if any("story" in message.content for message in talk.messages):
            tell_story(talk, rng, _casual(rng, rng.choice(("Another one, please.", "Tell me another story.", "One more story, please."))))
        case 4:
            talk.say(rng.choice(("Thank you!", "Thanks.", "Thank you very much.", "That was nice.")), "You are welcome.")
        case _:
            talk.say(_strange_question(rng), UNKNOWN)


def _agree(talk: Talk, rng: Random) -> None:
    if rng.random() < 0.5:
        tell_story(talk, rng, _casual(rng, rng.choice(("Yes, please.", "Yes.", "Yes, please!", "Please do.", "Yes, I would like that."))))


def _strange_question(rng: Random) -> str:
    something, name = rng.choice(words.OBJECTS + words.LANDMARKS + words.ANIMALS), words.invented_name(rng)
    return rng.choice((
        f"What is the capital of {name}?", f"Who was the first king of {name}?", f"How far is it to {name}?",
        f"What does {name.lower()} mean?", f"How do I repair {a(something)}?", f"Write a program that draws {a(something)}.",
        f"How much does {a(something)} weigh?",
        f"Who invented the {something}?", f"When was {name} born?", f"Can you explain {name.lower()} to me?", "What time is it?",
        "What will the weather be tomorrow?", f"Why is the {something} {rng.choice(words.COLOURS)}?", f"Is {name} a country?",
        f"Translate {something} into another language.", "What is the meaning of life?", f"What do you think of {name}?",
    ))  # fmt: skip


TOPICS: tuple[tuple[Callable[[Talk, Random], None], int], ...] = (
    (_facts, 5), (recall_later, 5), (_not_told, 1), (small_sum, 3), (tell_story, 5), (_reading, 3), (_small_talk, 3),
)  # fmt: skip


def conversation(rng: Random, size: int) -> list[Message]:
    """A conversation of about `size` words; it ends with questions about what was told and not asked for yet."""
    talk = Talk()
    if rng.random() < 0.1:
        talk.messages.append(Message("system", rng.choice(("You are Tale.", "You tell stories.", "Answer in one sentence.", "Be kind."))))
    kinds, weights = zip(*TOPICS, strict=True)
    while talk.words < size:
        rng.choices(kinds, weights)[0](talk, rng)
    while talk.open_facts and rng.random() < 0.9:
        recall_later(talk, rng)
    return talk.messages


@dataclass(frozen=True, slots=True)
class LongDocument:
    """`messages` end when the stories have been read. Only the facts at the start contain the answers."""

    messages: list[Message]
    facts: list[ToldFact]


def long_document(rng: Random, filler_words: int, facts: int = 4) -> LongDocument:
    """Some facts, then about `filler_words` words of stories that have nothing to do with them."""
    told = distinct_facts(rng, facts)
    filler: list[str] = []
    count = 0
    while count < filler_words:
        part = story(rng, 3).text.split()[: filler_words - count]
        count += len(part)
        filler.append(" ".join(part).rstrip(",.;") + ".")
    text = " ".join(f"{upper(f.statement)}." for f in told)
    messages = [Message("user", f"Please remember this: {text}"), Message("assistant", "I will remember that.")]
    if filler:
        messages += [Message("user", f"Read this: {' '.join(filler)}"), Message("assistant", "I have read it.")]
    return LongDocument(messages, told)
