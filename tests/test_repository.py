"""The structure of the project: which package may import which, current generated code, and no pickle anywhere."""

import ast
import graphlib
import itertools
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
from each import for_each
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
# The packages of this project. A file belongs to the longest name that matches.
ROOMS = (
    "baton", "baton.access", "baton.cli", "baton.cluster", "baton.cockpit",
    "baton.engine", "baton.engine.core", "baton.engine.cpu", "baton.engine.facts",
    "baton.engine.gpu", "baton.engine.grammars", "baton.engine.model", "baton.engine.vllm", "baton.launch", "baton.models", "baton.plan",
    "baton.planner", "baton.predict", "baton.profile", "baton.recorder", "baton.simulate", "baton.tiers", "baton.worker",
    "decode_worker", "kvtransfer", "loadtest", "prefill_worker", "router",
)  # fmt: skip
WORKER = {"baton.clock", "baton.engine", "baton.cluster", "baton.moves", "baton.recorder", "baton.tiers", "baton.v1", "kvtransfer"}

# package → which of our packages it may import. An entry that names a module allows only that module.
ARROWS = {
    "baton": {"baton.answer", "baton.attempts", "baton.client", "baton.targets", "baton.v1"},
    "baton.access": {
        "baton.client",
        "baton.cluster",
        "baton.launch.pods",
        "baton.launch.port_forward",
        "baton.launch.state",
        "baton.section",
    },
    "baton.cli": {"baton", "kvtransfer", "loadtest.cli", "loadtest.options"},
    "baton.cluster": {
        "baton.engine.core.block_key",
        "baton.engine.options",
        "baton.moves",
        "baton.section",
        "baton.stages",
        "baton.uncached",
    },
    "baton.cockpit": {
        "baton.access",
        "baton.clock",
        "baton.cluster",
        "baton.engine.core.limits",
        "baton.engine.machine",
        "baton.launch.child",
        "baton.launch.state",
        "baton.plan",
        "baton.predict",
        "baton.profile",
        "baton.simulate",
        "baton.stages",
        "baton.v1",
        "loadtest",
        "router.http.errors",
        "router.http.page",
        "router.http.server",
        "router.http.strangers",
    },
    "baton.engine": {"baton.section"},  # and its own files: options, runner, choice, build, start
    "baton.engine.core": {"baton.moves"},
    "baton.engine.facts": {"baton.engine.core"},
    "baton.engine.grammars": {
        "baton.engine.core.grammar",
        "baton.engine.core.masks",
        "baton.engine.core.thinking",
        "baton.engine.facts.tokenizer_files",
    },  # the router loads it: no torch
    "baton.engine.model": {"baton.engine.core", "baton.engine.facts"},
    "baton.engine.cpu": {"baton.engine.core", "baton.engine.model"},
    "baton.engine.gpu": {"baton.engine.core", "baton.engine.model", "baton.engine.runner"},
    "baton.engine.vllm": {
        "baton.engine.build",
        "baton.engine.core",
        "baton.engine.defaults",
        "baton.engine.facts",
        "baton.engine.grammars",
        "baton.engine.machine",
        "baton.engine.model.sampler",
        "baton.engine.options",
    },
    "baton.launch": {"baton.clock", "baton.cluster", "baton.engine.options", "baton.moves", "baton.v1"},
    "baton.models": {"baton.engine.build", "baton.engine.core", "baton.engine.facts", "baton.engine.model", "baton.engine.options"},
    "baton.plan": {"baton.engine.facts.fields", "baton.profile"},
    "baton.planner": {
        "baton.clock",
        "baton.cluster",
        "baton.launch.kubernetes_launcher",
        "baton.launch.pods",
        "baton.moves",
        "baton.plan.formulae",
        "baton.profile",
        "baton.simulate",
        "baton.v1",
        "router.curves",
    },
    "baton.predict": {
        "baton.client",
        "baton.cluster",
        "baton.plan",
        "baton.profile",
        "baton.simulate",
        "baton.stages",
        "baton.v1",
        "loadtest",
        "router.request",
    },
    "baton.profile": set(),
    "baton.recorder": {"baton.cluster"},
    "baton.simulate": {
        "baton.clock",
        "baton.cluster",
        "baton.engine.core",
        "baton.profile",
        "baton.recorder",
        "baton.tiers",
        "baton.worker.prompts",
        "baton.worker.refusal",
        "baton.worker.taped",
        "router",
    },
    "baton.tiers": {
        "baton.engine.core.block_key",
        "baton.engine.core.colder",
        "baton.engine.core.ghosts",
        "baton.engine.core.kvcache",
        "baton.engine.core.long_contexts",
        "baton.engine.core.pages",
        "baton.moves",
    },
    "baton.worker": WORKER,
    "decode_worker": WORKER | {"baton.worker"},
    "kvtransfer": {
        "baton.clock",
        "baton.engine.core.kvcache",
        "baton.cluster.errors",
        "baton.cluster.failpoint",
        "baton.cluster.handoff",
        "baton.cluster.open_files",
        "baton.moves",
    },
    "loadtest": {
        "baton.access",
        "baton.client",
        "baton.cluster.errors",
        "baton.cluster.gpus",
        "baton.launch.kubernetes_api",
        "baton.launch.kubernetes_launcher",
        "baton.launch.pods",
        "baton.launch.state",
        "baton.stages",
        "baton.terminal",
        "baton.v1",
    },
    "prefill_worker": WORKER | {"baton.worker"},
    # Of the engine only what is plain data and standard library: the router never loads torch.
    "router": {
        "baton.engine.core.beams",
        "baton.engine.core.block_key",
        "baton.engine.facts.fields",
        "baton.engine.facts.fingerprint",
        "baton.engine.facts.model_facts",
        "baton.engine.core.grammar",
        "baton.engine.core.sampling",
        "baton.engine.core.speculation",
        "baton.engine.core.thinking",
        "baton.engine.grammars",
        "baton.engine.facts.tokenizer_files",
        "baton.clock",
        "baton.cluster",
        "baton.moves",
        "baton.recorder",
        "baton.stages",
        "baton.uncached",
        "baton.v1",
    },
}
# Heavy third-party libraries and the only places that may import them.
HOMES = {
    "torch": (
        *(
            f"baton/engine/{name}"
            for name in (
                "build.py",
                "choice.py",
                "cpu/",
                "device_draft.py",
                "draft_model.py",
                "draft_steps.py",
                "gpu/",
                "head_drafter.py",
                "model/",
            )
        ),
        "baton/engine/runner.py",
        "baton/engine/vllm/",
        "baton/models/",
    ),
    "numba": ("baton/engine/cpu/",),
    "llguidance": ("baton/engine/grammars/library.py",),
    "llvmlite": tuple(
        f"baton/engine/cpu/{name}.py"
        for name in ("amx", "amx_int4", "amx_products", "dots", "features", "group_tile", "int5_dots", "primitives", "softmax", "tile")
    ),
    "triton": ("baton/engine/gpu/triton_",),
    "flashinfer": ("baton/engine/gpu/flashinfer_backend.py",),
    "flash_attn": ("baton/engine/gpu/flash_attn_backend.py",),
    "nixl_cu13": ("kvtransfer/nixl_transport.py",),
    "pynvml": ("baton/cluster/gpus.py",),
    "redis": ("baton/cluster/redis_client.py",),
    "psutil": ("baton/cluster/address.py", "baton/engine/vllm/engine.py", "kvtransfer/ucx.py"),
    "ray": ("baton/launch/ray_launcher.py",),
    "opentelemetry": ("baton/cluster/otel.py",),
    "cryptography": ("baton/cli/certs.py", "baton/tiers/sealed_store.py"),
    "prometheus_client": ("baton/cluster/metrics_http.py",),
    "kubernetes": ("baton/launch/kubernetes_api.py",),
    "tokenizers": ("router/", "baton/models/", "loadtest/plan.py"),
    "typer": ("baton/access/options.py", "baton/cli/", "loadtest/cli.py", "loadtest/options.py"),
    "rich": ("baton/terminal.py", "baton/cli/", "baton/models/train/", "loadtest/"),
    "matplotlib": ("loadtest/", "baton/models/"),
    "transformers": ("baton/models/train/",),
    "starlette": ("baton/cockpit/page.py", "router/http/"),
    "h11": ("router/http/connection.py", "baton/cluster/page_server.py", "loadtest/http_door.py"),
    "limits": ("router/rates.py",),
    "gguf": ("baton/models/gguf/source.py",),
    "huggingface_hub": ("baton/models/fetch/hub.py",),
    "httpx2": ("baton/models/fetch/hub.py",),
    "boto3": ("baton/models/fetch/bucket.py", "baton/tiers/bucket_objects.py"),
    "botocore": ("baton/models/fetch/bucket.py", "baton/tiers/bucket_objects.py"),
    "fsspec": ("baton/tiers/fsspec_objects.py",),
    "urllib3": ("baton/models/fetch/bucket.py", "baton/launch/kubernetes_api.py"),
    "awscrt": ("baton/models/fetch/digest.py",),
    "vllm": ("baton/engine/vllm/",),
    "zmq": ("baton/worker/kv_events.py",),
    "msgspec": ("baton/worker/kv_events.py",),
}
# Code that only decides: no await, no clock, no randomness, no torch.
PURE = (
    "baton/engine/defaults.py",
    "baton/engine/core/arrivals.py", "baton/engine/core/scheduler.py", "baton/engine/core/blocks.py", "baton/engine/core/sequence.py",
    "baton/engine/core/ghosts.py",
    "baton/engine/core/drafting.py", "baton/engine/core/prompt_lookup.py", "baton/engine/core/step_costs.py",
    "baton/engine/core/grammar.py", "baton/engine/core/masks.py", "baton/engine/core/thinking.py", "baton/engine/grammars/closing.py",
    "baton/engine/grammars/keywords.py", "baton/engine/grammars/repetition.py",
    "baton/stages.py", "kvtransfer/lease.py", "router/uncached.py", "router/chat_map.py", "router/split.py", "router/trust.py",
    "baton/engine/vllm/block_events.py", "baton/engine/vllm/desk.py", "baton/engine/vllm/ledger.py",
    "baton/attempts.py", "baton/launch/patience.py", "baton/launch/placing.py", "baton/launch/pods.py",
    "baton/cluster/awake.py", "baton/worker/stall.py",
    "router/standings.py", "baton/simulate/jumps.py", "baton/simulate/flight.py",
    "router/policy.py", "router/poison.py", "router/view.py", "router/members.py", "router/ledger.py", "router/served.py",
    "kvtransfer/choose.py", "kvtransfer/nixl_link.py", "router/prompt_lease.py",
    "router/degradation.py", "router/outliers.py", "router/retry_budget.py",
    "router/prefix_index.py", "router/admission.py", "router/pace.py",
    "router/curves.py", "router/listing.py", "router/plans.py",
    *(f"router/tools/{name}.py" for name in ("arguments", "calls", "delta", "families", "forms", "generic", "grammar", "reading")),
    "router/tools/source.py", "router/tools/thinking.py", "router/conversation.py",
    "router/stop.py", "router/slo.py", "router/resume.py", "router/transcript.py", "loadtest/latency.py",
    "baton/plan/advice.py", "baton/plan/formulae.py", "baton/plan/pools.py", "baton/plan/search.py", "baton/plan/traffic.py",
    "baton/plan/values.py",
    "baton/profile/models.py",
    *(f"baton/planner/{name}.py" for name in ("capacity", "change", "decide", "demand", "forecast", "learning", "memory", "planner")),
    "baton/planner/present.py",
    "baton/cockpit/knobs.py", "baton/cockpit/experiments.py", "baton/cockpit/calculators.py", "baton/cockpit/bounds.py",
    "baton/cockpit/checkpoints.py",
    "loadtest/slo.py", "loadtest/distribution.py", "loadtest/window.py", "loadtest/summary.py", "loadtest/estimate.py",
    "loadtest/verdict.py", "loadtest/arms.py",
)  # fmt: skip
BANNED = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def sources() -> list[Path]:
    tops = sorted({room.split(".")[0] for room in ROOMS})
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py")) if "v1" not in path.parts]


