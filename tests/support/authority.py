"""Certificates for tests, made with the command that a person would type."""

import os
from pathlib import Path
from typing import Any

from baton.cli import certs
from baton.cluster.config import SecurityConfig


def make(folder: Path, name: str = certs.SERVER_NAME) -> Path:
    """A folder with what `baton certs` makes; the server's certificate contains `name` and no address."""
    made = certs.Authority.new()
    folder.mkdir(parents=True, exist_ok=True)
    certs.write(folder, made, made.issue(name, server=True, hosts=()), made.issue("client", server=False, hosts=()))
    return folder


def security(folder: Path, **other: Any) -> SecurityConfig:
    return SecurityConfig(
        tls_cert=str(folder / "server.pem"), tls_key=str(folder / "server.key"), tls_ca=str(folder / "ca.pem"), **other
    )  # fmt: skip


def replace(folder: Path, other: Path) -> None:
    """Puts the files of another folder in place of this one's, as an operator would: each one at once."""
    for path in other.iterdir():
        copy = folder / f".{path.name}"
        copy.write_bytes(path.read_bytes())
        os.replace(copy, folder / path.name)
