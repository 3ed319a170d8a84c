"""The models that a router serves: each member belongs to one of them, and each has its own tokenizer, limits, workers and prefix index."""

import time
from dataclasses import replace
from typing import Any

import pytest
from fake_workers import FakeWorkers, record

from baton.cluster.config_router import RouterConfig
from baton.cluster.records import BlockEvent, WorkerRecord
from baton.engine.core.sampling import SamplingParams
from router.dispatch import Dispatcher
from router.members import Joined, Left
from router.policy import TERMS, Choice, choose_decode, choose_prefill, places
from router.request import Request, Stopwatch, Trace
from router.served import Refused, Served
from router.view import ClusterView

KEYS = [bytes([n]) * 16 for n in range(4)]
TERMS_ = replace(TERMS, bypass_tokens=0)


def worker(name: str, model: str, **fields: Any) -> WorkerRecord:
    """Its name ends with that of its model."""
    return record(
        f"{name}-{model}", **{"model_name": model, "model_fingerprint": f"is {model}", "tokenizer_fingerprint": f"of {model}", **fields}
    )


SMALL = [worker(name, "small") for name in ("p0", "d0", "d1")]
LARGE = [worker(name, "large", block_size=32, max_model_len=8192, max_num_seqs=4) for name in ("p0", "d0")]


def two(*workers: WorkerRecord, tokenizers: dict[str, str] | None = None) -> ClusterView:
    view = ClusterView(tokenizers or {"small": "of small", "large": "of large"})
    view.update(workers or [*LARGE, *SMALL], 0.0)
    return view


def names(records: list[WorkerRecord]) -> list[str]:
    return [each.name for each in records]


def test_each_of_two_models_has_its_own_workers_and_limits() -> None:
    view = ClusterView({"small": "of small", "large": "of large"})
    assert view.update([*LARGE, *SMALL], 0.0) == [Joined(each) for each in (*LARGE, *SMALL)], "nobody is refused"
    small, large = view.models["small"], view.models["large"]
    assert names(small.prefill_workers()) == ["p0-small"] and names(small.decode_workers()) == ["d0-small", "d1-small"]
    assert names(large.prefill_workers()) == ["p0-large"] and names(large.decode_workers()) == ["d0-large"]
    eos = frozenset(SMALL[0].eos_token_ids)
    assert small.served == Served("is small", 16, 4096, eos) and large.served == Served("is large", 32, 8192, eos)
    assert small.pool("decode") == (("d0-small", 1), ("d1-small", 1)) and (places(small), places(large)) == (None, 4 + 1 + 1)
    assert len(view.decode_workers()) == 3 and len(view.prefill_workers()) == 2


def test_a_request_is_routed_to_the_members_that_serve_its_model() -> None:
    view = two()
    for tie in range(8):
        for name, model in view.models.items():
            first = choose_prefill(model, KEYS, 64, 100, 0.0, (), TERMS_, tie)
            second = choose_decode(model, KEYS, 100, 0.0, (), TERMS_, tie)
            assert isinstance(first, Choice) and isinstance(second, Choice)
            assert first.worker == f"p0-{name}" and second.worker in names(model.decode_workers())


async def test_dispatchers_of_two_models_share_the_members() -> None:
    """What one has sent counts for both, and each uses only its own workers."""
    view, workers = two(), FakeWorkers()
    for name, model in view.models.items():
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=7, ignore_eos=True)
        trace = Trace(Stopwatch(time.monotonic))
        request = Request(f"to {name}", list(range(40)), 40, params, "", time.monotonic() + 10, trace)
        workers.calls.clear()
        async for _ in Dispatcher(model, workers, RouterConfig(bypass_tokens=8)).generate(request):
            assert sum(view.members.decodes(each.name) + view.members.prefills(each.name) for each in view.members.records()) <= 1
        assert request.finish == "length" and request.model == f"is {name}"
        assert len(workers.calls) == 2 and all(call.worker.endswith(name) for call in workers.calls)
    assert not workers.leases


