"""What a person sees: the list of pods, a worker that died, logs, and the live page in a browser."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import chromium, needs_chromium
from kube import ON_A_CLUSTER, Kube, Release, forwarded
from kube_load import loaded, toy_release

pytestmark = [*ON_A_CLUSTER, pytest.mark.timeout(900)]

# Pid 1 passes signals on; its child is the worker.
KILL = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        if pid not in ("1", str(os.getpid())) and b"decode_worker" in file.read():
            os.kill(int(pid), 9)
"""


@pytest.fixture(scope="module")
def release(kube: Kube) -> Iterator[Release]:
    with toy_release(kube, "baton-person", "--set", "prefill.replicas=1") as made:
        with loaded(made, 50):
            pass
        yield made


def test_the_list_of_pods_shows_a_calm_release(release: Release) -> None:
    lines = release.kube.kubectl("-n", release.namespace, "get", "pods", "--no-headers").splitlines()
    assert len(lines) == 6
    assert all(line.split()[1:4] == ["1/1", "Running", "0"] for line in lines), lines


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_log_is_one_json_object_a_line(release: Release, role: str) -> None:
    pod = release.pods(role)[0]["metadata"]["name"]
    lines = release.kube.kubectl("-n", release.namespace, "logs", pod).splitlines()
    records = [json.loads(line) for line in lines]
    assert records and all({"ts", "level"} <= record.keys() for record in records), lines[:3]


def test_a_worker_that_died_says_why_and_comes_back(release: Release) -> None:
    pod = release.pods("decode")[0]["metadata"]["name"]
    where = ("-n", release.namespace)
    release.kube.kubectl(*where, "exec", pod, "--", "python", "-c", KILL, check=False)

    def restarted() -> bool:
        status = next(each for each in release.pods("decode") if each["metadata"]["name"] == pod)["status"]["containerStatuses"][0]
        return bool(status["restartCount"] == 1 and status["ready"])

    release.kube.wait(restarted, 120)
    text = release.kube.kubectl(*where, "describe", "pod", pod)
    assert "Exit Code:    137" in text and "Restart Count:  1" in text
    with loaded(release, 30):
        pass


@needs_chromium
def test_the_live_page_opens_in_a_browser(release: Release, tmp_path: Path) -> None:
    with forwarded(release, 8472) as address, chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"http://{address}/")
        for pod in [*release.pods("prefill"), *release.pods("decode")]:
            page.get_by_text(pod["metadata"]["name"]).first.wait_for(timeout=60_000)
        page.screenshot(path=Path(os.environ.get("BATON_TEST_PICTURES", tmp_path)) / "kubernetes.png")
