"""Arms from hardware: which worker gets what, every split, and what is refused at once."""

import json
from typing import Any

import pytest
import typer
from fake_nvml import FakeGpu, FakeNvml, alike

from baton.cluster.gpus import HostGpus
from loadtest import cli, cluster, hardware
from loadtest.arms import common_part, make_arms
from loadtest.hardware import ClusterError, Cores, WorkerGpus, default_cores, find_gpus, with_ranks
from loadtest.options import Arms
from loadtest.plan import ComparePlan

TWO = WorkerGpus(2, 1, ("GPU 0", "GPU 1"))
FOUR = WorkerGpus(4, 1, ())


def sizes(*names: str, hardware: Any = FOUR, ratio: tuple[int, int] | None = (1, 1)) -> dict[str, tuple[int, int]]:
    made = make_arms(names, hardware, ratio, None)
    return {arm.name: (int(arm.topology["prefill.replicas"]), int(arm.topology["decode.replicas"])) for arm in made}


def compared(hardware: Any, engines: tuple[str, ...] = ("baton",), **more: Any) -> ComparePlan:
    return ComparePlan(
        model="m", arms=("colocated", "disaggregated"), hardware=hardware, ratio=(1, 1), chunk=None, rates=(1.0,), vary=("", ("",)),
        bisections=0, engines=engines, **more,
    )  # fmt: skip


def test_two_gpus_are_two_workers_that_do_both_or_one_of_each() -> None:
    comparison = compared(TWO, dtype="bfloat16")
    assert [dict(arm.topology) for arm in comparison.make_arms()] == [
        {"prefill.replicas": "0", "decode.replicas": "2"},
        {"prefill.replicas": "1", "decode.replicas": "1", "router.bypass_tokens": "0"},
    ], "what is not asked for stays the engine's own"
    common = {"model.path": "m", "model.dtype": "bfloat16", "engine.device": "cuda", "prefill.gpus": "1", "decode.gpus": "1"}
    assert {key: value for key, value in comparison.common.items() if key != "telemetry.log_level"} == common
    configs = {arm.name: cluster.config_of({**comparison.common, **arm.topology}) for arm in comparison.make_arms()}
    shared = common_part(comparison.make_arms(), configs, TWO)
    assert shared["model.dtype"] == "bfloat16" and "prefill.replicas" not in shared
    with pytest.raises(ClusterError, match="arm colocated uses 2 GPUs, not all of 4"):
        common_part(comparison.make_arms(), configs, FOUR)


def test_every_split_is_an_arm_and_one_can_be_named() -> None:
    every = {f"disaggregated-{k}:{4 - k}": (k, 4 - k) for k in (1, 2, 3)}
    assert sizes("colocated", "disaggregated", ratio=None) == {"colocated": (0, 4), **every}
    assert sizes("bypass@64", hardware=TWO, ratio=None) == {"bypass-1:1@64": (1, 1)}
    assert sizes("disaggregated-1:3", "bypass-2:2@64") == {"disaggregated-1:3": (1, 3), "bypass-2:2@64": (2, 2)}
    cores = Cores(default_cores()[:2])
    assert make_arms(("disaggregated",), cores, None, 64)[0].topology["decode.cores"] == str([cores.cores[1]])
    for name, why in (
        ("disaggregated-1:1", "there are 4 workers"),
        ("disaggregated-4:0", "at least one for each"),
        ("colocated-1:3", "after - come"),
        ("disaggregated-", "after - come"),
        ("disaggregated-1", "after - come"),
        ("-1:3", "is not one of"),
    ):
        with pytest.raises(ClusterError, match=why):
            sizes(name)
    with pytest.raises(ClusterError, match="3 workers cannot be split 1:1; `all` tries every split"):
        sizes("disaggregated", hardware=WorkerGpus(3, 1, ()))
    with pytest.raises(ClusterError, match="1 worker cannot be split"):
        sizes("disaggregated", hardware=Cores(default_cores()[:1]), ratio=None)


