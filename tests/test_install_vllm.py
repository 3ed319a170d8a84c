"""The environment of `make test-vllm`: its packages are installed once for each set of requirements."""

import os
import time
from pathlib import Path

import install_vllm
import pytest


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the folders into which packages were installed."""
    names: list[str] = []

    def install(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        names.append(folder.name)

    monkeypatch.setattr(install_vllm, "install", install)
    return names


def project(folder: Path, serve: str, more: str = "") -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        f'[project]\ndependencies = ["grpcio"]\n[project.optional-dependencies]\nserve = ["{serve}"]\n{more}'
    )
    return folder


def test_only_what_is_installed_decides_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = install_vllm.key(project(tmp_path / "a", "torch>=2"))
    assert first == install_vllm.key(project(tmp_path / "b", "torch>=2", "[tool.ruff]\nline-length = 140\n"))
    assert first != install_vllm.key(project(tmp_path / "c", "torch>=3"))
    (tmp_path / "recipe").write_text("another")
    monkeypatch.setattr(install_vllm, "RECIPE", tmp_path / "recipe")
    assert first != install_vllm.key(tmp_path / "a")


def test_packages_are_installed_once_and_again_if_that_was_interrupted(tmp_path: Path, installed: list[str]) -> None:
    found = install_vllm.packages(tmp_path)
    assert install_vllm.packages(tmp_path) == found == tmp_path / install_vllm.key()
    assert installed == [found.name]
    (found / install_vllm.READY).unlink()
    install_vllm.packages(tmp_path)
    assert installed == [found.name] * 2


def test_what_nobody_used_for_a_month_goes_and_what_is_used_stays(tmp_path: Path, installed: list[str]) -> None:
    for name, days in (("old", 31), ("young", 29), (install_vllm.key(), 31)):
        (tmp_path / name).mkdir()
        (tmp_path / name / install_vllm.READY).touch()
        os.utime(tmp_path / name / install_vllm.READY, (time.time() - days * 86400,) * 2)
    found = install_vllm.packages(tmp_path)
    assert not installed and not (tmp_path / "old").exists() and (tmp_path / "young").exists()
    assert time.time() - (found / install_vllm.READY).stat().st_mtime < 600
