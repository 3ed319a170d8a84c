"""`baton plan`: what it prints, what it writes, and what it refuses, by field."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from baton.cli.main import app

USUAL = {
    "--gpus": "h100=8", "--price": "h100=2.5", "--rate": "20", "--slo": "ttft=500ms,tpot=30ms", "--input": "500-3000",
    "--output": "100-400", "--max-tokens": "4096", "--duration": "20", "--verify": "0",
}  # fmt: skip


def plan(*more: str, model: str = "llama-3.1-8b", **changed: str) -> Result:
    asked = USUAL | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return CliRunner().invoke(app, ["plan", model, *(word for pair in asked.items() for word in pair if pair[1]), *more])


def test_a_plan_says_first_what_it_is_not_and_names_what_baton_cannot_install() -> None:
    result = plan(gpus="h100=8,l40s=16", price="h100=2.5,l40s=0.9")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Nothing was measured or simulated")
    for words in ("2 x h100", "an hour", "estimated", "not simulated", "the decisions", "tensor parallelism", "unlike numbers of ranks"):
        assert words in result.stdout, words


def test_a_plan_for_programs_and_its_values(tmp_path: Path) -> None:
    path = tmp_path / "made" / "values.yaml"
    result = plan("--json", model="llama-3.1-70b", rate="2", slo="ttft=1s,tpot=50ms", values=str(path))
    told = json.loads(result.stdout)
    assert told["asked"]["model"] == "llama-3.1-70b" and told["asked"]["cv2"] == 1
    costs = [each["cost"] for each in told["configurations"]]
    assert costs == sorted(costs) and all(each["estimated_attainment"] >= 0.9 for each in told["configurations"])
    assert all(each["simulated"] is None for each in told["configurations"]), "nothing was"
    first = next(each for each in told["configurations"] if not each["lacking"])
    values = yaml.safe_load(path.read_text())
    assert values["decode"]["replicas"] == first["pools"]["decode"]["workers"] and values["engine"] == first["engine"] == "vllm"
    assert values["config"]["engine"]["vllm"]["tensor_parallel_size"] == first["pools"]["decode"]["tensor"]
    assert path.read_text().startswith("# llama-3.1-70b: ") and "Planned, not measured" in path.read_text()


def test_what_is_simulated_is_said_with_its_interval(tmp_path: Path) -> None:
    result = plan("--json", rate="2", input="200", output="20", duration="15", verify="1", draws="1", model="qwen3-0.6b")
    told = json.loads(result.stdout)
    assert told["warning"].startswith("Outside of what was validated: nothing was measured: the profile is from the sheet h100")
    (simulated,) = [each["simulated"] for each in told["configurations"] if each["simulated"]]
    value, low, high = simulated["attainment"]
    assert 0.9 <= low <= value <= high <= 1


def test_a_trace_is_read_with_its_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:{second // 60:02}:{second % 60:02}.0000000,{900 + second},50" for second in range(300)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    result = plan("--json", input="", output="", duration="", rate="10", trace=str(trace), arrivals="trace")
    told = json.loads(result.stdout)
    assert told["asked"]["cv2"] == pytest.approx(0, abs=0.01), "once a second"
    assert told["asked"]["prompt"] == pytest.approx(1049.5, abs=2) and told["asked"]["rate"] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("gpus: 'tpu' is not in the sheet", {"gpus": "tpu=4"}),
        ("gpus: h100=0 must be above 0", {"gpus": "h100=0"}),
        ("gpus: h100=1.5 is not a whole number", {"gpus": "h100=1.5"}),
        ("gpus: h100 is given twice", {"gpus": "h100=1,h100=2"}),
        ("gpus: 'h100' is not like h100=2", {"gpus": "h100"}),
        ("price: l40s is given, and gpus has none of it", {"price": "h100=2.5,l40s=1"}),
        ("price: l40s has none", {"gpus": "h100=8,l40s=8"}),
        ("price: h100=-1 must be above 0", {"price": "h100=-1"}),
        ("model: gpt-9 is no folder", {"model": "gpt-9"}),
        ("slo: tpot is missing", {"slo": "ttft=500ms"}),
        ("slo: ttft is missing", {"slo": "tpot=50ms"}),
        ("tpot is given twice", {"slo": "tpot=50ms,tpot=1s"}),
        ("rate: 0 is not", {"rate": "0"}),
        ("rate: -3 is not", {"rate": "-3"}),
        ("weight_bits: '12'", {"weight_bits": "12"}),
        ("kv_bits: 'x'", {"kv_bits": "x"}),
        ("output: 0 in", {"output": "0"}),
    ],
)
def test_bad_input_is_refused_by_field(words: str, changed: dict[str, str]) -> None:
    result = plan(**changed)
    assert result.exit_code == 2, result.output
    assert f"baton plan: {words}" in result.output or (words.startswith("tpot is given") and words in result.output)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    (trace := tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    result = plan(trace=str(trace), arrivals="trace", rate="1")
    assert result.exit_code == 2 and "no request" in result.output


def test_no_configuration_says_which_term_forbids_it_and_what_would_do() -> None:
    result = plan(slo="ttft=500ms,tpot=1ms")
    assert result.exit_code == 1 and "TPOT: a step of a single sequence" in result.output
    result = plan(gpus="h100=1", rate="300")
    assert result.exit_code == 1 and "with more GPUs of these kinds" in result.output
    result = plan(model="llama-3.1-70b", gpus="l40s=2", price="")
    assert result.exit_code == 1 and "141 GB of weights need at least 4 GPUs" in result.output
