"""Stop strings compared with an oracle that examines the whole text, character by character."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.stop import StopMatcher


def oracle(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Finds the match that ends first, and the longest of those that end there. Returns the text before it, and the match."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None, int]:
    """Returns the emitted text, the match, and after how many pieces it was found."""
    matcher = StopMatcher(stops)
    out = ""
    for count, piece in enumerate(pieces, 1):
        emitted, matched = matcher.push(piece)
        out += emitted
        if matched is not None:
            assert matcher.push("more") == ("", matched) and matcher.flush() == ""
            return out, matched, count
    return out + matcher.flush(), None, len(pieces)


words = st.text(alphabet="ab", min_size=1, max_size=6)


@given(pieces=st.lists(st.text(alphabet="abc", max_size=5), max_size=12), stops=st.lists(words, max_size=5))
@example(pieces=["ab", "c"], stops=["ab", "abc"])  # one is a prefix of the other
@example(pieces=["abc"], stops=["abcd", "bc"])  # the match that starts later ends first
@example(pieces=["aab"], stops=["b", "ab", "aab"])  # all end at the same character
@example(pieces=list("aabaabaaab"), stops=["aabaaa"])
@settings(max_examples=600, deadline=None)
def test_matches_agree_with_the_oracle_for_any_pieces(pieces: list[str], stops: list[str]) -> None:
    out, matched, count = run(pieces, stops)
    assert (out, matched) == oracle("".join(pieces), stops)
    if matched is not None:  # found with the piece that completes it
        assert oracle("".join(pieces[: count - 1]), stops)[1] is None


@given(text=st.text(alphabet="ab", max_size=30), stops=st.lists(words, min_size=1, max_size=4))
@settings(max_examples=300, deadline=None)
def test_exactly_the_longest_possible_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher, out = StopMatcher(stops), ""
    for end, char in enumerate(text, 1):
        emitted, matched = matcher.push(char)
        out += emitted
        if matched is not None:
            return
        held = text[len(out) : end]
        beginnings = [text[start:end] for start in range(end) if any(stop.startswith(text[start:end]) for stop in stops)]
        assert held == max(beginnings, key=len, default="")


@pytest.mark.parametrize(
    ("pieces", "stops", "expected"),
    [
        (["hello"], [], ("hello", None)),
        (["he", "llo"], ["l"], ("he", "l")),
        (["x", "😀"], ["😀"], ("x", "😀")),
        (["STO", "P"], ["STOP"], ("", "STOP")),
        (["STO"], ["STOP"], ("STO", None)),
        (["\n", "\nuser:"], ["\n\n", "\n\nuser:"], ("", "\n\n")),
        (["a" * 1000], ["a" * 256 + "b"], ("a" * 1000, None)),
    ],
)
def test_known_examples_of_stop_strings(pieces: list[str], stops: list[str], expected: tuple[str, str | None]) -> None:
    assert run(pieces, stops)[:2] == expected


@given(pieces=st.lists(st.text(alphabet="ab", max_size=4), max_size=10), stops=st.lists(words, max_size=4), least=st.integers(0, 11))
@example(pieces=["ab", "ab"], stops=["ab"], least=2)
@example(pieces=["aa", "a"], stops=["aaa", "aa"], least=2)
@settings(max_examples=600, deadline=None)
def test_no_match_ends_the_output_before_the_least_number_of_pieces(pieces: list[str], stops: list[str], least: int) -> None:
    matcher, out, text = StopMatcher(stops), "", ""
    for count, piece in enumerate(pieces, 1):
        emitted, matched = matcher.push(piece, count >= least)
        out += emitted
        ends = [end for end in range(len(text) + 1, len(text) + len(piece) + 1) if count >= least]
        text += piece
        expected = next((max(found, key=len) for end in ends if (found := [stop for stop in stops if text[:end].endswith(stop)])), None)
        assert matched == expected
        if matched is not None:
            end = next(end for end in ends if text[:end].endswith(matched))
            assert out == text[: end - len(matched)]
            return
    assert out + matcher.flush() == text


def test_the_held_text_is_limited() -> None:
    """The held text does not grow with the output."""
    matcher = StopMatcher(["ab" * 100 + "c"])
    emitted = sum(len(matcher.push("ab")[0]) for _ in range(10_000))
    assert 20_000 - emitted == len(matcher.flush()) <= 200


def test_a_search_in_each_piece_alone_would_miss_a_match() -> None:
    """Negative control: this is why text is held back."""
    assert not any("STOP" in piece for piece in ("ST", "OP")) and run(["ST", "OP"], ["STOP"])[1] == "STOP"
