"""Fingerprints of a model folder: if they are equal, the KV, tokens and text of one process are valid in another.

Standard library only: the router computes the fingerprint of its tokenizer without loading torch.
"""

import hashlib
import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

WHOLE_FILE = 256 << 20  # bytes; longer files are sampled
SAMPLE = 1 << 20  # bytes per sample
SUMS = "SHA256SUMS"
SAMPLES = 64  # evenly spaced, the first and the last byte of the file included


def fingerprint(path: Path) -> str:
    """BLAKE2b-128 (hex) over config.json and the weights of a model folder. Raises OSError if a file cannot be read.

    File names, sizes and contents count; the folder's name and location do not. Of a weights file over 256 MiB, only its size and 64
    samples of 1 MiB count, header and end included.
    """
    return _digest(b"baton.model", [path / "config.json", *weight_files(path)])


def tokenizer_fingerprint(path: Path) -> str:
    """BLAKE2b-128 (hex) over tokenizer.json. Raises OSError if it cannot be read."""
    return _digest(b"baton.tokenizer", [path / "tokenizer.json"])


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder: model.safetensors, else those that the index names, else none (the toy has none).

    A folder may contain both if a model was saved twice. transformers then reads the single file, and so do we. Raises ValueError if the
    index is not a map from tensors to files next to it.
    """
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if single.exists() or not index.exists():
        return [single] if single.exists() else []
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: weight_map is missing or damaged") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index}: weight_map names {name!r}, which is not a file of this folder")
    return [path / name for name in names]


def check_sums(path: Path) -> None:
    """Compare a model folder with its SHA256SUMS (in the format of `sha256sum`), if it has one: a weight with a flipped byte is still a
    number, so nothing else would notice.

    Raises ValueError, which names the file that is altered, truncated or missing, or the line that makes no sense.
    """
    sums = path / SUMS
    if not sums.exists():
        return
    for line in sums.read_text().splitlines():
        said, _, name = line.partition("  ")
        if len(said) != 64 or Path(name).name != name:
            raise ValueError(f"{sums}: {line!r} is not a checksum of a file in this folder")
        try:
            with (path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ValueError(f"{path / name}: cannot be read: {error.strerror}; {SUMS} names it") from None
        if found != said:
            raise ValueError(f"{path / name}: altered or truncated: its SHA-256 is not the one in {SUMS}")


def _digest(person: bytes, files: list[Path]) -> str:
    digest = blake2b(digest_size=16, person=person)
    for file in files:
        size = file.stat().st_size
        name = file.name.encode()
        digest.update(len(name).to_bytes(4, "little") + name + size.to_bytes(8, "little"))
        for piece in _pieces(file, size):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        if size <= WHOLE_FILE:
            while piece := stream.read(SAMPLE):
                yield piece
            return
        for i in range(SAMPLES):
            stream.seek((size - SAMPLE) * i // (SAMPLES - 1))
            yield stream.read(SAMPLE)
