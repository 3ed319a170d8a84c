"""What is kept between choices is what would be judged anew: any history of loads, work and caches, and the same choice."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster.records import BlockEvent, Load, RoleName, WorkerRecord
from router.policy import Terms, choose_decode, choose_prefill
from router.served import ServedModel
from router.standings import Ranks
from router.view import ClusterView

BLOCK, BLOCKS, KEYS = 16, 100, [bytes([i]) * 16 for i in range(6)]
NAMES = ("d0", "d1", "d2", "d3", "p0", "p1", "p2")
NOBODY = {("nobody", 0)}  # who excludes anybody is answered by a walk over all workers


def worker(name: str, longest: int = BLOCK * BLOCKS) -> WorkerRecord:
    pool: RoleName = "prefill" if name.startswith("p") else "decode"
    load = Load(credit_tokens=BLOCK * BLOCKS)
    return WorkerRecord(
        name, pool, f"{name}:1", 1, "ready", 1, "host", "small", "model", "tokenizer", BLOCK, longest, BLOCKS, "tcp", load, max_num_seqs=4
    )


names = st.sampled_from(NAMES)
tokens = st.sampled_from([0, 16, 160, 1600])
loads = st.builds(
    Load,
    running=st.integers(0, 4),
    waiting=st.sampled_from([0, 0, 1, 3]),
    credit_tokens=st.sampled_from([1600, 800, 160, -32]),
    waiting_tokens=tokens,
)
STEPS = st.one_of(
    st.tuples(st.just("answer"), names, loads),
    st.tuples(st.just("others"), names, tokens),
    st.tuples(st.just("pace"), names, st.sampled_from([0.001, 0.1])),
    st.tuples(st.just("begin"), names, tokens, st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("cached"), names, st.integers(1, 6)),
    st.tuples(st.just("roles"), names, st.sampled_from([("prefill",), ("decode",), ("prefill", "decode")])),
    st.tuples(st.just("state"), st.sampled_from(["down", "ejected", "hung", "up"]), names),
    st.tuples(st.just("epoch")),
    st.tuples(st.just("update"), st.sampled_from([BLOCK * BLOCKS, 4096])),
)


class History:
    def __init__(self) -> None:
        self.view = ClusterView({"small": "tokenizer"})
        self.view.update(map(worker, NAMES), 0.0)
        self.now, self._events = 1.0, dict.fromkeys(NAMES, 0)

    def do(self, step: Any) -> None:
        members, (kind, *args) = self.view.members, step
        self.now += 0.25
        match kind:
            case "answer":
                members.note_answer(args[0], 1, "ready", args[1], members.next_epoch())
            case "others":
                members.note_others(args[0], 1, args[1], self.now)
            case "pace":
                members.note_prefill(args[0], 1, args[1])
            case "begin":
                start = members.start_prefill if args[0].startswith("p") else members.start_decode
                start(f"r{args[2]}", args[0], args[1])
            case "end":
                members.end_prefill(f"r{args[0]}")
                members.end_decode(f"r{args[0]}")
            case "cached":
                self._events[args[0]] += 1
                self.view.apply(BlockEvent(args[0], 1, self._events[args[0]], "stored", tuple(KEYS[: args[1]])))
            case "roles":
                members.note_roles(args[0], 1, args[1])
            case "state":
                self._state(*args)
            case "epoch":
                members.next_epoch()
            case "update":
                self.view.update([worker(name, args[0]) for name in NAMES], self.now)

    def _state(self, state: str, name: str) -> None:
        members = self.view.members
        match state:
            case "down":
                members.mark_down(name, 1)
            case "ejected":
                members.mark_ejected(name, 1, "slow")
            case "hung":
                members.mark_hung(name, 1, True)
            case _:
                members.mark_hung(name, 1, False)
                members.mark_ejected(name, 1, "")
                members.note_answer(name, 1, "ready", Load(credit_tokens=1600), members.next_epoch())


def both(model: ServedModel, now: float, longest: int, prompt: int, tie: int, terms: Terms) -> tuple[Any, Any]:
    """By what is kept, and by a walk over all."""
    found = []
    excludes: tuple[set[tuple[str, int]], ...] = (set(), NOBODY)
    for exclude in excludes:
        first = choose_prefill(model, KEYS, prompt, longest, now, exclude, terms, tie)
        found.append((first, choose_decode(model, KEYS, longest, now, exclude, terms, tie)))
    return found[0], found[1]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(STEPS, max_size=25),
    st.sampled_from([100, 200, 900, 5000]),
    st.sampled_from([90, 160, 1500, 1700]),
    st.sampled_from([Terms(), Terms(0, 0), Terms(0, 64, 64, 0.5, 3)]),
)
def test_a_choice_is_the_same_as_if_all_workers_were_judged_anew(steps: list[Any], longest: int, prompt: int, terms: Terms) -> None:
    history = History()
    model = history.view.models["small"]
    for number, step in enumerate(steps):
        history.do(step)
        kept, anew = both(model, history.now, longest, prompt, number, terms)
        assert kept == anew


def test_of_a_thousand_idle_workers_none_is_judged_for_a_choice(monkeypatch: Any) -> None:
    view = ClusterView({"small": "tokenizer"})
    view.update([worker(f"{role}{number:03}") for role in "pd" for number in range(500)], 0.0)
    model, judged = view.models["small"], list[str]()
    unreported = view.members.unreported_decode_tokens
    choose_prefill(model, KEYS, 96, 200, 1.0)

    def counted(name: str) -> int:
        judged.append(name)
        return unreported(name)

    monkeypatch.setattr(view.members, "unreported_decode_tokens", counted)
    view.members.start_decode("r", "d007", 200)
    choose_prefill(model, KEYS, 96, 200, 1.0)
    assert judged.count("d007") == 1 and len(judged) <= 3
    judged.clear()
    choose_prefill(model, KEYS, 96, 200, 1.0, NOBODY)
    assert len(judged) == 500, "negative control"


@given(
    st.lists(st.tuples(st.integers(0, 8), st.one_of(st.none(), st.integers(0, 3)))), st.sets(st.integers(0, 8)), st.sets(st.integers(9, 11))
)
def test_ranks_count_equals_by_place(puts: list[tuple[int, int | None]], without: set[int], more: set[int]) -> None:
    ranks, plain = Ranks[float](), dict[int, int]()
    for place, key in puts:
        if key is None:
            ranks.drop(place)
            plain.pop(place, None)
        else:
            ranks.put(place, key)
            plain[place] = key
    left = {place: key for place, key in plain.items() if place not in without}
    assert ranks.first(without) == min(left.values(), default=None)
    assert ranks.first(without, lambda key: key >= 2) == min((key for key in left.values() if key >= 2), default=None)
    for key in range(4):
        equal = sorted(place for place, its in left.items() if its == key)
        assert ranks.count(key, without) == len(equal)
        assert [ranks.nth(key, number, without) for number in range(len(equal))] == equal
        mixed = sorted([*equal, *more])
        assert [ranks.nth(key, number, without, more) for number in range(len(mixed))] == mixed
