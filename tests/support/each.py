"""One rule, many cases: a test that runs over all of them and names those that fail. A test for each would cost more than most rules do."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def for_each(cases: Iterable[T], name: Callable[[T], str] = str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a test of one case, its last argument, into a test of all of them, which fails once with every failure."""
    given = list(cases)
    assert given, "no case, no test"

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        def test(*instance: Any) -> None:
            failures: dict[str, BaseException] = {}
            for case in given:
                try:
                    check(*instance, case)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"for {name(case)}")
                    failures[name(case)] = error
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(given)} fail: {', '.join(failures)}", list(failures.values()))

        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__ = check.__module__
        return test

    return decorate
