"""The shape of the project itself: import arrows, generated code, nothing unsafe on a socket."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("baton", "cluster", "decode_worker", "engine", "kvtransfer", "loadtest", "models", "prefill_worker", "router", "worker")

# room → what of ours it may import. A longer entry allows only that module.
ARROWS = {
    "engine": set(),
    "cluster": set(),
    "kvtransfer": {"engine.kvcache", "cluster.errors", "cluster.failpoint"},
    "worker": {"engine", "kvtransfer", "cluster", "baton.v1"},
    "prefill_worker": {"engine", "kvtransfer", "cluster", "worker", "baton.v1"},
    "decode_worker": {"engine", "kvtransfer", "cluster", "worker", "baton.v1"},
    "router": {"engine.block_key", "engine.sampling", "cluster", "baton.v1"},
    "baton": {"baton", "cluster", "engine", "kvtransfer", "loadtest.cli"},
    "loadtest": {"baton"},
    "models": {"engine.fingerprint", "engine.memory"},
}
# Heavy third parties and the only places that may import them.
HOMES = {
    "torch": ("engine/", "models/"),
    "numba": ("engine/kernels.py",),
    "llvmlite": ("engine/kernels.py",),
    "triton": ("engine/gpu/triton_",),
    "flashinfer": ("engine/gpu/flashinfer_backend.py",),
    "flash_attn": ("engine/gpu/flash_attn_backend.py",),
    "nixl_cu13": ("kvtransfer/nixl_transport.py",),
    "redis": ("cluster/redis_registry.py",),
    "ray": ("cluster/ray_launcher.py",),
    "opentelemetry": ("cluster/telemetry.py",),
    "prometheus_client": ("cluster/metrics_http.py",),
    "kubernetes": ("cluster/",),
    "tokenizers": ("router/", "models/", "loadtest/measure.py"),
    "typer": ("baton/", "loadtest/cli.py"),
    "rich": ("baton/", "models/train/", "loadtest/"),
    "matplotlib": ("loadtest/", "models/"),
    "transformers": ("models/train/",),
    "starlette": ("router/http/",),
    "uvicorn": ("router/http/server.py",),
    "limits": ("router/rates.py",),
}
# Deciding code: no await, no clock, no randomness, no torch.
PURE = (
    "engine/scheduler.py", "engine/blocks.py", "engine/sequence.py", "kvtransfer/lease.py", "router/policy.py", "router/view.py",
    "router/prefix_index.py", "router/admission.py", "router/stop.py", "router/slo.py", "loadtest/metrics.py", "loadtest/verdict.py",
)  # fmt: skip
BANNED = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if "v1" not in path.parts]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def allowed(module: str, room: str) -> bool:
    return module.split(".")[0] == room or any(module == entry or module.startswith(f"{entry}.") for entry in ARROWS[room])


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    ours = {module for module in imports(path) if module.split(".")[0] in ROOMS}
    if path == ROOT / "baton" / "client.py":
        assert all(module.startswith("baton.v1") for module in ours)
    wrong = sorted(module for module in ours if not allowed(module, room))
    assert not wrong, f"{room} may not import {wrong}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_libraries_stay_in_their_file(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for module in imports(path):
        home = HOMES.get(module.split(".")[0])
        assert home is None or name.startswith(home), f"{name} imports {module}"
        assert module.split(".")[0] not in BANNED, f"{name} imports {module}: nothing of ours is pickled"
        assert not module.startswith("torch.load"), name


def test_an_arrow_against_the_rules_is_seen() -> None:
    """Negative control."""
    assert not allowed("router.policy", "engine") and not allowed("engine.engine", "router")
    assert allowed("engine.block_key.block_keys", "router") and not allowed("engine.block_keys", "router")


@pytest.mark.parametrize("name", PURE)
def test_deciding_code_is_pure(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Await | ast.AsyncFunctionDef)]
    roots = {module.split(".")[0] for module in imports(ROOT / name)}
    assert not roots & {"torch", "time", "random", "secrets", "asyncio", "prometheus_client", "opentelemetry", "logging"}


def test_generated_code_is_current() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "generate.py"), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_proto_is_no_package() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py"))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("router.wiring", "torch"),
        ("baton.client", "torch"),
        ("baton.client", "cluster"),
        ("baton.cli", "torch"),
        ("baton.cli", "matplotlib"),
        ("engine.toy", "torch"),
        ("engine.runner", "numba"),
    ],
)
def test_light_processes_stay_light(module: str, absent: str) -> None:
    code = f"import {module}, sys; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_init_files_hold_a_docstring_only() -> None:
    for path in ROOT.glob("*/__init__.py"):
        body = ast.parse(path.read_text()).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr), path
