"""`baton chat --tools`: the model calls, this machine computes, and the model reads the result."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import grpc
import pytest

from baton.cli.chat import MAX_ROUNDS, Conversation
from baton.cli.chat_tools import Toolbox, calculate
from baton.client import Client
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc


class Model(generation_pb2_grpc.GenerationServicer):
    """Calls the calculator with the last question, and tells the result. "again" makes it call for ever."""

    def __init__(self) -> None:
        self.asked: list[pb.GenerateRequest] = []

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.asked.append(request)
        last = request.chat.messages[-1]
        if request.chat.tool_choice == "none" or (last.role == "tool" and request.chat.messages[0].content != "again"):
            yield pb.GenerateResponse(tokens=pb.Tokens(tokens=[pb.Token(text=f"It is {last.content}.")]))
            yield pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_STOP))
            return
        arguments = json.dumps({"expression": last.content})
        begin = pb.ToolCallDelta(id=f"c{len(self.asked)}", name="calculate", arguments=arguments[:5])
        rest = pb.ToolCallDelta(arguments=arguments[5:])
        yield pb.GenerateResponse(tokens=pb.Tokens(tokens=[pb.Token(reasoning="hm", tool_calls=[begin]), pb.Token(index=1)]))
        yield pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_TOOL_CALLS, tool_calls=[rest]))


@pytest.fixture
def server() -> Iterator[tuple[Model, Client]]:
    model, grpc_server = Model(), grpc.server(ThreadPoolExecutor(2))
    generation_pb2_grpc.add_GenerationServicer_to_server(model, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    with Client(f"127.0.0.1:{port}") as client:
        yield model, client
    grpc_server.stop(None)


def test_calls_are_run_and_their_results_are_read(server: tuple[Model, Client]) -> None:
    model, client = server
    told: list[str] = []
    conversation = Conversation(client, tools=Toolbox(), told=told.append)
    assert "".join(conversation.ask("12 * (3 + 4)")) == "It is 84."
    assert told == ['calculate({"expression": "12 * (3 + 4)"}) → 84']
    first, second = model.asked
    assert [tool.name for tool in first.chat.tools] == ["calculate", "time"] and first.chat.tool_choice == "auto"
    assert [message.role for message in second.chat.messages] == ["user", "assistant", "tool"]
    assert second.chat.messages[1].tool_calls[0].id == second.chat.messages[2].tool_call_id == "c1"
    assert len(conversation.turns) == 4 and "".join(conversation.ask("1 + 1")) == "It is 2."


def test_a_model_that_only_calls_must_answer_in_the_end(server: tuple[Model, Client]) -> None:
    model, client = server
    assert "".join(Conversation(client, tools=Toolbox()).ask("again")).startswith("It is error")
    assert [request.chat.tool_choice for request in model.asked] == ["auto"] * MAX_ROUNDS + ["none"]


def test_the_client_tells_calls_and_thoughts(server: tuple[Model, Client]) -> None:
    _, client = server
    with client.generate(messages=[{"role": "user", "content": "1"}]) as stream:
        assert "".join(stream.texts()) == ""
        result = stream.result
    assert (result.finish_reason, result.reasoning) == ("tool_calls", "hm")
    (call,) = result.tool_calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("c1", "calculate", {"expression": "1"})


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+3*4", "14"), ("-(2**10)", "-1024"), ("7/2", "3.5"), ("6/3", "2"), ("2^3", "8"), ("7 % 4 // 2", "1"), (".1+.2", str(0.1 + 0.2))],
)
def test_sums(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["9**9**9", "1/0", "open('x')", "a", "'a'*9", "True", "(" * 300, "1;2", "", "[1]", "(-1)**.5", "1" * 600, "10.0**999"]
)
def test_what_is_no_sum_is_an_error_that_the_model_reads(expression: str) -> None:
    assert Toolbox().run("calculate", json.dumps({"expression": expression})).startswith("error: ")


def test_the_time_and_the_look_up(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text('{"Baton": "serves models", "sizes": [1, 2]}')
    tools = Toolbox.read(tmp_path / "facts.json")
    assert tools.run("look_up", '{"name": "baton"}') == "serves models" and tools.run("look_up", '{"name": "Sizes"}') == "[1, 2]"
    assert "nothing is known" in tools.run("look_up", '{"name": "x"}') and tools.run("other", "{}").startswith("error")
    assert tools.run("look_up", "[]").startswith("error") and tools.run("time", "{").startswith("error")
    clock = Toolbox(now=lambda zone: datetime(2026, 1, 2, 3, 4, 5, tzinfo=zone))
    assert clock.run("time", "{}") == "2026-01-02 03:04:05"
    assert clock.run("time", '{"zone": "UTC"}') == "2026-01-02 03:04:05+00:00" and "no time zone" in clock.run("time", '{"zone": "Mars"}')
    assert "look_up" not in [tool["name"] for tool in clock.definitions]
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="object of names"):
        Toolbox.read(tmp_path / "list.json")
