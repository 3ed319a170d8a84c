"""What is trained, and for how long: everything that decides the bytes of a checkpoint."""

from dataclasses import dataclass

from baton.models.folder import Shape

SEED = 7
VOCAB = 2048
CONTEXT = 2048  # tokens
TOKENIZER_DOCUMENTS = 6000
ROUND_WORDS = 20_000  # words that are drawn, sorted by length and cut into batches together


@dataclass(frozen=True, slots=True)
class Recipe:
    name: str
    shape: Shape
    tokens: int  # of training, without padding
    learning_rate: float
    teacher: str = ""  # the model whose distribution is learned instead of the text's


def _shape(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> Shape:
    return Shape(hidden, inner, layers, heads, kv_heads, VOCAB, CONTEXT, tied=True)


TALE = Recipe("tale", _shape(256, 688, layers=4, heads=4, kv_heads=2), tokens=13_000_000, learning_rate=2.5e-3)
DRAFT = Recipe("tale-draft", _shape(96, 256, layers=2, heads=3, kv_heads=1), 8_000_000, 5e-3, teacher="tale")
RECIPES = {recipe.name: recipe for recipe in (TALE, DRAFT)}


@dataclass(frozen=True, slots=True)
class Phase:
    """`sizes`: words in a document → share of the documents."""

    until: float  # share of the training
    sizes: tuple[tuple[int, float], ...]
    batch_tokens: int  # at most, padding included


# A model learns to copy from far away after it has learned to copy from nearby, and the latter takes many steps rather than many tokens.
PHASES = (
    Phase(0.131, ((20, 1.0),), 2048),
    Phase(0.327, ((20, 0.3), (40, 0.3), (110, 0.4)), 2048),
    Phase(0.62, ((20, 0.1), (110, 0.2), (150, 0.3), (350, 0.3), (1250, 0.1)), 4096),
    Phase(1.0, ((110, 0.15), (150, 0.25), (350, 0.3), (1250, 0.3)), 4096),
)


def phase(progress: float) -> Phase:
    """The phase at a point of the training (0 to 1)."""
    return next((phase for phase in PHASES if progress < phase.until), PHASES[-1])
