"""The flags of every command that reaches a cluster, each declared once. `loadtest.options.takes` adds them to a command.

An option that is not given is None: then the environment, the profile (`baton.access.profile`) or the running cluster decides.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.launch.pods import ReleaseName, parse_release


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Which cluster."""

    address: Annotated[
        str | None,
        typer.Option(help="host:port of the door that the command uses, or https://host:port; the running cluster's by default."),
    ] = None
    name: Annotated[str | None, typer.Option("--name", help="Name of a cluster that runs on this machine; baton by default.")] = None
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", help="Configuration of the cluster (YAML), for its TLS files; may be given more than once."),
    ] = None
    kubernetes: Annotated[
        str | None, typer.Option(help="NAMESPACE/RELEASE of the chart: through the API server, with the rights of your kubeconfig.")
    ] = None
    context: Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig; its current one by default.")] = None

    def __post_init__(self) -> None:
        """Raises typer.BadParameter."""
        if self.kubernetes is None:
            if self.context is not None:
                raise typer.BadParameter("--context goes with --kubernetes")
            return
        if self.release is None:
            raise typer.BadParameter(f"--kubernetes {self.kubernetes}: must be NAMESPACE/RELEASE")
        if given := [flag for flag, value in (("--address", self.address), ("--name", self.name)) if value is not None]:
            raise typer.BadParameter(f"--kubernetes and {given[0]} both say which cluster: give one")

    @property
    def release(self) -> ReleaseName | None:
        return parse_release(self.kubernetes or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientIdentity:
    """Whom the client trusts, and how it proves who it is."""

    tls: Annotated[bool, typer.Option("--tls", help="Use TLS, with the system's authorities unless --ca names another.")] = False
    ca: Annotated[Path | None, typer.Option("--ca", "--tls-ca", help="PEM file of the authority that issued the server's certificate.")] = (
        None
    )
    cert: Annotated[Path | None, typer.Option("--cert", "--tls-cert", help="PEM file of a client certificate, for mutual TLS.")] = None
    key: Annotated[Path | None, typer.Option("--key", "--tls-key", help="PEM file of that certificate's private key.")] = None
    server_name: Annotated[
        str | None, typer.Option(help="Name that the server's certificate must contain, if that is not its address: baton.internal.")
    ] = None
    api_key: Annotated[
        str | None, typer.Option(envvar="BATON_API_KEY", help="API key. Other users can read a command line: prefer the variable.")
    ] = None
