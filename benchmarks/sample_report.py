"""The campaign behind docs/sample-report: does disaggregation pay on two cores, with short prompts and with long ones?

    python benchmarks/sample_report.py measure short     # about 20 minutes each; nothing else may run
    python benchmarks/sample_report.py measure long
    python benchmarks/sample_report.py draw              # writes docs/sample-report

    python benchmarks/sample_report.py measure short --quick   # a toy model and short runs: shows that it works, measures nothing
    python benchmarks/sample_report.py measure long --quick
    python benchmarks/sample_report.py draw --quick            # writes into the folder of the measurements

The parts are measured and judged separately: a slow rate needs a longer run. Raw records are kept in `--records`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from baton.models.make_small import make_toy
from loadtest.cli import NO_VERDICT

ROOT = Path(__file__).resolve().parents[1]
ARMS = "colocated,colocated@64,disaggregated,bypass"  # chunks of 256 tokens, and of 64 as the best that colocation can do for gaps
SLO = "ttft=3s,tpot=35ms,itl_p99=200ms"
# A quarter of each prompt is shared, so that the picture of cached tokens has something to show.
COMMON = ["--arms", ARMS, "--slo", SLO, "--hit-rate", "0.25", "--prefix-tokens", "16", "--prefix-depth", "12", "--bisections", "1"]
WHOLE = ["--seeds", "1,2,3,4,5,6", "--output", "64", "--arrivals", "gamma:4", "--warm-up", "3", "--cool-down", "1", "--timeout", "20"]
QUICK = ["--output", "6", "--seeds", "1,2", "--duration", "3", "--warm-up", "0.5", "--cool-down", "0.5", "--timeout", "10"]
PARTS = {
    "short": (["--vary", "input=32", "--rates", "5,10", "--duration", "10"], ["--vary", "input=32", "--rates", "2"]),
    "long": (["--vary", "input=480", "--rates", "0.7,1.4", "--duration", "16"], ["--vary", "input=480", "--rates", "2"]),
}


def measure(part: str, records: Path, quick: bool) -> None:
    whole, small = PARTS[part]
    with tempfile.TemporaryDirectory() as folder:
        model: list[str] = []
        if quick:
            make_toy(toy := Path(folder) / "toy", step_delay_ms=2)
            model = ["--model", str(toy)]
        _loadtest("compare", *COMMON, *(QUICK + small if quick else WHOLE + whole), *model, "--out", str(records / part))


def draw(records: Path, out: Path) -> None:
    """Writes each part's report and pictures, and an archive of all records, from which `baton loadtest replay` makes them again."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tarfile.open(out / "records.tar.xz", "w:xz") as archive:
        for part in PARTS:
            folder = out / part
            _loadtest("replay", str(records / part), "--out", str(folder))
            for name in ("campaign.json", "records"):
                archive.add(folder / name, f"{part}/{name}")
            shutil.rmtree(folder / "records")
            for name in ("campaign.json", "results.json"):
                (folder / name).unlink()


def _loadtest(*arguments: str) -> None:
    """Exits with the command's status if it failed. That it gave no verdict is a result."""
    command = [sys.executable, "-m", "baton", "loadtest", *arguments]
    print(" ".join(["baton", *command[3:]]))
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode not in (0, NO_VERDICT):
        sys.exit(done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "draw"))
    parser.add_argument("part", nargs="?", choices=sorted(PARTS))
    parser.add_argument("--records", type=Path, default=Path(tempfile.gettempdir()) / "baton-sample")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    records = options.records / ("quick" if options.quick else "whole")
    if options.what == "draw":
        draw(records, records / "report" if options.quick else ROOT / "docs" / "sample-report")
    elif options.part is None:
        parser.error("measure which part: short or long?")
    else:
        measure(options.part, records, options.quick)


if __name__ == "__main__":
    main()
