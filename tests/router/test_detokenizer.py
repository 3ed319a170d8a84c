"""A stream of token ids becomes a stream of text: joined, the pieces are the whole text, and no character is ever split."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizer_parts import tokenizer_of
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from tokenizers.decoders import DecodeStream

from router.detokenizer import Detokenizer
from router.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = ["the quick brown fox", "né à 你好 😀😀 👩‍👩‍👧 क्षि"] * 3
    special = ["<s>", "<|end|>"]
    library.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    )
    library.add_tokens([AddedToken("<think>", special=False), AddedToken("é", special=False), AddedToken("你", special=False)])
    return library


def byte_fallback() -> Library:
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcé", "▁a", "▁b", "▁▁", "😀"]
    library = Library(models.BPE({word: id_ for id_, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    library.add_special_tokens(["<unk>", "<s>"])
    return library


def metaspace() -> Library:
    words = [("<unk>", 0.0), ("<s>", 0.0), ("▁", -2.0), ("▁a", -2.0), *((char, -3.0) for char in "abcé😀")]
    library = Library(models.Unigram(words, unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(["<s>"])
    return library


def word_level() -> Library:
    return Library(models.WordLevel({"a": 0, "b": 1, "é": 2}, unk_token="a"))


BYTE_LEVEL, BYTE_FALLBACK = tokenizer_of(byte_level().to_str()), tokenizer_of(byte_fallback().to_str())
TOKENIZERS = {
    "byte-level": BYTE_LEVEL,
    "byte-fallback": BYTE_FALLBACK,
    "metaspace": tokenizer_of(metaspace().to_str()),
    "words": tokenizer_of(word_level().to_str()),
}


def stream(tokenizer: Tokenizer, ids: list[int], tail: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, tail or [])
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=max_size)  # a model's vocabulary may be larger than its tokenizer's


def fallback_bytes(*data: int) -> list[int]:
    return [BYTE_FALLBACK.id_for(f"<0x{byte:02X}>") or 0 for byte in data]


@given(ids=ids_of(BYTE_LEVEL, max_size=40))
@settings(max_examples=400, deadline=None)
def test_byte_level_pieces_form_the_whole_text(ids: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@given(ids=ids_of(BYTE_LEVEL, max_size=20), tail=ids_of(BYTE_LEVEL, max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_stream_contains_nothing_of_the_prompt(ids: list[int], tail: list[int]) -> None:
    assert "".join(stream(BYTE_LEVEL, ids, tail)) == BYTE_LEVEL.decode(ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(alphabet="abc é😀你", max_size=20))
@settings(max_examples=100, deadline=None)
def test_encoded_text_is_restored(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if name == "byte-level" and "é" not in text:  # an added token spelled like that is decoded as a byte, by the library too
        assert "".join(pieces) == text


@pytest.mark.parametrize("name", ["byte-fallback", "metaspace"])
@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_spaces_after_a_prompt_are_kept(name: str, data: st.DataObject) -> None:
    """The output is what the tokenizer writes after the prompt. It drops a space only at the beginning of a text."""
    tokenizer = TOKENIZERS[name]
    words = [
        id_ for id_ in range(tokenizer.vocab_size) if (piece := tokenizer.piece(id_)) and piece.decode(errors="ignore").encode() == piece
    ]
    ids, tail = data.draw(st.lists(st.sampled_from(words))), data.draw(st.lists(st.sampled_from(words)))
    assert "".join(stream(tokenizer, ids, tail)) == tokenizer.decode(tail + ids).removeprefix(tokenizer.decode(tail))


def plain_bytes(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    """The oracle for byte fallback: the byte of a byte token, the word of any other."""
    words = [BYTE_FALLBACK_LIBRARY.id_to_token(id_) for id_ in ids if id_ not in tokenizer.special_ids]
    known = [word.replace("▁", " ") for word in words if word is not None]
    return b"".join(bytes.fromhex(word[3:5]) if len(word) == 6 and word.startswith("<0x") else word.encode() for word in known)


BYTE_FALLBACK_LIBRARY = byte_fallback()


@given(ids=ids_of(BYTE_FALLBACK, max_size=30))
@example(ids=fallback_bytes(0xE2, 0x82, 0xAC, 0xF0, 0x41))
@example(ids=fallback_bytes(0x20, 0x20))
@settings(max_examples=400, deadline=None)
def test_byte_fallback_streams_keep_whole_characters(ids: list[int]) -> None:
    expected = plain_bytes(BYTE_FALLBACK, ids).removeprefix(b" ")
    assert "".join(stream(BYTE_FALLBACK, ids)) == expected.decode(errors="replace")
    if BROKEN not in BYTE_FALLBACK.decode(ids):
        assert "".join(stream(BYTE_FALLBACK, ids)) == BYTE_FALLBACK.decode(ids)


def test_a_character_is_returned_when_it_is_complete() -> None:
    smile = fallback_bytes(*"😀".encode())
    assert stream(BYTE_FALLBACK, smile) == ["", "", "", "😀", ""]
    assert stream(BYTE_FALLBACK, smile[:3]) == ["", "", "", BROKEN]
    assert stream(BYTE_FALLBACK, [*smile[:2], BYTE_FALLBACK.id_for("a") or 0]) == ["", "", f"{BROKEN}a", ""]


def test_special_tokens_write_no_text_and_split_no_character() -> None:
    special = BYTE_FALLBACK.id_for("<s>") or 0
    euro = fallback_bytes(0xE2, 0x82, 0xAC)
    assert stream(BYTE_FALLBACK, [euro[0], special, *euro[1:]]) == ["", "", "", "€", ""]
    assert stream(BYTE_FALLBACK, [special, BYTE_FALLBACK.id_for("▁a") or 0]) == ["", "a", ""]  # the text begins after it


def test_the_library_decode_stream_fails_in_three_ways() -> None:
    """Negative control: each of these would abort, stall or falsify an answer."""
    library = byte_fallback()
    letter = library.token_to_id("a")
    assert letter is not None
    decoder = DecodeStream(skip_special_tokens=True)
    with pytest.raises(Exception, match="Invalid prefix"):
        for id_ in [*fallback_bytes(0xE2, 0x82, 0xAC, 0xF0), letter]:
            decoder.step(library, id_)
    behind = DecodeStream(ids=[letter, *fallback_bytes(0xE2, 0x82)], skip_special_tokens=True)
    assert behind.step(library, *fallback_bytes(0xAC)) == "a€"  # repeats the "a" of the prompt
    stalled = DecodeStream(skip_special_tokens=True)
    assert [stalled.step(library, *fallback_bytes(0xFF)) for _ in range(100)] == [None] * 100
    assert "".join(stream(BYTE_FALLBACK, fallback_bytes(*[0xFF] * 100))) == BROKEN * 100
