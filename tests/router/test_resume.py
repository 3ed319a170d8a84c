"""The receipt of a stream: what it is bound to, and that nothing else is accepted."""

from dataclasses import replace

import pytest

from baton.cluster.errors import BatonError, Reason
from router.resume import Receipt, prompt_digest, receipt_key
from router.validate import MAX_REQUEST_ID, RequestLimits

KEY = receipt_key("0123456789abcdef", bytes)
PROMPT = prompt_digest([1, 2, 3])
RECEIPT = Receipt.of("mine", PROMPT, "model", "shop", 1000.9)
SEALED = RECEIPT.sealed(KEY)


def refused(sealed: bytes, **facts: object) -> BatonError:
    with pytest.raises(BatonError) as caught:
        check(sealed, **facts)
    return caught.value


def check(sealed: bytes, **facts: object) -> Receipt:
    told: dict[str, object] = {"request_id": "mine", "tenant": "shop", "model_fingerprint": "model", "now": 999.0, **facts}
    receipt = Receipt.unseal(sealed, KEY)
    receipt.check(**told)  # type: ignore[arg-type]
    return receipt


def test_a_receipt_comes_back_as_it_was_made() -> None:
    assert check(SEALED) == RECEIPT and RECEIPT.expires_at == 1000
    RECEIPT.check_prompt(prompt_digest((1, 2, 3)))


@pytest.mark.parametrize("i", range(len(SEALED)))
def test_a_receipt_with_any_byte_altered_is_refused(i: int) -> None:
    altered = bytearray(SEALED)
    altered[i] ^= 1
    error = refused(bytes(altered))
    assert (error.reason, error.violations[0].field) == (Reason.INVALID_FIELD, "resume")


@pytest.mark.parametrize("sealed", [b"", b"x", SEALED[:-1], SEALED[1:], SEALED + b"x", b"x" * 256, SEALED[:8]], ids=repr)
def test_a_receipt_with_bytes_missing_or_added_is_refused(sealed: bytes) -> None:
    assert "altered" in refused(sealed).message


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"tenant": "other"}, "another tenant"),
        ({"tenant": ""}, "another tenant"),
        ({"request_id": "other"}, "another request"),
        ({"now": 1000.0}, "expired"),
        ({"now": 1e9}, "expired"),
    ],
)
def test_a_receipt_of_another_request_is_refused_by_name(facts: dict[str, object], says: str) -> None:
    error = refused(SEALED, **facts)
    assert error.reason is Reason.INVALID_FIELD and error.violations[0].field == "resume" and says in error.message


def test_no_other_model_may_continue() -> None:
    error = refused(SEALED, model_fingerprint="other")
    assert error.reason is Reason.RETRIES_SPENT and error.message == "the cluster serves another model now"


@pytest.mark.parametrize("tokens", [[], [1, 2], [1, 2, 4], [1, 2, 3, 0], [3, 2, 1]])
def test_another_prompt_is_refused(tokens: list[int]) -> None:
    with pytest.raises(BatonError, match="another prompt") as caught:
        RECEIPT.check_prompt(prompt_digest(tokens))
    assert caught.value.violations[0].field == "resume"


def test_a_request_without_an_id_takes_that_of_the_receipt() -> None:
    assert check(SEALED, request_id="").request_id == "mine"


def test_only_routers_with_the_same_cluster_key_accept_each_others_receipts() -> None:
    assert receipt_key("0123456789abcdef", bytes) == KEY != receipt_key("0123456789abcdeF", bytes)
    with pytest.raises(BatonError):
        Receipt.unseal(SEALED, receipt_key("another cluster key", bytes))
    keys = [receipt_key(None, lambda size, n=n: bytes([n]) * size) for n in range(2)]  # type: ignore[misc]
    assert Receipt.unseal(RECEIPT.sealed(keys[0]), keys[0]) == RECEIPT
    with pytest.raises(BatonError):
        Receipt.unseal(RECEIPT.sealed(keys[0]), keys[1])


def test_every_fact_changes_the_receipt() -> None:
    """Negative control of the tests above: none of the facts is left out of the bytes."""
    others = [
        replace(RECEIPT, request_id="other"),
        replace(RECEIPT, prompt=b"p" * 16),
        replace(RECEIPT, model=b"m" * 16),
        replace(RECEIPT, tenant=b"t" * 16),
        replace(RECEIPT, expires_at=1001),
    ]
    assert len({SEALED, *(other.sealed(KEY) for other in others)}) == 6


def test_the_longest_receipt_is_accepted_by_the_limits() -> None:
    assert len(replace(RECEIPT, request_id="x" * MAX_REQUEST_ID).sealed(KEY)) <= RequestLimits().max_resume
