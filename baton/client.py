"""The client for application backends: typed, sync and async, over `baton.v1.Generation`. It loads gRPC, and none of our other packages.

    with Client("127.0.0.1:8470") as client:
        with client.generate("Once upon a time", max_tokens=50, timeout_s=30) as stream:
            for token in stream:
                print(token.text, end="")
        print(stream.result.usage)

Leaving the stream's context before its end cancels the request: the cluster stops computing within one step.

A stream whose router dies or drains is resumed, at another router if the client knows several, and its reader does not notice: no token is
missing, none is repeated, and all are those of an undisturbed stream.
"""

import asyncio
import contextlib
import itertools
import json
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.answer import Assembly, GenerateError, Result, Token, Usage, to_error
from baton.attempts import Attempts, Failure
from baton.targets import DEFAULT_ADDRESS, Address, Options, channel_options, insists, targets_of
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc

__all__ = [
    "AsyncClient", "AsyncStream", "Client", "GenerateError", "Model", "Result", "Stream", "Token", "Usage", "build_request",
    "channel_options", "leave", "targets_of", "to_error",
]  # fmt: skip
_THROUGH_S = 5.0
MAX_RESUMES = 8
ASK_S = 60.0  # for a short question


class _Stream:
    """One request, and the calls that it takes."""

    _left: threading.Event | asyncio.Event  # set when the reader wants no more

    def __init__(self, doors: "_Doors", request: pb.GenerateRequest, timeout_s: float | None) -> None:
        now = monotonic()
        self._doors = doors
        self._request = request
        self._attempts = doors.attempts(now, None if timeout_s is None else now + timeout_s)
        self._assembly = Assembly()
        self._call = self._open(timeout_s)

    @property
    def request_id(self) -> str:
        return self._assembly.accepted.request_id

    @property
    def result(self) -> Result:
        """Raises RuntimeError until the stream has come to its end."""
        if self._assembly.result is None:
            raise RuntimeError("the stream has not come to its end")
        return self._assembly.result

    @property
    def results(self) -> list[Result]:
        """One for each choice (`n`) that has ended, in their order."""
        return self._assembly.results

    @property
    def _ended_here(self) -> bool:
        """Whether the request was cancelled, or the client closed, on this side."""
        return self._left.is_set() or self._doors.closed

    def _open(self, timeout_s: float | None) -> Any:
        request = self._assembly.to_continue(self._request)
        return self._doors.stubs[self._attempts.at].Generate(request, timeout=timeout_s, metadata=self._doors.metadata)

    def _open_next(self) -> None:
        if self._ended_here:
            raise _cancelled()
        deadline = self._attempts.deadline
        self._call = self._open(None if deadline is None else max(0.0, deadline - monotonic()))
        if self._ended_here:  # meanwhile, in another thread
            self._call.cancel()

    def _take(self, response: pb.GenerateResponse) -> list[Token]:
        if response.HasField("accepted"):
            self._attempts.accept(bool(response.accepted.resume))
        return self._assembly.take(response, self._attempts.resumes)

    def _wait_s(self, error: GenerateError) -> float:
        """How long to wait before the next call. Raises `error` if it is final."""
        if self._ended_here:
            raise error from None
        wait = self._attempts.wait_s(Failure(error.code, error.reason, error.retry_after_s), monotonic())
        if wait is None:
            # gRPC drops with a bare CANCELLED the calls that meet the end of their server.
            raise _dropped() if (error.code, error.reason) == ("CANCELLED", "") else error from None
        return wait


class Stream(_Stream):
    """Iterator of Tokens. Raises GenerateError."""

    _left: threading.Event

    def __init__(self, doors: "_Doors", request: pb.GenerateRequest, timeout_s: float | None) -> None:
        self._left = threading.Event()
        super().__init__(doors, request, timeout_s)

    def __iter__(self) -> Iterator[Token]:
        while True:
            try:
                for response in self._call:
                    yield from self._take(response)
                return
            except grpc.RpcError as error:
                wait = self._wait_s(to_error(error))
            self._left.wait(wait)
            self._open_next()

    def texts(self) -> Iterator[str]:
        """The texts of the tokens, and at the end the text that was held back: together they are the answer. Of a beam search, the best
        answer. Raises GenerateError."""
        for token in self:
            yield token.text
        yield self.result.text if self._assembly.hypotheses else self._assembly.held_back

    def cancel(self) -> None:
        self._left.set()
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        leave(self._call)


