"""What is trained, and for how long: everything that decides the bytes of a checkpoint."""

from dataclasses import dataclass

SEED = 7
VOCAB = 2048
CONTEXT = 2048  # tokens
RMS_NORM_EPS = 1e-5
TOKENIZER_DOCUMENTS = 6000
ROUND_DOCUMENTS = 128  # drawn, sorted by length and cut into batches together


@dataclass(frozen=True, slots=True)
class Recipe:
    """A Llama with tied embeddings and its training."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    tokens: int  # of training, padding left out
    batch_tokens: int  # at most, padding included
    learning_rate: float
    teacher: str = ""  # whose distribution is learned instead of the text's

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


TALE = Recipe("tale", hidden=256, layers=4, heads=4, kv_heads=2, inner=688, tokens=20_000_000, batch_tokens=4096, learning_rate=1.2e-2)
DRAFT = Recipe("tale-draft", 96, 2, 3, 1, 256, tokens=14_000_000, batch_tokens=4096, learning_rate=1.2e-2, teacher="tale")
RECIPES = {recipe.name: recipe for recipe in (TALE, DRAFT)}


def sizes(progress: float) -> tuple[tuple[int, float], ...]:
    """Words of a document and how often, at a stage of the training (0 to 1): long ones come when the short ones are understood."""
    return ((150, 0.6), (350, 0.3), (1250, 0.1)) if progress < 0.5 else ((150, 0.35), (350, 0.35), (1250, 0.3))
