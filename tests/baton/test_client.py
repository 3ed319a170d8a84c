"""The client for application backends, sync and async, against an in-process server that answers as the test specifies."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import baton
from baton.client import AsyncClient, Client, GenerateError, Model, Result, Token, Usage, build_request, channel_options
from baton.cluster.errors import BatonError, Reason, Violation
from baton.cluster.rpc import Context, abort
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc

FINISHED = pb.Finished(
    request_id="r",
    reason=pb.FINISH_REASON_STOP,
    text="!",
    stop="END",
    usage=pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
    stages=pb.StageTimes(queue_ms=1, prefill_ms=2, transfer_ms=3, decode_ms=4, read_ms=0.5),
    workers=pb.Workers(prefill="p0", decode="d0", retries=1),
    handoff=pb.Handoff(transport="nixl", blocks=3, bytes=300),
)
WHOLE = (
    pb.GenerateResponse(accepted=pb.Accepted(request_id="r", model="m", prompt_tokens=3)),
    pb.GenerateResponse(tokens=pb.Tokens(tokens=[pb.Token(index=0, id=7, text="Hel")])),
    pb.GenerateResponse(
        tokens=pb.Tokens(tokens=[pb.Token(index=1, id=8, text="lo", logprob=-0.5, top=[pb.TopLogprob(id=8, logprob=-0.5)])])
    ),
    pb.GenerateResponse(finished=FINISHED),
)


class Scripted(generation_pb2_grpc.GenerationServicer):
    """Sends `responses`; then fails with `error` or `bare`, or hangs if `hangs` is set."""

    def __init__(self) -> None:
        self.responses: Sequence[pb.GenerateResponse] = WHOLE
        self.error: BatonError | None = None
        self.bare: grpc.StatusCode | None = None
        self.hangs = False
        self.asked: list[pb.GenerateRequest] = []
        self.timeouts: list[float | None] = []
        self.cancelled = threading.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        self.asked.append(request)
        self.timeouts.append(context.time_remaining())
        try:
            for response in self.responses:
                yield response
            if self.error is not None:
                await abort(context, self.error)
            if self.bare is not None:
                await context.abort(self.bare, "bare")
            if self.hangs:
                await asyncio.sleep(60)
        except (asyncio.CancelledError, GeneratorExit):  # GeneratorExit: while a response was being sent
            self.cancelled.set()
            raise

    async def Tokenize(self, request: pb.GenerateRequest, context: Any) -> pb.TokenizeResponse:
        if self.error is not None:
            await abort(context, self.error)
        return pb.TokenizeResponse(token_ids=pb.TokenIds(ids=map(ord, request.text)))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids.ids)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="toy"), pb.Model(name="long", max_model_len=9)])


@contextmanager
def serving() -> Iterator[tuple[Scripted, str]]:
    """Runs the server on a separate thread, because the sync client blocks its own."""
    servicer, address, stop = Scripted(), "", threading.Event()
    ready = threading.Event()

    async def serve() -> None:
        nonlocal address
        server = grpc.aio.server()
        generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
        healthy = health.aio.HealthServicer()
        await healthy.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.01)
        await server.stop(None)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, serve())
        assert ready.wait(5)
        try:
            yield servicer, address
        finally:
            stop.set()
            running.result(5)


@pytest.fixture
def server() -> Iterator[tuple[Scripted, str]]:
    with serving() as pair:
        yield pair


@pytest.fixture
def scripted(server: tuple[Scripted, str]) -> Scripted:
    return server[0]


@pytest.fixture
def address(server: tuple[Scripted, str]) -> str:
    return server[1]


Take = Callable[..., tuple[list[Token], Result]]


def take_sync(address: str, prompt: str | None = "x", **ask: Any) -> tuple[list[Token], Result]:
    with Client(address) as client, client.generate(prompt, **ask) as stream:
        return list(stream), stream.result


def take_async(address: str, prompt: str | None = "x", **ask: Any) -> tuple[list[Token], Result]:
    async def take() -> tuple[list[Token], Result]:
        async with AsyncClient(address) as client, client.generate(prompt, **ask) as stream:
            return [token async for token in stream], stream.result

    return asyncio.run(take())


both = pytest.mark.parametrize("take", [take_sync, take_async], ids=["sync", "async"])


@both
def test_every_part_of_an_answer_is_returned(take: Take, scripted: Scripted, address: str) -> None:
    tokens, result = take(address, "Once", max_tokens=5, temperature=0.0, timeout_s=30, model="m", request_id="r", cache_salt="s")
    assert tokens == [Token(0, 7, "Hel"), Token(1, 8, "lo", -0.5, ((8, -0.5),))]
    assert (result.text, result.token_ids, result.finish_reason, result.stop) == ("Hello!", (7, 8), "stop", "END")
    assert result.usage == Usage(3, 2, 1) and result.request_id == "r"
    assert result.stages_ms == {
        "queue": 1, "prefill": 2, "transfer": 3, "decode": 4, "prefill_wait": 0, "prefill_compute": 0,
        "connect": 0, "read": 0.5, "verify": 0,
    }  # fmt: skip
    assert result.workers == {"prefill": "p0", "decode": "d0", "retries": 1}
    assert (result.handoff["transport"], result.handoff["blocks"], result.handoff["bytes"]) == ("nixl", 3, 300)
    (asked,) = scripted.asked
    assert (asked.text, asked.model, asked.request_id, asked.cache_salt) == ("Once", "m", "r", "s")
    assert asked.sampling.max_tokens == 5 and asked.sampling.HasField("temperature") and not asked.sampling.HasField("top_p")
    assert scripted.timeouts[0] is not None and 25 < scripted.timeouts[0] < 31  # gRPC rounds it up


@both
@pytest.mark.parametrize("finished", [{"stop_token_id": 9}, {}], ids=["token", "nothing"])
def test_the_result_says_what_stopped_it(take: Take, finished: dict[str, Any], scripted: Scripted, address: str) -> None:
    scripted.responses = [*WHOLE[:3], pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, **finished))]
    _, result = take(address)
    assert result.stop == finished.get("stop_token_id") and result.finish_reason == "length"


@both
@pytest.mark.parametrize("reason", Reason)
def test_refusals_are_typed(take: Take, reason: Reason, scripted: Scripted, address: str) -> None:
    scripted.responses = WHOLE[:2]
    scripted.error = BatonError(reason, "because", (Violation("sampling.top_p", "must be at most 1"),), {"tokens_emitted": "1"})
    with pytest.raises(GenerateError, match=f"{reason.name}: because") as caught:
        take(address)
    error = caught.value
    assert (error.code, error.reason, error.message) == (reason.value.grpc, reason.name, "because")
    assert error.violations == (("sampling.top_p", "must be at most 1"),)
    assert error.retry_after_s == reason.value.retry_after and error.metadata == {"tokens_emitted": "1"}


@both
def test_a_bare_status_is_an_error_too(take: Take, scripted: Scripted, address: str) -> None:
    scripted.bare = grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(GenerateError) as caught:
        take(address)
    error = caught.value
    assert (error.code, error.reason, error.violations, error.retry_after_s) == ("RESOURCE_EXHAUSTED", "", (), None)
    assert str(error) == "RESOURCE_EXHAUSTED: bare"


@both
def test_an_unreachable_server_is_an_error(take: Take) -> None:
    with serving() as (_, address):
        pass
    with pytest.raises(GenerateError) as caught:
        take(address)
    assert caught.value.code == "UNAVAILABLE"


@both
def test_the_deadline_ends_the_request(take: Take, scripted: Scripted, address: str) -> None:
    scripted.hangs = True
    began = time.monotonic()
    with pytest.raises(GenerateError) as caught:
        take(address, timeout_s=0.2)
    assert caught.value.code == "DEADLINE_EXCEEDED" and time.monotonic() - began < 3
    assert scripted.cancelled.wait(3)


@both
def test_a_stream_that_ends_early_has_no_result(take: Take, scripted: Scripted, address: str) -> None:
    scripted.responses = WHOLE[:3]
    with pytest.raises(RuntimeError, match="not come to its end"):
        take(address)


# Leaving early


def test_leaving_the_context_cancels(scripted: Scripted, address: str) -> None:
    scripted.responses, scripted.hangs = WHOLE[:3], True
    with Client(address) as client:
        with client.generate("x") as stream:
            assert next(iter(stream)).text == "Hel" and stream.request_id == "r"
            with pytest.raises(RuntimeError, match="not come to its end"):
                _ = stream.result
        assert scripted.cancelled.wait(3)


def test_no_thread_of_grpc_is_still_at_work_on_a_call_that_was_left(scripted: Scripted, address: str) -> None:
    """A process that ends then could hang: see `leave`."""
    scripted.responses, scripted.hangs = WHOLE[:3], True
    with Client(address) as client:
        for _ in range(20):
            with client.generate("x") as stream:
                next(iter(stream))
            assert not stream._call.add_callback(print), "gRPC still has an event of the call to deliver"


async def test_leaving_the_async_context_cancels(scripted: Scripted, address: str) -> None:
    scripted.responses, scripted.hangs = WHOLE[:3], True
    async with AsyncClient(address) as client:
        async with client.generate("x") as stream:
            async for token in stream:
                assert token.text == "Hel" and stream.request_id == "r"
                break
            with pytest.raises(RuntimeError, match="not come to its end"):
                _ = stream.result
        assert await asyncio.to_thread(scripted.cancelled.wait, 3)


async def test_cancelling_the_task_cancels_the_request(scripted: Scripted, address: str) -> None:
    scripted.responses, scripted.hangs = WHOLE[:3], True
    async with AsyncClient(address) as client:

        async def read() -> None:
            async with client.generate("x") as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(read())
        while not scripted.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await asyncio.to_thread(scripted.cancelled.wait, 3)


def test_cancelling_from_elsewhere_is_an_error_for_the_reader(scripted: Scripted, address: str) -> None:
    scripted.responses, scripted.hangs = WHOLE[:3], True
    with Client(address) as client, client.generate("x") as stream:
        threading.Timer(0.1, stream.cancel).start()
        with pytest.raises(GenerateError) as caught:
            list(stream)
    assert caught.value.code == "CANCELLED"


@pytest.mark.parametrize("how", ["stream.cancel", "client.close"])
async def test_cancelling_from_elsewhere_does_not_cancel_the_task_of_the_reader(how: str, scripted: Scripted, address: str) -> None:
    """A task that was not cancelled must not end as if it were: it would vanish from its task group without a trace."""
    scripted.responses, scripted.hangs = WHOLE[:3], True
    client = AsyncClient(address)
    stream = client.generate("x")

    async def read() -> list[Token]:
        return [token async for token in stream]

    task = asyncio.create_task(read())
    while not scripted.asked:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    if how == "stream.cancel":
        stream.cancel()
    else:
        await client.close()
    with pytest.raises(GenerateError) as caught:
        async with asyncio.timeout(30):
            await task
    assert caught.value.code == "CANCELLED"
    await client.close()


def test_a_finished_request_is_not_cancelled(scripted: Scripted, address: str) -> None:
    take_sync(address)
    assert not scripted.cancelled.wait(0.2)


async def test_many_concurrent_requests_share_one_channel(scripted: Scripted, address: str) -> None:
    async with AsyncClient(address) as client:

        async def one() -> str:
            async with client.generate("x") as stream:
                async for _ in stream:
                    pass
                return stream.result.text

        assert await asyncio.gather(*(one() for _ in range(50))) == ["Hello!"] * 50


def test_many_threads_can_share_one_client(scripted: Scripted, address: str) -> None:
    with Client(address) as client, ThreadPoolExecutor(8) as pool:

        def one(_: int) -> str:
            with client.generate("x") as stream:
                list(stream)
                return stream.result.text

        assert list(pool.map(one, range(32))) == ["Hello!"] * 32


# Requests


def test_every_kind_of_prompt_is_accepted() -> None:
    assert build_request("").WhichOneof("prompt") == "text"
    plain = build_request("x", parse_special=False, temperature=0.5)
    assert plain == pb.GenerateRequest(text="x", parse_special=False, sampling=pb.SamplingParams(temperature=0.5))
    named = build_request(messages=[{"role": "user", "content": "Hi", "name": "Ida"}]).chat.messages[0]
    assert named == pb.ChatMessage(role="user", content="Hi", name="Ida")
    chat = build_request(messages=[{"role": "user", "content": "Hi"}])
    assert [(message.role, message.content) for message in chat.chat.messages] == [("user", "Hi")]
    assert list(build_request(token_ids=[1, 2]).token_ids.ids) == [1, 2]
    assert build_request(messages=[]).WhichOneof("prompt") == "chat" and build_request(token_ids=[]).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize("prompts", [{}, {"prompt": "x", "token_ids": [1]}, {"messages": [], "token_ids": []}])
def test_exactly_one_prompt_is_required(prompts: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="exactly one"):
        build_request(**prompts)


def test_every_sampling_field_is_accepted_and_no_other() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "top_a": 0.1, "repetition_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": 0.5, "seed": 7, "logit_bias": {3: 1.5}, "logprobs": 2, "stop_token_ids": [4], "stop": ["x"],
        "max_tokens": 5, "min_tokens": 1, "ignore_eos": True, "structured": {"kind": "regex", "text": "a+"},
        "logprobs_mode": "processed_logprobs", "prompt_logprobs": 1,
    }  # fmt: skip
    assert set(given) == set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    assert build_request("x", **given).sampling == pb.SamplingParams(**{**given, "structured": pb.Structured(kind="regex", text="a+")})
    assert build_request("x", top_p=None) == build_request("x")
    with pytest.raises(TypeError, match="max_token, temprature"):
        build_request("x", temprature=1, max_token=3)


def test_importing_the_client_loads_only_the_stubs() -> None:
    code = """
