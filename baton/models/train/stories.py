"""Short stories from a random number generator, each with questions that its text answers.

A story is an opening with a goal, a few episodes, and an ending that refers back to what was said before. Everybody and everything in it
keeps name, kind, pronoun and number: a model that learns these texts has to remember.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from baton.models.train import words
from baton.models.train.words import a, upper


@dataclass(frozen=True, slots=True)
class Character:
    name: str
    kind: str
    he: str
    his: str
    him: str

    @property
    def full(self) -> str:
        return f"{self.name} the {self.kind}"


@dataclass(slots=True)
class Story:
    rng: Random
    hero: Character
    friend: Character
    home: str
    goal: tuple[str, str]  # infinitive, past
    sentences: list[str] = field(default_factory=list)
    questions: list[tuple[str, str]] = field(default_factory=list)  # question, answer

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    def tell(self, *sentences: str | tuple[str, ...]) -> None:
        """Adds sentences in order; from a tuple, one is chosen."""
        self.sentences.extend(upper(said if isinstance(said, str) else self.rng.choice(said)) for said in sentences)

    def ask(self, question: str | tuple[str, ...], answer: str) -> None:
        self.questions.append((question if isinstance(question, str) else self.rng.choice(question), upper(answer)))

    def when(self) -> str:
        return self.rng.choice(words.TIMES)


def character(rng: Random, *others: Character) -> Character:
    """A character that shares neither name nor kind with the others."""
    while True:
        girl = rng.random() < 0.5
        kind = rng.choice(words.ANIMALS) if rng.random() < 0.7 else ("girl" if girl else "boy")
        name = words.invented_name(rng) if rng.random() < 0.15 else rng.choice(words.GIRLS if girl else words.BOYS)
        if all(name != other.name and kind != other.kind for other in others):
            return Character(name, kind, *(("she", "her", "her") if girl else ("he", "his", "him")))


def story(rng: Random, episodes: int, like: Story | None = None) -> Story:
    """A story of `episodes` episodes, up to eight, of about 45 words each; `like` determines the characters, the place and the goal."""
    told = like or outline(rng)
    _open(told)
    planted = _secret(told) if rng.random() < 0.4 else None
    for episode in rng.sample(EPISODES, episodes):
        episode(told)
    if planted:
        _remember(told, *planted)
    _end(told)
    return told


def outline(rng: Random) -> Story:
    """A story of which nothing has been told yet."""
    hero, home = character(rng), rng.choice(words.HOMES)
    goal = rng.choice([goal for goal in words.GOALS if home not in goal[0]])
    return Story(rng, hero, character(rng, hero), home, goal)


def _open(s: Story) -> None:
    h, wish, trait = s.hero, s.goal[0], s.rng.choice(words.TRAITS)
    match s.rng.randrange(4):
        case 0:
            s.tell(
                f"Once upon a time there was {a(h.kind)} who lived near the {s.home} and wanted to {wish}.",
                f"The {h.kind} was called {h.name}, and everybody knew that {h.he} was very {trait}.",
            )
        case 1:
            s.tell(
                f"Once upon a time there was {a(f'{trait} {h.kind}')} named {h.name}.",
                (f"{h.name} lived near the {s.home} and wanted to {wish}.", f"{upper(h.he)} lived near the {s.home} and wanted to {wish}."),
            )
        case 2:
            s.tell(
                f"{h.name} was {a(f'{trait} {h.kind}')} who lived near the {s.home}.",
                (f"More than anything else, {h.name} wanted to {wish}.", f"Every day {h.he} said the same thing: I want to {wish}."),
            )
        case _:
            s.tell(
                f"Near the {s.home} lived {a(f'{trait} {h.kind}')}.",
                f"{h.his} name was {h.name}, and {h.he} dreamed of one thing.",
                f"{h.he} wanted to {wish}.",
            )
    f = s.friend
    s.tell((f"{h.his} best friend was {f.full}.", f"{h.name} had a good friend, {f.full}.", f"{f.full} was {h.his} best friend."))
    s.ask((f"What did {h.name} want to do?", f"What did {h.name} want?"), f"{h.name} wanted to {wish}.")
    s.ask(f"Where did {h.name} live?", f"{h.name} lived near the {s.home}.")
    s.ask((f"Who was the friend of {h.name}?", f"Who was the best friend of {h.name}?"), f"The friend of {h.name} was {f.full}.")
    for one in (h, f):
        s.ask((f"Who was {one.name}?", f"What was {one.name}?"), f"{one.name} was {a(one.kind)}.")


def _lost(s: Story) -> None:
    h, f, lost, why = s.hero, s.friend, words.thing(s.rng), s.rng.choice(words.REASONS_LOST)
    first, found = words.place(s.rng), words.place(s.rng)
    s.tell(
        (f"{s.when()}, {h.name} could not find {h.his} {lost}.", f"{s.when()}, {h.name} lost {h.his} {lost} and was sad."),
        (f"{h.name} looked {first}, but it was not there.", f"First {h.he} looked {first}, but there was nothing."),
        (f"Then {f.name} came along.", f"After a while {f.name} came by."),
        (f'"Have you seen my {lost}?" asked {h.name}.', f'"I am looking for my {lost}," said {h.name}.'),
        (f'"It is {found}," said {f.name}.', f'"I saw it {found}," said {f.name}.'),
        (f"{h.name} ran there and found the {lost} {found}.", f"They went together, and there was the {lost}, {found}."),
        why,
        f"{h.name} was {s.rng.choice(words.FEELINGS)} and thanked {f.name}.",
    )
    s.ask(f"What did {h.name} lose?", f"{h.name} lost {h.his} {lost}.")
    s.ask(f"Where did {h.name} look first?", f"{h.name} looked {first} first.")
    s.ask((f"Where was the {lost}?", f"Where was the {lost} of {h.name}?"), f"The {lost} was {found}.")
    s.ask(f"Why was the {lost} there?", why)


def _count(s: Story) -> None:
    h, f, food, spot = s.hero, s.friend, s.rng.choice(words.FOODS), words.place(s.rng)
    had, more = s.rng.randint(2, 10), s.rng.randint(2, 9)
    given = s.rng.randint(1, had + more - 1)
    total, left = had + more, had + more - given
    why = s.rng.choice((f"{f.name} was hungry", f"{f.name} had none", f"{f.name} had been so kind"))
    s.tell(
        (f"{s.when()}, {h.name} had {had} {food}.", f"{s.when()}, {h.name} picked {had} {food}."),
        (f"{h.he} found {more} more {spot}.", f"There were {more} more {spot}, and {h.he} took them too."),
        (f"Now {h.he} had {total} {food}.", f"That made {total} {food}."),
        f"{h.name} gave {given} of them to {f.name} because {why}.",
        (f"Then {h.name} had {left} left.", f"So {h.he} kept {left}."),
    )
    s.ask(f"How many {food} did {h.name} have at first?", f"At first {h.name} had {had} {food}.")
    s.ask(f"How many {food} did {h.name} find {spot}?", f"{h.name} found {more} {food} {spot}.")
    s.ask(f"How many {food} were left?", f"{h.name} had {left} {food} left.")
    s.ask(f"Why did {h.name} give {food} to {f.name}?", f"{h.name} gave {food} to {f.name} because {why}.")


def _obstacle(s: Story) -> None:
    h, f = s.hero, s.friend
    what, why, tool, solved = s.rng.choice(words.OBSTACLES)
    s.tell(
        (f"{s.when()}, {h.name} and {f.name} came to {what}.", f"{s.when()}, their way led {h.name} and {f.name} to {what}."),
        (f"They could not go on because {why}.", f"Because {why}, they could not go on."),
        (f'"What shall we do?" asked {h.name}.', f'"We must not give up," said {h.name}.', f"{h.name} sat down and thought."),
        (f"{f.name} had an idea and brought {tool}.", f"Then {f.name} came back with {tool}."),
        f"With {tool} they {solved}.",
        (f"{h.name} laughed with joy.", "Now the way was free.", f"{h.name} was proud of {f.name}."),
    )
    s.ask((f"Why could {h.name} not go on?", "Why could they not go on?"), f"They could not go on because {why}.")
    s.ask(f"What did {f.name} bring?", f"{f.name} brought {tool}.")
    s.ask(f"What did {h.name} and {f.name} come to?", f"They came to {what}.")


def _rescue(s: Story) -> None:
    h, gift, spot = s.hero, words.thing(s.rng), words.place(s.rng)
    small = s.rng.choice([small for small in words.SMALL_ANIMALS if small not in (h.kind, s.friend.kind)])
    trouble, help_ = s.rng.choice(words.TROUBLES)
    s.tell(
        (f"{s.when()}, {h.name} heard a cry {spot}.", f"{s.when()}, somebody called for help {spot}."),
        (f"It was a little {small}.", f"{h.name} went closer and saw a little {small}."),
        (f"The {small} was crying because {trouble}.", f'"Why do you cry?" asked {h.name}, and saw that {trouble}.'),
        (f'"Do not worry," said {h.name}, and {h.he} {help_}.', f"{h.name} did not wait and {help_}."),
        (
            f"The little {small} was thankful and gave {h.name} {a(gift)}.",
            f'"This is for you," said the {small} and gave {h.name} {a(gift)}.',
        ),
    )
    s.ask(f"Who did {h.name} help?", f"{h.name} helped a little {small}.")
    s.ask(f"Why was the {small} crying?", f"The {small} was crying because {trouble}.")
    s.ask(f"What did the {small} give to {h.name}?", f"The {small} gave {h.name} {a(gift)}.")
    s.ask(f"Where was the {small}?", f"The {small} was {spot}.")


def _weather(s: Story) -> None:
    h, f, spot, activity = s.hero, s.friend, s.rng.choice(words.LANDMARKS), s.rng.choice(words.ACTIVITIES)
    weather, effect, over = s.rng.choice(words.WEATHER)
    s.tell(
        f"{s.when()}, {weather}, and {effect}.",
        (f"So {h.name} and {f.name} waited in the {spot} and {activity}.", f"{h.name} and {f.name} stayed in the {spot} and {activity}."),
        (f"When {over}, they went outside again.", f"They did not go on until {over}."),
    )
    s.ask(f"Why did {h.name} and {f.name} wait?", f"They waited because {weather}.")
    s.ask(f"Where did {h.name} and {f.name} wait?", f"They waited in the {spot}.")
    s.ask("What did they do while they waited?", f"They {activity}.")


def _bake(s: Story) -> None:
    h, f, treat, spot = s.hero, s.friend, s.rng.choice(words.TREATS), words.place(s.rng)
    needed, missing = s.rng.sample(words.FOODS, 2)
    guest = character(s.rng, h, f)
    s.tell(
        (
            f"{s.when()}, {h.name} wanted to make {treat} for {f.name}.",
            f"It was the birthday of {f.name}, so {h.name} wanted to make {treat}.",
        ),
        (f"{h.he} needed {needed} and {missing}.", f"For this {h.he} needed {needed} and {missing}."),
        f"The {needed} were {spot}, but there were no {missing}.",
        (
            f"So {h.name} asked {guest.full} for help, and {guest.name} brought {missing}.",
            f"Luckily {guest.full} came and brought {missing}.",
        ),
        (f"The {treat} was good, and {f.name} ate all of it.", f"{f.name} had never eaten such good {treat}."),
    )
    s.ask(f"What did {h.name} make for {f.name}?", f"{h.name} made {treat} for {f.name}.")
    s.ask(f"Where were the {needed}?", f"The {needed} were {spot}.")
    s.ask(f"Who brought {missing}?", f"{guest.full} brought {missing}.")
    s.ask("What was missing?", f"There were no {missing}.")


def _play(s: Story) -> None:
    h, f, game, prize = s.hero, s.friend, s.rng.choice(words.GAMES), words.thing(s.rng)
    winner, loser = s.rng.sample((h, f), 2)
    why = s.rng.choice(("was faster", "was luckier that day", "had practised for weeks", "knew every trick"))
    s.tell(
        f"{s.when()}, {h.name} and {f.name} {game}.",
        (f"{winner.name} won because {winner.he} {why}.", f"Because {winner.he} {why}, {winner.name} won."),
        (f"The prize was {a(prize)}.", f"{winner.name} got {a(prize)} as a prize."),
        (f'"Well done," said {loser.name}, and they both laughed.', f'"Next time I will win," said {loser.name}.'),
    )
    s.ask(("Who won the game?", "Who won?"), f"{winner.name} won.")
    s.ask(f"Why did {winner.name} win?", f"{winner.name} won because {winner.he} {why}.")
    s.ask("What was the prize?", f"The prize was {a(prize)}.")


def _trade(s: Story) -> None:
    h, offered, wanted, town = s.hero, words.thing(s.rng), words.thing(s.rng), s.rng.choice(words.LANDMARKS)
    trader = character(s.rng, h, s.friend)
    s.tell(
        (
            f"{s.when()}, {h.name} met {trader.full} near the {town}.",
            f"{s.when()}, {trader.full} stood near the {town} and greeted {h.name}.",
        ),
        (f"{trader.name} was selling {a(wanted)}.", f"{trader.name} had {a(wanted)} to sell."),
        (f'"I have no money," said {h.name}, "but I can give you my {offered}."', f'"Will you take my {offered} for it?" asked {h.name}.'),
        (f"{trader.name} agreed, and {h.name} got the {wanted}.", f'"With pleasure," said {trader.name}, and {h.name} took the {wanted}.'),
    )
    s.ask(f"Who did {h.name} meet near the {town}?", f"{h.name} met {trader.full}.")
    s.ask(f"What did {trader.name} sell?", f"{trader.name} sold {a(wanted)}.")
    s.ask(f"What did {h.name} give to {trader.name}?", f"{h.name} gave {trader.name} {h.his} {offered}.")


EPISODES: tuple[Callable[[Story], None], ...] = (_lost, _count, _obstacle, _rescue, _weather, _bake, _play, _trade)


def _secret(s: Story) -> tuple[str, str]:
    h, f, hidden, spot = s.hero, s.friend, words.thing(s.rng), words.place(s.rng)
    s.tell(
        (f'"I will tell you a secret," {f.name} said to {h.name}.', f'"Can you keep a secret?" {f.name} asked {h.name}.'),
        f'"{upper(a(hidden))} is hidden {spot}."',
    )
    s.ask(f"What was the secret of {f.name}?", f"{a(hidden)} was hidden {spot}.")
    return hidden, spot


def _remember(s: Story, hidden: str, spot: str) -> None:
    h, f = s.hero, s.friend
    s.tell(
        (f"{s.when()}, {h.name} remembered the secret of {f.name}.", f"{s.when()}, {h.name} thought of what {f.name} had said."),
        f"{h.he} looked {spot}, and there was the {hidden}.",
    )
    s.ask(f"Where did {h.name} find the {hidden}?", f"{h.name} found the {hidden} {spot}.")


def _end(s: Story) -> None:
    h, f, done = s.hero, s.friend, s.goal[1]
    s.tell(
        (
            f"In the end {h.name} {done}, and {f.name} was with {h.him}.",
            f"At last the great day came, and {h.name} {done}.",
            f"And so it happened that {h.name} {done}.",
        ),
        (
            f"{h.he} had never been so {s.rng.choice(words.FEELINGS)}.",
            f"{h.name} and {f.name} stayed friends for ever.",
            f"That night {h.name} slept near the {s.home} and dreamed of it again.",
        ),
    )
    if s.rng.random() < 0.5:
        s.tell(words.MORALS)
    s.ask((f"What did {h.name} do in the end?", "How did the story end?"), f"In the end {h.name} {done}.")
