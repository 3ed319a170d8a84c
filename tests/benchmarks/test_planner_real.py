"""The benchmark of the planner on a real cluster: its load, what workers cost, which splits are run, and what counts as a wrong token."""

import csv
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from planner_day import HOURS, LONGEST, Foreseen, day, foresee, prompt_of, smaller
from planner_hpa import Autoscaler
from planner_ledger import WorkerLedger, WorkersSeen, workers_of
from planner_loads import Sent, day_rates
from planner_real import BUDGET, PLANNER, Streamed, candidates, changes_of, every_split, right, sizes_of

from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.records import Load, Pools, RoleName, WorkerRecord
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import naive
from baton.planner.capacity import PoolSizes
from baton.profile.file import Profile
from baton.profile.models import Fitted
from baton.simulate.cluster import worker

HOUR_S = 60.0


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every request of a trace is alike; code has prompts that are too long for the toy."""
    folder = tmp_path_factory.mktemp("traces")
    for name, prompt, output in (("code", 20_000, 30), ("conv", 1000, 200)):
        with (folder / f"azure_{name}_2023.csv").open("w", newline="") as file:
            written = csv.writer(file)
            written.writerows([["TIMESTAMP", "ContextTokens", "GeneratedTokens"], ["", prompt, output]])
    return folder


def test_the_day_asks_for_code_by_day_and_for_conversations_in_the_evening(traces: Path) -> None:
    sent = day(traces, HOUR_S)
    code = [one.at / HOUR_S for one in sent if one.output == 15]
    conversations = [one.at / HOUR_S for one in sent if one.output == 100]
    assert len(code) + len(conversations) == len(sent) and 0 <= sent[0].at < sent[-1].at < HOURS * HOUR_S
    assert all(sent[i].at <= sent[i + 1].at for i in range(len(sent) - 1)) and sent == day(traces, HOUR_S)
    assert sum(10 <= at < 16 for at in code) > len(code) / 2
    assert sum(17 <= at < 23 for at in conversations) > 3 * sum(6 <= at < 12 for at in conversations)
    rates = [sum(day_rates(HOUR_S, 2.0)(HOUR_S * hour)) for hour in range(HOURS)]
    assert len(sent) == pytest.approx(HOUR_S * sum(rates), rel=0.1)


def test_requests_are_small_enough_for_the_toy(traces: Path) -> None:
    assert smaller(Sent(1.0, 1000, 200)) == Sent(1.0, 250, 100) and smaller(Sent(1.0, 1, 1)) == Sent(1.0, 2, 1)
    assert max(one.prompt + one.output for one in day(traces, HOUR_S)) == LONGEST


def test_no_prompt_begins_like_another() -> None:
    assert len({tuple(prompt_of(number, 16)) for number in range(5000)}) == 5000
    assert all(0 <= token < 256 for token in prompt_of(4999, 300)) and len(prompt_of(7, 2)) == 2


def record(pool: RoleName, pid: int, **how: object) -> WorkerRecord:
    made = replace(worker(f"{pool}-{pid}", pool, sizes_of(PoolSizes(1, 1))), pid=pid)
    return replace(made, **how)  # type: ignore[arg-type]


def looked(at: float, wanted: tuple[int, int], processes: Mapping[int, RoleName], *records: WorkerRecord) -> WorkersSeen:
    return WorkersSeen(at, Pools(*wanted), processes, records)


def test_a_worker_costs_from_the_wish_until_its_process_is_gone() -> None:
    """One is wanted at 10 s, is there at 11 s, serves at 14 s, drains at 20 s, and is gone at 25 s."""
    pair: dict[int, RoleName] = {1: "prefill", 2: "decode"}
    both, there = {**pair, 3: "decode"}, (record("prefill", 1), record("decode", 2))
    ledger = WorkerLedger()
    for look in (
        looked(0.0, (1, 1), pair, *there),
        looked(10.0, (1, 2), pair, *there),
        looked(11.0, (1, 2), both, *there),
        looked(12.0, (1, 2), both, *there, record("decode", 3, roles=(), proving=("decode",))),
        looked(14.0, (1, 2), both, *there, record("decode", 3)),
        looked(20.0, (1, 1), both, *there, record("decode", 3, state="draining")),
        looked(22.0, (1, 1), both, *there),  # its record is gone, and it is not yet
        looked(25.0, (1, 1), pair, *there),
        looked(30.0, (1, 1), pair, *there),
    ):
        ledger.note(look)
    assert ledger.worker_s == 2 * 30 + 15 and ledger.most == 3 and ledger.longest_gap_s == 10
    assert ledger.starts == [3.0], "those that are there at the first look were started before"
    assert ledger.sizes == [(0.0, 1, 1), (14.0, 1, 2), (20.0, 1, 1)]


def test_one_that_drains_costs_beside_the_one_that_takes_its_place() -> None:
    ledger = WorkerLedger()
    leaves = record("decode", 2, state="draining")
    ledger.note(looked(0.0, (1, 1), {1: "prefill", 2: "decode"}, record("prefill", 1), leaves))
    ledger.note(looked(10.0, (1, 1), {1: "prefill"}, record("prefill", 1)))
    assert ledger.worker_s == 30.0 and ledger.most == 3


def test_workers_are_found_among_the_children_of_a_process() -> None:
    command = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    child = [sys.executable, "-c", "print(flush=True); input()", "decode_worker"]
    with subprocess.Popen([*command, *child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert list(workers_of(parent.pid).values()) == ["decode"]
        parent.communicate(b"\n")
    assert workers_of(parent.pid) == {}


def test_the_splits_that_are_run_are_the_best_of_the_simulator() -> None:
    """First those that serve enough, by what they make of a worker's time; then those that serve most."""
    few, cheap, dear, none = PoolSizes(1, 2), PoolSizes(2, 2), PoolSizes(3, 3), PoolSizes(1, 1)
    foreseen = [Foreseen(none, 0.2, 9e3), Foreseen(few, 0.89, 8e3), Foreseen(dear, 0.99, 2e3), Foreseen(cheap, 0.91, 3e3)]
    assert candidates(foreseen, 4) == [cheap, dear, few, none] and candidates(foreseen, 1) == [cheap]
    assert len(set(every_split())) == len(every_split()) == 15 and max(split.total for split in every_split()) == BUDGET == PLANNER.budget


