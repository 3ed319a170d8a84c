"""The client's profile: a YAML file with what would otherwise be given as flags at every command.

# ~/.config/baton/client.yaml, or the file that BATON_CLIENT_CONFIG names
address: cluster.example:8470         # gRPC; for generate, chat and the load test
admin_address: cluster.example:8471   # for status, top, trace, roles and scale
http_address: cluster.example:8000    # for the load test with --door http
ca: ca.pem                            # relative to this file
cert: client.pem
key: client.key
server_name: baton.internal
api_key: ...
"""

import os
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from baton.cluster.config import ConfigError
from baton.cluster.config_layers import did_you_mean
from baton.section import Section

VARIABLE = "BATON_CLIENT_CONFIG"


class Profile(Section):
    """Unknown keys are refused."""

    address: str | None = Field(default=None, min_length=1)
    admin_address: str | None = Field(default=None, min_length=1)
    http_address: str | None = Field(default=None, min_length=1)
    name: str | None = Field(default=None, min_length=1)
    tls: bool = False
    ca: Path | None = Field(default=None, strict=False)
    cert: Path | None = Field(default=None, strict=False)
    key: Path | None = Field(default=None, strict=False)
    server_name: str | None = Field(default=None, min_length=1)
    api_key: str | None = Field(default=None, min_length=1, repr=False)

    def address_of(self, endpoint: str) -> str | None:
        return {"grpc": self.address, "admin": self.admin_address, "http": self.http_address}[endpoint]


def read(env: Mapping[str, str] = os.environ) -> Profile:
    """The profile of this user; an empty one if there is no file. Raises ConfigError."""
    path = _path(env)
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        if env.get(VARIABLE):
            raise ConfigError(f"{VARIABLE}: there is no file {path}") from None
        return Profile()
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"file {path}: cannot be read: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"file {path}: the top level must be a mapping, not {type(given).__name__}")
    for name in given:
        if name not in Profile.model_fields:
            raise ConfigError(f"file {path}: unknown key {name!r}{did_you_mean(str(name), Profile.model_fields)}")
    try:
        profile = Profile.model_validate(given)
    except ValidationError as error:
        raise ConfigError("\n".join(f"file {path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())) from None
    files = {name: path.parent / file.expanduser() for name in ("ca", "cert", "key") if (file := getattr(profile, name)) is not None}
    return profile.model_copy(update=files)


def _path(env: Mapping[str, str]) -> Path:
    if given := env.get(VARIABLE):
        return Path(given).expanduser()
    return Path(env.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()) / "baton" / "client.yaml"
