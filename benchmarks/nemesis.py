"""Random load on a cluster whose processes are killed and stopped at random, and what became of every request.

    python benchmarks/nemesis.py --minutes 5 --seed 1 [--json FILE]
    python benchmarks/nemesis.py --hosts                           three hosts, which are also cut off
    python benchmarks/nemesis.py --model tale --type int8          a trained model instead of the toy (or a FOLDER), in some number type
    python benchmarks/nemesis.py --target decode --how kill --faults 200        one kind of fault, so many times
    python benchmarks/nemesis.py --target decode --how restart                  all decode workers, one after another, with SIGTERM
    python benchmarks/nemesis.py --cancelled 1 --target none --requests 10000   cancels only
    python benchmarks/nemesis.py --speculation prompt_lookup --predicted 0.5    guesses, also by half of the clients
    python benchmarks/nemesis.py --structured 0.5                  half of the requests ask for a JSON document of a schema
    python benchmarks/nemesis.py --several 0.5 --target decode     half of the requests ask for four choices (no router continues these)
    python benchmarks/nemesis.py --beams 0.5                       half of the requests are beam searches, which are not cancelled

Three routers, two prefill and three decode workers and a Redis on this host; with --hosts, on three network namespaces (root, iproute2):
Redis and the routers on the first, a prefill and a decode worker on each. It is known which tokens each request must get: the toy's can be
computed, those of a model come from an engine without a cluster, which serves one request at a time. Half of the requests draw their
tokens with a seed, one in ten is cancelled at a random token. Every few seconds one process is killed, or stopped for 0.5 to 15 s, or a
host is cut off for that time; the next fault comes when everything is back. All kinds of faults come equally often, in a random order, and
the processes of a tier in turn.

    exact      all tokens are those that the model must produce
    wrong      some differ
    invalid    the answer ended by itself and is no document of the schema that was asked for
    refused    an error before the first token, by reason
    lost       an error after it, by reason
    moved      attempts that a router made at another worker after a fault of that kind
    seen       from the fault until every router that had requests there moved the first of them
    back       from the fault, or from the end of a stop, until every process answers and is ready
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
from continuation import TYPES
from documents import Documents
from machine import describe
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from beam_reference import toy_search
from hosts import Host
from joined_hosts import joined
from live_cluster import Cluster, cluster, toy

from baton.cli.up import SHIPPED
from baton.client import AsyncClient, GenerateError
from baton.engine.build import build
from baton.engine.core.beams import EARLY_STOPPING, Beams
from baton.engine.core.grammar import Grammar
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import naive
from baton.engine.options import Options
from baton.models.train.stories import story

ROUTERS, PREFILL, DECODE, HOSTS = 3, 2, 3, 3
BACK_WITHIN_S = 120.0
KV_MIB = 1024  # of a model; the toy is content with less
TARGETS = ("router", "prefill", "decode", "redis")
DONE = {"kill": "killed", "stop": "stopped", "restart": "restarted", "cut": "cut off"}
CHOICES = 4  # of a request that asks for several
END_OF_ANSWER = -1
KNOWN = 48  # requests of which a model's outputs are computed before


@dataclass(frozen=True)
class Plan:
    minutes: float  # and at most so many requests and faults
    requests: float
    faults: float
    seed: int
    model: str
    type: str
    tokens: int
    hosts: bool
    kinds: tuple[tuple[str, str], ...]  # target and what happens to it
    streams: int
    cancelled: float  # share of the requests
    structured: float  # likewise
    stops_s: tuple[float, float]
    quiet_s: float  # between two faults
    speculation: str = ""  # engine.speculation, if it is not to be the default
    predicted: float = 0.0  # share of the requests that bring a prediction
    beams: float = 0.0  # share of the requests
    several: float = 0.0  # share of the requests that ask for several choices


@dataclass(frozen=True)
class Scene:
    live: Cluster
    processes: int  # routers and workers
    hosts: list[Host]


@contextmanager
def stage(model: Path, arithmetic: Mapping[str, Any], folder: Path, several: bool, speculation: str = "") -> Iterator[Scene]:
    flags = ["--router.replicas", str(ROUTERS), "--router.bypass-tokens", "0", "--engine.threads", "1", "--telemetry.log-format", "json"]
    flags += ["--launcher.restart-backoff-max-s", "1"]  # the patience with a process that keeps dying is not what is measured
    if speculation:
        flags += ["--engine.speculation", speculation]
    if arithmetic:
        flags += ["--engine.kv-memory-mib", str(KV_MIB)]
    for name, value in arithmetic.items():
        flags += [f"--{'model' if name == 'dtype' else 'engine'}.{name.replace('_', '-')}", value]
    if several:
        with joined(model, folder, HOSTS, *flags) as (live, made):
            yield Scene(live, ROUTERS + 2 * HOSTS, made)
    else:
        with cluster(model, *flags, prefill=PREFILL, decode=DECODE) as live:
            yield Scene(live, ROUTERS + PREFILL + DECODE, [])


@dataclass
class Faults:
    """What came of the faults of one kind."""

    back: list[float] = field(default_factory=list)
    seen: list[float] = field(default_factory=list)  # of the faults after which a request was moved
    moved: int = 0


@dataclass
class Tally:
    over: asyncio.Event = field(default_factory=asyncio.Event)
    begun: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    retried: int = 0  # attempts that moved to another worker
    resumed: int = 0  # streams that moved to another router
    documents: int = 0  # answers that ended by themselves and are valid
    drafted: int = 0  # guesses, of whole answers, at the router that finished them
    accepted: int = 0
    gaps: list[float] = field(default_factory=list)  # the longest of each request: seconds without a token
    faults: defaultdict[str, Faults] = field(default_factory=lambda: defaultdict(Faults))


@dataclass(frozen=True)
class Work:
    prompt: list[int]
    params: dict[str, Any]
    n: int = 1
    prediction: list[int] | None = None

    def choice(self, number: int) -> SamplingParams:
        """What an answer is sampled with."""
        seed = {"seed": self.params["seed"] + number} if "seed" in self.params else {}
        return sampling_of(replace(self, params=self.params | seed))


class ToyOracle:
    """Any request will do: prompts share prefixes."""

    arithmetic: Mapping[str, Any] = {}

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.path, self._tokens, self._plan = toy(folder / "toy", step_delay_ms=5), plan.tokens or 400, plan
        self.documents = Documents(self.path, 257, frozenset([256]))
        rng = random.Random(plan.seed)
        self._shared = [[rng.randrange(256) for _ in range(160)] for _ in range(32)]

    def draw(self, rng: random.Random) -> Work:
        prompt = rng.choice(self._shared)[: rng.choice((0, 64, 160))] + [rng.randrange(256) for _ in range(rng.randrange(1, 200))]
        if rng.random() < self._plan.beams:
            return Work(prompt, searching(rng, self._tokens))
        params = drawn(rng, self._tokens, self.documents if rng.random() < self._plan.structured else None)
        return Work(prompt, params, several(rng, self._plan))

    def expected(self, work: Work, choice: int = 0) -> list[int]:
        if "beam" in work.params:
            return joined_up(one.tokens for one in toy_search(work.prompt, sampling_of(work)))
        return naive(work.prompt, work.choice(choice), matcher=self.documents.matcher(work.params.get("structured")))


class ModelOracle:
    """Requests whose outputs one engine has computed, one at a time and without a prefix cache. Every product is Baton's: a row's bits then
    do not depend on its batch, and the cluster has no excuse."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.path = SHIPPED if plan.model == "tale" else Path(plan.model)
        self.arithmetic: Mapping[str, Any] = {"products": "baton", "dtype": "float32", **TYPES[plan.type]}
        engine = build(Options.of(self.path, kv_memory_mib=KV_MIB, prefix_caching=False, **self.arithmetic)).engine
        self.documents = Documents(self.path, engine.runner.vocab_size, engine.runner.eos_token_ids)
        tokenizer, rng = Tokenizer.from_file(str(self.path / "tokenizer.json")), random.Random(plan.seed)
        self._known: list[tuple[Work, list[list[int]]]] = []
        for _ in range(KNOWN):
            told = " ".join(story(rng, 4).sentences)
            documents = self.documents if rng.random() < plan.structured else None
            prompt, longest = tokenizer.encode(told).ids[: rng.randrange(20, 200)], plan.tokens or 200
            work, outputs = Work(prompt, drawn(rng, longest, documents), several(rng, plan)), list[list[int]]()
            if rng.random() < plan.beams:
                work = Work(prompt, searching(rng, longest))
            for choice in range(work.n):
                params = work.choice(choice)
                matcher = self.documents.matcher(params.structured)
                engine.add(Sequence("alone", list(work.prompt), len(work.prompt), params, b"root", matcher=matcher))
                outputs.append([])
                while not engine.idle:
                    for step in engine.step():
                        outputs[-1] += [step.sampled.token] if step.sampled else joined_up(one.tokens for one in step.found)
            self._known.append((work, outputs))

    def draw(self, rng: random.Random) -> Work:
        return rng.choice(self._known)[0]

    def expected(self, work: Work, choice: int = 0) -> list[int]:
        return next(outputs for known, outputs in self._known if known.prompt is work.prompt)[choice]


