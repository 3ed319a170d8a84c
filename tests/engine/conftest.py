"""`BATON_TEST_PLAIN=1 python -m pytest tests/engine` runs the engine tests with the compiled kernels switched off."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def plain_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("BATON_TEST_PLAIN"):
            from baton.engine import choice
            from baton.engine.model.ops import Ops

            patch.setattr(choice, "choose_ops", lambda *_: Ops())
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Test processes that run side by side, each with a thread for every core, take a third longer. Tests of several threads set them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.fixture
def single_thread() -> Iterator[None]:
    """Threads that wait for a core of a busy machine take many times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
