"""The log of a process, read by whoever asks for it."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from baton.cluster import log_file
from baton.cluster.errors import BatonError, Reason


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "decode-0.log"
    monkeypatch.setenv(log_file.VARIABLE, str(path))
    path.write_bytes(b"one\ntwo\nthree\n")
    return path


async def read(lines: int) -> bytes:
    return b"".join([text async for text in log_file.read("decode-0", lines, follow=False)])


@pytest.mark.parametrize(("lines", "shown"), [(0, b""), (1, b"three\n"), (2, b"two\nthree\n"), (9, b"one\ntwo\nthree\n")])
async def test_it_begins_with_the_last_lines(log: Path, lines: int, shown: bytes) -> None:
    assert await read(lines) == shown


async def test_a_line_that_is_being_written_is_the_last_one(log: Path) -> None:
    log.write_bytes(b"one\ntwo\nthr")
    assert await read(1) == b"thr" and await read(2) == b"two\nthr"
    log.write_bytes(b"")
    assert await read(5) == b""


async def test_a_large_file_is_not_searched_to_its_beginning(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "MOST_BYTES", 1000)
    log.write_bytes(b"".join(b"%06d\n" % number for number in range(10_000)))
    shown = await read(log_file.MOST_LINES)
    assert len(shown) <= 1000 and shown.endswith(b"009999\n")
    assert await read(3) == b"009997\n009998\n009999\n"


async def test_a_follower_gets_what_is_written_later_also_after_the_file_was_emptied(log: Path) -> None:
    async with asyncio.timeout(20), aclosing(log_file.read("decode-0", 1, follow=True)) as texts:
        assert await anext(texts) == b"three\n"
        with log.open("ab") as file:
            file.write(b"four\n")
        assert await anext(texts) == b"four\n"
        log.write_bytes(b"new\n")
        assert await anext(texts) == b"new\n"


async def test_followers_are_bounded_and_one_that_leaves_makes_room(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "READERS", 1)
    async with aclosing(log_file.read("decode-0", 1, follow=True)) as texts:
        await anext(texts)
        with pytest.raises(BatonError) as refused:
            await anext(log_file.read("decode-0", 1, follow=True))
        assert refused.value.reason is Reason.SATURATED
        assert await read(1) == b"three\n", "whoever does not follow is served"
    async with aclosing(log_file.read("decode-0", 1, follow=True)) as texts:
        assert await anext(texts) == b"three\n"


async def test_a_process_without_a_log_file_says_so(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    log.unlink()
    with pytest.raises(BatonError, match="cannot be read: No such file"):
        await read(1)
    monkeypatch.delenv(log_file.VARIABLE)
    with pytest.raises(BatonError, match="decode-0 does not write to a file"):
        await read(1)
    with pytest.raises(BatonError, match="lines: must be from 0 to"):
        await read(log_file.MOST_LINES + 1)
