"""Whose prompts a worker has, and how many tokens of them are to be computed."""

import pytest

from baton.worker.prompts import Prompts


def test_an_asker_is_told_of_the_prompts_of_all_others() -> None:
    prompts = Prompts()
    with prompts.present("a", 100), prompts.present("b", 20):
        with prompts.present("a", 7):
            assert (prompts.besides("a"), prompts.besides("b"), prompts.besides("new")) == (20, 107, 127)
        assert (prompts.besides("a"), prompts.besides("b")) == (20, 100)
    assert prompts.besides("new") == 0


def test_a_prompt_that_fails_is_forgotten_and_so_is_an_asker_without_prompts() -> None:
    prompts = Prompts()
    with pytest.raises(ZeroDivisionError), prompts.present("a", 5):
        raise ZeroDivisionError
    assert prompts.besides("b") == 0 and not prompts._tokens
