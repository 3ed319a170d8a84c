"""`BATON_TEST_PLAIN=1 python -m pytest tests/engine` runs the engine tests with the compiled kernels switched off."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def plain_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("BATON_TEST_PLAIN"):
            from baton.engine import runner
            from baton.engine.ops import Ops

            patch.setattr(runner, "choose_ops", lambda *_: Ops())
        yield
