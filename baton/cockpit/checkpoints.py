"""The models that an experiment can run for real on any machine: those that ship, and untrained ones, which are made of a seed. Nothing is
downloaded. Decides and does nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MODELS = Path(__file__).resolve().parents[1] / "models"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`made`: the arguments of `baton.models.make_small`; none: it ships, in a folder of its name. `context`: tokens."""

    name: str
    parameters: int
    context: int = 2048
    made: Mapping[str, int] = field(default_factory=dict)

    @property
    def says(self) -> str:
        return f"{self.name}: {self.parameters / 1e6:.2g} million parameters"

    @property
    def folder(self) -> Path:
        """Where it lies, if it ships."""
        return MODELS / self.name

    @property
    def weight_bytes(self) -> int:
        """The weights in memory, as floats of 32 bits."""
        return 4 * self.parameters


CHECKPOINTS = {
    one.name: one
    for one in (
        LocalModel("tale-draft", 393_696),
        LocalModel("tale", 3_426_560),
        LocalModel("untrained-27m", 27_271_680, made={"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4}),
        LocalModel("untrained-86m", 85_740_288, made={"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4}),
    )
}
