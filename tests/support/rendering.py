"""What the chart makes of values, rendered by helm without a cluster."""

import subprocess
from pathlib import Path
from typing import Any

import yaml
from kube import CHART, HELMS

Objects = dict[tuple[str, str], dict[str, Any]]


def helm(
    *values: str, version: str = "1.34.0", program: str = "", files: tuple[Path, ...] = (), more: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    sets = [word for value in values for word in ("--set", value)]
    sets += [word for file in files for word in ("-f", str(file))]
    command = [program or HELMS[0], "template", "r", str(CHART), "--kube-version", version, *more, *sets]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def rendered(*values: str, **how: Any) -> Objects:
    """Objects by kind and component."""
    done = helm(*values, **how)
    assert done.returncode == 0, done.stderr
    found = [each for each in yaml.safe_load_all(done.stdout) if each]
    return {(each["kind"], each["metadata"]["labels"]["app.kubernetes.io/component"]): each for each in found}


def refusal(*values: str, **how: Any) -> str:
    done = helm(*values, **how)
    assert done.returncode, "it was not refused"
    return done.stderr


def pod(objects: Objects, role: str) -> dict[str, Any]:
    spec: dict[str, Any] = objects["Job" if role == "fetch" else "Deployment", role]["spec"]["template"]["spec"]
    return spec


def config(objects: Objects, role: str) -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load(objects["ConfigMap", role]["data"]["config.yaml"])
    return told


def volume(spec: dict[str, Any], name: str = "model") -> dict[str, Any] | None:
    return next((each for each in spec["volumes"] if each["name"] == name), None)
