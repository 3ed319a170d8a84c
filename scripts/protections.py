"""Whether the tests notice when a protection is gone: `python scripts/protections.py [--only NAME] [--list]`.

Each entry of PROTECTIONS names a text of the code without which the project breaks a promise, what becomes of it, and the tests that must
fail then. In a copy of the tracked files, these tests first run on the code as it is, and must pass. Then one entry after the other is
applied, and each of its tests must fail: in the test itself, not because something cannot be imported, found or set up. The text must occur
exactly once in its file, so no entry outlives what it is about. The exit status is 1 if a protection can go unnoticed.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 120  # of one test; a protection whose test hangs without it has no test that says so
# A test that ends so says nothing of the protection: the mutant is no program.
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "Failed: Timeout")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-x", "-q", "--timeout", str(LIMIT_S))


@dataclass(frozen=True, slots=True)
class Protection:
    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


PROTECTIONS = (
    Protection(
        "digests of KV are compared",
        "kvtransfer/importer.py",
        "        if wrong:\n",
        "        if wrong and not blocks:\n",
        ("tests/worker/test_handoff.py::test_a_flipped_byte_is_recomputed",),
    ),
    Protection(
        "a lease that ended voids the read",
        "kvtransfer/importer.py",
        "if blocks and self._importer.checks.lease and not was_held:",
        "if not blocks and self._importer.checks.lease and not was_held:",
        ("tests/worker/test_handoff.py::test_a_lease_that_ended_before_the_read_voids_it",),
    ),
    Protection(
        "an expired lease is refused",
        "kvtransfer/lease.py",
        "return lease if lease is not None and now < lease.expires_at else None",
        "return lease",
        ("tests/kvtransfer/test_lease.py::test_an_expired_lease_is_dead_before_the_reaper_comes",),
    ),
    Protection(
        "a lease is fenced by the incarnation",
        "kvtransfer/exporter.py",
        "if (handle.worker, handle.incarnation) != (self.worker, self.incarnation):",
        "if handle.worker != self.worker:",
        ("tests/worker/test_handoff.py::test_a_holder_refuses_a_handle_of_its_earlier_incarnation_itself",),
    ),
    Protection(
        "the MAC of a handle is checked",
        "kvtransfer/handle.py",
        'return hmac.compare_digest(getattr(self, "mac", b""), self._compute_mac(key))',
        'return len(getattr(self, "mac", b"")) == len(self._compute_mac(key))',
        ("tests/kvtransfer/test_handle.py::test_any_altered_field_is_refused",),
    ),
    Protection(
        "a handle is good for one request",
        "kvtransfer/handle.py",
        "if self.request_id != request_id:",
        "if not self.request_id:",
        ("tests/kvtransfer/test_handle.py::test_a_handle_of_another_request_or_key_is_refused",),
    ),
    Protection(
        "KV of another layout is not read",
        "kvtransfer/importer.py",
        "if self.checks.layout and handle.layout_fingerprint != self.pool.layout.fingerprint:",
        "if self.checks.layout and not handle.layout_fingerprint:",
        ("tests/worker/test_handoff.py::test_kv_with_another_layout_is_never_read",),
    ),
    Protection(
        "a block is offered when it is full",
        "baton/engine/core/engine.py",
        "full=tuple(seq.blocks[: seq.computed // self.block_size])",
        "full=tuple(seq.blocks[: seq.computed // self.block_size + 1])",
        ("tests/worker/test_live.py::test_blocks_are_read_while_the_prompt_is_computed",),
    ),
    Protection(
        "blocks of an abandoned read wait in quarantine",
        "kvtransfer/importer.py",
        "if fetch is None or fetch.settled():",
        "if fetch is None or fetch.num_blocks:",
        ("tests/worker/test_handoff.py::test_blocks_of_a_cancelled_read_stay_quarantined_until_nothing_can_land",),
    ),
    Protection(
        "the KV port serves those with the key",
        "kvtransfer/tcp_wire.py",
        'return hmac.compare_digest(receive(sock, PROOF_BYTES, deadline), proof(key, b"reader", instance, nonces))',
        "return len(receive(sock, PROOF_BYTES, deadline)) == PROOF_BYTES",
        ("tests/kvtransfer/test_tcp.py::test_a_reader_without_the_key_receives_no_kv",),
    ),
    Protection(
        "digests of units in a disk tier are compared",
        "baton/tiers/disk_store.py",
        "whole = [good and xxh3_128_digest(wanted[i].into) == entry.digest for",
        'whole = [good and entry.digest != b"" for',
        ("tests/tiers/test_disk_store.py::test_a_damaged_unit_stays_dropped",),
    ),
    Protection(
        "keys of the prefix cache contain the tenant's salt",
        "baton/engine/core/block_key.py",
        "for field in (model_fingerprint, salt, adapter):",
        "for field in (model_fingerprint, adapter):",
        ("tests/engine/core/test_engine.py::test_salt_separates_prefixes",),
    ),
    Protection(
        "the mask of a grammar is applied",
        "baton/engine/model/sampler.py",
        "scores.masked_fill_(torch.from_numpy(allowed == 0).to(scores.device), -torch.inf)",
        "scores.masked_fill_(torch.from_numpy(allowed == 2).to(scores.device), -torch.inf)",
        ("tests/engine/model/test_sampler.py::test_a_form_is_the_same_as_a_vocabulary_without_the_others",),
    ),
    Protection(
        "max_tokens ends an output",
        "baton/engine/core/sequence.py",
        "if seq.remaining <= 0 or len(seq.tokens) >= max_len:",
        "if len(seq.tokens) >= max_len:",
        ("tests/engine/core/test_engine.py::test_each_stop_rule_ends_the_sequence",),
    ),
    Protection(
        "weights are compared with SHA256SUMS",
        "baton/engine/facts/fingerprint.py",
        "if found != said:",
        "if not found:",
        ("tests/engine/facts/test_fingerprint.py::test_a_flipped_bit_or_a_missing_byte_is_refused_by_name",),
    ),
    Protection(
        "a worker refuses calls meant for another process",
        "baton/worker/identity.py",
        'for field in ("worker", "incarnation", "model_fingerprint"):',
        'for field in ("worker", "model_fingerprint"):',
        ("tests/worker/test_addressee.py::test_a_worker_refuses_a_call_meant_for_another_and_names_the_field[Worker.Probe]",),
    ),
    Protection(
        "a worker proves itself before it serves",
        "router/proof.py",
        "if why := parting(reference, await self._tokens(*through)):",
        "if await self._tokens(*through) and (why := parting(reference, reference)):",
        ("tests/router/test_proof.py::test_a_worker_that_lies_is_not_admitted",),
    ),
    Protection(
        "a retry goes on behind the tokens that were said",
        "router/calls.py",
        "job.token_ids.extend(request.tokens)",
        "job.token_ids.extend(request.tokens[: request.prompt_len])",
        ("tests/router/test_clients.py::test_a_decode_call_starts_and_returns_all_its_events",),
    ),
    Protection(
        "a router resumes a stream at the exact index",
        "router/service.py",
        "_pieces(tokens, request.output_len - len(tokens), text)",
        "_pieces(tokens, request.made - len(tokens), text)",
        ("tests/router/test_continuation.py::test_a_stream_can_be_cut_again_and_again",),
    ),
    Protection(
        "a client notices a stream that begins again",
        "baton/answer.py",
        "if resumes and tokens and tokens[0].index != len(self.token_ids):",
        "if resumes and tokens and tokens[0].index < 0:",
        ("tests/baton/test_resuming_client.py::test_a_router_that_begins_again_is_noticed",),
    ),
    Protection(
        "no other model continues an output",
        "router/choosing.py",
        "if request.model not in (None, served.model_fingerprint):",
        'if request.model == "":',
        ("tests/router/test_dispatch.py::test_an_output_never_continues_on_another_model",),
    ),
    Protection(
        "a receipt is good for its tenant",
        "router/resume.py",
        "if self.tenant != _digest(tenant):",
        "if not self.tenant:",
        ("tests/router/test_resume.py::test_a_receipt_of_another_request_is_refused_by_name",),
    ),
    Protection(
        "an unknown API key is refused",
        "baton/cluster/keys.py",
        '        if not found:\n            raise BatonError(Reason.UNAUTHENTICATED, "this API key is unknown")\n',
        '        if not found:\n            return ""\n',
        ("tests/cluster/test_keys.py::test_anything_but_a_known_bearer_key_is_refused",),
    ),
    Protection(
        "deaths under a request are counted",
        "router/poison.py",
        "return Suspicion(position, before.deaths + 1,",
        "return Suspicion(position, before.deaths,",
        ("tests/router/test_dispatch.py::test_a_request_that_kills_two_workers_is_ended_and_its_prompt_refused",),
    ),
    Protection(
        "the retries of a request are bounded",
        "router/dispatch.py",
        "if request.trace.retries >= self._config.max_retries:",
        "if request.trace.retries > self._config.max_retries:",
        ("tests/router/test_dispatch.py::test_the_number_of_retries_is_limited",),
    ),
    Protection(
        "a budget bounds the retries of all requests",
        "router/retry_budget.py",
        "return self._tokens >= 1 if begun else self._tokens > self._most / 2",
        "return True",
        ("tests/router/test_retry_budget.py::test_a_sick_pool_gets_no_retries_of_new_requests_and_then_none_of_streams",),
    ),
    Protection(
        "credit that was given away is not given away again",
        "router/standings.py",
        "credit = worker.load.credit_tokens - members.unreported_decode_tokens(worker.name)",
        "credit = worker.load.credit_tokens",
        ("tests/router/test_policy.py::test_room_that_was_just_given_away_is_not_given_away_again",),
    ),
    Protection(
        "a cluster that the cockpit has started dies with it",
        "baton/cockpit/own.py",
        "leashed(*words), env=env",
        "[*words], env=env",
        ("tests/system/test_cockpit.py::test_a_cluster_of_its_own_dies_with_the_cockpit",),
    ),
    Protection(
        "a cluster that the cockpit has started is taken down, whatever is cancelled",
        "baton/cockpit/own.py",
        "await asyncio.shield(ending)",
        "await ending",
        ("tests/cockpit/test_own.py::test_the_end_of_the_cockpit_takes_it_down_even_if_it_does_not_listen",),
    ),
    Protection(
        "cockpits start one cluster at a time",
        "baton/cockpit/own.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        ("tests/cockpit/test_own.py::test_one_runs_at_a_time_whichever_cockpit_asks",),
    ),
    Protection(
        "a cluster that the cockpit has started is not configured by the environment",
        "baton/cockpit/own.py",
        'if not name.startswith("BATON_") or name in KEPT_VARIABLES',
        "if name",
        ("tests/cockpit/test_own.py::test_why_it_does_not_start_is_told_and_no_setting_of_the_user_reaches_it",),
    ),
    Protection(
        "a cluster that the cockpit starts has no more workers than the machine has room for",
        "baton/cockpit/bounds.py",
        "if workers > room.workers:",
        "if workers > 2 * room.workers:",
        (
            "tests/cockpit/test_own.py::test_a_cluster_takes_no_more_workers_than_the_machine_has_cores",
            "tests/cockpit/test_own.py::test_what_this_machine_has_no_room_for_starts_nothing",
        ),
    ),
)


def stale(root: Path, protections: Sequence[Protection]) -> list[str]:
    """What is wrong with entries: their text does not occur exactly once."""
    found = []
    for one in protections:
        file = root / one.file
        times = file.read_text().count(one.before) if file.is_file() else 0
        if times != 1:
            found.append(f"{one.name}: {one.before.strip()!r} occurs {times} times in {one.file}, not once")
    return found


def copy(root: Path, folder: Path) -> None:
    """The tracked files, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