def test_ranks_take_gpus_and_are_of_vllm_alone() -> None:
    pairs = WorkerGpus(4, 2, ())
    assert sizes("colocated", "disaggregated", hardware=pairs) == {"colocated": (0, 2), "disaggregated": (1, 1)}
    comparison = compared(pairs, ("vllm",), parallel=2, vllm="{enforce_eager: true}")
    given = [json.loads(arm.topology["engine.vllm"]) for arm in comparison.make_arms()]
    assert given == [{"enforce_eager": True, "tensor_parallel_size": 2}] * 2 and comparison.common["decode.gpus"] == "2"
    assert "engine.block_size" not in comparison.common, "that is for vLLM on a CPU"
    for engines in (("baton",), ("vllm", "baton")):
        with pytest.raises(ValueError, match="tensor-parallel: baton computes on one GPU"):
            compared(pairs, engines, parallel=2).make_arms()
    with pytest.raises(ClusterError, match=r"engines: 'sglang' is not one of baton, vllm"):
        compared(pairs, ("sglang",), parallel=2).make_arms()
    with pytest.raises(ValueError, match="tensor_parallel_size 4 is not --tensor-parallel 2"):
        with_ranks("{tensor_parallel_size: 4}", 2, ("vllm",))
    for text in ("[1]", "{", "x"):
        with pytest.raises(ValueError, match="is no mapping"):
            with_ranks(text, 2, ("vllm",))


@pytest.mark.parametrize(
    ("count", "parallel", "why"),
    [
        (1, 1, "gpus: 1 is one worker; .* need 2"),
        (2, 2, "gpus: 2 is one worker; .* need 4"),
        (0, 1, "do not fill"),
        (-2, 1, "do not fill"),
        (3, 2, "do not fill"),
        (2, 0, "do not fill"),
    ],
)
def test_too_few_gpus_for_a_comparison_are_refused(count: int, parallel: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        find_gpus(count, parallel, {}, alike(8))


def test_gpus_that_are_not_there_are_refused_with_the_reason() -> None:
    assert find_gpus(2, 1, {}, alike(2)).facts["gpus_used"] == 2
    for nvml, env, why in (
        (alike(2), {}, "4 are asked for, and 2 can be used here$"),
        (alike(4), {"CUDA_VISIBLE_DEVICES": "0,1"}, "and 2 can be used here: CUDA_VISIBLE_DEVICES hides others"),
        (FakeNvml(), {}, "and 0 can be used here: the NVIDIA driver finds no GPU here"),
        (FakeNvml(fails=12), {}, "and 0 can be used here: there is no NVIDIA driver here"),
        (FakeNvml([FakeGpu(f"GPU-{i}", name) for i, name in enumerate(("L4", "L4", "A10", "A10"))]), {}, "A10 and L4 are unlike"),
    ):
        with pytest.raises(ClusterError, match=why):
            find_gpus(4, 1, env, nvml)
    with pytest.raises(ValueError, match="there is no device 7 here"):
        find_gpus(2, 1, {"CUDA_VISIBLE_DEVICES": "7"}, alike(2))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"gpus": 2, "cores": "0,1"}, "cores: with --gpus"),
        ({"gpus": 2, "threads": 1}, "threads: with --gpus"),
        ({"tensor_parallel": 2}, "tensor-parallel: ranks are on GPUs"),
        ({"ratio": "both"}, "ratio: 'both' is not N:M or all"),
        ({"dtype": "float8"}, "model.dtype"),
    ],
)
def test_flags_that_contradict_are_bad_input(flags: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model of default is made, which takes a while."""
    with pytest.raises(typer.Exit) as ended, cli.failing():
        cli._comparison(Arms(**flags), frozenset())
    said = capsys.readouterr().err
    assert ended.value.exit_code == 2 and why.split(" ")[0] in said and "Traceback" not in said


def test_a_machine_without_gpus_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "find", lambda nvml: HostGpus(reason="no driver"))
    with pytest.raises(ClusterError, match="gpus: 2 are asked for, and 0 can be used here: no driver"):
        cli._comparison(Arms(gpus=2), frozenset())
