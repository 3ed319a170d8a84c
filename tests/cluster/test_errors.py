"""The table of failure reasons."""

import grpc

from baton.cluster.errors import Reason


def test_no_two_reasons_are_equal() -> None:
    assert len(list(Reason)) == len(Reason.__members__)


def test_every_reason_has_valid_statuses_and_a_consistent_retry_rule() -> None:
    for reason in Reason:
        assert reason.value.grpc in grpc.StatusCode.__members__
        assert 400 <= reason.value.http < 600
        assert reason.value.grpc != "INVALID_ARGUMENT" or not (reason.value.retry_elsewhere or reason.value.retry_after)