import sys
from baton.client import AsyncClient, Client
with Client("127.0.0.1:1") as client:
    try:
        list(client.generate("x", timeout_s=0.1))
    except Exception as error:
        assert type(error).__name__ == "GenerateError", error
ours = {"decode_worker", "kvtransfer", "loadtest", "prefill_worker", "router"}
loaded = {name.split(".")[0] for name in sys.modules}
print(sorted(loaded & (ours | {"torch", "numpy", "pydantic", "redis", "ray", "tokenizers", "typer", "rich", "yaml"})))
print(sorted(name for name in sys.modules if name.startswith("baton.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[]",
        "['baton.answer', 'baton.attempts', 'baton.client', 'baton.targets', 'baton.v1', 'baton.v1.generation_pb2',"
        " 'baton.v1.generation_pb2_grpc']",
    ]


def test_the_package_exports_its_client_and_loads_it_lazily() -> None:
    code = "import sys, baton; assert 'grpc' not in sys.modules; from baton import AsyncClient, Client; import baton.client as c;"
    code += "assert (Client, AsyncClient) == (c.Client, c.AsyncClient) and not {'torch', 'redis', 'pydantic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert not hasattr(baton, "Server")


@pytest.mark.parametrize(
    ("address", "through_a_proxy"),
    [("127.0.0.1:1", False), ("localhost:1", False), ("[::1]:1", False), ("dns:///localhost:1", False), ("ipv4:127.0.0.1:1", False),
     ("far.example:1", True), ("10.0.0.1:1", True), ("127.example.com:1", True), ("localhost.example:1", True)],
)  # fmt: skip
def test_only_other_hosts_are_reached_through_a_proxy(address: str, through_a_proxy: bool) -> None:
    assert (("grpc.enable_http_proxy", 0) not in channel_options(address)) == through_a_proxy


def test_a_channel_to_another_host_follows_the_environment() -> None:
    """A channel to loopback does not. The connections that reach the proxy show it."""
    code = (
        "import sys\nfrom baton import Client\n"
        "try: Client(sys.argv[1]).generate('x', timeout_s=3).__iter__().__next__()\n"
        "except Exception: pass"
    )
    for address, asks in (("far.example:1234", True), ("127.0.0.1:1", False)):
        with socket.socket() as proxy:
            proxy.bind(("127.0.0.1", 0))
            proxy.listen()
            proxy.settimeout(60)
            url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
            env = {**os.environ, "http_proxy": url, "https_proxy": url, "grpc_proxy": url, "no_proxy": ""}
            client = subprocess.Popen([sys.executable, "-c", code, address], env=env)
            try:
                if asks:
                    taken, _ = proxy.accept()
                    with taken:
                        assert taken.recv(100).startswith(b"CONNECT far.example:1234")
                client.wait(60)
                proxy.settimeout(0)
                if not asks:
                    with pytest.raises(BlockingIOError):
                        proxy.accept()
            finally:
                client.kill()
                client.wait()


def questions_sync(address: str) -> list[Any]:
    with Client(address) as client:
        return [client.tokenize("hé"), client.detokenize([104, 233]), client.models(), client.status()]


def questions_async(address: str) -> list[Any]:
    async def ask() -> list[Any]:
        async with AsyncClient(address) as client:
            return [await client.tokenize("hé"), await client.detokenize([104, 233]), await client.models(), await client.status()]

    return asyncio.run(ask())


@pytest.mark.parametrize("ask", [questions_sync, questions_async])
def test_short_questions(address: str, scripted: Scripted, ask: Callable[[str], list[Any]]) -> None:
    told = [[104, 233], "hé", [Model("toy", None), Model("long", 9)], "NOT_SERVING"]
    assert ask(address) == told
    assert ask(f"127.0.0.1:1,{address}") == told, "an address that does not answer is passed over"
    scripted.error = BatonError(Reason.INVALID_FIELD, "no")
    with pytest.raises(GenerateError, match="INVALID_FIELD"):
        ask(address)


def test_a_short_question_to_nobody_is_an_error_at_once() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(GenerateError) as lost:
        client.status()
    assert lost.value.code == "UNAVAILABLE"
