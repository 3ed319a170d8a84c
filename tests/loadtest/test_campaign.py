"""A campaign is loaded from its folder exactly as it was saved, or an error says what is wrong with the folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.campaign import FILE, Arm, Campaign, CampaignError, Probe, merge, this_machine
from loadtest.record import Record
from loadtest.slo import Slo


def record(number: int) -> Record:
    times = tuple(number + 0.1 * i for i in range(3))
    stages = {"queue": 1.0, "prefill": 90.0, "transfer": 2.0, "decode": 200.0}
    return Record(
        number,
        "",
        number - 0.1,
        number - 0.1,
        times,
        times[-1],
        "ok",
        "",
        10,
        3,
        3,
        0,
        stages,
        "prefill-0",
        "decode-0",
        0,
        "nixl",
        640,
        1,
        0,
    )


@pytest.fixture
def campaign() -> Campaign:
    probes = tuple(
        Probe("A", rate, seed, tuple(record(i) for i in range(1, 6)), 5, 8.0, variant="input=9") for rate in (1.0, 2.0) for seed in (1, 2)
    )
    arms = (Arm("A", {"prefill.replicas": "0"}, "all in one"),)
    return Campaign(
        "t", Slo(ttft_s=1.0, itl_p99_s=0.2), 0.5, 0.5, arms, probes, {"input": "9"}, {"engine.threads": 1}, this_machine(), {"bad": 2}
    )


def test_a_saved_campaign_is_loaded_unchanged(campaign: Campaign, tmp_path: Path) -> None:
    campaign.save(tmp_path)
    again = Campaign.load(tmp_path)
    assert again == campaign
    assert [again.summary(probe) for probe in again.probes] == [campaign.summary(probe) for probe in campaign.probes]
    assert len(list((tmp_path / "records").glob("*.jsonl"))) == 4


def test_truncated_records_make_the_run_partial(campaign: Campaign, tmp_path: Path) -> None:
    campaign.save(tmp_path)
    file = tmp_path / "records" / "0001.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    again = Campaign.load(tmp_path)
    assert [bool(probe.partial) for probe in again.probes] == [False, True, False, False] and len(again.probes[1].records) == 4


def test_a_lost_or_repeated_record_makes_the_run_void(campaign: Campaign, tmp_path: Path) -> None:
    campaign.save(tmp_path)
    file = tmp_path / "records" / "0001.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[:2], *lines[3:]]))
    again = Campaign.load(tmp_path)
    assert [again.summary(probe).void for probe in again.probes] == [None, "5 requests became due and 4 have a record", None, None]
    file.write_text("".join([*lines[:2], *lines[1:]]))
    again = Campaign.load(tmp_path)
    assert again.summary(again.probes[1]).void == "1 of 5 requests have more than one record"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 9}, "version 9"),
        ({"arms": []}, "does not name: A"),
        ({"slo": {"ttft": 1}}, "is not a campaign"),
        ({"probes": [{}]}, "is not a campaign"),
    ],
)
def test_a_folder_with_an_invalid_campaign_is_refused(change: dict[str, object], says: str, campaign: Campaign, tmp_path: Path) -> None:
    campaign.save(tmp_path)
    file = tmp_path / FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(CampaignError, match=says):
        Campaign.load(tmp_path)


def test_the_error_for_a_missing_or_undecodable_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match=r"campaign\.json: No such file"):
        Campaign.load(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(CampaignError, match="is not a campaign"):
        Campaign.load(tmp_path)


def test_merge_joins_the_parts_of_a_campaign(campaign: Campaign) -> None:
    other = Arm("B", {"prefill.replicas": "1"})
    more = Probe("B", 1.0, 3, (record(1),), 1, 8.0)
    part = replace(campaign, arms=(*campaign.arms, other), probes=(more,), machine={**campaign.machine, "when": "later"}, partial="broken")
    whole = merge([campaign, part])
    assert whole.arms == (*campaign.arms, other) and whole.probes == (*campaign.probes, more) and whole.partial == "broken"
    assert merge([campaign]) == campaign


def test_merge_joins_parts_of_other_length_and_refuses_a_repeated_run(campaign: Campaign) -> None:
    """Each run states its own length, so it is judged over its own window."""
    longer = replace(campaign.probes[0], seed=3, duration_s=20.0)
    whole = merge([replace(campaign, workload={"duration_s": 8}), replace(campaign, workload={"duration_s": 20}, probes=(longer,))])
    assert [whole.window(probe).length for probe in whole.probes] == [7.0] * 4 + [19.0]
    with pytest.raises(CampaignError, match="two parts have runs of A at 1 requests/s with seed 1: they would count twice"):
        merge([campaign, campaign])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slo": Slo(ttft_s=2.0)}, "slo"),
        ({"workload": {"input": "10"}}, "workload"),
        ({"config": {"engine.threads": 2}}, "config"),
        ({"machine": {"cores": 1024}}, "machine"),
        ({"arms": (Arm("A", {"prefill.replicas": "1"}),)}, "arm A"),
        ({"warm_up_s": 0.6}, "warm_up_s"),
    ],
)
def test_merge_refuses_parts_that_differ(campaign: Campaign, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CampaignError, match=f"differ in {named}$"):
        merge([campaign, replace(campaign, **change)])
