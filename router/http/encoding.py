"""Bodies that a client compressed (RFC 9110, 8.4): unpacked up to a bound, so that a few bytes cannot become gigabytes."""

import zlib

from router.http.errors import HttpError

# What zlib is told about the wrapper: gzip's (RFC 1952), or zlib's own (RFC 1950), which HTTP calls deflate.
WRAPPERS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
IDENTITY = "identity"


def check_encoding(name: str) -> None:
    """Raises HttpError for an encoding that is not known, or for several at once."""
    if name != IDENTITY and name not in WRAPPERS:
        message = f"the content-encoding {name[:80]!r} is not known here: send the body plain, or as one of {', '.join(WRAPPERS)}"
        raise HttpError(415, message, headers={"accept-encoding": ", ".join(WRAPPERS)})


def unpack(body: bytes, name: str, most: int) -> bytes:
    """`body` without the encoding that `check_encoding` accepted. Raises HttpError if it is damaged or becomes longer than `most` bytes."""
    if name == IDENTITY:
        return body
    packed = zlib.decompressobj(WRAPPERS[name])
    try:
        plain = packed.decompress(body, most + 1)
    except zlib.error:
        raise HttpError(400, f"the body is not {name}, as its content-encoding says", code="invalid_encoding") from None
    if len(plain) > most:
        raise HttpError(413, f"the body must have at most {most} bytes when it is unpacked")
    if not packed.eof or packed.unused_data:
        raise HttpError(400, f"the body is not one whole {name} stream", code="invalid_encoding")
    return plain
