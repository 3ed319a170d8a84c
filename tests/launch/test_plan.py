"""The configuration is checked and completed before anything starts."""

import errno
import socket
from pathlib import Path
from typing import Any

import pytest

from baton.cluster.config import ConfigError
from baton.cluster.config_layers import load
from baton.launch import plan
from baton.launch.plan import UpError, check_model, check_ports, templates
from baton.launch.ports import Ports
from baton.models.make_small import make_toy


def config(**flags: object) -> Any:
    return load([], {}, {name.replace("__", "."): str(value) for name, value in flags.items()}).config


@pytest.mark.parametrize("one", ["router.port", "router.admin_port", "router.http_port", "router.page_port"])
def test_the_ports_of_one_process_must_differ(one: str) -> None:
    """Across all sections, because the metrics of the router have a port too."""
    with pytest.raises(ConfigError, match=f"{one} and telemetry.metrics_port must differ"):
        load([], {}, {one: "7007", "telemetry.metrics_port": "7007"})
    with pytest.raises(ConfigError, match=r"decode.port and telemetry.worker_metrics_port"):
        config(decode__port=7007, telemetry__worker_metrics_port=7007)


def test_pools_may_share_a_port_only_on_different_hosts() -> None:
    shared = config(prefill__port=7007, decode__port=7007)
    with pytest.raises(UpError, match=r"prefill.port and decode.port would share port 7007"):
        check_ports(shared)
    with pytest.raises(UpError, match=r"router.port and decode.port would share"):
        check_ports(config(router__port=7007, decode__port=7007))
    with pytest.raises(UpError, match=r"telemetry.worker_metrics_port"):
        check_ports(config(telemetry__worker_metrics_port=7007))
    with pytest.raises(UpError, match=r"decode.port: two workers"):
        check_ports(config(decode__port=7007, decode__replicas=2))
    plan.check_shared_ports(config(decode__port=7007, prefill__port=7008, telemetry__metrics_port=8473))


@pytest.mark.parametrize("name", ["prefill.port", "decode.port", "kv.port", "telemetry.worker_metrics_port", "router.page_port"])
def test_a_taken_port_of_any_process_is_found_before_anything_starts(name: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        free = {f"router.{door}": "0" for door in ("port", "admin_port", "http_port", "page_port")}
        asked = {**free, "prefill.replicas": "0" if name in ("kv.port", "telemetry.worker_metrics_port") else "1", name: str(port)}
        with pytest.raises(UpError, match=rf"{name}: cannot listen on 127.0.0.1:{port} .*; choose another with --{name.replace('_', '-')}"):
            check_ports(load([], {}, asked).config)
        check_ports(load([], {}, {**asked, name: "0"}).config)


def test_a_model_that_this_user_cannot_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_toy(tmp_path / "toy")
    for closed in (tmp_path / "toy", tmp_path / "toy" / "tokenizer.json"):
        monkeypatch.setattr("os.access", lambda path, mode, closed=closed: Path(path) != closed)
        with pytest.raises(UpError, match=f"model.path: {closed} cannot be read by this user"):
            check_model(config(model__path=tmp_path / "toy"))


def test_the_documented_metrics_port_is_free() -> None:
    root = Path(__file__).resolve().parents[2]
    named = (root / "docs" / "observability.md").read_text().partition("--telemetry.metrics-port ")[2].split()[0]
    assert config(telemetry__metrics_port=named).telemetry.metrics_port == int(named)
    assert f"127.0.0.1:{named}/targets" in (root / "deploy" / "prometheus" / "prometheus.yml").read_text()


def test_an_address_of_another_machine_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Ports, port: int = 0) -> int:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(Ports, "hold", refuse)
    with pytest.raises(UpError, match=r"cluster.host: 127.0.0.1 is not an address of this machine"):
        check_ports(config())


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    make_toy(tmp_path / "toy")
    check_model(config(model__path=tmp_path / "toy"))
    for path, said in ((tmp_path / "none", "there is no folder"), (tmp_path / "toy" / "config.json", "is not a folder")):
        with pytest.raises(UpError, match=f"{said}|{path}"):
            check_model(config(model__path=path))
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / "toy" / name).unlink()
        with pytest.raises(UpError, match=f"holds no {name}|holds no config.json and no tokenizer.json"):
            check_model(config(model__path=tmp_path / "toy"))
    check_model(config(model__path=tmp_path / "none", launcher__kind="ray", launcher__ray_address="10.0.0.1:6379"))


def test_the_router_has_its_own_drain_time() -> None:
    made = templates(config(router__drain_s=3, decode__drain_s=90), Ports("127.0.0.1"))
    grace = {template.role: template.grace_s for template, _ in made}
    assert grace["router"] == 3 + plan.GRACE_S and grace["decode"] == 90 + plan.GRACE_S
