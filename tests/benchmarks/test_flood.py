"""The light clients of the overload benchmark, over sockets to the router's own doors: what they say of an answer is what it was."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from flood import Door, Run, flood, frame, header, literal
from http_door import House, Script, served, settled, toy_tokenizer

from baton.cluster.config import Config
from baton.cluster.config_router import RouterConfig
from baton.cluster.measures import Measure
from baton.cluster.rpc import Server
from baton.v1 import generation_pb2_grpc
from router.degradation import Degradation, Rules
from router.door import GenerationDoor
from router.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@asynccontextmanager
async def opened(house: House, door: Door) -> AsyncIterator[str]:
    if door == "http":
        async with served(house.door) as address:
            yield address
        return
    server = Server(Config(), 1 << 20)
    generation_pb2_grpc.add_GenerationServicer_to_server(GenerationDoor(house.service, house.keys), server.grpc)
    address = server.bind(0)
    await server.start()
    yield address
    await server.stop(None)


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_complete_answers_are_counted_with_their_tokens_and_what_was_taken(tokenizer: Tokenizer, door: Door) -> None:
    house = House(tokenizer)
    house.journal.degradation = Degradation(Rules((Measure("max_tokens", 3),)))
    async with opened(house, door) as address:
        plain = await flood(Run(door, address, 0.5, rate=40.0, seed=1, output=3))
        house.journal.degradation.level = 1
        less = await flood(Run(door, address, 0.5, rate=40.0, seed=1, output=9))
    for told, degraded in ((plain, False), (less, True)):
        assert len(told["seen"]) == len(told["lags_s"]) > 5 and told["cpu_s"] > 0
        for one in told["seen"]:
            assert (one["status"], one["tokens"], one["degraded"]) == ("", 3, degraded) and 0 < one["ttft_s"] <= one["e2e_s"]
    prompts = {tuple(request.tokens[: request.prompt_len]) for request in house.script.begun}
    assert len(prompts) == len(house.script.begun) // 2, "no prompt twice in a run"
    house.check()


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_refusals_are_counted_with_the_time_that_they_name(tokenizer: Tokenizer, door: Door) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()), RouterConfig(max_inflight=1, max_queue=0))
    async with opened(house, door) as address:
        told = await flood(Run(door, address, 0.5, rate=40.0, seed=2, urgent=0.5, deadline_s=1.0))
        await settled(lambda: house.service.idle)
    first, *others = told["seen"]
    assert first["status"] in ("DEADLINE_EXCEEDED", "RESET 8", "UNANSWERED") and others, "the gate stays closed"
    assert {(one["status"], one["retry_after_s"]) for one in others} == {("RESOURCE_EXHAUSTED", 1.0)}
    assert {one["urgent"] for one in told["seen"]} == {True, False}


@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_closed_loop_asks_again_when_it_has_its_answer(tokenizer: Tokenizer, door: Door) -> None:
    house = House(tokenizer)
    async with opened(house, door) as address:
        told = await flood(Run(door, address, 0.5, at_once=3, output=3))
    assert len(told["seen"]) > 3 and {one["status"] for one in told["seen"]} == {""}
    assert house.admission.inflight == 0 and len(house.script.begun) == len(told["seen"])


async def test_a_server_that_goes_away_leaves_no_request_unanswered(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()))
    async with opened(house, "grpc") as address:
        running = asyncio.create_task(flood(Run("grpc", address, 0.3, rate=40.0)))
        await settled(lambda: len(house.script.begun) > 1)
    assert "" not in {one["status"] for one in (await running)["seen"]}


def test_headers_are_read_as_they_are_written() -> None:
    long = b"v" * 126
    block = literal(b"grpc-status-details-bin", b"\0abc") + literal(b"grpc-status", b"8") + literal(b"x", long)
    assert header(block, b"grpc-status") == b"8" and header(block, b"grpc-status-details-bin") == b"\0abc"
    assert header(block, b"x") == long and header(block, b"y") == b""
    assert header(b"\0\x01x\x7f\x81\x01" + b"v" * 256, b"x") == b"v" * 256, "127 and a number of two bytes, 1 + 1 * 128"
    with pytest.raises(ValueError, match="Huffman"):
        header(b"\0\x01x\x81v", b"x")
    assert frame(6, 1, 0, b"12345678") == b"\0\0\x08\x06\x01\0\0\0\0" + b"12345678"
