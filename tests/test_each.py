import pytest
from each import for_each


def test_every_failure_is_told_with_its_case() -> None:
    @for_each([1, -2, 3, 0], name=lambda number: f"n{number}")
    def positive(number: int) -> None:
        if number == 0:
            pytest.fail("zero")
        assert number > 0

    with pytest.raises(BaseExceptionGroup, match="2 of 4 fail: n-2, n0") as told:
        positive()
    assert [error.__notes__ for error in told.value.exceptions] == [["for n-2"], ["for n0"]]


def test_no_case_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no case"):
        for_each([])


class TestMethods:
    @for_each("ab")
    def test_a_rule_may_be_a_method(self, letter: str) -> None:
        """Of a class of tests."""
        assert isinstance(self, TestMethods) and letter in "ab"

    def test_its_name_stays(self) -> None:
        assert self.test_a_rule_may_be_a_method.__name__ == "test_a_rule_may_be_a_method"
        assert self.test_a_rule_may_be_a_method.__doc__ == "Of a class of tests."
