"""What all tests share: examples are not judged by their time, and which tests stay together when several processes run the suite."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no failure. pytest-timeout ends what hangs.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")

TESTS = Path(__file__).parent
WHOLE_MACHINE = {"system", "launch"}  # folders whose tests start clusters: one at a time, since a machine has one Ray and few cores


def group(path: Path) -> str:
    """Tests of one group run one after the other in one process. A file is one at least, so that its fixtures are made once.

    `path`: relative to this folder.
    """
    return "machine" if path.parts[0] in WHOLE_MACHINE else path.as_posix()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Here and not when all are collected: pytest-xdist reads the groups then."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        item.add_marker(pytest.mark.xdist_group(group(item.path.relative_to(TESTS))))