def test_the_simulator_says_what_splits_make_of_a_load() -> None:
    """A prompt takes 0.41 s; two come every 0.5 s."""
    numbers = {"step": 0.01, "tokens": 8e-4, "decodes": 8e-4}
    profile = Profile("test", "", "toy", {}, 128.0, "sum", {"step": Fitted(numbers), "handoff": Fitted({"base": 0.01})})
    sent = [Sent(0.25 * number, 500, 4) for number in range(60)]
    slo = SloConfig(ttft_s=1.0, tpot_s=0.1)
    small, large = (foresee(sent, 15.0, slo, profile, sizes_of(PoolSizes(size, 1)), RouterConfig()) for size in (1, 3))
    assert small.attainment < 0.3 and large.attainment == 1.0
    assert large.rate == 60 * 3600 / (4 * 15) > small.rate


def test_a_wrong_token_is_seen_also_of_an_answer_that_broke_off() -> None:
    one = Sent(0.0, 20, 6)
    tokens = naive(prompt_of(5, 20), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    assert right(Streamed(5, 0.0, tokens=tokens), one) and not right(Streamed(6, 0.0, tokens=tokens), one)
    assert not right(Streamed(5, 0.0, tokens=tokens[:5]), one), "it is too short"
    assert right(Streamed(5, 0.0, tokens=tokens[:5], error="DEADLINE"), one)
    assert not right(Streamed(5, 0.0, tokens=[*tokens[:4], tokens[4] ^ 1], error="DEADLINE"), one)


def test_objectives_are_judged_by_the_time_at_which_a_request_was_due() -> None:
    slo = SloConfig(ttft_s=1.0, tpot_s=0.1)
    assert Streamed(0, 5.0, 6.0, 6.3, [1] * 5).met(slo)
    assert not Streamed(0, 5.0, 6.1, 6.3, [1] * 5).met(slo) and not Streamed(0, 5.0, 6.0, 6.5, [1] * 5).met(slo)
    assert Streamed(0, 5.0, 5.5, 5.5, [1]).met(slo), "one token has no pace"
    assert not Streamed(0, 5.0, error="SATURATED").met(slo)


def test_changes_are_counted_by_kind() -> None:
    notes = [{"kind": "decision", "action": "decode pool 1 → 2"}] + [
        {"kind": "outcome", "action": action, "state": state}
        for action, state in (("grow", "settled"), ("flip", "undone"), ("grow", "settled"), ("shrink", "settled"))
    ]
    assert changes_of(notes) == {"grow": 2, "flip": 1, "shrink": 1, "undone": 1} and changes_of([]) == {"undone": 0}


def test_the_autoscaler_follows_load_up_at_once_and_down_later() -> None:
    rule = Autoscaler({"prefill": 1.0, "decode": 3.0}, PLANNER)

    def wants(at: float, prefill: list[int], decode: list[int]) -> str:
        return str(rule.wants({"prefill": [Load(running=one) for one in prefill], "decode": [Load(waiting=one) for one in decode]}, at))

    assert wants(0.0, [1, 1], [3]) == "2P1D", "what fits stays"
    assert wants(5.0, [2, 2], [3]) == "3P1D", "half of the budget at most"
    assert wants(15.0, [0, 0, 0], [4]) == "3P2D"
    assert wants(20.0 + PLANNER.hold_s, [0, 0, 0], [0, 0]) == "1P1D"
