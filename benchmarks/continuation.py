"""Whether a stream that is disturbed has the tokens, and the bits of the logits, of an undisturbed one, in every number type.

    python benchmarks/continuation.py --model FOLDER [--streams 24] [--tokens 80] [--guess] [--json FILE]

An engine serves the streams together, greedy and then seeded. Others serve them again, each disturbed at a place drawn at random: see
KINDS. The last kinds are negative controls: an engine that is not told where the output starts, and one that takes the KV of output for
that of a prompt (`engine.reuse_output`). Exits with status 1 if a stream differs that must not, or if no control does.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from machine import describe
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from host_pool import on_host

from baton.cli.up import SHIPPED
from baton.engine.choice import load_runner
from baton.engine.core.drafting import Drafter, DraftRequest, Tree
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.protocol import Chunk, Tokens, path
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence, State
from baton.engine.runner import Computed, ModelRunner

TYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weight_dtype": "int8"},
    "int4": {"weight_dtype": "int4"},
    "float32/int8": {"kv_dtype": "int8"},
    "bfloat16/int8": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "float32/int5": {"kv_dtype": "int5"},
    "bfloat16/int5": {"dtype": "bfloat16", "kv_dtype": "int5"},
}
MOST_GUESSES, BRANCHES = 6, 3
TOPICS = (
    "a lighthouse keeper", "how bread rises", "the rules of chess", "why the sky is blue", "a river that lost its way", "planting an oak",
    "the history of the bicycle", "a letter to a friend abroad", "how a telescope works", "a recipe for lentil soup", "the habits of bees",
    "learning to swim",
)  # fmt: skip
ASK = "Write a short and cheerful text about {}."
MORE = " It should mention {}, and after that {}, but not in the first sentence, and it should end with a question."


class Watched(ModelRunner):
    """Keeps a digest of the logits after every known token: (sequence, tokens) → digest."""

    def __init__(self, model: Any, layout: Any, device: torch.device) -> None:
        super().__init__(model, layout, device)
        self.seen: dict[tuple[str, int], bytes] = {}

    def _logits(self, batch: Seq[Chunk]) -> Computed:
        computed = super()._logits(batch)
        self._rows = [blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in computed.logits]
        return computed

    def run(self, batch: Seq[Chunk]) -> list[Tokens]:
        answers = super().run(batch)
        rows = iter(self._rows)
        for chunk, tokens in zip(batch, answers, strict=True):
            own = [next(rows) for _ in chunk.rows]
            way = path(chunk, tokens)[1] if tokens else ()
            for count, row in enumerate(way):  # one after a wrong guess is of another text
                self.seen[chunk.seq.id, len(chunk.seq.tokens) + count] = own[row]
        return answers


@dataclass(slots=True)
class Stream:
    id: str
    prompt: list[int]
    params: SamplingParams
    output: list[int] = field(default_factory=list)  # undisturbed
    before: "Stream | None" = None  # the conversation's turn before

    def sequence(self, known: int = 0, hold: bool = False, prompt_len: int | None = None) -> Sequence:
        """With so many tokens of the output known."""
        tokens = self.prompt + self.output[:known]
        return Sequence(self.id, tokens, prompt_len or len(self.prompt), self.params, b"root", hold)


class Guesses(Drafter):
    """Guesses of what some streams will say: right ones, wrong ones, and right ones up to a wrong one. Of several that begin with different
    tokens, any may be the right one."""

    def __init__(self, streams: list[Stream], seed: int = 0) -> None:
        self._known = {stream.id: stream.prompt + stream.output for stream in streams}
        self._rng = random.Random(seed)

    def propose(self, asks: Seq[DraftRequest]) -> list[Seq[int]]:
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: DraftRequest) -> Seq[int]:
        guess = self._guess(ask.seq, ask.most)
        if not guess or self._rng.random() < 0.3:
            return guess
        ways = [[guess[0] ^ flip, *guess[1:]] for flip in range(BRANCHES)]
        self._rng.shuffle(ways)
        return Tree.of(ways[0], ways[1:])

    def _guess(self, seq: Sequence, most: int) -> list[int]:
        count, at = self._rng.randrange(MOST_GUESSES + 1), len(seq.tokens)
        right = self._known.get(seq.id, [])[at : at + min(most, count)]
        if right and self._rng.random() < 0.5:
            right[self._rng.randrange(len(right))] ^= 1
        return right


class Bench:
    """Engines with the same weights, and pools of their own. `drafter` guesses for all that are made from now on."""

    def __init__(self, runner: ModelRunner, longest: int, streams: int) -> None:
        self._runner, self._longest, self._streams = runner, longest, streams
        self.drafter: Guesses | None = None

    def engine(self, budget: int = 512, **options: Any) -> Engine:
        runner = Watched(self._runner.model, self._runner.layout, self._runner.device)
        block = runner.layout.block_size
        runner.attach(KvPool(runner.layout, (self._streams + 2) * -(-self._longest // block)))
        limits = Limits(self._streams, max(budget, self._streams), speculation_branches=BRANCHES)
        return Engine(runner, limits, self._longest, drafter=self.drafter, **options)


Served = list[tuple[Sequence, Engine]]
Kind = Callable[[Bench, list[Stream], random.Random], Served]


def finished(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def lost(engine: Engine) -> None:
    """Nothing that is cached is found any more."""
    engine.pool.forget(range(engine.pool.num_blocks))


def undisturbed(bench: Bench, streams: list[Stream], rng: random.Random) -> Served:
    engine = bench.engine()
    served = [(stream.sequence(), engine) for stream in streams]
    for seq, _ in served:
        engine.add(seq)
    finished(engine)
    return served


def preempted(bench: Bench, streams: list[Stream], rng: random.Random) -> Served:
    """Each loses its KV once, at some token; what it had is not found in the cache. Chunks are of any size."""
    engine, left = bench.engine(rng.choice((40, 100, 512))), {stream.id: cut(stream, rng) for stream in streams}
    served = [(stream.sequence(), engine) for stream in streams]
    for seq, _ in served:
        engine.add(seq)
    while not engine.idle:
        engine.step()
        for seq in [seq for seq in engine.scheduler.running if seq.output_len >= left.get(seq.id, 1 << 30)]:
            del left[seq.id]
            engine.scheduler.preempt(seq)
            lost(engine)
    return served


def retried(bench: Bench, streams: list[Stream], rng: random.Random) -> Served:
    """Another engine gets the prompt and the tokens that were sent: after the death of a worker, or of the router."""
    engine = bench.engine(rng.choice((40, 100, 512)))
    served = [(stream.sequence(cut(stream, rng)), engine) for stream in streams]
    for seq, _ in served:
        engine.add(seq)
        engine.step()
    finished(engine)
    return served


def handed_over(bench: Bench, streams: list[Stream], rng: random.Random, late: bool = False, fails: bool = False) -> Served:
    """The same by way of a prefill worker, which computes all known tokens and samples the next. `late`: the decode worker has reserved
    blocks before that token is known, and gets the KV of a part. `fails`: of none."""
    prefill, decode = bench.engine(rng.choice((40, 100, 512))), bench.engine()
    served: Served = []
    for stream in streams:
        held = stream.sequence(cut(stream, rng) - 1, hold=True)
        twin = Sequence(held.id, list(held.tokens), held.prompt_len, held.params, held.root)
        prefill.add(held)
        while held.state is not State.HELD:
            prefill.step()
        end = len(held.tokens) - 1
        if not late:
            twin.tokens.append(held.tokens[-1])
        while not decode.reserve(twin):
            decode.step()
        if fails:
            decode.release(decode.give_up(twin, held.tokens[-1]))
        else:
            end = rng.randrange(max(1, twin.computed), end) if late else end  # the twin has what another stream left
            count = -(-end // decode.block_size)
            on_host(decode.runner.pool).array[twin.blocks[:count]] = on_host(prefill.runner.pool).array[held.blocks[:count]]
            decode.arrive(twin, end)
            decode.adopt(twin, held.tokens[-1] if late else None)
        prefill.abort(held.id)
        served.append((twin, decode))
        decode.step()
    finished(decode)
    return served


def handed_over_late(bench: Bench, streams: list[Stream], rng: random.Random) -> Served:
    return handed_over(bench, streams, rng, late=True)


def recomputed(bench: Bench, streams: list[Stream], rng: random.Random) -> Served:
    """The KV does not arrive: the decode worker computes it, and learns the first token."""
    return handed_over(bench, streams, rng, late=True, fails=True)


def cached(bench: Bench, streams: list[Stream], rng: random.Random) -> Served:
    """A part of each prompt, of any length, was served before."""
    engine = bench.engine()
    for number, stream in enumerate(streams):
        part = stream.prompt[: rng.randrange(1, len(stream.prompt))]
        engine.add(Sequence(f"before-{number}", part, len(part), replace(stream.params, max_tokens=4), b"root"))
    finished(engine)
    served = [(stream.sequence(), engine) for stream in streams]
    for seq, _ in served:
        engine.add(seq)
    finished(engine)
    return served


def next_turn(bench: Bench, streams: list[Stream], rng: random.Random, reuse: bool = False) -> Served:
    """The prompt holds an earlier prompt and its answer, which the engine has served. The streams' own baseline has not."""
    engine = bench.engine(reuse_output=reuse)
    for number, stream in enumerate(streams):
        assert stream.before is not None
        engine.add(replace(stream.before, id=f"before-{number}").sequence())
    finished(engine)
    served = [(stream.sequence(), engine) for stream in streams]
    for seq, _ in served:
        engine.add(seq)
    finished(engine)
    return served


