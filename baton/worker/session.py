"""The worker's side of a session: the stream on which one router starts and cancels calls of one role, and reads their events. The doors of
the roles say how a call is served, and what its events are on the wire (`worker.proto`).

What one call does wrong ends that call. The stream, and with it every call that was started on it, ends when its router leaves, does not
read, or breaks the protocol.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from baton.cluster.errors import BatonError, Reason, invalid
from baton.cluster.rpc import Answering, Context, told

MAX_EVENTS = 256  # in one message: the router reads a message in one turn of its loop
MAX_OUTBOX = 65536  # events a router may leave unread before it counts as gone
Emit = Callable[[Any], None]
Serve = Callable[[Emit, "asyncio.Future[int]"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Form:
    """`begin(call_id, start)`: what a start begins, its own call first, each with its number and what serves it. That one, `serve(emit,
    first)`, gives the call's events to `emit`; what it raises becomes the last one. `first` resolves to the first token, if the router
    tells it. `event(call_id, event)` and `events(events=...)` make messages."""

    begin: Callable[[int, Any], Sequence[tuple[int, Serve]]]
    event: Callable[[int, Any], Any]
    events: Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Call:
    task: "asyncio.Task[None]"
    first: "asyncio.Future[int]"


class SessionDoor:
    """The method of a role's service."""

    form: Form

    def opened(self) -> "Session":
        return Session(self.form)

    async def Session(self, request_iterator: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        session = self.opened()
        reader = asyncio.create_task(session.obey(request_iterator))
        async with Answering(context):
            try:
                while not session.overflowed:
                    yield await session.next_events()
            finally:
                # The router is gone or has cancelled the stream: the calls that it started end, too.
                reader.cancel()
                await asyncio.shield(session.close())


class Session:
    def __init__(self, form: Form) -> None:
        self._form = form
        self._calls: dict[int, _Call] = {}
        self._outbox: list[Any] = []
        self._filled = asyncio.Event()
        self.overflowed = False  # the router does not read: the stream ends, and with it all calls that were started on it
        self._failure: BatonError | None = None  # the router broke the protocol: the stream ends likewise

    async def obey(self, messages: AsyncIterator[Any]) -> None:
        try:
            async for message in messages:
                for command in message.commands:
                    self._obey(command)
        except grpc.aio.BaseError:  # gRPC's own word that the server has stopped, which is nobody's fault
            self._fail(BatonError(Reason.DRAINING, "this worker's server has stopped"))
        except Exception as error:
            self._fail(told(error))

    async def next_events(self) -> Any:
        """Waits for events and returns the oldest. Raises BatonError if the router broke the protocol."""
        await self._filled.wait()
        if self._failure is not None:
            raise self._failure
        events, self._outbox = self._outbox[:MAX_EVENTS], self._outbox[MAX_EVENTS:]
        if not self._outbox:
            self._filled.clear()
        return self._form.events(events=events, **self.aside())

    def aside(self) -> dict[str, Any]:
        """What a message has beside events. Whoever has something to say calls `speak`."""
        return {}

    def speak(self) -> None:
        """A message goes out, with no events if there are none."""
        self._filled.set()

    def begun(self, start: Any) -> None:
        """A start has come."""

    async def close(self) -> None:
        tasks = [call.task for call in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _obey(self, command: Any) -> None:
        call = self._calls.get(command.call_id)
        match command.WhichOneof("command"):
            case "start":
                self.begun(command.start)
                for number, serve in self._form.begin(command.call_id, command.start):
                    self._start(number, serve)
            case "first" if call is not None and not call.first.done():
                call.first.set_result(command.first.token_id)
            case "cancel" if call is not None:
                call.task.cancel()

    def _start(self, call_id: int, serve: Serve) -> None:
        if call_id in self._calls:  # answers under this number could not tell the two calls apart
            raise invalid("call_id", f"{call_id} is the number of a call that has not ended")
        first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(call_id, serve, first))
        self._calls[call_id] = _Call(task, first)
        task.add_done_callback(lambda _: self._calls.pop(call_id))

    async def _run(self, call_id: int, serve: Serve, first: "asyncio.Future[int]") -> None:
        def emit(event: Any) -> None:
            self._emit(call_id, event)

        try:
            await serve(emit, first)
        except Exception as error:
            emit(told(error))

    def _emit(self, call_id: int, event: Any) -> None:
        if len(self._outbox) >= MAX_OUTBOX:
            self.overflowed = True
        else:
            self._outbox.append(self._form.event(call_id, event))
        self._filled.set()

    def _fail(self, error: BatonError) -> None:
        self._failure = error
        self._filled.set()
