"""Where each value of a configuration comes from: a flag, the environment, a file, the default, or what Baton decides for this device."""

import json
from contextlib import suppress
from pathlib import Path

from baton.cluster.config import Config
from baton.cluster.config_layers import Loaded
from baton.engine.defaults import DeviceFacts, settle, stored_dtype
from baton.engine.options import Options


def origins(loaded: Loaded) -> dict[str, str]:
    """By dotted key."""
    engine = loaded.config.engine
    settled = settle(Options(loaded.config.model, engine), DeviceFacts(engine.device), _stored(loaded.config))
    found = dict(loaded.sources)
    for name, why in settled.why.items():
        value = settled.values[name]
        set_to_auto = f"{found[name]}; " if found[name] != "default" else ""
        found[name] = f"{set_to_auto}auto: {why}" if value in (None, "auto") else f"{set_to_auto}auto: {value}, {why}"
    return found


def _stored(config: Config) -> str | None:
    """The type that the model's config.json names, if the folder is here; what is wrong with it is `baton doctor`'s to say."""
    if config.model.path:
        with suppress(OSError, ValueError, AttributeError):
            return stored_dtype(json.loads((Path(config.model.path) / "config.json").read_text()))
    return None
