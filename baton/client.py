"""The client for application backends: typed, sync and async, over `baton.v1.Generation`. It loads gRPC, and none of our other packages.

    with Client("127.0.0.1:8470") as client:
        with client.generate("Once upon a time", max_tokens=50, timeout_s=30) as stream:
            for token in stream:
                print(token.text, end="")
        print(stream.result.usage)

Leaving the stream's context before its end cancels the request: the cluster stops computing within one step.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:8470"
# A proxy from the environment (http_proxy, https_proxy) cannot reach this host's loopback; for any other address it is used.
_LOOPBACK = re.compile(r"(dns:(//[^/]*/)?|ipv[46]:)?(localhost|127(\.\d+){1,3}|\[::1\]|\[::ffff:127(\.\d+){3}\])(:\w+)?$")
Options: TypeAlias = Sequence[tuple[str, Any]]
_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Token:
    index: int
    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """The whole answer. `stages_ms`: queue, prefill, transfer, decode add up to the request's time at the router; the rest are parts."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop: str | int | None
    usage: Usage
    stages_ms: dict[str, float]
    workers: dict[str, Any]
    handoff: dict[str, Any]


class GenerateError(Exception):
    """The request was refused or failed. `reason` is a name from Baton's error table; if `retry_after_s` is set, trying again can help."""

    def __init__(
        self,
        code: str,
        reason: str,
        message: str,
        violations: tuple[tuple[str, str], ...],
        retry_after_s: float | None,
        metadata: Mapping[str, str],
    ) -> None:
        super().__init__(f"{reason or code}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.violations = violations  # (field, what is wrong with it)
        self.retry_after_s = retry_after_s
        self.metadata = metadata


@dataclass(slots=True)
class _Assembly:
    """An answer while it arrives."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    request_id: str = ""
    held_back: str = ""
    result: Result | None = None

    def take(self, response: pb.GenerateResponse) -> list[Token]:
        match response.WhichOneof("event"):
            case "accepted":
                self.request_id = response.accepted.request_id
            case "tokens":
                tokens = [_to_token(token) for token in response.tokens.tokens]
                self.texts += [token.text for token in tokens]
                self.token_ids += [token.id for token in tokens]
                return tokens
            case "finished":
                self.held_back = response.finished.text
                self.result = self._finish(response.finished)
        return []

    def _finish(self, finished: pb.Finished) -> Result:
        stopped_by = finished.WhichOneof("stopped_by")
        return Result(
            request_id=finished.request_id,
            text="".join(self.texts) + finished.text,
            token_ids=tuple(self.token_ids),
            finish_reason=_FINISH.get(finished.reason, "unknown"),
            stop=getattr(finished, stopped_by) if stopped_by else None,
            usage=Usage(finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.usage.cached_tokens),
            stages_ms={f.name.removesuffix("_ms"): getattr(finished.stages, f.name) for f in finished.stages.DESCRIPTOR.fields},
            workers={f.name: getattr(finished.workers, f.name) for f in finished.workers.DESCRIPTOR.fields},
            handoff={f.name: getattr(finished.handoff, f.name) for f in finished.handoff.DESCRIPTOR.fields},
        )


class _Stream:
    def __init__(self, call: Any) -> None:
        self._call = call
        self._assembly = _Assembly()

    @property
    def request_id(self) -> str:
        return self._assembly.request_id

    @property
    def result(self) -> Result:
        """Raises RuntimeError until the stream has come to its end."""
        if self._assembly.result is None:
            raise RuntimeError("the stream has not come to its end")
        return self._assembly.result

    def cancel(self) -> None:
        self._call.cancel()


class Stream(_Stream):
    """Iterator of Tokens. Raises GenerateError."""

    def __iter__(self) -> Iterator[Token]:
        try:
            for response in self._call:
                yield from self._assembly.take(response)
        except grpc.RpcError as error:
            raise to_error(error) from None

    def texts(self) -> Iterator[str]:
        """The texts of the tokens, and at the end the text that was held back: together they are the answer. Raises GenerateError."""
        for token in self:
            yield token.text
        yield self._assembly.held_back

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class AsyncStream(_Stream):
    """Asynchronous iterator of Tokens. Raises GenerateError."""

    async def __aiter__(self) -> AsyncIterator[Token]:
        try:
            async for response in self._call:
                for token in self._assembly.take(response):
                    yield token
        except grpc.RpcError as error:
            raise to_error(error) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Other code cancelled the call or closed the channel; the reading task itself was not cancelled.
            raise GenerateError("CANCELLED", "", "the request was cancelled on this side", (), None, {}) from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """`credentials` (grpc.ChannelCredentials) for TLS; `api_key` if the server requires one; `options`: more options for the gRPC channel.
    `server_name`: the name that the server's certificate must contain, if not the address (`baton.internal` in a cluster's own TLS).

    Thread-safe; all requests share one channel.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        options: Options = (),
        server_name: str | None = None,
    ) -> None:
        how = channel_options(address, options, server_name)
        self._channel = grpc.secure_channel(address, credentials, how) if credentials else grpc.insecure_channel(address, how)
        self._metadata = _metadata(api_key)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    def generate(self, prompt: str | None = None, *, timeout_s: float | None = None, **ask: Any) -> Stream:
        """See `build_request` for the keywords."""
        return Stream(self._stub.Generate(build_request(prompt, **ask), timeout=timeout_s, metadata=self._metadata))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """Like Client, for asyncio."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        credentials: grpc.ChannelCredentials | None = None,
        api_key: str | None = None,
        options: Options = (),
        server_name: str | None = None,
    ) -> None:
        self._metadata = _metadata(api_key)
        how = channel_options(address, options, server_name)
        self._channel = grpc.aio.secure_channel(address, credentials, how) if credentials else grpc.aio.insecure_channel(address, how)
        self._stub = generation_pb2_grpc.GenerationStub(self._channel)

    def generate(self, prompt: str | None = None, *, timeout_s: float | None = None, **ask: Any) -> AsyncStream:
        """See `build_request` for the keywords."""
        return AsyncStream(self._stub.Generate(build_request(prompt, **ask), timeout=timeout_s, metadata=self._metadata))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def channel_options(address: str, options: Options = (), server_name: str | None = None) -> list[tuple[str, Any]]:
    name = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return [*([("grpc.enable_http_proxy", 0)] if _LOOPBACK.match(address) else ()), *name, *options]


def build_request(
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, str]] | None = None,
    token_ids: Sequence[int] | None = None,
    model: str = "",
    request_id: str = "",
    cache_salt: str = "",
    priority: int = 0,
    **sampling: Any,
) -> pb.GenerateRequest:
    """Takes one of `prompt`, `messages` ({"role", "content"}) and `token_ids`; `sampling` takes the fields of baton.v1.SamplingParams.

    Raises TypeError for any other keyword, or unless exactly one prompt is given.
    """
    if sum(given is not None for given in (prompt, messages, token_ids)) != 1:
        raise TypeError("give exactly one of prompt, messages and token_ids")
    unknown = set(sampling) - set(pb.SamplingParams.DESCRIPTOR.fields_by_name)
    if unknown:
        raise TypeError(f"unknown sampling parameters: {', '.join(sorted(unknown))}")
    request = pb.GenerateRequest(
        model=model,
        request_id=request_id,
        cache_salt=cache_salt,
        priority=priority,
        sampling=pb.SamplingParams(**{name: value for name, value in sampling.items() if value is not None}),
    )
    if prompt is not None:
        request.text = prompt
    elif messages is not None:
        request.chat.messages.extend(pb.ChatMessage(role=message["role"], content=message["content"]) for message in messages)
        request.chat.SetInParent()
    else:
        request.token_ids.ids.extend(token_ids or ())
        request.token_ids.SetInParent()
    return request


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _to_token(token: pb.Token) -> Token:
    logprob = token.logprob if token.HasField("logprob") else None
    return Token(token.index, token.id, token.text, logprob, tuple((top.id, top.logprob) for top in token.top))


def to_error(error: grpc.RpcError) -> GenerateError:
    """What google.rpc.Status says, or the bare status if there is none."""
    reason, violations, retry_after, metadata = "", [], None, {}
    try:
        status = rpc_status.from_call(error)
    except (ValueError, NotImplementedError, DecodeError):  # details that contradict the status, or cannot be parsed
        status = None
    for detail in status.details if status else ():
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            violations = [(violation.field, violation.description) for violation in bad.field_violations]
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return GenerateError(error.code().name, reason, error.details() or "", tuple(violations), retry_after, metadata)