_seconds = itertools.count(1)


@contextmanager
def without(folder: Path, one: Protection) -> Iterator[None]:
    """The folder's code without a protection."""
    file = folder / one.file
    text, at = file.read_text(), file.stat().st_mtime_ns
    try:
        file.write_text(text.replace(one.before, one.after))
        _touch(file, at + 10**9 * next(_seconds))
        yield
    finally:
        file.write_text(text)
        _touch(file, at)


def _touch(file: Path, at: int) -> None:
    """Python recognises a file that it has compiled by size and second: each version gets a second of its own."""
    os.utime(file, ns=(at, at))


def tried(folder: Path, tests: Sequence[str], more: Mapping[str, str] | None = None) -> str:
    """How the tests end there: "passed", "failed", or why neither can be said. `more`: of the environment."""
    with tempfile.TemporaryDirectory() as other:
        report = Path(other) / "report.xml"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(folder), **(more or {})}
        command = [*PYTEST, f"--junitxml={report}", *tests]
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S * (1 + len(tests)))
        except subprocess.TimeoutExpired:
            return "hangs"
        if done.returncode not in (0, 1) or not report.is_file():
            return f"pytest ended with {done.returncode}: {_end(done.stdout + done.stderr)}"
        suites = list(ElementTree.parse(report).iter("testsuite"))
    count = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")}
    messages = [element.get("message", "") for suite in suites for element in suite.iter("failure")]
    if count["errors"] or any(message.startswith(BROKEN) for message in messages):
        return f"no test of it came to an end: {_end(done.stdout)}"
    if done.returncode:
        return "failed"
    return "passed" if count["tests"] > count["skipped"] else "skipped"


