"""Finding the request that killed the workers, and refusing the same prompt later."""

from time import monotonic

from baton.engine.core.block_key import extend_keys, root_key
from baton.engine.core.sampling import SamplingParams
from router.poison import MAX_DEAD, MAX_PROMPTS, Poison
from router.request import Request, Stopwatch, Trace

BLOCK = 4


def request(*prompt: int, output: int = 0) -> Request:
    tokens = [*(prompt or (1, 2, 3)), *range(output)]
    return Request("r", tokens, len(tokens) - output, SamplingParams(max_tokens=9), "", 1e9, Trace(Stopwatch(monotonic)))


def on(poison: Poison, worker: str, **requests: Request) -> None:
    for name, one in requests.items():
        poison.begin(f"{name}@{worker}", one, worker, 1)


def dies(poison: Poison, worker: str, *names: str) -> list[bool]:
    """The process is lost. Each request learns of it in turn, and its stretch ends before the next one learns."""
    found = []
    for name in names:
        found.append(poison.died(f"{name}@{worker}"))
        poison.end(f"{name}@{worker}")
    return found


def test_a_request_is_condemned_if_two_processes_die_under_it() -> None:
    poison, x = Poison(), request()
    on(poison, "d0", x=x)
    assert dies(poison, "d0", "x") == [False] and poison.may_try(x)
    on(poison, "d1", x=x)
    assert dies(poison, "d1", "x") == [True] and x.suspicion.deaths == 2


def test_a_token_between_two_deaths_clears_the_request() -> None:
    """The two workers crashed for other reasons."""
    poison, x = Poison(), request()
    on(poison, "d0", x=x)
    assert dies(poison, "d0", "x") == [False]
    on(poison, "d1", x=x)
    x.tokens.append(7)
    assert dies(poison, "d1", "x") == [False]


def test_requests_on_the_same_process_are_not_condemned_with_it() -> None:
    """They were there first, moved to the same worker, and had no new token when the second worker died."""
    for order in (["x", "n", "m"], ["n", "m", "x"]):
        poison, x, n, m = Poison(), request(), request(output=3), request(output=3)
        on(poison, "d0", n=n, m=m)
        n.tokens.append(7)
        m.tokens.append(7)
        on(poison, "d0", x=x)
        assert dies(poison, "d0", *order) == [False] * 3
        on(poison, "d1", x=x, n=n, m=m, new=request())
        m.tokens.append(8)
        assert dict(zip(order, dies(poison, "d1", *order), strict=True)) == {"x": True, "n": False, "m": False}
        assert dies(poison, "d1", "new") == [False]
        assert poison.may_try(m) and poison.may_try(n)


def test_equally_suspect_requests_are_tried_one_after_another() -> None:
    poison, x, n = Poison(), request(), request()
    for worker in ("d0", "d1"):
        on(poison, worker, x=x, n=n)
        assert dies(poison, worker, "x", "n") == [False, False], "one of them is innocent"
    assert poison.may_try(n) and not poison.may_try(x) and poison.may_try(n)
    on(poison, "d2", n=n)
    n.tokens.append(7)  # so `n` is innocent
    assert poison.may_try(x) and poison.may_try(n)
    on(poison, "d2", x=x)
    assert dies(poison, "d2", "n", "x") == [False, True]


def test_a_suspect_that_gives_up_its_trial_makes_room_for_the_next() -> None:
    poison, x, n = Poison(), request(), request()
    for worker in ("d0", "d1"):
        on(poison, worker, x=x, n=n)
        dies(poison, worker, "x", "n")
    assert poison.may_try(n) and not poison.may_try(x)
    poison.forget(x)
    assert not poison.may_try(x)
    poison.forget(n)
    assert poison.may_try(x)


def test_a_request_that_kills_after_some_tokens_is_condemned_too() -> None:
    poison, x, n = Poison(), request(), request()
    on(poison, "d0", x=x, n=n)
    x.tokens.append(5)
    n.tokens.append(5)
    assert dies(poison, "d0", "x", "n") == [False, False]
    on(poison, "d1", x=x, n=n)
    n.tokens.append(6)
    assert dies(poison, "d1", "n", "x") == [False, True]


def test_the_number_of_remembered_dead_processes_is_limited() -> None:
    poison = Poison()
    for number in range(3 * MAX_DEAD):
        on(poison, f"d{number}", x=request())
        dies(poison, f"d{number}", "x")
    assert len(poison._dead) == MAX_DEAD and not poison._stretches


def parents(prompt: list[int], salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key("model", salt), prompt, BLOCK)
    return [root_key("model", salt), *keys]


def refused(poison: Poison, prompt: list[int], now: float = 0.0, salt: str = "") -> bool:
    return poison.refusal(parents(prompt, salt), BLOCK, prompt, now) is not None


def test_a_condemned_prompt_and_its_extensions_are_refused_for_a_while() -> None:
    poison, prompt = Poison(), [1, 2, 3, 4, 5, 6]
    poison.quarantine(parents(prompt), BLOCK, prompt, 600.0)
    assert poison.refusal(parents(prompt), BLOCK, prompt, 100.0) == 500.0
    assert refused(poison, prompt) and refused(poison, [*prompt, 7]) and refused(poison, [*prompt, 7, 8, 9, 10, 11])
    for other in ([1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 7, 8, 9, 10], [2, *prompt]):
        assert not refused(poison, other), other
    assert not refused(poison, prompt, salt="another tenant's")
    assert not refused(poison, prompt, now=600.0)
    assert not poison._until


def test_extensions_of_a_prompt_shorter_than_a_block_are_not_refused() -> None:
    """Otherwise a prompt of just the first token that all prompts share would block every request."""
    poison = Poison()
    poison.quarantine(parents([1]), BLOCK, [1], 600.0)
    assert refused(poison, [1]) and not refused(poison, [1, 2]) and not refused(poison, [1, 2, 3, 4, 5])


def test_a_condemned_prompt_of_whole_blocks_is_recognized() -> None:
    poison, prompt = Poison(), [1, 2, 3, 4]
    poison.quarantine(parents(prompt), BLOCK, prompt, 600.0)
    assert refused(poison, prompt) and refused(poison, [*prompt, 9]) and not refused(poison, [1, 2, 3])


def test_the_quarantine_table_is_limited() -> None:
    poison = Poison()
    for number in range(2 * MAX_PROMPTS):
        prompt = [number] * BLOCK
        poison.quarantine(parents(prompt), BLOCK, prompt, 600.0)
    assert not refused(poison, [0] * BLOCK) and refused(poison, [2 * MAX_PROMPTS - 1] * BLOCK) and len(poison._until) == MAX_PROMPTS
