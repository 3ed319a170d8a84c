"""A GGUF file becomes a model folder: whole or not at all, once for each content."""

import fcntl
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from baton.engine.facts.fields import CheckpointError
from baton.engine.facts.tokenizer_files import TokenizerFiles
from baton.engine.model.checkpoint import expected_tensors
from baton.engine.model.config_json import read_config
from baton.engine.model.quantised.gguf import SIZES as BLOCKS
from baton.models.gguf.model import config_of, order, renamed
from baton.models.gguf.source import GgufFile
from baton.models.gguf.tokenizer import files_of

SUFFIX = ".gguf"
SIZES = {"F32": 4, "F16": 2, "U8": 1}
LAYOUT = 2  # of the folder: what another version of Baton has unpacked is not read
POLL_S, LOCK_S = 0.5, 3600.0
REPORT_S = 5.0
Say = Callable[[str], None]


def cached(file: Path, say: Say, home: Path | None = None, plainly: bool = False) -> Path:
    """The folder of a GGUF file in this user's cache, made if it is not there. It is named after the file, in a folder named after the
    content, so an altered file gets another. Raises CheckpointError; `home`: the cache; `plainly`: see `unpack`."""
    root = home or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "baton"
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        inside = root / "gguf" / f"{digest[:32]}-{LAYOUT}{'-plain' if plainly else ''}"
        folder = inside / file.name.removesuffix(SUFFIX)
        if not folder.is_dir():
            inside.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone(inside, say):
                if not folder.is_dir():
                    unpack(file, folder, say, plainly)
    except OSError as error:
        raise CheckpointError(file, "", f"cannot be unpacked into {root}: {error.strerror or error}") from None
    return folder


def unpack(file: Path, folder: Path, say: Say, plainly: bool = False) -> None:
    """`plainly`: matrices are dequantised, so that other programs can read the folder. Raises CheckpointError for a file that cannot be
    served, and if `folder` is there; OSError."""
    if folder.exists():
        raise CheckpointError(folder, "", "is there already")
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        draft.mkdir(parents=True)
        _write(GgufFile(file), draft, say, plainly)
        os.rename(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    say(f"{file.name}: unpacked into {folder}")


def _write(source: GgufFile, folder: Path, say: Say, plainly: bool) -> None:
    """Everything is checked before the first weight is read."""
    config = config_of(source)
    _dump(folder / "config.json", config)
    for name, content in files_of(source, config["vocab_size"]).items():
        _dump(folder / name, content)
    names = renamed(source)
    try:
        expected = expected_tensors(read_config(folder))
        TokenizerFiles.read(folder)
    except ValueError as error:
        raise CheckpointError(source.file, "", f"cannot be served: {str(error).removeprefix(f'{folder}/')}") from None
    shapes = source.shapes()
    for name in sorted(expected.keys() | names.keys()):
        if name not in names or name not in expected:
            raise source.error(names.get(name, name), "is missing" if name in expected else "is not part of this model")
        if shapes[names[name]] != expected[name]:
            raise source.error(names[name], f"shape {list(shapes[names[name]])}, the fields imply {list(expected[name])}")
    parts = {name: _part(source, name, theirs, plainly) for name, theirs in names.items()}
    if any(part != name for name, part in parts.items()):
        _dump(folder / "config.json", config | {"quantization_config": {"quant_method": "gguf"}})
    _write_weights(source, folder / "model.safetensors", {parts[name]: theirs for name, theirs in names.items()}, config, say)


def _part(source: GgufFile, name: str, theirs: str, plainly: bool) -> str:
    """What a tensor is called in the folder: a matrix whose blocks are kept has its type in place of `weight`."""
    module, _, last = name.rpartition(".")
    kept = last == "weight" and len(source.shapes()[theirs]) == 2 and source.kind(theirs) in BLOCKS and not plainly
    return f"{module}.{source.kind(theirs)}" if kept else name


def _write_weights(source: GgufFile, file: Path, names: dict[str, str], config: dict[str, Any], say: Say) -> None:
    """A safetensors file, tensor by tensor: a model may be larger than memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, theirs in names.items():
        shape, kind = source.shapes()[theirs], source.stored(theirs)
        if name.rpartition(".")[2] in BLOCKS:
            shape, kind = source.blocks(theirs).shape, "U8"
        size = SIZES[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    if at > (free := shutil.disk_usage(file.parent).free):
        raise CheckpointError(source.file, "", f"{at >> 20} MiB are needed and {free >> 20} are free in {file.parent.parent}")
    said, done, text = time.monotonic(), 0, json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, theirs in names.items():
            for piece in _pieces(source, name, theirs, config):
                done += stream.write(piece.data.cast("B"))
            if time.monotonic() - said > REPORT_S:
                said = time.monotonic()
                say(f"{source.file.name}: {done >> 20} of {at >> 20} MiB unpacked")
        stream.flush()
        os.fsync(stream.fileno())


def _pieces(source: GgufFile, name: str, theirs: str, config: dict[str, Any]) -> Iterator[Any]:
    """What is written of a tensor. Raises CheckpointError for numbers that are not finite: of blocks, the matrix is read to find out."""
    if name.rpartition(".")[2] not in BLOCKS:
        yield from source.pieces(theirs, order(theirs, config))
        return
    for _ in source.pieces(theirs):
        pass
    yield source.blocks(theirs, order(theirs, config))


def _dump(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=None if file.name == "tokenizer.json" else 2), encoding="utf-8")


@contextmanager
def _alone(folder: Path, say: Say) -> Iterator[None]:
    """The kernel frees the lock of a process that dies. What that left is removed. Raises CheckpointError after an hour."""
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        began = time.monotonic()
        while not _taken(descriptor):
            if time.monotonic() - began > LOCK_S:
                raise CheckpointError(folder, "", f"another process has been unpacking into it for {LOCK_S:g} s")
            say(f"another process unpacks into {folder}; waiting for it")
            time.sleep(POLL_S)
        for left in folder.glob(".*.part"):
            shutil.rmtree(left)
        yield
    finally:
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
