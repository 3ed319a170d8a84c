"""What the engine's refusals mean to a caller of the worker."""

from baton.cluster.errors import BatonError, Reason
from baton.engine.engine import Malformed, Output, QueueFull, Refused, TooLong

_REASONS = {QueueFull: Reason.SATURATED, TooLong: Reason.CONTEXT_LENGTH, Malformed: Reason.INVALID_FIELD}


def refusal(error: Refused) -> BatonError:
    return BatonError(_REASONS[type(error)], str(error))


def failure(output: Output) -> BatonError:
    """The error of an output without a token."""
    if output.expired:
        return BatonError(Reason.DEADLINE, "the deadline of the request was over while it waited in the worker's queue")
    return BatonError(Reason.INTERNAL, output.failure or "")
