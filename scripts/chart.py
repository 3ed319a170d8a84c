"""What is generated in the chart, from values.yaml and from Baton's configuration: `python scripts/chart.py` writes values.schema.json and
README.md and copies the alerts and the dashboard, `--check` only compares and names what differs.

The schema of a value follows from its default; `config` has the schema of `baton config schema`. A value's description is the comment
above it that begins with `# --`.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml

from baton.cluster.config_layers import schema

CHART = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "baton"
ROLES = ("router", "prefill", "decode", "planner", "redis")
PULL = ["Always", "IfNotPresent", "Never"]
SCALING = ["values", "hpa", "keda", "baton"]
ONE_OF = {
    "engine": ["baton", "vllm"],
    "security.certManager.kind": ["Issuer", "ClusterIssuer"],
    "image.pullPolicy": PULL,
    "model.imagePullPolicy": PULL,
    "loadtest.door": ["grpc", "http"],
    "service.type": ["ClusterIP", "NodePort", "LoadBalancer"],
    "service.externalTrafficPolicy": ["Cluster", "Local"],
    "prefill.workload": ["deployment", "lws"],
    "decode.workload": ["deployment", "lws"],
    "prefill.scaling": SCALING,
    "decode.scaling": SCALING,
}
COPIES = ("prometheus/alerts.yml", "grafana/baton.json")  # a chart reads only files inside it
AT_LEAST = {"decode.replicas": 1, "planner.replicas": 1, "decode.autoscale.min": 1, "gpu.workersPerGpu": 1}
OPEN = ("resources", "rollout", "disruption")  # Kubernetes checks these
Schema = dict[str, Any]

HEAD = """# The Baton chart

Installs routers, prefill and decode workers and a Redis. One image serves all of them
([docs/image.md](../../../docs/image.md)).

```
helm install baton deploy/helm/baton --set image.registry=registry.example/team
```

This file and `values.schema.json` are made by `python scripts/chart.py` from the comments in `values.yaml`.

| value | default | |
|---|---|---|
"""


def of_value(value: object, path: str) -> Schema:
    """What may stand at `path`, whose default is `value`. A mapping with keys is closed, an empty one is open."""
    match value:
        case dict() if value:
            return closed({name: of_value(each, f"{path}.{name}".lstrip(".")) for name, each in value.items()})
        case dict():
            return {"type": "object"}
        case list():
            return {"type": "array"}
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": AT_LEAST.get(path, 0)}
        case _:
            return {"type": "string"} | ({"enum": ONE_OF[path]} if path in ONE_OF else {})


def closed(properties: Schema) -> Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def values_schema(values: dict[str, Any]) -> Schema:
    made = of_value(values, "")
    properties = made["properties"]
    config = schema()
    properties["config"] = closed(config["properties"])
    for role in ROLES:
        properties[role]["properties"] |= properties["common"]["properties"]
        properties[role]["properties"] |= {name: {"type": "object"} for name in OPEN if name in values[role]}
    of_profile = properties["common"]["properties"] | {name: {"type": "object"} for name in OPEN}
    properties["profiles"] = {"type": "object", "additionalProperties": closed(of_profile)}
    properties["model"]["properties"]["fetch"]["properties"]["resources"] = {"type": "object"}
    properties["loadtest"]["properties"]["resources"] = {"type": "object"}
    # Helm merges values of a parent chart into `global`, and many installers put the others beside our own.
    properties["global"] = {"type": "object", "properties": properties["global"]["properties"]}
    properties["enabled"] = {"type": "boolean"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": config["$defs"], **made}


def described(text: str) -> list[tuple[str, str]]:
    """Path and description of every value with a comment, in the order of the file."""
    found: list[tuple[str, str]] = []
    path: list[str] = []
    about = ""
    for line in text.splitlines():
        if match := re.match(r"\s*# -- (.*)", line):
            about = match[1]
        elif match := re.match(r"( *)([\w.-]+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if about:
                found.append((".".join(path), about))
            about = ""
    return found


def readme(text: str, values: dict[str, Any]) -> str:
    rows = []
    for path, about in described(text):
        value: Any = values
        for name in path.split("."):
            value = value[name]
        rows.append(f"| `{path}` | `{json.dumps(value)}` | {about} |")
    return HEAD + "\n".join(rows) + "\n"


def main() -> None:
    text = (CHART / "values.yaml").read_text()
    values = yaml.safe_load(text)
    made = {
        CHART / "values.schema.json": json.dumps(values_schema(values), indent=1) + "\n",
        CHART / "README.md": readme(text, values),
        **{CHART / "files" / Path(name).name: (CHART.parents[1] / name).read_text() for name in COPIES},
    }
    wrong = [str(path) for path, content in made.items() if not path.exists() or path.read_text() != content]
    if "--check" in sys.argv[1:]:
        if wrong:
            sys.exit(f"out of date; run `python scripts/chart.py`: {', '.join(wrong)}")
        return
    for path, content in made.items():
        path.write_text(content)


if __name__ == "__main__":
    main()