def _end(output: str) -> str:
    return " / ".join(output.strip().splitlines()[-3:])


def judge(folder: Path, one: Protection, more: Mapping[str, str] | None = None) -> str:
    """ "caught" if each of its tests fails without it, "survived" if one passes, else what happened."""
    with without(folder, one):
        ends = [tried(folder, [test], more) for test in one.tests]
    if all(end == "failed" for end in ends):
        return "caught"
    return "survived" if "passed" in ends else next(end for end in ends if end != "failed")


def check(root: Path, protections: Sequence[Protection]) -> bool:
    """Prints a table. Returns whether all were caught."""
    with tempfile.TemporaryDirectory(prefix="baton-protections-") as name:
        folder = Path(name)
        copy(root, folder)
        began = time.monotonic()
        ends = tried(folder, list(dict.fromkeys(test for one in protections for test in one.tests)))
        if ends != "passed":
            print(f"with all protections in place, their tests do not pass: {ends}")
            return False
        print(f"all tests pass with the protections in place ({time.monotonic() - began:.0f} s); without each of them:")
        wide, missed = max(len(one.name) for one in protections), 0
        for one in protections:
            began = time.monotonic()
            verdict = judge(folder, one)
            missed += verdict != "caught"
            test = ", ".join(test.partition("::")[2] for test in one.tests)
            print(f"{one.name:<{wide}}  {verdict:<8}  {time.monotonic() - began:4.1f} s  {one.file}  {test}", flush=True)
    print(f"{len(protections) - missed} of {len(protections)} caught")
    return not missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="an entry, or those whose names contain this")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [one for one in PROTECTIONS if options.only is None or any(part in one.name for part in options.only)]
    if not chosen:
        sys.exit("no entry has such a name; --list tells them")
    if options.list:
        print("\n".join(f"{one.name}  ({one.file})" for one in chosen))
        return
    if found := stale(ROOT, chosen):
        sys.exit("\n".join(found))
    sys.exit(0 if check(ROOT, chosen) else 1)


if __name__ == "__main__":
    main()
