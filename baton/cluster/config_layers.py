"""The layers of a configuration: defaults, files, environment variables and flags, merged into one `Config`.

Each key of the tree is also an environment variable (`engine.block_size` → `BATON_ENGINE_BLOCK_SIZE`) and a flag (`--engine.block-size`).
A flag wins over the environment, the environment over the files (a later file over an earlier one), and a file over the default. An unknown
name is refused, never skipped: a start that fails is better than a setting that silently does nothing. pydantic-settings is not used,
because it looks only for the variables that it knows, so it would skip a misspelt one.
"""

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from baton.cluster.config import Config, ConfigError

ENV_PREFIX = "BATON_"
# Environment variables with our prefix that are not keys: failpoints, the command line, the launcher and the tests read them.
FOREIGN_ENV = (
    "BATON_API_KEY",
    "BATON_CLIENT_CONFIG",
    "BATON_FAILPOINTS",
    "BATON_FAILPOINTS_FOLDER",
    "BATON_KERNEL_CACHE",
    "BATON_LOG_FILE",
    "BATON_PULSE_FD",
    "BATON_PYTHON",
    "BATON_STATE_DIR",
    "BATON_WORKER_NAME",
)
FOREIGN_ENV_PREFIX = "BATON_TEST_"
MASK = "********"


@dataclass(frozen=True, slots=True)
class Key:
    """One leaf of the tree. `flag` is None for a secret: other users can read a command line."""

    name: str  # dotted: engine.block_size
    env: str
    flag: str | None  # without the leading dashes
    default: object
    description: str


@dataclass(frozen=True, slots=True)
class Loaded:
    config: Config
    sources: dict[str, str]  # dotted key → "default" | "file NAME" | "env NAME" | "flag --NAME"


def load(files: Sequence[Path] = (), env: Mapping[str, str] = os.environ, flags: Mapping[str, str] | None = None) -> Loaded:
    """Merge defaults, files, environment and flags. Flag names are dotted keys; dashes count as underscores.

    Numbers, booleans and lists in `env` and `flags` are read as YAML; the value of a text key is used as it is (an empty value or `null`
    unsets an optional key). Raises ConfigError, with one line for each problem.
    """
    values: dict[str, object] = {}
    sources = {key.name: "default" for key in keys()}
    for layer in (*(_from_file(path) for path in files), _from_env(env), _from_flags(flags or {})):
        for name, value, source in layer:
            values[name], sources[name] = value, source
    tree: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        section, leaf = name.split(".")
        tree.setdefault(section, {})[leaf] = value
    try:
        return Loaded(Config.model_validate(tree), sources)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(detail, sources) for detail in error.errors(include_url=False))) from None


def to_env(config: Config) -> dict[str, str]:
    """The variables from which `load` rebuilds this configuration."""
    env = {}
    for key in keys():
        value = config.at(key.name)
        if value != key.default:
            env[key.env] = _to_text(value)
    return env


def _to_text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return json.dumps(value)  # which is YAML, too
    return str(list(value) if isinstance(value, tuple) else value)


def schema() -> dict[str, Any]:
    """JSON schema of the tree."""
    return Config.model_json_schema()


def dump(config: Config, secrets: bool = False) -> str:
    """YAML that `load` reads back. Without `secrets`, the cluster key and a password in the Redis URL are masked."""
    tree = config.model_dump(mode="json")
    if not secrets:
        for name, field in _leaves():
            section, leaf = name.split(".")
            if _is_secret(field) and tree[section][leaf] is not None:
                tree[section][leaf] = MASK
        tree["redis"]["url"] = mask_password(tree["redis"]["url"])
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def mask_password(url: str) -> str:
    """`url` with its password masked, so that it can be logged."""
    try:
        password = urlsplit(url).password
    except ValueError:
        return MASK
    if password:
        url = url.replace(f":{password}@", f":{MASK}@", 1)
    return re.sub(r"(?<=[?&]password=)[^&]*", MASK, url)


def keys() -> list[Key]:
    """Every leaf, in the order of the tree."""
    return [
        Key(name, _env_name(name), None if _is_secret(field) else name.replace("_", "-"), field.default, field.description or "")
        for name, field in _leaves()
    ]


def _leaves() -> Iterator[tuple[str, FieldInfo]]:
    for section, outer in Config.model_fields.items():
        for leaf, field in type(outer.default).model_fields.items():
            yield f"{section}.{leaf}", field


def _env_name(name: str) -> str:
    return ENV_PREFIX + name.upper().replace(".", "_")


def _is_secret(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("secret"))


_FIELDS = dict(_leaves())
_BY_ENV = {_env_name(name): name for name in _FIELDS}
if len(_BY_ENV) != len(_FIELDS):  # pragma: no cover - two keys would share one variable
    raise RuntimeError("two configuration keys have the same environment variable")

_Setting = tuple[str, object, str]  # dotted key, value, source


