"""Baton serves large language models with prefill and decode on separate pools of workers.

`from baton import Client, AsyncClient` is what an application needs; nothing is loaded before it is used.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> object:
    """Loads the client lazily: each of our processes imports this package, and most need no client."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from baton import client

    return getattr(client, name)