class AsyncStream(_Stream):
    """Asynchronous iterator of Tokens. Raises GenerateError."""

    _left: asyncio.Event

    def __init__(self, doors: "_Doors", request: pb.GenerateRequest, timeout_s: float | None) -> None:
        self._left = asyncio.Event()
        super().__init__(doors, request, timeout_s)

    async def __aiter__(self) -> AsyncIterator[Token]:
        while True:
            try:
                async for response in self._call:
                    for token in self._take(response):
                        yield token
                return
            except grpc.RpcError as error:
                wait = self._wait_s(to_error(error))
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The reading task itself was not cancelled. Other code cancelled the call or closed the channel, or else the server did.
                wait = self._wait_s(_cancelled())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._left.wait()
            self._open_next()

    def cancel(self) -> None:
        self._left.set()
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


def leave(call: Any) -> None:
    """Cancels a call of gRPC's, and returns when gRPC's own thread is through with it. Frozen with the call's lock when the interpreter
    exits, that thread would hold up the call's finaliser for ever."""
    call.cancel()
    through = threading.Event()
    if call.add_callback(through.set):
        through.wait(_THROUGH_S)


class _Doors:
    """The addresses of a client, each with a channel of its own. Thread-safe."""

    def __init__(self, address: Address, open_channel: Callable[[str], Any], api_key: str | None, max_resumes: int) -> None:
        targets = targets_of(address)
        self.channels = [open_channel(target) for target in targets]
        self.stubs = [generation_pb2_grpc.GenerationStub(channel) for channel in self.channels]
        self.health = [health_pb2_grpc.HealthStub(channel) for channel in self.channels]
        self.metadata = _metadata(api_key)
        self.closed = False
        self._max_resumes = max_resumes
        self._insists = insists(targets)
        self._turns = itertools.count(random.randrange(len(targets)))  # clients that start together do not all begin at the same address

    def attempts(self, now: float, deadline: float | None) -> Attempts:
        at = next(self._turns) % len(self.stubs)
        return Attempts(len(self.stubs), at, now, deadline, self._max_resumes, self._insists, random.random)


class _Question:
    """One short question, and the calls that it takes."""

    def __init__(self, doors: "_Doors", timeout_s: float) -> None:
        self._doors = doors
        self._deadline = monotonic() + timeout_s
        self._attempts = doors.attempts(monotonic(), self._deadline)

    def call(self, method: str, request: Any) -> Any:
        """The call at the address whose turn it is; to be awaited or not, as the channels are."""
        stub = (self._doors.health if method == "Check" else self._doors.stubs)[self._attempts.at]
        return getattr(stub, method)(request, timeout=max(0.0, self._deadline - monotonic()), metadata=self._doors.metadata)

    def wait_s(self, error: grpc.RpcError) -> float:
        """How long to wait before the next call. Raises GenerateError if the error is final."""
        found = to_error(error)
        wait = self._attempts.wait_s(Failure(found.code, found.reason, found.retry_after_s), monotonic())
        if wait is None or self._doors.closed:
            raise found from None
        return wait


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    max_model_len: int | None  # tokens, prompt plus output; None until a worker is ready


def _models(answer: pb.ListModelsResponse) -> list[Model]:
    return [Model(model.name, model.max_model_len if model.HasField("max_model_len") else None) for model in answer.models]


def _to_text(token_ids: Sequence[int], model: str) -> pb.DetokenizeRequest:
    return pb.DetokenizeRequest(model=model, token_ids=pb.TokenIds(ids=token_ids))


