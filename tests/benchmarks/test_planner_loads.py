"""The loads of the planner's benchmark: what comes when, and that their rates follow the rule."""

from pathlib import Path

import planner
import pytest
from planner_loads import BLOCK, KV_BLOCKS, LOADS, LONG_ANSWER, LONG_PROMPT, SHORT_PROMPT, SWING_RATES, SWING_SEQS, objectives, workload

from baton.planner.capacity import PoolSizes


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """Made: some rows are not what swing takes."""
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = [f"2023-11-16 18:{minute:02}:{second:02}.0000000," for minute in range(15, 45) for second in range(60)]
    code = [row + (f"{5000 + number},20" if number % 3 else "800,10") for number, row in enumerate(rows)]
    conversations = [row + ("500,300" if number % 2 else "2000,250") for number, row in enumerate(rows)]
    (tmp_path / "azure_code_2023.csv").write_text(head + "\n".join(code))
    (tmp_path / "azure_conv_2023.csv").write_text(head + "\n".join(conversations))
    lines = [f'{{"timestamp": {number}, "input_length": {9000 + 30000 * (number % 2)}, "output_length": 50}}' for number in range(10)]
    (tmp_path / "mooncake_conversation.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("name", LOADS)
def test_a_load_is_the_same_for_the_same_seed_and_lies_within_its_time(name: str, traces: Path) -> None:
    one, same, other = (workload(each, traces, quick=False) for each in (name, name, f"{name}:9" if name != "bursts" else "bursts:2"))
    assert one == same and one.sent[:50] != other.sent[:50]
    assert [each.at for each in one.sent] == sorted(each.at for each in one.sent)
    assert one.sent[0].at >= 0 and one.sent[-1].at < one.seconds and one.parts * one.part_s == pytest.approx(one.seconds)
    assert all(each.prompt > 0 and each.output > 0 and each.prompt + each.output < KV_BLOCKS * BLOCK for each in one.sent)


def test_swing_asks_for_one_role_and_then_for_the_other(traces: Path) -> None:
    offered = workload("swing", traces, quick=False)
    phases = [[each for each in offered.sent if each.at // offered.part_s == part] for part in range(offered.parts)]
    assert len(phases) == 4
    for number, phase in enumerate(phases):
        rate = SWING_RATES[number % 2]
        assert 0.75 * rate < len(phase) / offered.part_s < 1.25 * rate
        if number % 2:
            assert all(each.output >= LONG_ANSWER and each.prompt <= SHORT_PROMPT for each in phase)
        else:
            assert all(each.prompt >= LONG_PROMPT for each in phase)


def test_every_split_within_the_budget_is_tried_on_swing() -> None:
    arms = planner.arms_of("swing:2", "static,static 9+1,planner")
    assert len(arms) == 28 + 2 and {"static 1+1", "static 7+1", "static 1+7", "static 4+4", "planner"} < set(arms)
    assert all(sum(map(int, arm.removeprefix("static ").split("+"))) <= planner.CONFIG.budget for arm in arms[:28])
    assert len(planner.arms_of("day", "static")) == len(planner.STATIC)


def test_a_rate_is_the_highest_that_a_split_serves(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "RATE_MOST", 1.6)
    split, slo = PoolSizes(1, 1), objectives(workload("swing", traces, quick=True).sent)
    served = planner.most_served(traces, 0, split, slo, 60.0)
    assert 0 < served < 0.7, "a prompt of 5,000 tokens takes 2.8 s"
    assert planner.most_served(traces, 0, PoolSizes(2, 1), slo, 60.0) > 1.5 * served


def test_as_many_of_the_longest_prompts_have_room() -> None:
    assert SWING_SEQS * 7437 <= KV_BLOCKS * BLOCK < (SWING_SEQS + 1) * 7437 + SWING_SEQS * BLOCK