def within(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    if path in (ROOT / "baton" / "__main__.py", ROOT / "loadtest" / "__main__.py"):
        return "baton.cli"  # `python -m` of either is the same command
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return max((room for room in ROOMS if name.startswith(f"{room}.")), key=len)


def imports(path: Path) -> set[str]:
    return imports_of(path.read_text())


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def imports_of(text: str) -> set[str]:
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def allowed(module: str, room: str) -> bool:
    within = [room, *ARROWS[room]] if room != "baton" else ARROWS[room]
    return any(module == entry or module.startswith(f"{entry}.") for entry in within)


@for_each(sources(), within)
def test_imports_follow_the_allowed_directions(path: Path) -> None:
    room = room_of(path)
    tops = {room.split(".")[0] for room in ROOMS}
    wrong = sorted(module for module in imports(path) if module.split(".")[0] in tops and not allowed(module, room))
    assert not wrong, f"{room} may not import {wrong}"


@for_each(sources(), within)
def test_heavy_libraries_stay_in_their_file(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    for module in imports(path):
        home = HOMES.get(module.split(".")[0])
        assert home is None or name.startswith(home), f"{name} imports {module}"
        assert module.split(".")[0] not in BANNED, f"{name} imports {module}: this project pickles nothing"
    assert not torch_loads(path.read_text()), f"{name} reads pickle: use safetensors"


def torch_loads(text: str) -> list[str]:
    """Every `load` function of torch that a file names. They unpickle, and a pickle can run any code."""
    return [name for name in meanings(parsed(text)) if name.startswith("torch.") and name.endswith(".load")]


def meanings(tree: ast.Module) -> list[str]:
    """What a file imports, and the attributes that it uses, each by its full name."""
    known: dict[str, str] = {}  # name in the file → what it imports
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {
                alias.asname or alias.name.split(".")[0]: alias.name if alias.asname else alias.name.split(".")[0] for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    used = [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [*known.values(), *(".".join((known.get(head, head), *rest)) for head, *rest in used)]


def dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`. A call or an index at its start becomes an empty name."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=attr):
            return [*dotted(value), attr]
    return [""]


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path, weights_only=True)",
        "from torch import load",
        "from torch import load as read",
        "import torch.serialization\nread = torch.serialization.load",
        "def late():\n    import torch\n    return torch.jit.load(path)",
        "from torch import jit\njit.load(path)",
    ],
)
def test_every_way_to_unpickle_is_detected(text: str) -> None:
    """Negative control."""
    assert torch_loads(text)


def test_a_load_that_does_not_unpickle_is_allowed() -> None:
    assert not torch_loads("import json, torch\nimport safetensors.torch as st\njson.load(f)\nst.load(b)\ntorch.zeros(2).load\nself.load()")


def test_an_import_against_the_rules_is_detected() -> None:
    """Negative control."""
    assert not allowed("router.policy", "baton.engine") and not allowed("baton.engine.core.engine", "router")
    assert allowed("baton.engine.core.block_key.extend_keys", "router") and not allowed("baton.engine.block_keys", "router")
    assert not allowed("baton.cluster.errors", "baton") and not allowed("baton.cli.main", "loadtest")


def file_graph(texts: dict[str, str]) -> dict[str, set[str]]:
    """module → the modules in `texts` that it imports, including imports inside functions."""

    def file_of(name: str) -> str | None:
        parts = name.split(".")
        prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
        return next((prefix for prefix in prefixes if prefix in texts), None)

    found = {name: {file_of(imported) for imported in imports_of(text)} for name, text in texts.items()}
    return {name: {file for file in files if file and file != name} for name, files in found.items()}


def circle(texts: dict[str, str]) -> list[str]:
    """Files that import each other in a circle, with the first one repeated at the end. Empty if there is no circle."""
    try:
        graphlib.TopologicalSorter(file_graph(texts)).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_files_import_each_other_in_a_circle() -> None:
    """An import inside a function hides a circle from Python, but not from a reader."""
    names = {path: path.relative_to(ROOT).with_suffix("").parts for path in sources() if path.name != "__init__.py"}
    texts = {".".join(parts): path.read_text() for path, parts in names.items()}
    assert not circle(texts)
    assert sum(map(len, file_graph(texts).values())) > len(texts), "the graph has lost its edges"


def by_room(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """room → the rooms that its files import. A file beside sub-rooms is a room of its own: they may lie between it and another file."""
    halls = {room for room in ROOMS if any(other.startswith(f"{room}.") for other in ROOMS)}

    def room(module: str) -> str:
        found = max((room for room in ROOMS if module.startswith(f"{room}.")), key=len)
        return module if found in halls else found

    found: dict[str, set[str]] = {}
    for module, others in graph.items():
        found.setdefault(room(module), set()).update({room(other) for other in others} - {room(module)})
    return found


def test_no_rooms_import_each_other_in_a_circle() -> None:
    names = {path: path.relative_to(ROOT).with_suffix("").parts for path in sources() if path.name != "__init__.py"}
    graph = by_room(file_graph({".".join(parts): path.read_text() for path, parts in names.items()}))
    order = list(graphlib.TopologicalSorter(graph).static_order())
    floors = [
        order.index(f"baton.engine.{name}") for name in ("core", "facts", "model", "cpu", "runner", "choice", "build", "vllm", "start")
    ]
    assert floors == sorted(floors)


def test_a_circle_of_rooms_is_detected() -> None:
    """Negative control: no two files import each other."""
    graph = by_room({"baton.engine.cpu.a": {"baton.engine.model.b"}, "baton.engine.model.c": {"baton.engine.cpu.d"}})
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()
    assert not by_room({"baton.engine.cpu.a": {"baton.engine.cpu.b"}})["baton.engine.cpu"]


# Public classes that may share a name where readers meet both.
SHARED_NAMES = {"State"}  # of a sequence, and of a worker that is put aside: recordings name both


def top_room(module: str) -> str:
    """Sub-rooms are one room here."""
    return ".".join(module.split(".")[: 2 if module.startswith("baton.") else 1])


def shared_names(texts: dict[str, str]) -> dict[str, set[str]]:
    """name → the modules that define a public class of it, two or more in one room, or in rooms of which one imports the other."""
    near = {(top_room(module), top_room(other)) for module, others in file_graph(texts).items() for other in others}
    homes: dict[str, list[str]] = {}
    for module, text in texts.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    found: dict[str, set[str]] = {}
    for name, modules in homes.items():
        for one, other in itertools.combinations(modules, 2):
            rooms = top_room(one), top_room(other)
            if rooms[0] == rooms[1] or rooms in near or rooms[::-1] in near:
                found.setdefault(name, set()).update((one, other))
    return found


def test_no_two_classes_that_readers_meet_share_a_name() -> None:
    texts = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text() for path in sources() if path.name != "__init__.py"}
    found = shared_names(texts)
    assert not {name: modules for name, modules in found.items() if name not in SHARED_NAMES}
    assert found.keys() == SHARED_NAMES, "an exception that nothing needs"


def test_a_name_of_two_classes_is_detected() -> None:
    """Negative control: in one room, in its sub-rooms, and across an import; not between rooms that know nothing of each other."""
    a = "class A: pass"
    assert shared_names({"router.b": a, "router.http.c": a}) == {"A": {"router.b", "router.http.c"}}
    assert shared_names({"baton.engine.core.b": a, "baton.engine.gpu.c": a})
    assert shared_names({"kvtransfer.b": a, "baton.cluster.c": a, "baton.cluster.d": "", "kvtransfer.e": "from baton.cluster import d"})
    assert not shared_names({"router.b": a, "loadtest.c": a, "router.d": "import baton.stages", "baton.stages": "", "baton.client": a})
    assert not shared_names({"router.b": a.replace("A", "_A"), "router.c": a.replace("A", "_A")})


CLOCKS = {f"time.{name}{unit}" for name in ("monotonic", "perf_counter", "time") for unit in ("", "_ns")}
# All that acts reads the clock of its event loop (`baton.clock`) or is given one. Who reads another clock, and why.
OTHER_CLOCKS = {
    "baton/cli/": "a command: the person's time",
    "baton/models/": "a command: the person's time",
    "loadtest/": "a command: it measures from outside",
    "baton/predict/measure.py": "a command: it measures from outside",
    "baton/client.py": "an application's thread, without a loop",
    "baton/cluster/gpu_watch.py": "a thread, which waits for a driver",
    "baton/launch/kubernetes_": "waits of threads, and of commands",
    "baton/launch/port_forward.py": "waits of threads",
    "baton/launch/redis_server.py": "starts before there is a loop",
    "baton/engine/core/loop.py": "the engine's thread",
    "baton/engine/vllm/": "vLLM's processes and threads",
    "baton/tiers/": "threads of a tier",
    "baton/engine/measure_steps.py": "times steps before there is a loop",
    "baton/engine/cpu/": "waits for another process, and times products, where no loop is",
    "kvtransfer/tcp_": "threads of the transport",
    "kvtransfer/nixl_transport.py": "threads of the transport",
    "kvtransfer/cuda_ipc_transport.py": "threads of the transport",
    "kvtransfer/device_transport.py": "threads of the transport",
}
# The wall clock, where people or other hosts read it: the Date header, when an answer, a record, a span or a process was made, when a
# receipt ends.
WALL_CLOCKS = {
    "baton/cluster/membership.py",
    "baton/cluster/otel.py",
    "baton/planner/process.py",
    *(f"router/http/{name}.py" for name in ("app", "connection", "openai_out", "responses_out")),
    *(f"router/{name}.py" for name in ("journal", "kept", "rates", "service")),
    "baton/worker/kv_events.py",
}


def clocks(text: str) -> set[str]:
    """The clocks that a file reads, by whatever name."""
    tree = parsed(text)
    return CLOCKS & set(meanings(tree))


@for_each(sources(), within)
def test_what_acts_reads_the_clock_of_its_loop(path: Path) -> None:
    """So a loop whose time is virtual runs it, too."""
    name = within(path)
    if not name.startswith(tuple(OTHER_CLOCKS)):
        assert clocks(path.read_text()) <= ({"time.time", "time.time_ns"} if name in WALL_CLOCKS else set())


def test_every_exception_among_clocks_is_needed() -> None:
    read = [within(path) for path in sources() if clocks(path.read_text())]
    assert not [start for start in (*OTHER_CLOCKS, *WALL_CLOCKS) if not any(name.startswith(start) for name in read)]


def test_another_clock_is_detected() -> None:
    """Negative control."""
    assert clocks("from time import monotonic as m\ndef f(clock=m): ...") == {"time.monotonic"}
    assert clocks("import time as t\nx = t.time_ns()") == {"time.time_ns"}
    assert clocks("import time\nx = time.perf_counter()") == {"time.perf_counter"} and not clocks("import time\ntime.sleep(1)")


def test_an_import_circle_is_detected() -> None:
    """Negative control: at the top of a file, inside a function, across several files."""
    assert circle({"a.b": "from a import c", "a.c": "def f():\n    from a.b import d"})
    assert circle({"a": "import b.x", "b.x": "from c import y", "c": "def f():\n    import a"})
    assert not circle({"a": "import b", "b": "from c import a", "c": "import os"})


@for_each(PURE)
def test_decision_code_is_pure(name: str) -> None:
    tree = parsed((ROOT / name).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Await | ast.AsyncFunctionDef)]
    roots = {module.split(".")[0] for module in imports(ROOT / name)}
    assert not roots & {"torch", "time", "random", "secrets", "asyncio", "prometheus_client", "opentelemetry", "logging"}


FACTS_WITH_ONE_HOME = {
    r'"queue", "prefill", "transfer", "decode"': "baton/stages.py",
    r"GREEDY_BELOW\s*=": "baton/engine/core/sampling.py",
    r"\bLINE = 64\b": "baton/engine/core/pages.py",
    r"KEY_BYTES\s*=\s*16": "baton/engine/core/block_key.py",
    r"MAX_REQUEST_ID\s*=": "router/validate.py",
}


@for_each(FACTS_WITH_ONE_HOME)
def test_a_fact_is_declared_once(pattern: str) -> None:
    files = [*sources(), *(ROOT / "router" / "http" / "static").glob("*.js")]
    homes = [str(path.relative_to(ROOT)) for path in files if re.search(pattern, path.read_text())]
    assert homes == [FACTS_WITH_ONE_HOME[pattern]]


def test_generated_code_is_current() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "generate.py"), "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_development_dependency_is_installed() -> None:
    """Tests skip where a package does not exist for the platform, so a missing one must fail here."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    needed = [Requirement(line) for line in extra]
    for one in needed:
        if one.marker is None or one.marker.evaluate():
            assert version(one.name)


HINT = re.compile(r"(?<![\w-])(baton(?:-llm)?)\[([a-z0-9,{}]+)\]")


def test_whatever_is_told_to_be_installed_exists() -> None:
    """The name `baton` belongs to somebody else on the package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    texts = [
        path.read_text() for name in names if (path := ROOT / name).suffix in (".py", ".md", ".toml", ".yaml", ".proto") and path.is_file()
    ]
    hints = {hint for text in texts for hint in HINT.findall(text)}
    assert len(hints) > 5
    for name, extras in hints:
        assert name == project["name"], f"{name}[{extras}]"
        assert extras.startswith("{") or set(extras.split(",")) <= set(project["optional-dependencies"]), extras


def test_proto_is_not_a_python_package() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py"))


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("router.wiring", "torch numpy opentelemetry"),
        ("baton", "grpc"),
        ("baton.client", "torch baton.cluster"),
        ("baton.cli.main", "torch numpy matplotlib kubernetes urllib3"),
        ("baton.cli.fetch", "huggingface_hub boto3"),
        ("loadtest.report", "matplotlib"),
        ("baton.launch.child", "pydantic"),  # each supervisor on Ray loads it
        ("baton.engine.core.toy", "torch"),
        ("baton.engine.runner", "numba"),
    ],
)
def test_light_processes_stay_light(module: str, absent: str) -> None:
    code = f"import {module}, sys; print(*{set(absent.split())}.intersection(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stdout.split()


def test_init_files_contain_only_a_docstring() -> None:
    """Only `baton` has more: it imports its client lazily."""
    for path in {path.parent for path in sources()}:
        body = ast.parse((path / "__init__.py").read_text()).body
        assert path == ROOT / "baton" or (len(body) == 1 and isinstance(body[0], ast.Expr)), path


MOST_FILE_LINES, MOST_FUNCTION_LINES, MOST_NESTING, MOST_PARAMETERS = 500, 60, 4, 8
FUNCTION_LINES = {"decode_worker": 40, "kvtransfer": 40, "router": 40}  # top folder → the most there
COMPOUND = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With | ast.AsyncWith | ast.Try | ast.TryStar | ast.Match
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
# Kernels are exempt: they unroll loops by hand and take pointers and strides one by one. Commands are not: option classes hold their flags.
KERNELS = ("triton.jit", "kernel", "body", "intrinsic")


def nesting(node: ast.AST, depth: int = 0) -> int:
    """The most compound statements around one statement of a function. `elif` counts with its `if`. Inner functions are left out."""
    deepest = depth
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTION | ast.ClassDef | ast.Lambda):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and child in node.orelse and child.col_offset == node.col_offset
        deepest = max(deepest, nesting(child, depth + (isinstance(child, COMPOUND) and not is_elif)))
    return deepest


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(each.func if isinstance(each, ast.Call) else each) in KERNELS for each in function.decorator_list)


def excesses(text: str, top: str) -> list[str]:
    """Lists everything in a file that exceeds a limit of size. `top`: its top folder."""
    lines = len(text.splitlines())
    found = [f"{lines} lines in the file"] if lines > MOST_FILE_LINES else []
    for function in ast.walk(parsed(text)):
        if not isinstance(function, FUNCTION) or is_kernel(function):
            continue
        taken = function.args
        names = [each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg) if each]
        sizes = {
            "lines": ((function.end_lineno or 0) - function.lineno + 1, FUNCTION_LINES.get(top, MOST_FUNCTION_LINES)),
            "levels": (nesting(function), MOST_NESTING),
            "parameters": (len([name for name in names if name not in ("self", "cls")]), MOST_PARAMETERS),
        }
        found += [f"{function.name}, line {function.lineno}: {size} {what}" for what, (size, most) in sizes.items() if size > most]
    return found


@for_each([*sources(), *sorted((ROOT / "scripts").glob("*.py"))], within)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert not excesses(path.read_text(), path.relative_to(ROOT).parts[0])


def inmost(node: ast.AST, depth: int = 0) -> int:
    """How many functions are one inside the other, at most."""
    return max([depth, *(inmost(child, depth + isinstance(child, FUNCTION)) for child in ast.iter_child_nodes(node))])


@for_each(sorted((ROOT / "baton" / "engine" / "cpu").glob("*.py")), within)
def test_what_emits_code_is_not_nested(path: Path) -> None:
    """Numba wants a function in a function. More than these two, and nobody sees what is emitted when."""
    assert inmost(parsed(path.read_text())) <= 2


def test_a_third_function_inside_two_is_detected() -> None:
    """Negative control."""
    assert inmost(parsed("class A:\n def f():\n  if x:\n   def g():\n    def h(): pass")) == 3 and inmost(parsed("def f(): pass")) == 1


PREPOSITION = re.compile(
    r"(?:about|above|across|after|against|along|among|around|as|at|before|behind|below|beneath|beside|between|beyond|"
    r"by|during|for|from|in|inside|into|like|near|of|off|on|onto|out|outside|over|past|per|since|through|"
    r"throughout|to|toward|towards|under|until|upon|via|with|within|without)\b",
    re.IGNORECASE,
)


def fragments(text: str) -> list[str]:
    """Docstrings that begin with a preposition: a reader has to find out what they are about."""
    nodes = (node for node in ast.walk(parsed(text)) if isinstance(node, FUNCTION | ast.ClassDef | ast.Module))
    found = [docstring for node in nodes if (docstring := ast.get_docstring(node))]
    return [docstring for docstring in found if PREPOSITION.match(docstring)]


@for_each([*sources(), *sorted((ROOT / "scripts").glob("*.py"))], within)
def test_docstrings_say_what_they_are_about(path: Path) -> None:
    assert not fragments(path.read_text())


def test_a_docstring_without_its_subject_is_detected() -> None:
    """Negative control."""
    assert fragments('"""Of one layer."""') and fragments('class A:\n def f():\n  """\n  To be called first."""')
    assert not fragments('"""Up to ten keys."""\ndef f():\n "Office hours."\ndef g(): pass')


DEEP = "def f():\n if a:\n  for b in c:\n   with d:\n    try:\n     {}\n    finally:\n     pass"


@pytest.mark.parametrize(
    ("top", "text", "found"),
    [
        ("baton", "x = 1\n" * 500, []),
        ("baton", "x = 1\n" * 501, ["501 lines in the file"]),
        ("baton", "def f():\n" + "    x = 1\n" * 59, []),
        ("baton", "class A:\n    async def f(self):\n" + "        x = 1\n" * 60, ["f, line 2: 61 lines"]),
        ("router", "def f():\n" + "    x = 1\n" * 39, []),
        *((top, "def f():\n" + "    x = 1\n" * 40, ["f, line 1: 41 lines"]) for top in ("decode_worker", "kvtransfer", "router")),
        ("baton", DEEP.format("x = 1"), []),
        ("baton", DEEP.format("if x: y = 1"), ["f, line 1: 5 levels"]),
        ("baton", DEEP.format("def g():\n      if x: y = 1"), []),
        ("baton", "def f():\n if a: x\n elif b: x\n elif c: x\n elif d: x\n elif e: x", []),
        ("baton", "def f(self, a, b, c, d, e, *f, g, **h): pass", []),
        ("baton", "def f(a, /, b, c, d, e, *f, g, h, **i): pass", ["f, line 1: 9 parameters"]),
        ("baton", "class A:\n a: int\n b: int\n c: int\n d: int\n e: int\n f: int\n g: int\n h: int\n i: int", []),
        ("baton", "@triton.jit\ndef f(a, b, c, d, e, f, g, h, i): pass", []),
        ("baton", "@app.command()\ndef f(a, b, c, d, e, f, g, h, i): pass", ["f, line 2: 9 parameters"]),
    ],
)
def test_oversized_code_is_detected(top: str, text: str, found: list[str]) -> None:
    """Includes negative controls: the largest allowed size and the smallest size that is too large."""
    assert excesses(text, top) == found


def defined(name: str) -> bool:
    """Whether a dotted name is a module of ours, or a class, function or method in one."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:end]).with_suffix(".py")
        if path.is_file():
            body: list[ast.stmt] = ast.parse(path.read_text()).body
            for part in parts[end:]:
                found = [node for node in body if getattr(node, "name", None) == part]
                if not found:
                    return False
                body = getattr(found[0], "body", [])
            return True
    return False


def test_the_glossary_names_what_exists() -> None:
    names = re.findall(
        r"`((?:baton|decode_worker|kvtransfer|loadtest|prefill_worker|router)\.[\w.]+)`", (ROOT / "docs" / "glossary.md").read_text()
    )
    assert len(names) > 50 and [name for name in names if not defined(name)] == []


def test_a_name_that_does_not_exist_is_detected() -> None:
    assert defined("router.gate.Gate.place") and defined("router.gate")
    assert not defined("router.gate.Gate.places") and not defined("router.gates") and not defined("router.gate.Door")
