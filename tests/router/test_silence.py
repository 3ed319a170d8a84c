"""The event loop carries all streams, so no input may block it for long.

Wall-clock time says little on a busy machine. Where only the event loop works, the tests measure the CPU time of its thread. Where another
thread works, they measure the longest silence of the loop as a share of the whole work.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from fake_workers import record
from turns import within

import baton.models
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from router.admission import Admission
from router.journal import Journal
from router.service import Draws, GenerateService, ModelText
from router.tokenizer import Tokenizer
from router.validate import Ask, AskSampling
from router.view import ClusterView

LOOP_S = 0.020  # CPU time that one request may take from the loop at a stretch
SENTENCE = "Once upon a time there was a little fox who lived by the river. "


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(baton.models.__file__).parent / "tale")


class Untouched:
    """A tokenizer that must not be used."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("encode", "render"):
            raise AssertionError("work began for a request that is refused for its size")
        return getattr(self.inner, name)


class NoDispatch:
    async def generate(self, request: Any) -> AsyncIterator[Any]:
        raise BatonError(Reason.NO_WORKER, "the test ends here")
        yield


def service(tokenizer: Any, context: int) -> GenerateService:
    view = ClusterView({"tale": tokenizer.fingerprint})
    view.update([record("d0", tokenizer_fingerprint=tokenizer.fingerprint, max_model_len=context)], 0.0)
    config, numbers = RouterConfig(), count()
    return GenerateService(
        model=view.models["tale"],
        text=ModelText(tokenizer),
        dispatcher=NoDispatch(),  # type: ignore[arg-type]
        admission=Admission(config.max_inflight, config.max_queue),
        config=config,
        journal=Journal(Book("router", model="tale"), Tracer(), "tale", SloConfig(), keep=10),
        draws=Draws(lambda: 1, lambda: f"req-{next(numbers)}"),
    )


@dataclass
class Silence:
    longest_s: float = 0.0
    took_s: float = 0.0


@asynccontextmanager
async def listening() -> AsyncIterator[Silence]:
    """Measures the longest time for which the event loop did not run other tasks."""
    silence, began = Silence(), time.perf_counter()

    async def listen() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.0005)
            now = time.perf_counter()
            silence.longest_s, last = max(silence.longest_s, now - last), now

    listener = asyncio.create_task(listen())
    await asyncio.sleep(0.01)
    try:
        yield silence
    finally:
        await asyncio.sleep(0.01)
        silence.took_s = time.perf_counter() - began
        listener.cancel()


async def refused(house: GenerateService, ask: Ask) -> BatonError:
    with pytest.raises(BatonError) as caught:
        async with aclosing(house.generate(ask, 60)) as events:
            async for _ in events:
                pass
    return caught.value


HOSTILE = {
    "a text of 1 MiB": (Ask(text="x" * (1 << 20)), Reason.CONTEXT_LENGTH),
    "a text of 4 MiB": (Ask(text="x" * (4 << 20)), Reason.INVALID_FIELD),
    "1.3 million ids": (Ask(token_ids=(7,) * 1_300_000), Reason.INVALID_FIELD),
    "a million ids": (Ask(token_ids=(7,) * 1_000_000), Reason.CONTEXT_LENGTH),
    "100,000 messages": (Ask(messages=(("user", "hello"),) * 100_000), Reason.INVALID_FIELD),
    "1,000 messages of 1 kB": (Ask(messages=(("user", "x" * 1024),) * 1000), Reason.CONTEXT_LENGTH),
    "300,000 biases": (Ask(text="x", sampling=AskSampling(logit_bias=dict.fromkeys(range(300_000), 1.0))), Reason.INVALID_FIELD),
    "300,000 stops": (Ask(text="x", sampling=AskSampling(stop=("a",) * 300_000)), Reason.INVALID_FIELD),
    "300,000 stop tokens": (Ask(text="x", sampling=AskSampling(stop_token_ids=(1,) * 300_000)), Reason.INVALID_FIELD),
    "a salt of 4 MiB": (Ask(text="x", cache_salt="s" * (4 << 20)), Reason.INVALID_FIELD),
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    """What a test process has on its heap is no work of the loop."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("name", HOSTILE)
async def test_refusing_a_request_for_its_size_takes_almost_no_time_of_the_loop(tokenizer: Tokenizer, name: str) -> None:
    house, (ask, reason) = service(Untouched(tokenizer), 2048), HOSTILE[name]
    await refused(house, Ask(model="another"))  # warm-up: things that are created only once
    began = time.thread_time()
    error = await refused(house, ask)
    assert error.reason is reason
    within(time.thread_time() - began, LOOP_S)


@pytest.mark.usefixtures("no_collection")
async def test_128_simultaneous_long_prompts_take_almost_no_time_of_the_loop(tokenizer: Tokenizer) -> None:
    house = service(Untouched(tokenizer), 2048)
    ask = Ask(text=SENTENCE * 512)  # 32 kB
    await refused(house, Ask(model="another"))  # warm-up: things that are created only once
    began = time.thread_time()
    errors = await asyncio.gather(*(refused(house, replace(ask, request_id=f"{number}")) for number in range(128)))
    assert {error.reason for error in errors} == {Reason.CONTEXT_LENGTH}
    within(time.thread_time() - began, 128 * LOOP_S / 10)


LONG = SENTENCE * 8192  # 512 KiB, 130,000 tokens


async def silence_of(work: Callable[[], Awaitable[object]]) -> Silence:
    async with listening() as silence:
        await work()
    return silence


async def test_a_long_prompt_is_tokenized_while_the_loop_runs(tokenizer: Tokenizer) -> None:
    """Negative control: a call that holds the GIL from beginning to end."""
    house = service(tokenizer, 1 << 20)
    ours = await silence_of(lambda: refused(house, Ask(text=LONG)))
    held = await silence_of(lambda: asyncio.to_thread(tokenizer._plain.encode, LONG, add_special_tokens=False))
    assert held.longest_s > 0.5 * held.took_s, "the negative control did not block the loop"
    assert ours.longest_s < 0.25 * held.longest_s and ours.longest_s < 0.25 * ours.took_s


async def test_a_prompt_that_is_too_long_is_recognized_by_its_first_pieces(tokenizer: Tokenizer) -> None:
    """No limit in bytes is known for such a tokenizer. The rest of the text is never examined."""
    began = time.process_time()
    with pytest.raises(BatonError) as caught:
        tokenizer.encode(LONG, 2048)
    short = time.process_time() - began
    assert caught.value.reason is Reason.CONTEXT_LENGTH and "at least" in caught.value.message
    began = time.process_time()
    assert len(tokenizer.encode(LONG, 1 << 20)) > 100_000
    assert short < 0.5 * (time.process_time() - began)


async def test_a_prompt_that_may_fit_is_encoded_once(tokenizer: Tokenizer) -> None:
    spent = []
    for most in (None, len(LONG) // 2):
        began = time.process_time()
        tokenizer.encode(LONG, most)
        spent.append(time.process_time() - began)
    assert spent[1] < 1.5 * spent[0], "counted first, it would take twice as long"


@pytest.mark.parametrize("text", ["", " ", "x", SENTENCE, SENTENCE * 100, "né 你好 😀", "<|endoftext|> a <|im_start|>"])
def test_encoding_without_the_gil_returns_the_same_ids(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == tokenizer._plain.encode(text).ids
