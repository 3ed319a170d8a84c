"""What can be known before a cluster starts is known then."""

import time
from pathlib import Path
from typing import Any

import pytest
from turns import within

from baton.cluster.config_layers import load
from baton.launch import preflight
from baton.launch.plan import UpError
from baton.launch.preflight import NEEDS, RAY, ModuleNeed, check_here


def config(**flags: str) -> Any:
    return load([], {}, {name.replace("__", "."): value for name, value in flags.items()}).config


@pytest.mark.parametrize("need", [RAY, *NEEDS], ids=lambda need: need.module)
def test_a_missing_package_is_named_with_the_way_to_get_it(need: ModuleNeed, monkeypatch: pytest.MonkeyPatch) -> None:
    value = "http://127.0.0.1:4317" if need.value == "*" else need.value
    flags = {need.key: value} | ({"engine.device": "cuda"} if need.key == "engine.attention_backend" else {})
    asked = load([], {}, flags).config
    monkeypatch.setattr(preflight, "_installed", lambda module: module != need.module)
    began = time.thread_time()
    with pytest.raises(UpError, match=f"^{need.key} {value}: the package {need.module.partition('.')[0]} is not installed") as refused:
        check_here(asked)
    assert need.way in str(refused.value)
    within(time.thread_time() - began, 1)
    check_here(config())
    monkeypatch.setattr(preflight, "_installed", lambda module: True)
    check_here(asked)


def test_packages_of_other_hosts_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_installed", lambda module: module == "ray")
    check_here(config(launcher__kind="ray", launcher__ray_address="10.0.0.1:6379", engine__kind="vllm", engine__device="cuda"))


def test_a_package_is_looked_for_without_loading_it() -> None:
    assert preflight._installed("grpc") and not preflight._installed("no_such") and not preflight._installed("no_such.part")


@pytest.mark.parametrize("name", preflight.FILES)
def test_a_file_that_cannot_be_read_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file.pem"
    other = {"tls_cert": "tls_key", "tls_key": "tls_cert"}.get(name)
    (tmp_path / "other.pem").touch()
    flags = {f"security.{name}": str(file)} | ({f"security.{other}": str(tmp_path / "other.pem")} if other else {})
    asked = load([], {}, flags).config
    with pytest.raises(UpError, match=f"security.{name}: {file} does not exist"):
        check_here(asked)
    file.touch()
    check_here(asked)
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != file)
    with pytest.raises(UpError, match=f"security.{name}: {file} cannot be read"):
        check_here(asked)
