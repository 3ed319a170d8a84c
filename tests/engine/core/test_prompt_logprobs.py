"""What the model says of a prompt: each token once and in order, with the numbers of the naive oracle, whatever the engine does meanwhile;
and the output is what it is without."""

import math
from typing import Any

import pytest
from late_toy import LateEngine, LateToy

from baton.engine.choice import load_runner
from baton.engine.core.block_key import root_key
from baton.engine.core.engine import Engine, Malformed
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams, Scored
from baton.engine.core.scheduler import SCORED_AT_ONCE
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import ToyRunner
from baton.engine.model.naive import next_logits
from baton.engine.runner import ModelRunner
from baton.models.make_small import make

TOY = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
PROMPT = [5 + (i * i) % 200 for i in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = tmp_path_factory.mktemp("model")
    make(path, hidden=64, layers=2, heads=4, kv_heads=2, vocab=300, context=700)
    return load_runner(ModelRunner, path, block_size=4)


def engine(runner: Any, blocks: int, **limits: Any) -> Engine:
    runner.attach(KvPool(runner.layout, blocks))
    bounds = Limits(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "reserve_growth": 0.0, **limits})
    return Engine(runner, bounds, min(700, blocks * 4))


def toy_engine(blocks: int = 200, **limits: Any) -> Engine:
    return engine(ToyRunner(TOY, "toy", 4), blocks, **limits)


def sequence(name: str, tokens: list[int], asked: int | None, prompt_len: int | None = None, **params: Any) -> Sequence:
    values: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True, "prompt_logprobs": asked, **params}
    return Sequence(name, list(tokens), prompt_len or len(tokens), SamplingParams(**values), root_key("m"))


def drain(running: Engine) -> tuple[dict[str, list[Scored]], dict[str, list[int]]]:
    scores: dict[str, list[Scored]] = {}
    output: dict[str, list[int]] = {}
    while not running.idle:
        for each in running.step():
            told = scores.setdefault(each.seq.id, [])
            if each.scores:
                assert each.scored_at == len(told) + 1 and each.sampled is None and not output.get(each.seq.id)
                told += each.scores
            elif each.sampled is not None:
                output.setdefault(each.seq.id, []).append(each.sampled.token)
    running.pool.check()
    return scores, output


def test_the_numbers_are_those_of_the_oracle(model: ModelRunner) -> None:
    running = engine(model, 200)
    for name, asked in (("none", 0), ("three", 3), ("unasked", None)):
        running.add(sequence(name, PROMPT, asked))
    scores, output = drain(running)
    assert not scores["unasked"] and output["none"] == output["three"] == output["unasked"]
    for position, told in enumerate(scores["three"], 1):
        expected = next_logits(model.model, PROMPT[:position])[0].log_softmax(dim=-1)
        assert told.token == PROMPT[position] and told.logprob == pytest.approx(float(expected[told.token]), abs=1e-4)
        assert told.rank == int((expected > expected[told.token]).sum()) + 1
        assert [id_ for id_, _ in told.top] == expected.topk(3).indices.tolist()
    assert [(each.token, each.logprob, each.top) for each in scores["none"]] == [(each.token, each.logprob, ()) for each in scores["three"]]


def test_a_part_of_an_output_is_not_scored(model: ModelRunner) -> None:
    running = engine(model, 200)
    running.add(sequence("a", PROMPT, 1, prompt_len=21))
    running.add(sequence("b", PROMPT[:1], 1))
    scores, output = drain(running)
    assert [each.token for each in scores["a"]] == PROMPT[1:21] and not scores["b"] and output["b"]


def test_cached_kv_is_not_used_for_it_and_the_rest_may_use_its_kv() -> None:
    running = toy_engine()
    running.add(sequence("before", PROMPT, None))
    drain(running)
    asked, after = sequence("asked", PROMPT, 1), sequence("after", PROMPT, None)
    running.add(asked)
    scores, _ = drain(running)
    assert asked.cached == 0 and len(scores["asked"]) == len(PROMPT) - 1
    running.add(after)
    drain(running)
    assert after.cached > 0


def test_what_a_preemption_computes_again_is_told_once() -> None:
    running = toy_engine(blocks=24)
    for i in range(4):
        running.add(sequence(f"s{i}", [i, *PROMPT[:20]], 2))
    preempted, steps = 0, 0
    scores: dict[str, list[Scored]] = {}
    while not running.idle:
        for each in running.step():
            scores.setdefault(each.seq.id, []).extend(each.scores)
        steps += 1
        if steps == 2:  # in the middle of a prompt
            running.scheduler.preempt(running.scheduler.running[-1])
            preempted += 1
    assert preempted and running.counts.preemptions
    for i in range(4):
        assert [each.token for each in scores[f"s{i}"]] == PROMPT[:20]
        assert all(
            (each.rank == 1) == (each.logprob == 0.0) and (each.rank == 2) == (each.logprob == -math.inf) for each in scores[f"s{i}"]
        )


def test_a_step_scores_so_many_positions_at_most(model: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    running, rows = engine(model, 480, max_num_batched_tokens=700), list[int]()
    found = model._logits

    def counted(batch: Any) -> Any:
        logits = found(batch)
        rows.append(len(logits[0]))
        return logits

    monkeypatch.setattr(model, "_logits", counted)
    prompt = [5 + i % 290 for i in range(600)]
    for name in "abc":
        running.add(sequence(name, prompt, 1, max_tokens=1))
    scores, _ = drain(running)
    assert all([each.token for each in scores[name]] == prompt[1:] for name in "abc") and max(rows) <= SCORED_AT_ONCE + 1
    assert len(rows) < 10, "what one prompt leaves of a step is another's"


def test_who_cannot_tell_them_refuses() -> None:
    late = LateEngine(LateToy(64, TOY, 16), Limits(), 128, True)
    with pytest.raises(Malformed, match="prompt_logprobs"):
        late.add(sequence("a", PROMPT, 1))
    held = sequence("b", PROMPT, 1)
    held.hold = True
    with pytest.raises(Malformed, match="prompt_logprobs"):
        toy_engine().add(held)
    assert late.idle


pytestmark = pytest.mark.usefixtures("single_thread")
