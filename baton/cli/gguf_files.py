"""What a person sees of GGUF files; `baton.models.gguf` does the work."""

from collections.abc import Callable
from pathlib import Path

from baton.cluster.config import ConfigError
from baton.engine.facts.fields import CheckpointError

SUFFIX = ".gguf"
Say = Callable[[str], None]


def folder_of(path: Path, say: Say, plainly: bool = False) -> Path:
    """The folder of a model: of a GGUF file the one in this user's cache, made if it is not there. `plainly`: for an engine that is not
    ours. Raises ConfigError."""
    if path.suffix != SUFFIX or path.is_dir():
        return path
    if not path.is_file():
        raise ConfigError(f"model.path: there is no file {path}")
    try:
        from baton.models.gguf.unpack import cached

        return cached(path, say, plainly=plainly)
    except ImportError as error:
        raise _lacking(path, error) from None
    except CheckpointError as error:
        raise ConfigError(f"model.path: {error}") from None


def unpack(file: Path, folder: Path, say: Say, plainly: bool) -> None:
    """Raises ConfigError, OSError."""
    try:
        from baton.models.gguf import unpack as work

        work.unpack(file, folder, say, plainly)
    except ImportError as error:
        raise _lacking(file, error) from None
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def _lacking(file: Path, error: ImportError) -> ConfigError:
    return ConfigError(f"{file}: {error.name} is not installed; pip install 'baton-llm[gguf]'")
