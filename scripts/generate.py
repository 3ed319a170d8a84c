"""Generated code: `python scripts/generate.py` writes baton/v1 from proto/, `--check` only compares and names what differs."""

import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PINNED = "1.85.1"  # generated code refuses an older runtime than its generator: this is the floor in pyproject.toml


def generate(target: Path) -> None:
    protos = sorted(str(path) for path in (ROOT / "proto").rglob("*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    outputs = (f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python"))
    status = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{include}", *outputs, *protos])
    if status:
        sys.exit(status)


def main() -> None:
    if version("grpcio-tools") != PINNED:
        sys.exit(f"grpcio-tools is {version('grpcio-tools')}, but the code must be generated with {PINNED}")
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*_pb2*")}
    committed = {path.relative_to(ROOT): path.read_bytes() for path in (ROOT / "baton" / "v1").glob("*_pb2*")}
    wrong = sorted(str(path) for path in fresh.keys() | committed.keys() if fresh.get(path) != committed.get(path))
    if wrong:
        sys.exit(f"out of date with proto/; run `python scripts/generate.py`: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
