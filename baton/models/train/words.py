"""The words of the generated world. The lists are data; `stories` and `dialogues` use them."""

from random import Random

# ruff: noqa: SIM905 - lists of words read better as text
GIRLS = (
    "Ada Anna Bella Cora Dora Edda Ella Emma Fern Flora Greta Hanna Ida Ines Iris Ivy June Kira Lena Lily Lola Luna Maja Mara Mia Mila "
    "Mina Nadia Nell Nina Nora Olga Pia Polly Rita Rosa Ruth Sara Tara Tess Tilda Una Vera Wanda Willa Yara Zita Zoe"
).split()
BOYS = (
    "Abel Adam Alan Arlo Ben Boris Bruno Carl Cyrus Dan Dario Eli Emil Erik Fabio Felix Finn Fred Gus Hugo Igor Ivo Jack Jon Kaspar "
    "Leo Levi Luca Max Milo Moritz Ned Nico Noah Oleg Oscar Otto Paul Pedro Piet Rafi Remi Rolf Sam Theo Tim Tobi Tom Victor Yuri"
).split()
ANIMALS = (
    "fox bear rabbit hedgehog mouse squirrel badger otter owl crow duck goose frog turtle beaver deer wolf cat dog goat sheep pony "
    "hen sparrow mole lizard raccoon swan donkey dragon"
).split()
SMALL_ANIMALS = "bird beetle mouse lamb kitten duckling puppy bee snail frog lizard chick butterfly squirrel".split()
TRAITS = "small brave kind curious clever quiet gentle cheerful shy patient young old hungry stubborn friendly lonely careful".split()
COLOURS = "red blue green yellow white black brown grey golden silver purple orange".split()
PAINTS = ("old", "new", *COLOURS)
QUALITIES = (*PAINTS, "tiny", "heavy", "round", "shiny", "broken", "wooden", "striped", "soft", "glass", "iron", "paper")
OBJECTS = (
    "key lantern bell cup hat scarf book map coin ring ball kite drum flute basket blanket mirror shell feather button box bottle "
    "compass ladder hammer spoon ribbon candle letter boot glove clock whistle stone"
).split()
SHELTERS = "bed table bench bridge stairs roof oak stove chair cart piano wagon fence haystack".split()
LANDMARKS = "mill barn well church school bakery tower shed stable garden hut cave castle market library harbour".split()
CONTAINERS = "drawer chest sack barrel jar bucket cupboard cellar attic kitchen nest trunk pocket suitcase".split()
HOMES = "river forest lake mountain meadow village sea hill garden pond valley mill harbour".split()
FOODS = "apples pears plums nuts berries cherries carrots beans mushrooms eggs".split()
TREATS = "bread soup cake porridge pie jam salad pudding".split()
GAMES = "played hide and seek,ran a race to the old tree,played chess,had a swimming match,played a guessing game,flew kites".split(",")
FEELINGS = "happy proud glad calm thankful cheerful".split()
TIMES = (
    "One morning",
    "One day",
    "One evening",
    "Early one day",
    "The next day",
    "Later that week",
    "After lunch",
    "At noon",
    "Soon after",
)
GOALS = (
    ("see the sea", "saw the sea"),
    ("find the tallest tree", "found the tallest tree"),
    ("learn to swim", "learned to swim"),
    ("learn to sing", "learned to sing"),
    ("build a boat", "built a boat"),
    ("climb the high hill", "climbed the high hill"),
    ("visit the big city", "visited the big city"),
    ("catch a falling star", "caught a falling star"),
    ("make a new friend", "made a new friend"),
    ("grow a giant pumpkin", "grew a giant pumpkin"),
    ("read the old book", "read the old book"),
    ("paint the old house", "painted the old house"),
    ("cross the wide desert", "crossed the wide desert"),
    ("hear the song of the whales", "heard the song of the whales"),
    ("win the summer race", "won the summer race"),
    ("meet the queen", "met the queen"),
    ("fly a kite over the clouds", "flew a kite over the clouds"),
    ("find the lost treasure", "found the lost treasure"),
)
# the obstacle, why it is one, the tool that helps, what they do with it
OBSTACLES = (
    ("a wide river", "the bridge was broken", "a boat", "rowed to the other side"),
    ("a deep ditch", "there was no way around", "a ladder", "climbed over it"),
    ("a high wall", "the gate was locked", "a rope", "climbed to the top"),
    ("a dark tunnel", "it was too dark to see", "a lamp", "walked through it slowly"),
    ("a fallen tree", "it lay across the path", "a saw", "cut a gap in it"),
    ("a field of snow", "the snow was too deep", "a sledge", "slid down the other side"),
    ("a muddy swamp", "the ground was too soft", "some boards", "made a path of wood"),
    ("a locked gate", "nobody had opened it for years", "a rusty key", "opened it together"),
)
WEATHER = (
    ("it rained all day", "the paths were full of mud", "the rain stopped"),
    ("it snowed", "the road was white and slippery", "the snow melted"),
    ("a storm came", "the wind broke many branches", "the wind grew quiet"),
    ("thick fog lay on the land", "nobody could see the way", "the fog lifted"),
    ("it was very hot", "the stones burned under every foot", "the evening brought cool air"),
)
ACTIVITIES = "told each other stories,played cards,sang songs,baked bread,drew pictures,mended a net,carved a small boat,slept".split(",")
REASONS_LOST = (
    "The wind had carried it there.",
    "A magpie had taken it there.",
    "It had fallen out of the bag there.",
    "A playful puppy had dragged it there.",
    "The water had washed it there.",
)
TROUBLES = (
    ("its foot was caught under a root", "lifted the root"),
    ("its wing was tangled in a thread", "cut the thread"),
    ("it had fallen into a hole", "let down a long branch"),
    ("it had lost its mother", "looked for her everywhere until she was found"),
    ("a thorn was in its foot", "pulled out the thorn"),
    ("the door had closed behind it", "pushed the door open"),
)
MORALS = (
    "A friend is worth more than gold.",
    "Who asks for help is never alone.",
    "Even a small step brings you closer.",
    "Kindness always comes back.",
    "It is good to share what you have.",
    "Patience opens every door.",
)
_ONSETS = "b br d dr f fl g gr h k l m n p r s st t tr v w z".split()
_VOWELS = "a e i o u ai ee oo".split()
_CODAS = "l m n r s x th nk rt".split()


def invented_name(rng: Random) -> str:
    """A name that is in no list, so that the model must copy names and cannot learn them all."""
    syllables = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((1, 2))))
    return (syllables + rng.choice(_CODAS)).capitalize()


def place(rng: Random) -> str:
    """Where a thing is: one of about a thousand phrases."""
    match rng.randrange(3):
        case 0:
            return f"under the {rng.choice(QUALITIES)} {rng.choice(SHELTERS)}"
        case 1:
            return f"{rng.choice(('behind', 'near', 'in front of', 'next to'))} the {rng.choice(PAINTS)} {rng.choice(LANDMARKS)}"
        case _:
            return f"in the {rng.choice(QUALITIES)} {rng.choice(CONTAINERS)}"


def thing(rng: Random) -> str:
    """`silver key`: without an article."""
    return f"{rng.choice(QUALITIES)} {rng.choice(OBJECTS)}"


def a(noun: str) -> str:
    """Adds the indefinite article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def upper(text: str) -> str:
    return text[:1].upper() + text[1:]
