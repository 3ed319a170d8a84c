"""A terminal that is not UTF-8 shows plain letters, whatever the command."""

import io

import pytest

from baton.terminal import write_anything


@pytest.mark.parametrize(
    ("encoding", "text", "shown"),
    [
        ("ascii", "a · b → c…", b"a - b > c~"),
        ("ascii", "█████░ ⠋ ┏━┓ ●", b"###### * +-+ *"),
        ("ascii", "Größe ﬁn €", b"Gro\\xdfe fin \\u20ac"),
        ("latin-1", "Größe · █", "Größe · #".encode("latin-1")),
        ("utf-8", "█ · ü", "█ · ü".encode()),
    ],
)
def test_what_an_encoding_lacks_is_written_in_plain_letters(encoding: str, text: str, shown: bytes) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding)
    write_anything(stream)
    stream.write(text)
    stream.flush()
    assert raw.getvalue() == shown
    with pytest.raises(UnicodeEncodeError):  # negative control
        io.TextIOWrapper(io.BytesIO(), "ascii").write(text)
    write_anything(io.StringIO())
