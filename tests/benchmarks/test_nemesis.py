"""The judge of `benchmarks/nemesis.py`: what it takes for right, wrong and invalid."""

import random
from dataclasses import replace
from pathlib import Path

from nemesis import END_OF_ANSWER, Plan, ToyOracle, judge

PLAN = Plan(1, 1, 1, 3, "toy", "float32", 300, False, (), 1, 0.0, 1.0, (0.5, 1.0), 1.0)


def test_documents_are_judged_by_another_library_than_that_of_the_masks(tmp_path: Path) -> None:
    oracle, rng, ended = ToyOracle(tmp_path, PLAN), random.Random(2), 0
    for _ in range(60):
        work = oracle.draw(rng)
        form, right = work.params["structured"], oracle.expected(work)
        assert judge(oracle, work, right, True) == "exact"
        assert judge(oracle, work, right[: len(right) // 2], False) == "exact", "the client left"
        if oracle.documents.ended(right):
            ended += 1
            assert oracle.documents.valid(form, right)
            assert judge(oracle, work, [*right[:-2], 256], True) == "invalid", "its last character is missing"
            assert judge(oracle, work, right[:-1], True) == "wrong"
    assert ended > 10


def test_answers_of_a_search_are_judged_all_together(tmp_path: Path) -> None:
    oracle, rng = ToyOracle(tmp_path, replace(PLAN, tokens=60, beams=1.0)), random.Random(4)
    for _ in range(10):
        work = oracle.draw(rng)
        right = oracle.expected(work)
        assert right.count(END_OF_ANSWER) == work.params["beam"]["count"]
        assert judge(oracle, work, right, True) == "exact"
        assert judge(oracle, work, right[: right.index(END_OF_ANSWER)], True) == judge(oracle, work, [0, *right[1:], 0], True) == "wrong"


def test_a_share_of_the_requests_asks_for_documents(tmp_path: Path) -> None:
    oracle, rng = ToyOracle(tmp_path, replace(PLAN, structured=0.5)), random.Random(1)
    asked = ["structured" in oracle.draw(rng).params for _ in range(200)]
    assert 60 < sum(asked) < 140
