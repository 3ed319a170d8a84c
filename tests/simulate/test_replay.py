"""What deciding code was asked and what it answered, replayed elsewhere: the same answers, or the first that differs."""

from pathlib import Path
from typing import Any

import pytest
from recorded import record, replayed

from baton.engine.core.scheduler import Scheduler
from baton.engine.core.sequence import Sequence


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More traffic than the cluster serves, so that requests wait, are refused and preempted."""
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    ends = record(path, rate=25.0, seconds=15.0)
    assert ends["ok"] > 50 and ends["SATURATED"] > 20 and ends["left"], ends
    return path


def test_a_run_under_overload_is_decided_again_as_it_was(recording: Path) -> None:
    outcomes = replayed(recording)
    assert [one.process for one in outcomes] == ["router-0", "prefill-0", "prefill-1", "decode-0", "decode-1"]
    assert not [one.difference for one in outcomes if one.difference] and not any(one.left_out for one in outcomes)
    router, *workers = (one.compared for one in outcomes)
    for method in ("admission.enter", "admission.retry_after", "policy.prefill", "policy.decode", "index.apply", "index.predict"):
        assert router[method] > 20, method
    for method in ("filling.add", "members.note_answer", "outliers.note_call", "trust.note", "budget.note_success", "split.note"):
        assert router[method] > 0, method
    assert all(one["engine.step"] > 50 for one in workers)


@pytest.mark.parametrize("within", ["time", "bytes"])
def test_a_ring_that_has_turned_over_begins_with_what_was_known_then(tmp_path: Path, within: str) -> None:
    path = tmp_path / "run.jsonl"
    record(path, rate=12.0, seconds=20.0, **({"span_s": 5.0} if within == "time" else {"most_bytes": 3 << 20}))
    outcomes = replayed(path)
    assert not [one.difference for one in outcomes if one.difference]
    assert 0 < outcomes[0].compared["admission.enter"] < 200, "the whole run is there"


def test_a_changed_constant_of_the_policy_is_found(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr("router.prefix_index.MAX_PREDICTED", 1)  # what was just sent to a worker does not count as cached there
    router = replayed(recording)[0]
    assert router.difference is not None and router.difference.method.startswith(("policy.", "index."))
    assert router.difference.recorded != router.difference.replayed and router.difference.args
    assert recording.read_bytes().splitlines()[router.difference.line - 1].startswith(b'{"call":')


@pytest.mark.parametrize(("name", "value", "method"), [
    ("router.pace.WEIGHT", 1 / 4, "admission."),
    ("router.policy._takes", lambda *_: True, "policy."),
])  # fmt: skip
def test_a_change_elsewhere_is_found_where_it_shows(
    recording: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, method: str
) -> None:
    monkeypatch.setattr(name, value)
    found = replayed(recording)[0].difference
    assert found is not None and found.method.startswith(method), found


def test_a_change_of_the_scheduler_is_found(recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Scheduler._chunk
    monkeypatch.setattr(Scheduler, "_chunk", lambda self, seq, budget, plan: plain(self, seq, min(budget, 32), plan))
    found = [one.difference.method for one in replayed(recording) if one.difference]
    assert found and all(method.startswith("engine.") for method in found)


def test_no_token_and_no_prompt_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block keys are there under other names: who guesses a prompt cannot look for its keys."""
    keys: set[bytes] = set()
    plain = Scheduler.extend_keys

    def seen(self: Scheduler, seq: Sequence) -> None:
        plain(self, seq)
        keys.update(seq.keys)

    monkeypatch.setattr(Scheduler, "extend_keys", seen)
    path = tmp_path / "run.jsonl"
    record(path, rate=4.0, seconds=3.0)
    text = path.read_text()
    assert len(keys) > 20 and not [key for key in keys if key.hex() in text]
    assert '"tokens"' not in text and '"prompt"' not in text
