"""The table of failures."""

import grpc

from baton.cluster.errors import Reason


def test_every_reason_is_one_of_its_own() -> None:
    assert len(list(Reason)) == len(Reason.__members__)


def test_every_kind_is_a_real_status_and_says_what_to_do() -> None:
    for reason in Reason:
        assert reason.value.grpc in grpc.StatusCode.__members__
        assert 400 <= reason.value.http < 600
        assert reason.value.grpc != "INVALID_ARGUMENT" or not (reason.value.retry_elsewhere or reason.value.retry_after)