Oracle = ToyOracle | ModelOracle


def several(rng: random.Random, plan: Plan) -> int:
    return CHOICES if plan.several and rng.random() < plan.several else 1


def judge(oracle: Oracle, work: Work, got: list[int], whole: bool, choice: int = 0) -> str:
    form: Grammar | None = work.params.get("structured")
    if form is not None and oracle.documents.ended(got) and not oracle.documents.valid(form, got):
        return "invalid"
    expected = oracle.expected(work, choice)
    return "exact" if got == (expected if whole else expected[: len(got)]) else "wrong"


def drawn(rng: random.Random, longest: int, documents: Documents | None = None) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": rng.randrange(1, longest), "temperature": 0.0, "ignore_eos": True}
    params |= {"structured": documents.draw(rng)} if documents is not None else {}
    return params | ({"temperature": 0.8, "seed": rng.randrange(1 << 31)} if rng.random() < 0.5 else {})


def searching(rng: random.Random, longest: int) -> dict[str, Any]:
    width = rng.randrange(2, 7)
    how = {"length_penalty": rng.choice([0.0, 1.0, 2.0]), "early_stopping": rng.choice(EARLY_STOPPING)}
    return {"max_tokens": rng.randrange(1, max(2, longest // 4)), "beam": {"width": width, "count": rng.randrange(1, width + 1), **how}}


def sampling_of(work: Work) -> SamplingParams:
    params = dict(work.params)
    beam = params.pop("beam", None)
    return SamplingParams(**params, beams=beam and Beams(**beam))


def joined_up(answers: Iterable[tuple[int, ...]]) -> list[int]:
    """The answers of a search as one list."""
    return [token for answer in answers for token in (*answer, END_OF_ANSWER)]


async def load(client: AsyncClient, oracle: Oracle, rng: random.Random, plan: Plan, tally: Tally) -> None:
    while not tally.over.is_set() and tally.begun < plan.requests:
        tally.begun += 1
        work = oracle.draw(rng)
        if rng.random() < plan.predicted:
            work = replace(work, prediction=edited(await asyncio.to_thread(oracle.expected, work), rng))
        await one(client, oracle, work, rng.randrange(work.params["max_tokens"]) if rng.random() < plan.cancelled else None, tally)
    tally.over.set()


def edited(output: list[int], rng: random.Random) -> list[int]:
    """What a client thinks who does not know of a few edits."""
    told = list(output)
    for place in sorted({rng.randrange(len(told)) for _ in range(1 + len(told) // 40)}, reverse=True):
        told[place : place + rng.randrange(3)] = [told[0]] * rng.randrange(3)
    return told


async def one(client: AsyncClient, oracle: Oracle, work: Work, leave_after: int | None, tally: Tally) -> None:
    outputs: list[list[int]] = [[] for _ in range(work.n)]
    got = outputs[0]
    last, gap = time.monotonic(), 0.0
    form: Grammar | None = work.params.get("structured")
    asked = work.params | ({"structured": form.told()} if form is not None else {})
    try:
        asked |= {"n": work.n if work.n > 1 else None, "prediction": work.prediction}
        async with client.generate(token_ids=work.prompt, timeout_s=120, **asked) as stream:
            async for token in stream:
                now = time.monotonic()
                last, gap = now, max(gap, now - last)
                outputs[token.choice].append(token.id)
                if len(got) - 1 == leave_after:
                    break
            else:
                got += joined_up(one.token_ids for one in stream.result.hypotheses)
                tally.retried += stream.result.workers["retries"]
                tally.resumed += stream.result.resumes > 0
                tally.drafted += stream.result.usage.drafted_tokens
                tally.accepted += stream.result.usage.accepted_tokens
    except GenerateError as error:
        kind = "lost" if any(outputs) else "refused"
        tally.outcomes[f"{kind} {error.reason or error.code}"] += 1
        print(f"{kind} after {len(got)} tokens: {error}", flush=True)
        return
    tally.gaps.append(gap)
    leave_after = None if "beam" in work.params else leave_after  # there was no token after which to leave
    judged = [await asyncio.to_thread(judge, oracle, work, each, leave_after is None, i) for i, each in enumerate(outputs)]
    found = next((one for one in judged if one != "exact"), "exact")
    tally.documents += found == "exact" and form is not None and oracle.documents.ended(got)
    tally.outcomes[found if leave_after is None or found != "exact" else "cancelled"] += 1


async def trouble(scene: Scene, plan: Plan, tally: Tally) -> None:
    rng, turns, bag = random.Random(plan.seed), Counter[str](), list[tuple[str, str]]()
    while plan.kinds and not tally.over.is_set() and turns.total() < plan.faults:
        bag = bag or rng.sample(plan.kinds, len(plan.kinds))
        target, how = bag.pop()
        began = time.time()
        back_s = await fault(scene, target, how, turns[target], rng.uniform(*plan.stops_s))
        turns[target] += 1
        kind = tally.faults[f"{target} {DONE[how]}"]
        kind.back.append(back_s)
        moves = [seconds for router in range(ROUTERS) if (seconds := moves_of(scene.live, router, began))]
        kind.seen += [max(router[0] for router in moves)] if moves else []
        kind.moved += sum(map(len, moves))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(tally.over.wait(), plan.quiet_s)
    if plan.kinds:
        tally.over.set()


def moves_of(live: Cluster, router: int, since: float) -> list[float]:
    """When a router began another attempt of a request, in seconds after `since`. Empty while its log is not there."""
    with contextlib.suppress(FileNotFoundError):
        retries = [json.loads(line)["ts"] for line in live.log(f"router-{router}").splitlines() if " is retried (" in line]
        return [at for told in retries if (at := datetime.fromisoformat(told).timestamp() - since) >= 0]
    return []


async def fault(scene: Scene, target: str, how: str, turn: int, stopped_s: float) -> float:
    """Returns the seconds from the fault, or from its end, until everything is back."""

    async def known() -> list[int]:
        found: list[int] = await asyncio.to_thread(scene.live.wait, partial(pids, scene.live, target), BACK_WITHIN_S)
        return found

    began = time.monotonic()
    if how == "restart":
        for pid in await known():
            os.kill(pid, signal.SIGTERM)
            await back(scene, pid)
        return time.monotonic() - began
    if how == "cut":
        await cut_off(scene.hosts[turn % len(scene.hosts)], stopped_s)
        dead = None
    else:
        found = await known()
        pid = found[turn % len(found)]
        dead = pid if how == "kill" else None
        await strike(pid, None if dead else stopped_s)
    began = time.monotonic()
    await back(scene, dead)
    return time.monotonic() - began


async def back(scene: Scene, without: int | None) -> None:
    await asyncio.to_thread(scene.live.wait, partial(whole, scene, without), BACK_WITHIN_S)


async def cut_off(host: Host, for_s: float) -> None:
    host.unplug()
    try:
        await asyncio.sleep(for_s)
    finally:
        host.plug_in()


async def strike(pid: int, stopped_s: float | None = None) -> None:
    """Kills the process, or stops it for a time."""
    if stopped_s is None:
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(stopped_s)
    with contextlib.suppress(ProcessLookupError):  # its supervisor may have given up on it
        os.kill(pid, signal.SIGCONT)


def pids(live: Cluster, target: str) -> list[int]:
    if target == "redis":
        found = []
        for child in psutil.Process(live.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [child.pid] if child.name().startswith("redis-server") else []
        return found
    status = live.status()
    known = status["routers"] if target == "router" else [worker for worker in status["workers"] if worker["pool"] == target]
    return [process["pid"] for process in known]


def whole(scene: Scene, without: int | None = None) -> bool:
    """Whether every process is there, answers and is ready, and the process `without` is not among them."""
    live = scene.live
    try:
        status = live.status()
    except grpc.RpcError:
        return False
    alive = [router["pid"] for router in status["routers"]] + [worker["pid"] for worker in status["workers"] if "error" not in worker]
    redis = pids(live, "redis")
    ready = all(worker["state"] == "ready" for worker in status["workers"])
    there = len(alive) == scene.processes and len(redis) == 1 and status["router"]["registry"] == "reachable"
    return ready and there and without not in (*alive, *redis)


async def run(scene: Scene, oracle: Oracle, plan: Plan) -> Tally:
    await back(scene, None)
    tally = Tally()
    addresses = [router["endpoints"]["grpc"] for router in scene.live.status()["routers"]]
    async with AsyncClient(addresses) as client, asyncio.TaskGroup() as group:
        for number in range(plan.streams):
            group.create_task(load(client, oracle, random.Random(f"{plan.seed} {number}"), plan, tally))
        group.create_task(trouble(scene, plan, tally))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(tally.over.wait(), 60 * plan.minutes)
        tally.over.set()
    await scene.live.quiet(60)
    return tally


def longest_waits(tally: Tally) -> dict[str, float]:
    gaps = statistics.quantiles(tally.gaps, n=1000) if len(tally.gaps) > 1 else [0.0] * 999
    return {"median": gaps[499], "P99": gaps[989], "P99.9": gaps[998]}


def report(tally: Tally) -> None:
    print(f"\nrequests {tally.outcomes.total()}: {', '.join(f'{name} {count}' for name, count in sorted(tally.outcomes.items()))}")
    print(f"guesses {tally.drafted}, of them right {tally.accepted}")
    print(f"documents that ended and are valid {tally.documents}")
    print(f"moved to another worker {tally.retried}, to another router {tally.resumed}; left behind: nothing")
    waits = longest_waits(tally)
    print(f"longest wait for a token, per request: {', '.join(f'{name} {seconds:.2f} s' for name, seconds in waits.items())}")
    print(f"\n{'fault':<18} {'times':>6} {'moved':>6} {'seen, s (median)':>17} {'longest':>8} {'back, s (median)':>17} {'longest':>8}")
    for name, kind in sorted(tally.faults.items()):
        seen = f"{statistics.median(kind.seen):17.2f} {max(kind.seen):8.2f}" if kind.seen else f"{'-':>17} {'-':>8}"
        print(f"{name:<18} {len(kind.back):6} {kind.moved:6} {seen} {statistics.median(kind.back):17.2f} {max(kind.back):8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="at most")
    parser.add_argument("--requests", type=int, default=math.inf, help="at most")
    parser.add_argument("--faults", type=int, default=math.inf, help="at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", default="toy", help="toy, tale or a folder")
    parser.add_argument("--type", choices=tuple(TYPES), default="float32", help="of the model's numbers")
    parser.add_argument("--tokens", type=int, default=0, help="fewer than so many in an answer; 0: 400 of the toy's, 200 of a model's")
    parser.add_argument("--hosts", action="store_true")
    parser.add_argument("--target", action="append", choices=(*TARGETS, "host", "none"))
    parser.add_argument("--how", action="append", choices=("kill", "stop", "restart"))
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--cancelled", type=float, default=0.1)
    parser.add_argument("--structured", type=float, default=0.0, help="share of the requests that ask for a JSON document")
    parser.add_argument("--speculation", default="", help="engine.speculation of the workers")
    parser.add_argument("--predicted", type=float, default=0.0, help="share of the requests that bring a prediction")
    parser.add_argument("--several", type=float, default=0.0, help="share of the requests that ask for four choices")
    parser.add_argument("--beams", type=float, default=0.0, help="share of the requests that are beam searches")
    parser.add_argument("--stops", type=float, nargs=2, default=(0.5, 15.0), metavar="S")
    parser.add_argument("--quiet", type=float, default=3.0, metavar="S", help="between two faults")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    default = (*TARGETS, "host") if options.hosts else TARGETS
    targets = [target for target in options.target or default if target != "none"]
    kinds = [(target, how) for target in targets if target != "host" for how in options.how or ("kill", "stop")]
    kinds += [("host", "cut")] * targets.count("host")
    same = (
        "minutes", "requests", "faults", "seed", "model", "type", "tokens", "hosts", "streams", "cancelled", "structured", "several",
        "speculation", "predicted", "beams",
    )  # fmt: skip
    plan = Plan(**{name: getattr(options, name) for name in same}, kinds=tuple(kinds), stops_s=tuple(options.stops), quiet_s=options.quiet)
    machine = describe()
    print(machine)
    with tempfile.TemporaryDirectory() as folder:
        oracle = ToyOracle(Path(folder), plan) if plan.model == "toy" else ModelOracle(Path(folder), plan)
        with stage(oracle.path, oracle.arithmetic, Path(folder), plan.hosts, plan.speculation) as scene:
            tally = asyncio.run(run(scene, oracle, plan))
    report(tally)
    if options.json:
        asked = {name: value for name, value in asdict(plan).items() if value != math.inf} | {"model": oracle.path.name}
        told = {
            "outcomes": tally.outcomes,
            "retried": tally.retried,
            "resumed": tally.resumed,
            "documents": tally.documents,
            "guesses": {"drafted": tally.drafted, "accepted": tally.accepted},
            "longest_waits_s": longest_waits(tally),
            "faults": {name: asdict(kind) for name, kind in tally.faults.items()},
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, **asked, **told}, indent=1))
    if tally.outcomes["wrong"] or tally.outcomes["invalid"] or any(name.startswith("lost") for name in tally.outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
