"""The router's side of a session: the stream to one worker that carries all calls of one role (`worker.proto`).

When the stream is lost, all its calls end immediately with WORKER_LOST. A loss is a `Died` only for calls of which the worker has seen
something: the others reached no process.
"""

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, TypeVar

import grpc

from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import to_error
from baton.v1 import worker_pb2
from router.workers import Died

COMMANDS_AT_ONCE = 64  # in one message
TOKENS_AT_ONCE = 8192  # of the prompts in one message; a longer prompt travels alone
log = logging.getLogger(__name__)
NOT_CONNECTED = "failed to connect"  # gRPC's words for a call that was never sent: nothing listens there
E = TypeVar("E")  # an event


class Session(Generic[E]):
    def __init__(
        self,
        worker: str,
        stream: Any,
        command: Callable[..., Any],
        commands: Callable[..., Any],
        aside: Callable[[Any], None] | None = None,
    ) -> None:
        """`worker`: its name. `stream`: the gRPC call. `command` and `commands`: the types of one command and of a message of several.
        `aside` gets each message: it may say more than its events."""
        self.lost = False
        self.loop = asyncio.get_running_loop()
        self._worker = worker
        self._stream = stream
        self._command, self._commands, self._aside = command, commands, aside
        self._numbers = itertools.count(1)
        self._calls: dict[int, SessionCall[E]] = {}
        self._unsent: OrderedDict[int, list[Any]] = OrderedDict()  # commands of each call, which bound it: a call has a few
        self._filled = asyncio.Event()
        self._writer = asyncio.create_task(self._write())
        self._reader = asyncio.create_task(self._read())

    def start(self, command: Any, tokens: int, timeout_s: float, put: "Put[E]", forks: "Sequence[SessionCall[E]]" = ()) -> "SessionCall[E]":
        """Begins a call, which lasts for the `with` block of what is returned. `command`: with its `start`, which carries so many `tokens`.
        `put` gets the events of the call in order, and the error that ends it early: a loss, or DEADLINE after `timeout_s`. `forks`: calls
        that `start` begins, too. Raises BatonError(WORKER_LOST)."""
        call = self.join(timeout_s, put)
        call.tokens, call.forks = tokens, tuple(forks)
        command.call_id = call.number
        self._send(call, command)
        return call

    def join(self, timeout_s: float, put: "Put[E]") -> "SessionCall[E]":
        """A call that begins with another one's `start`. Raises BatonError(WORKER_LOST)."""
        if self.lost:
            raise BatonError(Reason.WORKER_LOST, f"{self._worker} is gone")
        call = SessionCall(self, next(self._numbers), timeout_s, put)
        self._calls[call.number] = call
        return call

    def tell(self, call: "SessionCall[E]", **command: Any) -> None:
        """Sends a command, if the call has not ended and the worker is not lost."""
        if call.number in self._calls and not self.lost:
            self._send(call, self._command(call_id=call.number, **command))

    def _send(self, call: "SessionCall[E]", command: Any) -> None:
        self._unsent.setdefault(call.number, []).append(command)
        self._filled.set()

    def cancel(self, call: "SessionCall[E]") -> None:
        """Ends it on the worker."""
        self._unsent.pop(call.number, None)
        if call.sent:
            self.tell(call, cancel=worker_pb2.CallCancel())
            return
        for fork in call.forks:
            fork.put(fork, BatonError(Reason.SATURATED, f"{self._worker} was not asked: the call that this one begins with has ended"))

    def forget(self, call: "SessionCall[E]") -> None:
        """Nobody waits for it any more."""
        del self._calls[call.number]

    async def close(self) -> None:
        self._lose(Died(f"{self._worker} is gone"))
        self._stream.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, self._writer, return_exceptions=True)

    async def _write(self) -> None:
        try:
            while True:
                await self._filled.wait()
                if commands := self._next():
                    await self._stream.write(self._commands(commands=commands))
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the reader reports why
        except Exception as error:  # a fault of ours: nothing more would be sent, and all calls would wait for their deadlines
            log.exception("cannot send to %s", self._worker)
            self._lose(BatonError(Reason.INTERNAL, f"the router cannot send to {self._worker}: {error!r}"))
            self._stream.cancel()

    def _next(self) -> list[Any]:
        """Takes the oldest commands, for one message; none if those that waited were taken back."""
        taken: list[Any] = []
        left = TOKENS_AT_ONCE
        while self._unsent and left > 0 and len(taken) < COMMANDS_AT_ONCE:
            number, commands = next(iter(self._unsent.items()))
            call = self._calls.get(number)
            if call is not None and not call.sent:
                if taken and call.tokens > left:
                    break
                call.sent = True
                left -= call.tokens
                for fork in call.forks:
                    fork.sent = True
                    commands += [self._command(call_id=fork.number, cancel=worker_pb2.CallCancel())] if fork.cancelled else []
            self._unsent.popitem(last=False)
            taken += commands
        if not self._unsent:
            self._filled.clear()
        return taken

    async def _read(self) -> None:
        reason = BatonError(Reason.WORKER_LOST, f"{self._worker} ended the stream")
        try:
            async for message in self._stream:
                if self._aside is not None:
                    self._aside(message)
                for event in message.events:
                    call = self._calls.get(event.call_id)
                    if call is not None:
                        call.put(call, event)
        except grpc.RpcError as error:
            found = meaning(error)
            text = f"{self._worker}: {found.message}"
            reason = Died(text) if isinstance(found, Died) else BatonError(Reason.WORKER_LOST, text)
        finally:
            self._lose(reason)

    def _lose(self, reason: BatonError) -> None:
        if self.lost:
            return
        self.lost = True
        self._writer.cancel()
        self._unsent.clear()
        unsent = BatonError(Reason.WORKER_LOST, reason.message)
        for call in self._calls.values():
            call.put(call, reason if call.sent else unsent)


class SessionCall(Generic[E]):
    """A call to a worker. It is cancelled there if its block is left early: neither normally nor with an error of the worker's."""

    __slots__ = ("_late", "_session", "_timer", "cancelled", "forks", "number", "put", "sent", "tokens")

    def __init__(self, session: Session[E], number: int, timeout_s: float, put: "Put[E]") -> None:
        self.number, self.put = number, put
        self.tokens = 0
        self.forks: tuple[SessionCall[E], ...] = ()
        self.sent = False  # whether the worker may have seen it
        self.cancelled = False
        self._session = session
        self._late: BatonError | None = None
        self._timer = session.loop.call_later(timeout_s, self._expire)

    def _expire(self) -> None:
        self._late = BatonError(Reason.DEADLINE, "the deadline of the request has passed")
        self.put(self, self._late)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        self._timer.cancel()
        if error is not None and (error is self._late or not isinstance(error, BatonError)):
            self.cancel()
        self._session.forget(self)

    def tell(self, **command: Any) -> None:
        self._session.tell(self, **command)

    def cancel(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self._session.cancel(self)


Put = Callable[[SessionCall[E], E | BatonError], None]


def meaning(error: grpc.RpcError) -> BatonError:
    """What a failed call to a worker says: of a loss, whether its process was reached."""
    ours = to_error(error)
    if ours.reason is Reason.WORKER_LOST and not ours.message.startswith(NOT_CONNECTED):
        return Died(ours.message)
    return ours
