"""The flags of the commands are the fields of the option classes."""

import os
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from baton.access.options import ClientIdentity
from loadtest import cli, options
from loadtest.options import takes
from loadtest.plan import Plan, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    rate: Annotated[float, typer.Option(help="How fast.")]
    out_: Annotated[Path, typer.Option("--out")] = Path("here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    loud: Annotated[bool, typer.Option("--loud")] = False


def test_a_command_gets_the_objects_that_its_flags_describe() -> None:
    app, got = typer.Typer(), []

    @app.command()
    @takes(First, Second)
    def command(first: First, second: Second) -> None:
        """What it does."""
        got.append((first, second))

    assert CliRunner().invoke(app, ["--rate", "2", "--loud"]).exit_code == 0
    assert got == [(First(rate=2.0), Second(loud=True))]
    assert CliRunner().invoke(app, []).exit_code == 2, "a field without a default is required"
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "What it does." in shown and "How fast." in shown and "--out" in shown


def test_classes_that_share_a_field_are_refused() -> None:
    with pytest.raises(TypeError, match="share out_, rate"):
        takes(First, First)


@dataclass
class Seen:
    plan: Plan | None = None


OTHERS: dict[str, Any] = {
    "input": "7", "output": "8", "hit_rate": 0.25, "turns": "2", "think": "3", "prefix_tokens": 11, "prefix_branching": 12,
    "prefix_depth": 13, "trace": "t.csv", "format": "azure", "tokenizer": "t.json", "scale": 0.5, "max_tokens": 99, "vocab": 77,
    "lenient": True, "arrivals": "constant", "duration": 40.0,
}  # fmt: skip


def test_every_flag_reaches_the_plan() -> None:
    """A field that is renamed in only one place does not silently become None."""
    load = options.LoadOptions(**OTHERS)
    assert {field.name for field in fields(options.LoadOptions)} == OTHERS.keys()
    measured = options.MeasureOptions(warm_up=4.0, cool_down=5.0, timeout=6.0, seeds="9,8")
    plan = cli.plan_of("ttft=1s", measured, cli._access(options.Entrance(door="http"), ClientIdentity(api_key="k")), load)
    assert plan.workload == Workload(**{("duration_s" if name == "duration" else name): value for name, value in OTHERS.items()})
    assert (plan.warm_up_s, plan.cool_down_s, plan.timeout_s, plan.seeds) == (4.0, 5.0, 6.0, (9, 8))
    assert (plan.access.protocol, plan.access.api_key, plan.access.tls) == ("http", "k", None)
    defaults = Workload()
    for field in fields(options.LoadOptions):
        assert OTHERS[field.name] != field.default and hasattr(defaults, "duration_s" if field.name == "duration" else field.name)


def test_the_door_gets_the_identity_of_the_command(tmp_path: Path) -> None:
    (authority := tmp_path / "ca.pem").write_text("x")
    named = cli._access(options.Entrance(), ClientIdentity(tls=True, ca=authority, server_name="baton.internal")).tls
    assert named is not None and (named.ca, named.server_name) == (authority, "baton.internal")
    assert cli._access(options.Entrance(), ClientIdentity(server_name="baton.internal")).tls is None
    with pytest.raises(ValueError, match="TLS: "):
        named.context()


def test_every_command_has_a_help_page() -> None:
    for command in ("run", "compare", "replay", "diff"):
        shown = CliRunner().invoke(cli.app, [command, "--help"])
        assert shown.exit_code == 0, shown.output
    assert all(is_dataclass(kind) for kind in (options.MeasureOptions, options.Entrance, options.LoadOptions, options.Target, options.Arms))


def test_the_package_runs_as_the_command_does(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, "-m", "loadtest", "replay", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert (done.returncode, done.stdout) == (2, "") and "campaign.json: No such file" in done.stderr
    assert CliRunner().invoke(cli.app, ["replay", str(tmp_path)]).exit_code == 2
