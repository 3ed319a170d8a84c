"""oneDNN has fast code for every product of every model family that it is given: its own log says which code ran."""

import pytest
import torch
from families import FAMILIES, loaded, prefill

from baton.engine.model import onednn
from baton.engine.model.onednn import multiplies_int8

CPU = torch.device("cpu")
SLOW = ",ref"  # reference code, "ref:any" or "ref_int8:any", which is written for comparison, not for speed


def executed(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The log lines of oneDNN's products since the last call."""
    lines = capfd.readouterr().out.splitlines()
    return [line for line in lines if ",exec," in line and (",inner_product," in line or ",matmul," in line)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_falls_back_to_reference_code(family: str, precision: str, capfd: pytest.CaptureFixture[str]) -> None:
    if precision == "int8" and not multiplies_int8():
        pytest.skip("no VNNI")
    if precision == "bfloat16" and not onednn.multiplies(torch.bfloat16):
        pytest.skip("this processor's oneDNN has no bfloat16")
    runner = loaded(family, precision, layers=2, scale=8, products="onednn")
    capfd.readouterr()
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        prefill(runner, 64, chunk=40)
    lines = executed(capfd)
    assert len(lines) > 8
    assert not [line for line in lines if SLOW in line]


def test_reference_code_shows_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Negative control: oneDNN has nothing else for a matrix with gaps between its rows."""
    gaps = torch.randn(16, 24)[:, :20]
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        torch.ops.mkldnn._linear_pointwise.default(torch.randn(8, 16), gaps.t(), None, "none", [], "")
    assert any(SLOW in line for line in executed(capfd))
