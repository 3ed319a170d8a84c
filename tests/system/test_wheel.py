"""The wheel, installed into an empty environment: what it contains, and that the first screen of the README works when typed in a folder
full of files with the names of our packages."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution, requires
from pathlib import Path
from typing import Any

import pytest
from live_cluster import ROOT, ends_of_logs
from packaging.requirements import Requirement

from baton.cluster.packages import NAMES

pytestmark = pytest.mark.system
STRANGERS = (
    "router.py", "models.py", "cluster.py", "worker.py", "engine/__init__.py", "launch/__init__.py", "baton_stuff.py", "baton/__init__.py",
    "kvtransfer.py", "loadtest.py", "prefill_worker.py", "decode_worker.py", "grpc.py", "yaml.py", "redis.py", "client.py",
)  # fmt: skip
PROMPT = "Once upon a time there was a fox who lived near the river and wanted to see the sea. The fox was called Pim."
FREE_PORTS = ("--router.port", "0", "--router.admin-port", "0", "--router.http-port", "0", "--router.page-port", "0")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=170, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


def environment(home: Path, wheel: Path, libraries: Iterable[Path]) -> Path:
    """The `bin` folder of an environment with the wheel that sees `libraries` of this one but nothing of this checkout."""
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    (seen := home / "libraries").mkdir()
    for entry in libraries:
        (seen / entry.name).symlink_to(entry)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python")]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--quiet", str(wheel)], check=True, timeout=170, cwd=home)
    (site / "libraries.pth").write_text(f"{seen}\n")
    return home / "bin"


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = Path(sysconfig.get_path("purelib")).iterdir()
    others = [
        entry
        for entry in found
        if entry.name.removesuffix(".py") not in NAMES and entry.suffix != ".pth" and not entry.name.startswith("baton_llm-")
    ]
    return environment(tmp_path_factory.mktemp("environment"), wheel, others)


def needed_by(requirements: Iterable[str]) -> set[str]:
    """The distributions that pip would install for `requirements`."""
    found: set[str] = set()
    asked = [Requirement(line) for line in requirements]
    while asked:
        one = asked.pop()
        if (one.marker is None or one.marker.evaluate({"extra": ""})) and one.name not in found:
            found.add(one.name)
            asked += map(Requirement, requires(one.name) or ())
    return found


@pytest.fixture(scope="module")
def client_alone(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install baton-llm` gives an application."""
    plain = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    files = [file for name in needed_by(plain) for file in distribution(name).files or ()]
    tops = {file.parts[0] for file in files} - {"..", "__pycache__"}
    site = Path(sysconfig.get_path("purelib"))
    return environment(tmp_path_factory.mktemp("application"), wheel, [site / top for top in sorted(tops)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in STRANGERS:
        file = tmp_path / "application" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'raise SystemExit("a stranger\'s {name} ran")\n')
    return tmp_path / "application"


class Terminal:
    def __init__(self, bin: Path, folder: Path, state: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "PYTHON", "VIRTUAL_ENV"))}
        self.env = {**clean, "PATH": f"{bin}{os.pathsep}{clean['PATH']}", "BATON_STATE_DIR": str(state)}
        self.folder = folder

    def type(self, *words: str, **options: Any) -> str:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=170, **options
        )
        logs = ends_of_logs(Path(self.env["BATON_STATE_DIR"]))
        assert done.returncode == 0 and "stranger" not in done.stderr, f"{words}: {done.stdout}\n{done.stderr}\n{logs}"
        return done.stdout


@pytest.fixture
def terminal(installed: Path, folder: Path, tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(installed, folder, tmp_path / "state")
    yield terminal
    subprocess.run(["baton", "down"], cwd="/", env=terminal.env, capture_output=True, timeout=100)


def test_the_wheel_installs_only_our_packages(wheel: Path, installed: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == set(NAMES)
    (site,) = installed.parent.glob("lib/python*/site-packages")
    ours = {
        path.name for path in site.iterdir() if not path.name.startswith(("pip", "setuptools", "baton_llm-", "libraries", "_", "distutils"))
    }
    assert ours == set(NAMES)
    needed_files = ("router/http/static/page.html", "baton/cockpit/static/cockpit.html", "baton/cockpit/static/uPlot.LICENSE")
    for needed in ("baton/models/tale/model.safetensors", "baton/models/tale/tokenizer.json", *needed_files):
        assert needed in names, needed


def test_the_first_screen_of_the_readme_works(terminal: Terminal, client_alone: Path) -> None:
    # At its first start an installation compiles its kernels for a minute or more. That is not tested here.
    small = ("--engine.kv-memory-mib", "64", "--engine.compiled", "false")
    up = json.loads(terminal.type("baton", "up", "--detach", *FREE_PORTS, *small))
    assert terminal.type("baton", "generate", PROMPT, "--max-tokens", "20", "--ignore-eos", "--trace").strip()
    status = json.loads(terminal.type("baton", "status", "--json"))
    assert sorted(worker["pool"] for worker in status["workers"]) == ["decode", "prefill"] and status["model"] == "tale"
    assert "prefill" in terminal.type("baton", "trace", "--last")
    assert terminal.type("baton", "chat", input="Tell me a story about a hedgehog named Pim.\n").strip()
    snippet = (
        "from baton import Client\n"
        f"with Client({up['endpoints']['grpc']!r}) as client, client.generate('Once upon a time', max_tokens=4) as stream:\n"
        "    print(''.join(stream.texts()))\n"
    )
    assert terminal.type("python", "-P", "-c", snippet).strip()
    assert terminal.type(str(client_alone / "python"), "-P", "-c", snippet).strip()
    terminal.type("baton", "down")


def test_an_application_that_only_asks_installs_a_few_megabytes(client_alone: Path) -> None:
    installed = {path.name for path in (client_alone.parent / "libraries").iterdir()}
    assert {"grpc", "google"} <= installed and not installed & {"torch", "numpy", "ray", "numba", "redis", "pydantic", "typer"}


@pytest.mark.parametrize("command", [("-m", "baton", "up"), ("-m", "router"), ("-m", "decode_worker")])
def test_the_client_alone_says_what_a_cluster_needs(client_alone: Path, command: tuple[str, ...]) -> None:
    done = subprocess.run([client_alone / "python", "-P", *command], capture_output=True, text=True, timeout=60, cwd="/")
    assert done.returncode == 1 and "pip install 'baton-llm[serve]'" in done.stderr and "Traceback" not in done.stderr


def test_plain_python_would_run_the_strangers(terminal: Terminal) -> None:
    """Negative control: plain Python does import from the folder."""
    done = subprocess.run(["python", "-m", "router"], cwd=terminal.folder, env=terminal.env, capture_output=True, text=True, timeout=60)
    assert "a stranger's router.py ran" in done.stderr


def test_the_wheel_contains_the_checksums_of_the_checkpoint(terminal: Terminal) -> None:
    """Every worker checks the checksums at its start. This test checks that the wheel contains them."""
    code = "import baton, pathlib; print((pathlib.Path(baton.__file__).parent / 'models' / 'tale' / 'SHA256SUMS').read_text())"
    assert "model.safetensors" in terminal.type("python", "-P", "-c", code)
