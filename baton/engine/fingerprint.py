"""Names for what a model folder holds: equal fingerprints mean KV, tokens and text of one process make sense to another.

Standard library only: the router names its tokenizer without loading torch.
"""

import hashlib
import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

WHOLE_FILE = 256 << 20  # bytes; longer files are sampled
SAMPLE = 1 << 20  # bytes a sample
SUMS = "SHA256SUMS"
SAMPLES = 64  # evenly spaced, the first and the last byte of the file included


def fingerprint(path: Path) -> str:
    """BLAKE2b-128 (hex) over config.json and the weights of a model folder. OSError where a file cannot be read.

    The folder's name and place do not enter; file names, sizes and contents do. A weights file over 256 MiB enters through its size
    and 64 samples of 1 MiB, header and end included.
    """
    return _digest(b"baton.model", [path / "config.json", *weight_files(path)])


def tokenizer_fingerprint(path: Path) -> str:
    """BLAKE2b-128 (hex) over tokenizer.json. OSError where it cannot be read."""
    return _digest(b"baton.tokenizer", [path / "tokenizer.json"])


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model folder: model.safetensors, else those that the index names, else none (the toy has none).

    A folder may hold both, when a model was saved twice. transformers then reads the single file, and so do we. ValueError where the index
    is not a map from tensor to a file beside it.
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
    """Compare a model folder with its SHA256SUMS, as `sha256sum` writes it, where it has one: a flipped byte in a weight is a number too.

    ValueError names the file that is altered, truncated or missing, or the line that makes no sense.
    """
    sums = path / SUMS
    if not sums.exists():
        return
    for line in sums.read_text().splitlines():
        said, _, name = line.partition("  ")
        if len(said) != 64 or Path(name).name != name:
            raise ValueError(f"{sums}: {line!r} is no checksum of a file of this folder")
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
