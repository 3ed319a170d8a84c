"""What is trained, and for how long: everything that decides the bytes of a checkpoint."""

from dataclasses import dataclass

from baton.models.folder import Shape

SEED = 7
VOCAB = 2048
CONTEXT = 2048  # tokens
TOKENIZER_DOCUMENTS = 6000
ROUND_WORDS = 20_000  # words that are drawn, sorted by length and cut into batches together


@dataclass(frozen=True, slots=True)
class Phase:
    """`sizes`: words in a document → share of the documents."""

    until: float  # share of the stage
    sizes: tuple[tuple[int, float], ...]
    batch_tokens: int  # at most, padding included
    tools: float = 0.0  # share of the documents that offer tools


@dataclass(frozen=True, slots=True)
class Stage:
    tokens: int  # of training, without padding
    learning_rate: float
    phases: tuple[Phase, ...]

    def phase(self, progress: float) -> Phase:
        """The phase at a point of the stage (0 to 1)."""
        return next((phase for phase in self.phases if progress < phase.until), self.phases[-1])


@dataclass(frozen=True, slots=True)
class Recipe:
    """Stages follow each other, each with a new optimizer."""

    name: str
    shape: Shape
    stages: dict[str, Stage]
    teacher: str = ""  # the model whose distribution is learned instead of the text's


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """A head on the hidden states of `teacher` (`baton.models.train.head`)."""

    name: str
    teacher: str
    inner: int  # width of its MLP; all else is as in a layer of the teacher
    stage: Stage


def _shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Shape:
    return Shape(hidden, inner, layers, heads, kv_heads, VOCAB, CONTEXT, tied=True)


# A model learns to copy from far away after it has learned to copy from nearby, and the latter takes many steps rather than many tokens.
TEXTS = (
    Phase(0.131, ((20, 1.0),), 2048),
    Phase(0.327, ((20, 0.3), (40, 0.3), (110, 0.4)), 2048),
    Phase(0.62, ((20, 0.1), (110, 0.2), (150, 0.3), (350, 0.3), (1250, 0.1)), 4096),
    Phase(1.0, ((110, 0.15), (150, 0.25), (350, 0.3), (1250, 0.3)), 4096),
)
TOOLS = (
    Phase(0.7, ((20, 0.1), (60, 0.3), (110, 0.2), (150, 0.2), (350, 0.2)), 4096, tools=0.6),
    Phase(1.0, ((60, 0.25), (110, 0.2), (150, 0.15), (350, 0.2), (1250, 0.2)), 4096, tools=0.4),
)

TALE = Recipe(
    "tale",
    _shape(256, 688, layers=4, heads=4, kv_heads=2),
    {"texts": Stage(13_000_000, 2.5e-3, TEXTS), "tools": Stage(2_200_000, 1.2e-3, TOOLS)},
)
DRAFT = Recipe(
    "tale-draft",
    _shape(96, 256, layers=2, heads=3, kv_heads=1),
    {"texts": Stage(8_000_000, 5e-3, TEXTS), "tools": Stage(1_300_000, 2.5e-3, TOOLS)},
    teacher="tale",
)
MIXED = (
    Phase(0.3, ((20, 0.2), (110, 0.8)), 2048, tools=0.2),
    Phase(1.0, ((60, 0.2), (110, 0.4), (150, 0.3), (350, 0.1)), 2048, tools=0.3),
)
HEAD = HeadRecipe("tale-head", "tale", 256, Stage(400_000, 4e-3, MIXED))
RECIPES = {recipe.name: recipe for recipe in (TALE, DRAFT)}