def output_reused(bench: Bench, streams: list[Stream], rng: random.Random) -> Served:
    """Control: as `next_turn`, and the answer's KV is taken for that of a prompt."""
    return next_turn(bench, streams, rng, reuse=True)


def untold(bench: Bench, streams: list[Stream], rng: random.Random) -> Served:
    """Control: as `retried`, but the output so far counts as prompt."""
    engine = bench.engine()
    served: Served = []
    for stream in streams:
        known = cut(stream, rng)
        seq = stream.sequence(known, prompt_len=len(stream.prompt) + known)
        seq.params = replace(stream.params, max_tokens=stream.params.max_tokens - known)
        served.append((seq, engine))
        engine.add(seq)
    finished(engine)
    return served


def cut(stream: Stream, rng: random.Random) -> int:
    return rng.randrange(1, len(stream.output))


KINDS: tuple[Kind, ...] = (preempted, retried, handed_over, handed_over_late, recomputed, cached)
LATER: tuple[Kind, ...] = (next_turn,)  # with streams that have a turn before
CONTROLS: tuple[Kind, ...] = (untold, output_reused)


def seen(engine: Engine) -> dict[tuple[str, int], bytes]:
    assert isinstance(engine.runner, Watched)
    return engine.runner.seen


def baseline(bench: Bench, streams: list[Stream]) -> dict[tuple[str, int], bytes]:
    """Serves the streams undisturbed. Fills in their outputs; returns the digests."""
    served = undisturbed(bench, streams, random.Random(0))
    for stream, (seq, _) in zip(streams, served, strict=True):
        stream.output = seq.tokens[len(stream.prompt) :]
    return seen(served[0][1])


