"""What the answers and the errors of any store mean: whether another attempt can help, and what a person can do."""

import os
import re
from collections.abc import Iterator

from baton.models.fetch.store import FetchError, Interrupted

TRUST = "give the PEM file of the authority that issued it with --ca, or in SSL_CERT_FILE"


def refused(status: int, what: str, credentials: str, after: str | None = None) -> FetchError | Interrupted:
    """`credentials`: where they come from. `after`: the header Retry-After."""
    if status in (401, 403):
        return FetchError(f"{what}: refused ({status}): {credentials}")
    if status in (404, 410):
        return FetchError(f"{what}: not there ({status})")
    if status in (408, 425, 429) or status >= 500:
        return Interrupted(f"the store answered {status}", float(after) if after and after.isdigit() else 0.0)
    return FetchError(f"{what}: the store answered {status}")


def first_byte(content_range: str) -> int:
    """Where the bytes of an answer begin, as its header Content-Range says."""
    found = re.match(r"bytes (\d+)-", content_range)
    return int(found[1]) if found else 0


def untrusted(error: BaseException, what: str) -> FetchError | None:
    """If what failed is the check of a certificate."""
    for each in _chain(error):
        if "CERTIFICATE_VERIFY_FAILED" in str(each):
            return FetchError(f"{what}: the server's certificate is not trusted; {TRUST}")
    return None


def bundle(ca: str) -> str:
    """The authorities to trust in place of the system's; empty: the system's. Raises FetchError."""
    path = ca or os.environ.get("SSL_CERT_FILE", "")
    if path and not os.path.isfile(path):
        raise FetchError(f"{path}: there is no such file of authorities ({'--ca' if ca else 'SSL_CERT_FILE'})")
    return path


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__
