"""Whose prompts a worker has, and how many tokens of them are to be computed."""

import pytest

from baton.worker.prompts import MUCH, Prompts


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


def test_an_asker_is_told_at_once_of_long_prompts_of_others_and_of_their_end() -> None:
    prompts = Prompts()
    told: dict[str, list[int]] = {"a": [], "b": []}
    with prompts.present("c", MUCH + 1):
        leave = [prompts.follow(asker, told[asker].append) for asker in told]
        assert told == {"a": [MUCH + 1], "b": [MUCH + 1]}, "what is there already"
        with prompts.present("a", MUCH):
            assert told == {"a": [MUCH + 1], "b": [MUCH + 1, 2 * MUCH + 1]}, "not of its own"
            with prompts.present("c", MUCH - 1):
                assert len(told["a"]) == 1, "a short one is no news"
                with prompts.present("b", 1):
                    assert told["a"][1:] == [2 * MUCH + 1], "but together with others it is"
    assert told["a"][-1] < MUCH and told["b"][-1] < MUCH
    for each in leave:
        each()
    with prompts.present("c", 10 * MUCH):
        assert told["a"][-1] < MUCH and told["b"][-1] < MUCH, "who has left is told nothing"