def differences(streams: list[Stream], digests: dict[tuple[str, int], bytes], served: Served) -> dict[str, int]:
    """Streams whose tokens differ, logits that differ, and how many were compared; guesses that were right. Logits after a token that
    differs do not count."""
    engines = {id(engine): engine for _, engine in served}.values()
    found = {"streams": len(streams), "streams_differ": 0, "logits": 0, "logits_differ": 0}
    found["guessed"] = sum(engine.counts.accepted_tokens for engine in engines)
    for stream, (seq, engine) in zip(streams, served, strict=True):
        whole = stream.prompt + stream.output
        found["streams_differ"] += seq.tokens != whole
        same = next((n for n, (a, b) in enumerate(zip(seq.tokens, whole, strict=False)) if a != b), len(whole))
        pairs = [
            (digests[stream.id, n], other)
            for n in range(same + 1)
            if (other := seen(engine).get((stream.id, n))) and (stream.id, n) in digests
        ]
        found["logits"] += len(pairs)
        found["logits_differ"] += sum(a != b for a, b in pairs)
    return found


def measure(
    runner: ModelRunner, prompts: list[list[int]], tokens: int, seed: int = 1, guess: bool = False
) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(greedy or seeded, kind, `differences`). `guess`: the disturbed streams' tokens are guessed, see `Guesses`."""
    longest = 2 * (max(map(len, prompts)) + tokens) + 2
    bench = Bench(runner, longest, len(prompts))
    for way, temperature in (("greedy", 0.0), ("seeded", 0.8)):
        rng, bench.drafter = random.Random(seed), None
        streams = [
            Stream(f"s{i}", prompt, SamplingParams(max_tokens=tokens, temperature=temperature, seed=i, ignore_eos=True))
            for i, prompt in enumerate(prompts)
        ]
        digests = baseline(bench, streams)
        turns = [Stream(f"t{i}", each.prompt + each.output + each.prompt[:20], each.params, before=each) for i, each in enumerate(streams)]
        later = baseline(bench, turns)
        for kind in (*KINDS, *LATER, *CONTROLS):
            has_before = kind in LATER or kind is output_reused
            given = (turns, later) if has_before else (streams, digests)
            bench.drafter = Guesses(given[0]) if guess else None
            yield way, kind.__name__, differences(*given, kind(bench, given[0], rng))


