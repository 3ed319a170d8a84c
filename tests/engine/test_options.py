"""An engine's options are declared once: whatever else knows them takes them from there."""

import inspect
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from baton.cluster.config import Config
from baton.engine.core.limits import Limits
from baton.engine.options import EngineOptions, ModelOptions, Options, ReadBy


def test_every_option_has_a_meaning_and_a_module_that_acts_on_it() -> None:
    for section in (ModelOptions, EngineOptions):
        for name, told in section.model_fields.items():
            assert told.description, name
            assert isinstance(told.json_schema_extra, ReadBy), name
            place = find_spec(told.json_schema_extra.module)
            assert place is not None and place.origin is not None, name
            text = Path(place.origin).read_text()
            assert name in text or f"{name.removesuffix('_mib')}_bytes" in text, f"{place.name} has no {name}"


def test_the_limits_of_a_scheduler_are_options_with_the_same_defaults() -> None:
    assert EngineOptions().limits == Limits()
    assert {limit.name for limit in fields(Limits)} < EngineOptions.model_fields.keys()


def test_the_configuration_hands_its_own_sections_to_the_engine() -> None:
    config = Config()
    assert type(config.model) is ModelOptions and type(config.engine) is EngineOptions


def test_options_are_set_by_their_names_and_checked() -> None:
    made = Options.of(Path("folder"), dtype="bfloat16", block_size=32, kv_memory_mib=0.5)
    assert made.path == Path("folder") and made.model.dtype == "bfloat16" and made.engine.block_size == 32
    assert made.engine.kv_memory_bytes == 1 << 19 and EngineOptions().kv_memory_bytes is None
    changed = made.but(dtype="auto", compiled=False)
    assert changed.model.dtype == "auto" and not changed.engine.compiled and changed.engine.block_size == 32 and made.engine.compiled
    wrong: list[dict[str, Any]] = [
        {"block_sise": 16},
        {"block_size": 0},
        {"dtype": "int8"},
        {"kv_dtype": "int3"},
        {"kv_memory_mib": float("nan")},
    ]
    for keys in wrong:
        with pytest.raises(ValidationError, match=next(iter(keys))):
            Options.of(Path("folder"), **keys)
        with pytest.raises(ValidationError, match=next(iter(keys))):
            made.but(**keys)


def test_whoever_loads_a_model_takes_options_whole() -> None:
    from baton.engine.choice import load
    from baton.engine.runner import ModelRunner

    for function in (load, ModelRunner.load):
        assert inspect.signature(function).parameters.keys() <= {"kind", "options", "choose", "progress"}
