"""Before a cluster starts, its device and the GPUs of its workers are settled, or one sentence says what is wrong."""

from pathlib import Path
from typing import Any

import pytest

from baton.cluster.config import ConfigError
from baton.cluster.config_layers import load, to_env
from baton.cluster.device import DeviceChoice
from baton.cluster.gpus import Device
from baton.launch import gpus
from baton.launch.gpus import least_free, settle, settle_afar
from baton.launch.placing import LEAST_FREE
from baton.launch.plan import UpError, templates
from baton.launch.ports import Ports

GIB = 1 << 30
CPU = DeviceChoice("cpu")


def config(**flags: object) -> Any:
    return load([], {}, {name.replace("__", "."): str(value) for name, value in flags.items()}).config


def cuda(count: int, used: int = 0, kinds: tuple[str, ...] = ("H100",)) -> DeviceChoice:
    return DeviceChoice("cuda", tuple(Device(f"GPU-{i}", i, kinds[i % len(kinds)], 80 * GIB, used) for i in range(count)))


def test_auto_is_one_gpu_for_each_worker_where_gpus_are_used_else_none() -> None:
    settled = settle(config(), cuda(2)).config
    assert (settled.engine.device, settled.prefill.gpus, settled.decode.gpus) == ("cuda", 1.0, 1.0)
    settled = settle(config(), CPU).config
    assert (settled.engine.device, settled.prefill.gpus, settled.decode.gpus) == ("cpu", 0.0, 0.0)
    ranks = settle(config(engine__kind="vllm", engine__vllm="{tensor_parallel_size: 2}"), cuda(4))
    assert (ranks.config.prefill.gpus, ranks.config.decode.gpus) == (2.0, 2.0)


def test_what_is_settled_holds_for_every_process() -> None:
    settled = settle(config(prefill__gpus=0.5, decode__gpus=0.5), cuda(1))
    again = load([], to_env(settled.config)).config
    assert (again.engine.device, again.prefill.gpus, again.decode.gpus) == ("cuda", 0.5, 0.5)
    with Ports("127.0.0.1") as ports:
        assert {template.role: template.gpus for template, _ in templates(again, ports)} == {"router": 0.0, "prefill": 0.5, "decode": 0.5}
    assert settled.gpus is not None and [device.token for device in settled.gpus.devices] == ["GPU-0"]


@pytest.mark.parametrize(
    ("flags", "choice", "why"),
    [
        ({}, cuda(1), r"^engine.device cuda: 2 workers need 2 GPUs .* 1 too few; .*--prefill.gpus 0.5 --decode.gpus 0.5$"),
        ({}, cuda(2, used=79 * GIB + 1), "0 can be used here .*GPU 0 .* is full"),
        ({"decode__replicas": 2}, cuda(3, kinds=("A", "B", "C")), "not enough of one kind"),
        ({"launcher__kind": "ray"}, cuda(2, kinds=("A", "B")), "launcher.kind ray cannot tell unlike GPUs apart"),
    ],
)
def test_gpus_that_do_not_suffice_are_one_sentence(flags: dict[str, Any], choice: DeviceChoice, why: str) -> None:
    with pytest.raises(UpError, match=why):
        settle(config(**flags), choice)


@pytest.mark.parametrize(
    ("flags", "choice", "why"),
    [
        ({"prefill__gpus": 1}, CPU, r"^prefill.gpus 1: engine.device is cpu"),
        ({"decode__gpus": 0}, cuda(2), r"^decode.gpus 0: with engine.device cuda each worker needs a GPU"),
    ],
)
def test_keys_that_contradict_each_other_are_named(flags: dict[str, Any], choice: DeviceChoice, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        settle(config(**flags), choice)


@pytest.mark.parametrize("value", ["1.5", "-1", "some", "65", "nan"])
def test_a_number_of_gpus_that_cannot_be_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"prefill\.?.*gpus"):
        config(prefill__gpus=value)


def test_no_device_is_a_sentence_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(asked: str) -> DeviceChoice:
        raise ValueError(f"engine.device {asked}: there is none")

    monkeypatch.setattr(gpus, "choose", none)
    with pytest.raises(UpError, match=r"^engine.device cuda: there is none$"):
        settle(config(engine__device="cuda"))


def test_gpus_of_other_hosts_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "choose", None)
    asked = config(launcher__kind="ray", launcher__ray_address="10.0.0.1:6379")
    assert settle(asked).config == asked
    assert settle_afar(asked, 8.0).prefill.gpus == 1.0 and settle_afar(asked, 8.0).engine.device == "cuda"
    assert settle_afar(asked, 0.0).engine.device == "cpu"


def test_a_gpu_is_full_for_a_model_that_does_not_fit(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(32 * GIB)
    assert least_free(config(model__path=tmp_path)) == 16 * GIB
    assert least_free(config(model__path=tmp_path, engine__weight_dtype="int4")) == LEAST_FREE
    with pytest.raises(UpError, match=r"is full: 10.0 of 80.0 GiB are free"):
        settle(config(model__path=tmp_path), cuda(2, used=70 * GIB))
