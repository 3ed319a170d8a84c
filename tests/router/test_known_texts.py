"""What was tokenized before is not tokenized again: for the same text, place and salt, within the bound."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.cli.up import SHIPPED
from router.known_texts import ENTRY_BYTES, LEAST_CHARS, KnownTexts
from router.tokenizer import Tokenizer

LONG = "x" * LEAST_CHARS


class Encoder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> list[int]:
        self.asked += 1
        return [1, 2, 70_000]


def asked(texts: KnownTexts, text: str = LONG, first: bool = False, salt: str = "") -> int:
    """How often a text is encoded until its ids are known."""
    encoder = Encoder()
    assert texts.of(salt)(text, 0 if first else 9, encoder) == [1, 2, 70_000]
    return encoder.asked


def test_a_text_is_encoded_once_for_each_salt_and_place() -> None:
    texts = KnownTexts(1 << 20)
    for _ in range(2):
        assert [asked(texts), asked(texts)] == ([1, 0] if not _ else [0, 0])
    assert [asked(texts, salt="a"), asked(texts, salt="b"), asked(texts, first=True), asked(texts, LONG + "y")] == [1, 1, 1, 1]
    assert [asked(texts, salt="a"), asked(texts, first=True)] == [0, 0]
    assert (texts.hits, texts.misses) == (5 * 3, 5 * 3)


def test_salt_and_text_are_not_run_together() -> None:
    texts = KnownTexts(1 << 20)
    assert [asked(texts, "b" + LONG, salt="a"), asked(texts, LONG, salt="ab")] == [1, 1]


def test_a_short_text_is_not_kept_and_zero_keeps_nothing() -> None:
    texts = KnownTexts(1 << 20)
    assert [asked(texts, LONG[:-1]), asked(texts, LONG[:-1])] == [1, 1]
    none = KnownTexts(0)
    assert [asked(none), asked(none)] == [1, 1]


def test_a_text_that_is_not_valid_unicode_is_told_apart_too() -> None:
    texts = KnownTexts(1 << 20)
    assert [asked(texts, LONG + "\ud800"), asked(texts, LONG + "\ud801"), asked(texts, LONG + "\ud800")] == [1, 1, 0]


def test_what_was_not_needed_for_longest_goes_first() -> None:
    texts = KnownTexts(2 * (ENTRY_BYTES + 12))
    assert [asked(texts, LONG + one) for one in "abacabc"] == [1, 1, 0, 1, 0, 1, 1]
    assert texts._size == 2 * (ENTRY_BYTES + 12) == sum(ENTRY_BYTES + 4 * len(ids) for ids in texts._known.values())


def test_a_text_beyond_the_bound_is_encoded_each_time() -> None:
    texts = KnownTexts(ENTRY_BYTES)
    assert [asked(texts), asked(texts)] == [1, 1] and not texts._known and not texts._size


def test_an_error_is_not_kept() -> None:
    texts = KnownTexts(1 << 20)

    def fail() -> list[int]:
        raise ValueError("no")

    for _ in range(2):
        try:
            texts.of("")(LONG, 9, fail)
        except ValueError:
            continue
        raise AssertionError("it was kept")
    assert asked(texts) == 1


def test_threads_may_ask_at_once() -> None:
    texts = KnownTexts(20 * (ENTRY_BYTES + 12))

    def ask(i: int) -> Sequence[int]:
        return texts.of("")(LONG + str(i % 30), 9, lambda: [i % 30, 2, 3])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(3000))) == [[i % 30, 2, 3] for i in range(3000)]
    assert texts._size == (ENTRY_BYTES + 12) * len(texts._known) <= 20 * (ENTRY_BYTES + 12)


def test_only_the_new_messages_of_a_turn_are_encoded() -> None:
    tokenizer, texts = Tokenizer.load(SHIPPED), KnownTexts(1 << 20)
    conversation = [("user", "a story " * 200), ("assistant", "about a fox " * 200)]
    tokenizer.render(conversation, known=texts.of(""))
    assert texts.hits == 0 and (before := texts.misses) > 800
    tokenizer.render([*conversation, ("user", "who was late " * 100)], known=texts.of(""))
    assert texts.hits == before and 0 < texts.misses - before < before