def _from_file(path: Path) -> list[_Setting]:
    source = f"file {path}"
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{source}: cannot be read: {error}") from None
    settings: list[_Setting] = []
    for section, leaves in _mapping(tree, source, "the top level").items():
        if section not in Config.model_fields:
            raise ConfigError(f"{source}: unknown section {section!r}{did_you_mean(str(section), Config.model_fields)}")
        for leaf, value in _mapping(leaves, source, section).items():
            name = f"{section}.{leaf}"
            if name not in _FIELDS:
                raise ConfigError(f"{source}: unknown key {name!r}{did_you_mean(name, _FIELDS)}")
            settings.append((name, value, source))
    return settings


def _from_env(env: Mapping[str, str]) -> list[_Setting]:
    settings: list[_Setting] = []
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in FOREIGN_ENV or variable.startswith(FOREIGN_ENV_PREFIX):
            continue
        name = _BY_ENV.get(variable)
        if name is None:
            raise ConfigError(f"env {variable}: no such key{did_you_mean(variable, (*_BY_ENV, *FOREIGN_ENV))}{_service_link(variable)}")
        settings.append((name, _from_text(_FIELDS[name], text), f"env {variable}"))
    return settings


def _from_flags(flags: Mapping[str, str]) -> list[_Setting]:
    settings: list[_Setting] = []
    for flag, text in flags.items():
        name = flag.replace("-", "_")
        if name not in _FIELDS:
            raise ConfigError(f"flag --{flag}: no such key{did_you_mean(name, _FIELDS)}")
        if _is_secret(_FIELDS[name]):
            raise ConfigError(f"flag --{flag}: command lines are public, so a secret cannot be a flag; use {_env_name(name)} or a file")
        settings.append((name, _from_text(_FIELDS[name], text), f"flag --{flag}"))
    return settings


def _mapping(value: object, source: str, where: str) -> dict[Any, Any]:
    if value is None:  # an empty file, or a section with nothing but comments
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: {where} must be a mapping, not {type(value).__name__}")
    return value


def _from_text(field: FieldInfo, text: str) -> object:
    """`text` as a value of `field`. Text that is not YAML is returned unchanged, and validation refuses it."""
    branches = get_args(field.annotation) if get_origin(field.annotation) not in (Literal, tuple, dict) else (field.annotation,)
    words = [branch is type(None) or get_origin(branch) is Literal for branch in branches]
    if str in (field.annotation, *branches) or (words and all(words)):
        return None if type(None) in branches and text in ("", "null") else text
    try:
        return yaml.load(text, _Loader)
    except (ValueError, RecursionError, yaml.YAMLError):
        return text


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """The end of an error about an unknown name; empty if no candidate is like it."""
    known = list(candidates)
    near = _near_key(name, known) if "." in name else _near(name, known)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _near_key(name: str, known: list[str]) -> list[str]:
    """The leaf decides: the section is most of a key's letters, and is equal in all of its keys."""
    section, _, leaf = name.rpartition(".")
    if same_leaf := [candidate for candidate in known if candidate.endswith(f".{leaf}")]:
        return same_leaf[:2]
    [section] = difflib.get_close_matches(section, {candidate.partition(".")[0] for candidate in known}, n=1) or [section]
    leaves = [candidate.partition(".")[2] for candidate in known if candidate.startswith(f"{section}.")]
    return [f"{section}.{near}" for near in _near(leaf, leaves)]


def _near(name: str, known: list[str]) -> list[str]:
    prefixed = name.startswith(ENV_PREFIX)  # with its section, most of the letters are equal
    return difflib.get_close_matches(name, known, n=1, cutoff=0.85 if prefixed else 0.6)


def _service_link(variable: str) -> str:
    if re.search(r"_(SERVICE_(HOST|PORT)|PORT_\d+)", variable):
        return " (Kubernetes sets it for a Service of this name: set enableServiceLinks: false)"
    return ""


def _explain(detail: Any, sources: Mapping[str, str]) -> str:
    """One line for one of pydantic's errors."""
    path = [str(part) for part in detail["loc"]]
    name, message = ".".join(path[:2]), detail["msg"].removeprefix("Value error, ")
    if name in sources:
        value = MASK if _is_secret(_FIELDS[name]) else repr(detail["input"])
        if name in ("redis.url", "tiers.object"):
            value = repr(mask_password(str(detail["input"])))
        return f"{name} = {value} ({sources[name]}): {message}"
    # A rule between keys of one section or of several: the message names the keys, and the sources of those that were set follow.
    related = [key for key in sources if (key.startswith(f"{name}.") if name else key in message)]
    given = [f"{key} from {sources[key]}" for key in related if sources[key] != "default"]
    return f"{name or 'config'}: {message} [{'; '.join(given)}]"


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: a key given twice is an error, and `1e-3` is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is not text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))
