import pytest

from baton.cluster.config_layers import load
from baton.worker.host import fits


@pytest.mark.parametrize(
    "prefill,decode,threads,cores,pinned,fit",
    [
        ("1", "1", None, 2, {}, False),  # the default: each worker uses all cores
        ("1", "1", "1", 2, {}, True),
        ("0", "1", None, 2, {}, True),
        ("0", "2", "1", 2, {}, True),
        ("0", "2", "2", 2, {}, False),
        ("2", "2", "4", 16, {}, True),
        ("2", "3", "4", 16, {}, False),
        ("1", "1", "1", 1, {"prefill.cores": "[0]", "decode.cores": "[1]"}, True),  # each sees only its own core
        ("4", "1", "1", 1, {"prefill.cores": "[0, 1, 2, 3]"}, True),
    ],
)
def test_fits_compares_the_threads_of_all_workers_with_the_cores(
    prefill: str, decode: str, threads: str | None, cores: int, pinned: dict[str, str], fit: bool
) -> None:
    flags = {"prefill.replicas": prefill, "decode.replicas": decode, **pinned}
    config = load(env={}, flags=flags | ({"engine.threads": threads} if threads else {})).config
    assert fits(config, "decode", cores) is fit