def asked(model: Path, count: int) -> list[list[int]]:
    """Prompts of different lengths, the longest of several times as many tokens as the shortest."""
    tokenizer, rng = Tokenizer.from_file(str(model / "tokenizer.json")), random.Random(7)
    texts = [
        ASK.format(TOPICS[i % len(TOPICS)]) + "".join(MORE.format(*rng.sample(TOPICS, 2)) for _ in range(i % 13)) for i in range(count)
    ]
    return [tokenizer.encode(text).ids for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--types", nargs="*", default=list(TYPES), choices=list(TYPES))
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--guess", action="store_true", help="steps of several tokens: guesses, half of them right, are verified")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    prompts = asked(options.model, options.streams)
    print(describe())
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    print(f"{options.model.name}: {len(prompts)} prompts of {shortest} to {longest} tokens, and {options.tokens} more")
    rows: list[dict[str, Any]] = []
    for name in options.types:
        runner = load_runner(ModelRunner, options.model, products="baton", **TYPES[name])
        for way, kind, row in measure(runner, prompts, options.tokens, guess=options.guess):
            rows.append({"type": name, "way": way, "kind": kind, **row})
            what = f"{row['streams_differ']:3} of {row['streams']} streams, {row['logits_differ']:5} of {row['logits']:5} logits differ"
            print(f"  {name:9} {way:7} {kind:17} {what}", flush=True)
    controls = {kind.__name__ for kind in CONTROLS}
    wrong = sum(row["logits_differ"] + row["streams_differ"] for row in rows if row["kind"] not in controls)
    caught = all(any(row["logits_differ"] for row in rows if row["kind"] == control) for control in controls)
    print(f"{wrong} differences; the controls " + ("differ" if caught else "DO NOT DIFFER"))
    if options.json:
        said = {"machine": describe(), "model": options.model.name, "streams": len(prompts), "tokens": options.tokens}
        said |= {"guess": options.guess, "rows": rows}
        options.json.write_text(json.dumps(said, indent=1))
    sys.exit(bool(wrong) or not caught)


if __name__ == "__main__":
    main()
