"""`baton chat`: turns form a conversation, a failed turn leaves no trace in it, and cached tokens are reported."""

import io
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_status import rpc_status
from rich.console import Console

from baton.cli import chat
from baton.cli.chat import Conversation, talk
from baton.client import Client, GenerateError
from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import to_status
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc


class Echo(generation_pb2_grpc.GenerationServicer):
    """Echoes the last message in two pieces and a rest; "refuse" is refused, "break" breaks off, "hang" waits to be cancelled."""

    def __init__(self) -> None:
        self.asked: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.asked.append(request)
        said = request.chat.messages[-1].content
        if said == "hang":  # before the first token: once a client has read one it may cancel, and then no more code runs here
            context.add_callback(self.cancelled.set)
        if said == "refuse":
            context.abort_with_status(rpc_status.to_status(to_status(BatonError(Reason.CONTEXT_LENGTH, "too long"))))
        for i, text in enumerate((said[:2], said[2:4])):
            yield pb.GenerateResponse(tokens=pb.Tokens(tokens=[pb.Token(index=i, id=i, text=text)]))
        if said == "break":
            context.abort_with_status(rpc_status.to_status(to_status(BatonError(Reason.RETRIES_SPENT, "no worker came back"))))
        if said == "hang":
            self.cancelled.wait(30)
        length = sum(len(message.content) for message in request.chat.messages)
        yield pb.GenerateResponse(
            finished=pb.Finished(
                text=said[4:],
                usage=pb.Usage(prompt_tokens=length, completion_tokens=2, cached_tokens=length // 2),
                workers=pb.Workers(prefill="prefill-0", decode="decode-0"),
                handoff=pb.Handoff(transport="nixl", bytes=2048),
            )
        )


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Echo, Client]]:
    echo, grpc_server = Echo(), grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(echo, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    with Client(f"127.0.0.1:{port}") as client:
        yield echo, client
    grpc_server.stop(None)


def type_in(
    monkeypatch: pytest.MonkeyPatch, client: Client, *lines: str | type[BaseException], system: str | None = None
) -> tuple[str, str]:
    """What a person at a terminal would see: stdout and stderr."""
    typed = iter(lines)

    monkeypatch.setattr(chat, "_read", lambda interactive: next(typed, None))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    out, err = (Console(file=io.StringIO(), width=300, highlight=False) for _ in range(2))
    talk(Conversation(client, system, {"temperature": 0.0, "timeout_s": 20}), out, err)
    return out.file.getvalue(), err.file.getvalue()  # type: ignore[attr-defined]


def messages(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.chat.messages]


def test_each_turn_carries_the_whole_conversation(server: tuple[Echo, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    echo, client = server
    out, err = type_in(monkeypatch, client, "good morning", "", "and good night", system="Be kind.")
    assert out == "good morning\nand good night\n"
    system, first = ("system", "Be kind."), [("user", "good morning"), ("assistant", "good morning")]
    assert messages(echo.asked[-2]) == [system, first[0]]
    assert messages(echo.asked[-1]) == [system, *first, ("user", "and good night")]
    assert echo.asked[-1].sampling.temperature == 0.0
    assert "10 of 20 prompt tokens cached (50%) · 2 out" in err and "prefill-0 → 2.0 KiB → decode-0" in err


def test_new_forgets_the_conversation_but_not_the_system_message(server: tuple[Echo, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    echo, client = server
    type_in(monkeypatch, client, "first", "/new", "second", system="Be kind.")
    assert messages(echo.asked[-1]) == [("system", "Be kind."), ("user", "second")]


@pytest.mark.parametrize("bad", ["refuse", "break"])
def test_a_failed_turn_leaves_the_conversation_unchanged(bad: str, server: tuple[Echo, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    echo, client = server
    _, err = type_in(monkeypatch, client, "first", bad, "again")
    assert messages(echo.asked[-1]) == [("user", "first"), ("assistant", "first"), ("user", "again")]
    assert ("CONTEXT_LENGTH: too long (/new begins a new conversation)" if bad == "refuse" else "RETRIES_SPENT") in err


def test_an_interrupted_answer_is_cancelled_and_not_kept(server: tuple[Echo, Client]) -> None:
    """Ctrl-C while an answer streams."""
    echo, client = server
    before = signal.getsignal(signal.SIGINT)
    conversation = Conversation(client, None, {"timeout_s": 20})
    pieces = conversation.ask("hang")
    assert next(pieces) == "ha"
    signal.raise_signal(signal.SIGINT)  # does not raise here: only the call is cancelled
    with pytest.raises(KeyboardInterrupt):
        list(pieces)
    assert signal.getsignal(signal.SIGINT) is before
    assert echo.cancelled.wait(10), "the server keeps generating although the client left"
    assert conversation.turns == [] and conversation.last is None


def test_commands_are_handled_without_a_request(server: tuple[Echo, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    echo, client = server
    before = len(echo.asked)
    _, err = type_in(monkeypatch, client, "/trace", "/what", "/help", "/quit", "never read")
    assert len(echo.asked) == before
    assert "there is no answer yet" in err and "/what is not a command" in err and err.count("/quit") == 2
    _, err = type_in(monkeypatch, client, "hello", "/trace")
    assert "prefill" in err and "transfer" in err, "the stages of the last answer"


def test_piped_lines_are_turns_and_a_failure_is_raised(server: tuple[Echo, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    echo, client = server
    out, err = (Console(file=io.StringIO(), width=300, highlight=False) for _ in range(2))
    monkeypatch.setattr("sys.stdin", io.StringIO("one two\nthree\n"))
    talk(Conversation(client), out, err)
    assert out.file.getvalue() == "one two\nthree\n"  # type: ignore[attr-defined]
    assert "you" not in err.file.getvalue() and "model" not in err.file.getvalue()  # type: ignore[attr-defined]
    assert len(echo.asked[-1].chat.messages) == 3
    monkeypatch.setattr("sys.stdin", io.StringIO("refuse\nnever\n"))
    with pytest.raises(GenerateError):
        talk(Conversation(client), out, err)


def test_an_answer_that_looks_like_markup_is_printed_verbatim(server: tuple[Echo, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = server
    out, _ = type_in(monkeypatch, client, json.dumps({"[bold]": "[/] :smile:"}))
    assert out == '{"[bold]": "[/] :smile:"}\n'
