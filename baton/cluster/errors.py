"""The one table of failures: reason → gRPC status, HTTP status, and whether a retry elsewhere can help.

A refusal is an answer. The code that raises it names the reason, and the doors translate the reason into a status (gRPC:
`baton.cluster.rpc`, HTTP: the router's door); no other code invents one. `retry_elsewhere` answers the router's question ("may another
worker succeed?"), `retry_after` the client's ("may I succeed later?").
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: else reasons with equal fields would be one enumeration member
class ErrorKind:
    grpc: str  # name of a grpc.StatusCode
    http: int
    retry_elsewhere: bool = False
    retry_after: float | None = None  # seconds, sent to the client


class Reason(Enum):
    """Names are the `reason` of google.rpc.ErrorInfo (domain "baton") and of `CallError` between our processes."""

    INVALID_FIELD = ErrorKind("INVALID_ARGUMENT", 400)
    CONTEXT_LENGTH = ErrorKind("INVALID_ARGUMENT", 400)
    UNAUTHENTICATED = ErrorKind("UNAUTHENTICATED", 401)
    FORBIDDEN = ErrorKind("PERMISSION_DENIED", 403)  # by the API server of Kubernetes: the caller lacks a right
    MODEL_NOT_FOUND = ErrorKind("NOT_FOUND", 404)
    RATE_LIMITED = ErrorKind("RESOURCE_EXHAUSTED", 429, retry_after=60.0)
    SATURATED = ErrorKind("RESOURCE_EXHAUSTED", 429, retry_elsewhere=True, retry_after=1.0)
    NO_WORKER = ErrorKind("UNAVAILABLE", 503, retry_after=1.0)
    DRAINING = ErrorKind("UNAVAILABLE", 503, retry_elsewhere=True, retry_after=1.0)
    WRONG_ROLE = ErrorKind("FAILED_PRECONDITION", 503, retry_elsewhere=True)
    UNREACHABLE = ErrorKind("UNAVAILABLE", 503, retry_after=1.0)  # the API server of Kubernetes does not answer
    WORKER_LOST = ErrorKind("UNAVAILABLE", 503, retry_elsewhere=True, retry_after=1.0)
    WRONG_WORKER = ErrorKind("FAILED_PRECONDITION", 503, retry_elsewhere=True)  # another process has the address of the intended worker
    RETRIES_SPENT = ErrorKind("UNAVAILABLE", 503, retry_after=1.0)
    DEADLINE = ErrorKind("DEADLINE_EXCEEDED", 504)
    CANCELLED = ErrorKind("CANCELLED", 499)
    STALLED = ErrorKind("ABORTED", 499)  # the client did not read its answer
    # Handoff. For a client, these only mean "try again": the KV was not used.
    HANDSHAKE_MISMATCH = ErrorKind("FAILED_PRECONDITION", 503, retry_elsewhere=True)
    LEASE_REFUSED = ErrorKind("PERMISSION_DENIED", 503, retry_elsewhere=True)
    LEASE_EXPIRED = ErrorKind("ABORTED", 503, retry_elsewhere=True)
    DIGEST_MISMATCH = ErrorKind("DATA_LOSS", 503, retry_elsewhere=True)
    TRANSFER_FAILED = ErrorKind("UNAVAILABLE", 503, retry_elsewhere=True)
    INTERNAL = ErrorKind("INTERNAL", 500, retry_elsewhere=True)
    POISONOUS = ErrorKind("INTERNAL", 500)  # this request, or a recent one with the same prompt, killed workers


DEGRADED = "degraded"  # in the metadata of a refusal: by which measure of `router.degrade`, and why


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of the caller's message and what is wrong with it."""

    field: str
    description: str


class BatonError(Exception):
    """A failure with a reason from the table. `violations` go with INVALID_FIELD and CONTEXT_LENGTH; `retry_after` replaces the table's
    value where a better one is known."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        violations: tuple[Violation, ...] = (),
        metadata: dict[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.violations = violations
        self.metadata = metadata or {}
        self.retry_after = reason.value.retry_after if retry_after is None else retry_after  # seconds

    def __str__(self) -> str:
        return f"{self.reason.name}: {self.message}"


def invalid(field: str, description: str) -> BatonError:
    """The refusal of one bad field."""
    return BatonError(Reason.INVALID_FIELD, f"{field}: {description}", (Violation(field, description),))
