"""The files of a model's folder against their checksums; that an engine compares them is tested in tests/models/test_tale.py."""

import hashlib
from pathlib import Path

import pytest

from baton.engine.facts.fingerprint import SUMS, check_sums

WEIGHTS = bytes(range(256)) * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / SUMS).write_text(f"{hashlib.sha256(WEIGHTS).hexdigest()}  model.safetensors\n")
    return tmp_path


def test_what_agrees_with_its_sum_or_has_none_passes(folder: Path) -> None:
    check_sums(folder)
    (folder / SUMS).unlink()
    (folder / "model.safetensors").write_bytes(b"")
    check_sums(folder)


@pytest.mark.parametrize("data", [WEIGHTS[:-1], WEIGHTS + b"\0", WEIGHTS[:-1] + b"\xfe", b""])
def test_a_flipped_bit_or_a_missing_byte_is_refused_by_name(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: altered or truncated"):
        check_sums(folder)
