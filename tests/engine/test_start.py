import threading

import pytest

from baton.engine.start import in_a_thread_that_ends


async def test_the_thread_that_builds_a_model_ends() -> None:
    """Otherwise it would keep OpenMP threads, which slow down those of the engine."""
    thread = await in_a_thread_that_ends(threading.current_thread)
    assert thread is not threading.current_thread() and not thread.is_alive()


async def test_an_error_in_the_thread_that_ends_is_raised() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await in_a_thread_that_ends(int, "x")
