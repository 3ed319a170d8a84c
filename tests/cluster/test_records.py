"""The encoding of records in the registry."""

from dataclasses import replace

import pytest

from baton.cluster.records import Load, WorkerRecord

RECORD = WorkerRecord("d", "decode", "h:1", 5, "ready", 1, "h", "m", "f", "t", 16, 128, 64, "tcp")


def test_an_overbooked_worker_stays_a_member() -> None:
    """Its credit is negative exactly when it is busiest."""
    busy = WorkerRecord(**{**{f: getattr(RECORD, f) for f in RECORD.__slots__}, "load": Load(credit_tokens=-32)})
    assert WorkerRecord.from_json(busy.to_json()) == busy


def test_a_worker_lends_unless_its_record_says_otherwise() -> None:
    assert b',"lends":true' in RECORD.to_json()
    assert WorkerRecord.from_json(RECORD.to_json().replace(b',"lends":true', b"")).lends, "of an older writer"
    silent = replace(RECORD, lends=False)
    assert WorkerRecord.from_json(silent.to_json()) == silent


@pytest.mark.parametrize("field", ["running", "waiting", "free_blocks", "leases"])
def test_other_numbers_must_not_be_negative(field: str) -> None:
    with pytest.raises(ValueError, match=rf"load\.{field}: .*-1"):
        WorkerRecord.from_json(RECORD.to_json().replace(f'"{field}":0'.encode(), f'"{field}":-1'.encode()))
