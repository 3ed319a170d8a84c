"""Baton's commands run Baton's code, whatever files the working directory contains."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cluster import packages
from baton.cluster.packages import HOME, NAMES, find_stranger, without_working_directory

STRANGER = 'raise SystemExit("a stranger\'s file ran")\n'
# Typical files of a web application, and the names of the modules that our code imports first.
NAMED = (
    "router.py",
    "models.py",
    "cluster.py",
    "worker.py",
    "grpc.py",
    "yaml.py",
    "pydantic.py",
    "engine/__init__.py",
    "loadtest.py",
    "kvtransfer.py",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(STRANGER)
    return tmp_path


def run(folder: Path, *command: str, pythonpath: str = str(HOME), **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("BATON_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env={**clean, "PYTHONPATH": pythonpath, **env}, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "pythonpath", [str(HOME), f"{HOME}{os.pathsep}", f"{os.pathsep}{HOME}"], ids=["plain", "empty last", "empty first"]
)
@pytest.mark.parametrize("module", ["baton", "prefill_worker", "decode_worker"])
def test_nothing_is_imported_from_the_working_directory(folder: Path, module: str, pythonpath: str) -> None:
    """An empty entry in PYTHONPATH also means the working directory."""
    arguments = ("config", "print") if module == "baton" else ()
    done = run(folder, "-m", module, *arguments, pythonpath=pythonpath)
    assert "a stranger's file ran" not in done.stderr, done.stderr
    assert done.returncode == 0 if module == "baton" else (done.returncode == 2 and "cluster.key" in done.stderr)


def test_without_enter_the_working_directory_is_imported(folder: Path) -> None:
    """Negative control: without `enter` the same import runs the foreign file."""
    assert "a stranger's file ran" in run(folder, "-c", "import kvtransfer").stderr
    assert "a stranger's file ran" in run(folder, "-m", "router").stderr


def test_the_command_of_the_launchers_runs_our_router(folder: Path) -> None:
    """The launchers start this command in the folder where `baton up` was run."""
    done = run(folder, *packages.command("router")[1:])
    assert done.returncode == 2 and "model.path" in done.stderr


@pytest.mark.parametrize("name", ["router", "kvtransfer", "loadtest"])
def test_a_foreign_module_on_pythonpath_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text(STRANGER)
    done = run(tmp_path, "-m", "baton", "config", "print", pythonpath=f"{tmp_path}{os.pathsep}{HOME}")
    assert done.returncode == 1 and done.stdout == ""
    assert str(tmp_path / f"{name}.py") in done.stderr and done.stderr.count("\n") == 1


def test_our_own_packages_are_not_foreign() -> None:
    assert find_stranger() is None


def test_the_names_match_the_packages_of_the_wheel() -> None:
    import tomllib

    project = tomllib.loads((HOME / "pyproject.toml").read_text())
    assert sorted(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(NAMES)


@pytest.mark.parametrize("failing", ["", "raise ImportError"])
def test_garbage_is_collected_again_after_the_imports(failing: str, folder: Path) -> None:
    code = f"""
import gc
from baton.cluster.packages import importing
try:
    with importing():
        assert not gc.isenabled()
        {failing}
except ImportError:
    pass
assert gc.isenabled() and gc.get_freeze_count() > 0
"""
    done = run(folder, "-P", "-c", code)
    assert done.returncode == 0, done.stderr


def test_child_processes_inherit_the_rule(folder: Path) -> None:
    code = (
        "import subprocess, sys; from baton.cluster.packages import enter; enter();"
        "sys.exit(subprocess.run([sys.executable, '-c', 'import kvtransfer']).returncode)"
    )
    done = run(folder, "-P", "-c", code)
    assert done.returncode == 0, done.stderr


def test_child_processes_find_a_checkout_that_is_not_installed() -> None:
    code = (
        "import os, sys; from baton.cluster.packages import enter; enter(); import subprocess;"
        "sys.exit(subprocess.run([sys.executable, '-S', '-P', '-c', 'import baton.cluster.packages'], cwd='/').returncode)"
    )
    assert run(HOME, "-S", "-c", code.replace("enter();", f"sys.path[0] = {str(HOME)!r}; enter();", 1), pythonpath="").returncode == 0


def test_a_checkout_that_is_not_installed_has_a_version() -> None:
    code = f"import sys; sys.path[0] = {str(HOME)!r}; from baton.cluster.packages import version; print(version())"
    done = run(HOME, "-S", "-c", code, pythonpath="")
    assert done.returncode == 0 and done.stdout.strip() == "0+uninstalled", done.stderr


def test_only_implicit_entries_for_the_working_directory_are_removed() -> None:
    here, other = "/home/me/app", "/usr/lib/python3"
    assert without_working_directory([here, other], "", here) == [other]
    assert without_working_directory(["", other], "", here) == [other]
    assert without_working_directory([here, "/lib", other], "/lib", here) == ["/lib", other]
    assert without_working_directory([here, here, other], f"{os.pathsep}/lib", here) == [other]
    assert without_working_directory([here, here, other], here, here) == [here, here, other], "PYTHONPATH names it, so it is deliberate"
    assert without_working_directory(["/venv/bin", other, here], "", here) == ["/venv/bin", other, here], "the packages are installed there"
    assert without_working_directory([str(HOME), other], "", str(HOME)) == [str(HOME), other]


@pytest.mark.parametrize("after_s", [0.1, 0.25, 0.5])
def test_ctrl_c_during_the_imports_leaves_no_traceback(after_s: float, tmp_path: Path) -> None:
    code = (
        "import os, signal, threading, time; from baton.cluster.packages import enter; enter();"
        f"threading.Timer({after_s}, os.kill, (os.getpid(), signal.SIGINT)).start();"
        "exec('import baton.cli.main\\nwhile True: time.sleep(0.01)')"
    )
    done = run(tmp_path, "-P", "-c", code)
    assert done.returncode == 128 + signal.SIGINT and done.stderr == ""
