"""What an error of gRPC's means to the person who typed a command, where gRPC's own words do not say it."""

import re

_AT = re.compile(r"ipv[46]:([\w.\[\]%:]*:\d+)")
_DOORS = "generate and chat use the gRPC port (8470 by default), all other commands the admin port (8471)"


def explain(code: str, text: str) -> str:
    """One line for the error `code` with gRPC's or Baton's `text`. Pure."""
    found = _AT.search(text)
    at = found[1].replace("%5B", "[").replace("%5D", "]") if found else "the address"
    if "http1.x server" in text or "Failed parsing HTTP/2" in text:
        return f"{code}: {at} speaks HTTP, not gRPC: it is the port of the HTTP API, of the page or of another program; {_DOORS}"
    if code == "UNIMPLEMENTED" and "Method not found" in text:
        return f"{code}: the address is another gRPC port than the one that this command needs; {_DOORS}"
    if "Tls handshake failed" in text and "WRONG_VERSION_NUMBER" in text:
        return f"{code}: {at} does not use TLS: leave out https://, --tls and --ca"
    if "Connection refused" in text:
        return f"{code}: nothing listens at {at}"
    if code == "UNAUTHENTICATED" and "BATON_API_KEY" not in text:
        return f"{code}: {text} (set BATON_API_KEY, or api_key in the profile)"
    return f"{code}: {text}"
