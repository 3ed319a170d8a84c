"""Where each value of a configuration comes from: a flag, the environment, a file, the default, or what Baton decides for this device."""

import json
from contextlib import suppress
from pathlib import Path

from baton.cluster.config import Config
from baton.cluster.config_layers import Loaded
from baton.cluster.device import Asked, DeviceChoice, choose
from baton.engine.defaults import DeviceFacts, settle, stored_dtype
from baton.engine.options import Options


def origins(loaded: Loaded, choice: DeviceChoice | None = None) -> dict[str, str]:
    """Origins by dotted key. `choice`: what `engine.device` means here, if that is known already."""
    engine, found = loaded.config.engine, dict(loaded.sources)
    facts = _facts(engine.device, choice)
    if engine.device == "auto":
        source = found["engine.device"]
        found["engine.device"] = f"{'' if source == 'default' else f'{source}; '}auto: {facts.kind}, here"
    settled = settle(Options(loaded.config.model, engine), facts, _stored(loaded.config))
    for name, why in settled.why.items():
        value = settled.values[name]
        set_to_auto = f"{found[name]}; " if found[name] != "default" else ""
        found[name] = f"{set_to_auto}auto: {why}" if value in (None, "auto") else f"{set_to_auto}auto: {value}, {why}"
    return found


def _facts(asked: Asked, choice: DeviceChoice | None) -> DeviceFacts:
    """If the device that is asked for is missing, `baton up` says so; its options are shown all the same."""
    try:
        choice = choice or choose(asked)
    except ValueError:
        return DeviceFacts("cpu" if asked == "cpu" else "cuda")
    return DeviceFacts(choice.device, min((device.memory_total for device in choice.devices or ()), default=0))


def _stored(config: Config) -> str | None:
    """The type that the model's config.json names, if the folder is here; what is wrong with it is `baton doctor`'s to say."""
    if config.model.path:
        with suppress(OSError, ValueError, AttributeError):
            return stored_dtype(json.loads((Path(config.model.path) / "config.json").read_text()))
    return None
