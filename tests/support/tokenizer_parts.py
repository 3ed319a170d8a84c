"""A tokenizer of parts, without a folder."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.engine.facts.fields import Fields
from baton.engine.facts.tokenizer_files import SETTINGS, gather
from router.tokenizer import Tokenizer

NOWHERE = Path("/nowhere")


def tokenizer_of(definition: str, settings: Mapping[str, Any] | None = None, template: str | None = None) -> Tokenizer:
    """`definition`: tokenizer.json. `settings`: tokenizer_config.json."""
    files = gather(definition, Fields(NOWHERE / SETTINGS, dict(settings or {})), Fields(NOWHERE / "config.json", {}))
    return Tokenizer(replace(files, template=template))
