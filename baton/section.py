"""What every section of the configuration is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Strict: `true` is not an integer, and `"16"` in a file is not a number. Bounds exclude nan and inf."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)