class Client:
    """Thread-safe; all requests share one channel for each address.

    `address`: host:port (8470 if it is left out), or several of them in a list or separated by commas, or a gRPC target that stands for
    several (dns:///name:port). Calls go to all addresses in turn, and one that cannot be served at an address goes to the others, until its
    deadline (without one, for a minute). `credentials` (grpc.ChannelCredentials) for TLS; `api_key` if the server requires one; `options`:
    more options for the gRPC channels. `max_resumes`: how many times a stream that breaks is resumed; 0: never. Raises ValueError for an
    address that cannot be one.
    """

    def __init__(
        self,
        address: Address = DEFAULT_ADDRESS,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        options: Options = (),
        max_resumes: int = MAX_RESUMES,
        server_name: str | None = None,
    ) -> None:
        def open_channel(target: str) -> grpc.Channel:
            how = channel_options(target, options, server_name)
            return grpc.secure_channel(target, credentials, how) if credentials else grpc.insecure_channel(target, how)

        self._doors = _Doors(address, open_channel, api_key, max_resumes)

    def generate(self, prompt: str | None = None, *, timeout_s: float | None = None, **ask: Any) -> Stream:
        """See `build_request` for the keywords."""
        return Stream(self._doors, build_request(prompt, **ask), timeout_s)

    def tokenize(self, prompt: str | None = None, *, timeout_s: float = ASK_S, **ask: Any) -> list[int]:
        """The token ids that `generate` would make of this prompt. Takes its keywords; raises GenerateError."""
        return list(self._asked("Tokenize", build_request(prompt, **ask), timeout_s).token_ids.ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = ASK_S) -> str:
        """Their text, without special tokens. Raises GenerateError."""
        return str(self._asked("Detokenize", _to_text(token_ids, model), timeout_s).text)

    def models(self, *, timeout_s: float = ASK_S) -> list[Model]:
        """What `generate` may name. Raises GenerateError."""
        return _models(self._asked("ListModels", pb.ListModelsRequest(), timeout_s))

    def status(self, *, timeout_s: float = ASK_S) -> str:
        """SERVING, or NOT_SERVING while no worker can take a request. Raises GenerateError if no router answers."""
        answer = self._asked("Check", health_pb2.HealthCheckRequest(), timeout_s)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def _asked(self, method: str, request: Any, timeout_s: float) -> Any:
        question = _Question(self._doors, timeout_s)
        while True:
            try:
                return question.call(method, request)
            except grpc.RpcError as error:
                wait = question.wait_s(error)
            sleep(wait)

    def close(self) -> None:
        self._doors.closed = True
        for channel in self._doors.channels:
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio."""

    def __init__(
        self,
        address: Address = DEFAULT_ADDRESS,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        options: Options = (),
        max_resumes: int = MAX_RESUMES,
        server_name: str | None = None,
    ) -> None:
        def open_channel(target: str) -> grpc.aio.Channel:
            how = channel_options(target, options, server_name)
            return grpc.aio.secure_channel(target, credentials, how) if credentials else grpc.aio.insecure_channel(target, how)

        self._doors = _Doors(address, open_channel, api_key, max_resumes)

    def generate(self, prompt: str | None = None, *, timeout_s: float | None = None, **ask: Any) -> AsyncStream:
        """See `build_request` for the keywords."""
        return AsyncStream(self._doors, build_request(prompt, **ask), timeout_s)

    async def tokenize(self, prompt: str | None = None, *, timeout_s: float = ASK_S, **ask: Any) -> list[int]:
        return list((await self._asked("Tokenize", build_request(prompt, **ask), timeout_s)).token_ids.ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout_s: float = ASK_S) -> str:
        return str((await self._asked("Detokenize", _to_text(token_ids, model), timeout_s)).text)

    async def models(self, *, timeout_s: float = ASK_S) -> list[Model]:
        return _models(await self._asked("ListModels", pb.ListModelsRequest(), timeout_s))

    async def status(self, *, timeout_s: float = ASK_S) -> str:
        answer = await self._asked("Check", health_pb2.HealthCheckRequest(), timeout_s)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    async def _asked(self, method: str, request: Any, timeout_s: float) -> Any:
        question = _Question(self._doors, timeout_s)
        while True:
            try:
                return await question.call(method, request)
            except grpc.RpcError as error:
                wait = question.wait_s(error)
            await asyncio.sleep(wait)

    async def close(self) -> None:
        self._doors.closed = True
        for channel in self._doors.channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


OF_REQUEST = ("parse_special", "add_special_tokens", "prediction", "speculation", "n", "best_of", "beam")  # of GenerateRequest


def build_request(
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    token_ids: Sequence[int] | None = None,
    model: str = "",
    request_id: str = "",
    cache_salt: str = "",
    priority: int = 0,
    **sampling: Any,
) -> pb.GenerateRequest:
    """Takes one of `prompt`, `messages` (the fields of ChatMessage: "role", "content", …) and `token_ids`. `sampling` takes the fields of
    baton.v1.SamplingParams, `n`, `best_of`, `parse_special` and `add_special_tokens` of GenerateRequest, and for messages those of Chat,
    such as `tools`. The form of the answer is `structured`, a mapping with the fields of baton.v1.Structured, or one of `json_schema` (an
    object, or its text), `regex` and `choice` (strings). `prediction`: what the answer is expected to be, as text or token ids;
    `speculation`: the fields of baton.v1.Speculation. `beam`: the fields of baton.v1.Beam, for a beam search. No tokens are streamed then:
    `Result.hypotheses` has the answers.

    Raises TypeError for any other keyword, unless exactly one prompt is given, or if several forms are.
    """
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise TypeError("give exactly one of prompt, messages and token_ids")
    sampling = _with_form(sampling)
    of_chat = set(pb.Chat.DESCRIPTOR.fields_by_name) - {"messages"} if messages is not None else set()
    unknown = set(sampling) - set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - set(OF_REQUEST) - of_chat
    if unknown:
        raise TypeError(f"unknown sampling parameters: {', '.join(sorted(unknown))}")
    given = {name: value for name, value in sampling.items() if value is not None}
    how = {name: given.pop(name) for name in OF_REQUEST if name in given}
    if isinstance(predicted := how.get("prediction"), str):
        how["prediction"] = pb.Prediction(text=predicted)
    elif predicted is not None:
        how["prediction"] = pb.Prediction(token_ids=pb.TokenIds(ids=predicted))
    chat = {name: given.pop(name) for name in of_chat if name in given}
    request = pb.GenerateRequest(
        model=model, request_id=request_id, cache_salt=cache_salt, priority=priority, sampling=pb.SamplingParams(**given), **how
    )
    if prompt is not None:
        request.text = prompt
    elif messages is not None:
        request.chat.CopyFrom(pb.Chat(messages=[pb.ChatMessage(**message) for message in messages], **chat))
        request.chat.SetInParent()
    else:
        request.token_ids.ids.extend(token_ids or ())
        request.token_ids.SetInParent()
    return request


def _with_form(sampling: dict[str, Any]) -> dict[str, Any]:
    """`json_schema`, `regex` and `choice` as `structured`."""
    given = {name: sampling[name] for name in ("json_schema", "regex", "choice") if sampling.get(name) is not None}
    if len(given) + (sampling.get("structured") is not None) > 1:
        raise TypeError("give one of structured, json_schema, regex and choice")
    rest = {name: value for name, value in sampling.items() if name not in ("json_schema", "regex", "choice")}
    for kind, value in given.items():
        text = value if isinstance(value, str) else json.dumps(value if kind == "json_schema" else list(value))
        rest["structured"] = {"kind": kind, "text": text}
    return rest


def _cancelled() -> GenerateError:
    return GenerateError("CANCELLED", "", "the request was cancelled on this side", (), None, {})


def _dropped() -> GenerateError:
    return GenerateError("UNAVAILABLE", "", "the other side dropped the call", (), None, {})


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)
