"""Turns the engine's refusals into errors for a caller of the worker."""

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.engine import Malformed, Output, QueueFull, SequenceRefused, TooLong, Unfetchable

_REASONS = {
    QueueFull: Reason.SATURATED,
    TooLong: Reason.CONTEXT_LENGTH,
    Unfetchable: Reason.CONTEXT_LENGTH,
    Malformed: Reason.INVALID_FIELD,
}


def refusal(error: SequenceRefused) -> BatonError:
    return BatonError(_REASONS[type(error)], str(error))


def failure(output: Output) -> BatonError:
    """Returns the error for an output without a token."""
    if output.expired:
        return BatonError(Reason.DEADLINE, "the deadline of the request passed while it waited in the worker's queue")
    return BatonError(Reason.TRANSFER_FAILED if output.unavailable else Reason.INTERNAL, output.failure or "")
