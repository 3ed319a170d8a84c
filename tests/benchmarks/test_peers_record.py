"""The record of a peers run: whatever ends the run or fails in it, what was measured is kept, and what was not has a name."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peers.cells import Cell, Model
from peers.drivers import ceilings
from peers.engines import ENGINES, OURS, REFERENCE
from peers.process import Driver
from peers.record import Record, lines, results
from peers.report import table

HERE = Path(__file__).parents[2] / "benchmarks"
CELLS = (Cell("prefill 4", "prefill", ((4, 1),)), Cell("decode b1", "decode", ((4, 3),)))
BATON = next(engine for engine in ENGINES if engine.label == f"{OURS} float32")
PEER = next(engine for engine in ENGINES if engine.label == "openvino float32")
CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
ENGINE = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "start":
        answer = {"version": "1"}
    elif FAILS and asked["outputs"][0] > 1:
        answer = {"error": "no memory"}
    else:
        answer = {"tokens": [[7] * n for n in asked["outputs"]], "times": [[0.5 + k for k in range(n)] for n in asked["outputs"]]}
    print(json.dumps(answer), flush=True)
"""
CEILINGS = """
import json, sys
for line in sys.stdin:
    found = {} if "start" in line else {"found": {"float32 matmul GFLOP/s": 100.0}, "missing": {"bfloat16 matmul GFLOP/s": "cannot"}}
    print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """`benchmarks/peers.py`, beside which a package has its name."""
    spec = importlib.util.spec_from_file_location("peers_script", HERE / "peers.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Runs:
    def __init__(self, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script, self.tmp_path, self.monkeypatch = script, tmp_path, monkeypatch

    def __call__(self, programs: dict[str, str], engines: tuple[Any, ...] = (BATON, PEER, REFERENCE)) -> list[dict[str, Any]]:
        """Of engines and ceilings that are these programs."""
        script, model = self.script, self.tmp_path / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIG))
        self.monkeypatch.setattr(script, "ENGINES", engines)
        options = argparse.Namespace(cache=self.tmp_path, engines=None, threads=1, seed=0, repeats=2)
        record = Record(self.tmp_path / "samples.jsonl")
        record.add(run={"machine": "here", "commit": "0", "cores": [0], "threads": 1, "seed": 0, "versions": {}})
        self.monkeypatch.setattr(script.Places, "installed", lambda places, package: True)
        run = script.Run(options, record)

        def drive(driver: str, package: str | None, name: str, more: dict[str, str]) -> Driver:
            return Driver([sys.executable, "-c", programs.get(name, ENGINE.replace("FAILS", "False"))], {}, self.tmp_path / "log")

        for name, stand_in in (("drive", drive), ("checkpoint", lambda name: model), ("converted", lambda engine, checkpoint: model)):
            self.monkeypatch.setattr(run, name, stand_in)
        run.model("small", CELLS, time.monotonic() + 60)
        return list(lines(record.file))


@pytest.fixture
def runs(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    yield Runs(script, tmp_path, monkeypatch)


def rates(found: dict[str, Any]) -> dict[tuple[str, str], int]:
    """How many samples each cell of each engine has."""
    return {(row["engine"], cell): len(one["values"]) for row in found["rows"] for cell, one in row["cells"].items()}


def test_a_peer_that_fails_leaves_a_hole_and_what_it_had_measured(runs: Runs) -> None:
    found = results(runs({"ceilings": CEILINGS, PEER.label: ENGINE.replace("FAILS", "True")}))
    assert found["left_out"][PEER.label] == "small decode b1, repeat 1: no memory"
    assert rates(found) == {
        (OURS, "prefill 4"): 2, (OURS, "decode b1"): 2, ("openvino", "prefill 4"): 1, (REFERENCE.name, "prefill 4"): 2,
        (REFERENCE.name, "decode b1"): 2,
    }  # fmt: skip
    text = table(found["rows"], ["prefill 4", "decode b1"])
    assert "1.00x openvino" in text and "1.00x transformers" in text  # the best peer of each cell that has one


@pytest.mark.parametrize("at", ["start", "run"])
def test_without_ceilings_the_run_goes_on(at: str, runs: Runs) -> None:
    dies = f"import sys\nfor line in sys.stdin:\n    if '{at}' in line: sys.exit('no memory')\n    print('{{}}', flush=True)\n"
    found = results(runs({"ceilings": dies}, (BATON, REFERENCE)))
    assert "no memory" in found["left_out"]["ceilings"] and not found["ceilings"]
    assert set(rates(found).values()) == {2} and len(rates(found)) == 4
    assert "%" in table(found["rows"], ["prefill 4"])  # of equal tokens
    assert all(cell["share_of_ceiling"] is None for row in found["rows"] for cell in row["cells"].values())


def test_a_ceiling_that_is_missing_is_named_and_bfloat16_gets_that_of_float32(runs: Runs) -> None:
    narrow = next(engine for engine in ENGINES if engine.label == f"{OURS} bfloat16")
    found = results(runs({"ceilings": CEILINGS}, (BATON, narrow)))
    assert found["left_out"] == {"ceiling, bfloat16 matmul GFLOP/s": "cannot"}
    first, second = (row["cells"]["prefill 4"]["share_of_ceiling"] for row in found["rows"])
    assert first == second == pytest.approx(8 / (100e9 * 4 / Model.of(CONFIG, "small").prefill_flops(4)))


def test_samples_are_in_the_file_as_they_come_and_a_line_that_is_cut_off_is_no_harm(runs: Runs, tmp_path: Path) -> None:
    whole = runs({"ceilings": CEILINGS})
    first = next(i for i, line in enumerate(whole) if "tokens_per_s" in line)
    half = tmp_path / "half.jsonl"
    half.write_text("\n".join(json.dumps(line) for line in whole[: first + 1]) + '\n{"model": "small", "eng')
    assert list(rates(results(lines(half))).values()) == [1]
    half.write_text("\n".join(json.dumps(line) for line in whole[:2]) + "\n")
    assert results(lines(half))["rows"] == []
    half.write_text('{"run": {}}\n[1]\n{"note": "x"}\n')
    with pytest.raises(ValueError, match="line 2: not an object"):
        list(lines(half))
    with pytest.raises(ValueError, match="no run"):
        results([])


def test_tables_are_made_of_an_earlier_runs_samples(
    runs: Runs, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = results(runs({"ceilings": CEILINGS}))
    capsys.readouterr()
    monkeypatch.setattr(script, "measure", lambda *_: pytest.fail("nothing is measured"))
    monkeypatch.setattr(sys, "argv", ["peers.py", "--tables", str(tmp_path / "samples.jsonl"), "--json", str(tmp_path / "out.json")])
    script.main()
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == json.loads(json.dumps(found["rows"]))
    assert "1.00x openvino" in capsys.readouterr().out


def test_a_way_to_multiply_that_fails_is_missing_and_the_other_ceilings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ceilings.ways

    def ways(a: Any, b: Any) -> Any:
        if a.dtype == torch.bfloat16:
            raise RuntimeError("mkldnn_reorder_linear_weight: cannot\nC++ trace")
        return plain(a, b)

    for name, smaller in (("FAR", 1 << 16), ("SIDE", 32), ("ways", ways)):
        monkeypatch.setattr(ceilings, name, smaller)
    threads = torch.get_num_threads()
    answer = ceilings.start({"threads": threads})[1]({})
    assert answer["missing"] == {"bfloat16 matmul GFLOP/s": "mkldnn_reorder_linear_weight: cannot"}
    assert "float32 matmul GFLOP/s" in answer["found"] and f"read GB/s, {threads} threads" in answer["found"]


def test_without_instructions_for_bfloat16_its_ceiling_is_not_tried() -> None:
    """Plain torch multiplies it for minutes there, and oneDNN raises an error."""
    program = """
import torch
from peers.drivers.ceilings import ways
try:
    ways(*torch.ones(2, 32, 32, dtype=torch.bfloat16))
except ValueError as error:
    print(error)
"""
    env = {**os.environ, "PYTHONPATH": str(HERE), "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert "does not multiply bfloat16" in done.stdout, done.stderr
