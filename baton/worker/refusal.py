"""What the engine's refusals mean to a caller of the worker."""

from baton.cluster.errors import BatonError, Reason
from baton.engine.engine import Malformed, QueueFull, Refused, TooLong

_REASONS = {QueueFull: Reason.SATURATED, TooLong: Reason.CONTEXT_LENGTH, Malformed: Reason.INVALID_FIELD}


def refusal(error: Refused) -> BatonError:
    return BatonError(_REASONS[type(error)], str(error))