def test_each_model_has_an_index_of_its_own() -> None:
    view = two()
    small, large = view.models["small"], view.models["large"]
    for name in ("d1-small", "d0-large"):
        assert view.apply(BlockEvent(name, 1, 1, "stored", tuple(KEYS))) == "ok"
    assert view.apply(BlockEvent("stranger", 1, 1, "stored", tuple(KEYS))) == "stale"
    assert small.index.overlap(KEYS, 0.0) == {"d1-small": 4} and large.index.overlap(KEYS, 0.0) == {"d0-large": 4}
    assert sorted(view.needing_snapshot()) == ["d0-small", "p0-large", "p0-small"]
    assert view.fill("stranger", 1, 1) == "stale" and view.fill("d0-large", 1, 1) == "duplicate"


def test_the_workers_of_one_model_may_all_leave_while_the_other_is_served() -> None:
    view = two()
    view.apply(BlockEvent("d0-large", 1, 1, "stored", tuple(KEYS)))
    view.update(SMALL, 1.0)
    for gone in LARGE:
        view.members.note_silence(gone.name, 1)
    assert view.update(SMALL, 9.0) == [Left(LARGE[1]), Left(LARGE[0])]
    small, large = view.models["small"], view.models["large"]
    assert large.decode_workers() == [] and large.index.entries == 0 and large.served is not None, "a limit that was learned stays"
    assert names(small.decode_workers()) == ["d0-small", "d1-small"]


def test_of_models_with_one_tokenizer_a_member_belongs_to_the_one_whose_name_it_has() -> None:
    shared = {"small": "of both", "large": "of both"}
    alike = [replace(each, tokenizer_fingerprint="of both") for each in (*LARGE, *SMALL)]
    nameless = worker("d9", "other", tokenizer_fingerprint="of both")
    view = ClusterView(shared)
    assert Refused(nameless.name, "model_fingerprint") in view.update([*alike, nameless], 0.0), "the first model judges it"
    for name, model in view.models.items():
        assert all(each.name.endswith(name) for each in (*model.prefill_workers(), *model.decode_workers())) and model.decode_workers()


def test_what_belongs_to_no_model_is_refused_and_a_person_is_told() -> None:
    stranger = worker("d9", "strange")
    view = two(*SMALL, *LARGE, stranger)
    assert view.state(stranger.name) == "unfit" and "tokenizer_fingerprint of strange" in (view.misfit(stranger.name) or "")
    assert stranger not in view.decode_workers() and view.state("d0-large") == "ready"
    longer = replace(LARGE[1], name="d1-large", max_model_len=100)
    assert view.update([*SMALL, *LARGE, longer], 1.0)[-1] == Refused("d1-large", "max_model_len")
    assert str(Refused("d1-large", "max_model_len")).endswith("its max_model_len differs from the served model's")
    assert "arithmetic" in str(Refused("d1-large", "model_fingerprint"))
    assert names(view.models["large"].decode_workers()) == ["d0-large"]


def test_a_member_that_serves_another_model_now_is_forgotten_by_the_first() -> None:
    view = two()
    view.apply(BlockEvent("d1-small", 1, 1, "stored", tuple(KEYS)))
    moved = replace(SMALL[2], incarnation=2, **{field: getattr(LARGE[1], field) for field in MODEL_FIELDS})
    view.update([*SMALL[:2], *LARGE, moved], 1.0)
    small, large = view.models["small"], view.models["large"]
    assert small.index.entries == 0 and names(small.decode_workers()) == ["d0-small"]
    assert names(large.decode_workers()) == ["d0-large", "d1-small"] and "d1-small" in large.index.needing_snapshot()


MODEL_FIELDS = ("model_name", "model_fingerprint", "tokenizer_fingerprint", "block_size", "max_model_len")


def test_a_router_serves_at_least_one_model() -> None:
    with pytest.raises(ValueError, match="at least one model"):
        ClusterView({})
