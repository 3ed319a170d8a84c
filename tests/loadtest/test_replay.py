"""What a script learns from the load test's exit code, and a campaign judged again by other objectives."""

import json
from pathlib import Path

import pytest
from campaigns import GAP_S, campaign, counted, late
from typer.testing import CliRunner

from loadtest import cli
from loadtest.campaign import Campaign, Probe

A_AND_B = [counted(arm, 2, seed, 20, 0) for seed in (1, 2, 3) for arm in "ab"]


@pytest.mark.parametrize(
    ("runs", "code"),
    [
        (A_AND_B, 0),  # no difference is a verdict
        ([counted(arm, 2, seed, 18 if arm == "a" else 40, 0) for seed in (1, 2, 3) for arm in "ab"], 0),
        ([counted("a", 2, 1, 20, 0)], 0),  # one arm: there is nothing to compare
        (A_AND_B[:2], cli.NO_VERDICT),  # one seed
        ([*A_AND_B[::2], *map(late, A_AND_B[1::2])], cli.NO_VERDICT),  # b was not judged
        ([counted(arm, 2, seed, 0, 20) for seed in (1, 2) for arm in "ab"], cli.NO_VERDICT),  # no arm holds
        ([late(run) for run in A_AND_B], 1),  # no run counts
    ],
)
def test_the_exit_code_tells_a_verdict_from_none(runs: list[Probe], code: int, tmp_path: Path) -> None:
    campaign(runs).save(tmp_path)
    done = CliRunner().invoke(cli.app, ["replay", str(tmp_path)])
    assert done.exit_code == code, done.output
    told = json.loads((tmp_path / "results.json").read_text())["verdict"][""]
    assert (told["status"] == "no verdict") == (code != 0) and bool(told["advice"]) == (code != 0)


def test_a_campaign_is_judged_again_by_other_objectives(tmp_path: Path) -> None:
    """Its tokens come every 20 ms."""
    campaign(A_AND_B).save(tmp_path / "one")
    outcome = {}
    for ms in (1000 * GAP_S + 1, 1000 * GAP_S - 1):
        out = tmp_path / f"{ms:g}"
        done = CliRunner().invoke(cli.app, ["replay", str(tmp_path / "one"), "--slo", f"tpot={ms:g}ms", "--out", str(out)])
        outcome[ms > 1000 * GAP_S] = done.exit_code
        assert str(Campaign.load(out).slo) == f"tpot={ms:g}ms"
    assert outcome == {True: 0, False: cli.NO_VERDICT}
    for wrong, says in (
        (["--slo", "tpot=1ms"], "other objectives need a report folder"),
        (["--slo", "tpot=1"], "not a time with its unit"),
    ):
        done = CliRunner().invoke(cli.app, ["replay", str(tmp_path / "one"), *wrong])
        assert done.exit_code == 2 and says in done.output


def test_an_unknown_arm_is_refused_before_the_model_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(cli, "_model", made.append)
    done = CliRunner().invoke(cli.app, ["compare", "--slo", "ttft=1s", "--rates", "1", "--arms", "foo"])
    assert done.exit_code != 0 and "'foo' is not one of" in done.output and not made
