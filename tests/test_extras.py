"""What can be installed: each extra in an empty environment, as pip resolves it, and each command that a text or a message names."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from resolver import resolve

ROOT = Path(__file__).parents[1]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TOGETHER = ("serve", "events", "gguf", "gpu", "hub", "k8s", "otel", "s3", "tiers", "train")
APART = ("vllm",)  # it asks for versions of its own
BY_CI = ("dev",)  # `make test` installs it
TEXTS = (".py", ".md", ".yaml", ".toml", ".tpl", ".txt", ".html", ".js", "Dockerfile", "Makefile")


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """Every text file of the project but this one."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path for path in listed.stdout.splitlines() if path.endswith(TEXTS) and path != "tests/test_extras.py"]
    return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).is_file()}


def named(sources: dict[str, str]) -> set[str]:
    """Extras that some command asks for."""
    asked = [extra for text in sources.values() for extra in re.findall(r"(?:baton-llm|[\"' ]\.)\[([\w,]+)\]", text)]
    return {name for extra in asked for name in extra.split(",")}


def test_a_command_names_an_extra_that_exists_of_a_distribution_that_is_ours(sources: dict[str, str]) -> None:
    """`baton` on the index is another project."""
    assert {"serve", "vllm", "k8s", "otel", "gpu"} <= named(sources) <= set(EXTRAS)
    assert not [path for path, text in sources.items() if re.search(r"pip install [^\n`]*\bbaton(?![-\w./])", text)]


def test_an_extra_holds_nothing_that_is_built_against_what_is_installed() -> None:
    """flash-attn's build imports torch: pip, which builds apart from the environment, cannot install it."""
    assert not [line for lines in EXTRAS.values() for line in lines if line.startswith(("flash-attn", "flash_attn"))]


def test_every_extra_is_resolved_below() -> None:
    assert sorted(EXTRAS) == sorted([*TOGETHER, *APART, *BY_CI])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extras", [TOGETHER, APART], ids=",".join)
def test_an_empty_environment_takes_the_extra(extras: tuple[str, ...]) -> None:
    """If several can be installed together, each can be alone."""
    done = resolve(f"{ROOT}[{','.join(extras)}]")
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"Would install .*\bbaton-llm-", done.stdout)
