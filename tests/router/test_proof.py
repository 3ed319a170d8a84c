"""A worker proves itself before it serves another role: one that lies, or did not switch, is not admitted."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.records import RoleName, WorkerRecord
from baton.simulate import virtual_time
from baton.simulate.cluster import SimulatedCluster, Sizes
from baton.simulate.workers import ModelledWorkers, Times
from router.proof import TOKENS, prove
from router.request import Token
from router.workers import FirstToken


class Workers(ModelledWorkers):
    """Those of the simulator. `liar` says other tokens; `stuck` does not serve what it was asked to."""

    def __init__(self, fleet: Any, liar: str = "", stuck: str = "") -> None:
        super().__init__(fleet, "router")
        self.liar, self.stuck = liar, stuck
        self.wishes: list[tuple[str, tuple[str, ...], bool]] = []
        self.asked: list[tuple[str, str]] = []

    async def set_roles(self, worker: WorkerRecord, roles: Sequence[str], prove: bool = False) -> Any:
        self.wishes.append((worker.name, tuple(roles), prove))
        return tuple(roles), ()

    async def prefill(self, worker: WorkerRecord, request: Any, timeout_s: float, *rest: Any) -> AsyncGenerator[Any, None]:
        self._check(worker, "prefill")
        async for event in super().prefill(worker, request, timeout_s, *rest):
            if worker.name == self.liar and isinstance(event, FirstToken):
                event = replace(event, token=Token(event.token.id + 1))
            yield event

    async def decode(self, worker: WorkerRecord, request: Any, handle: bytes, timeout_s: float, *rest: Any) -> AsyncGenerator[Any, None]:
        self._check(worker, "decode")
        async for event in super().decode(worker, request, handle, timeout_s, *rest):
            if worker.name == self.liar and isinstance(event, tuple):
                event = tuple(Token(token.id + 1) for token in event)
            yield event

    def _check(self, worker: WorkerRecord, role: str) -> None:
        self.asked.append((worker.name, role))
        if worker.name == self.stuck:
            raise BatonError(Reason.WRONG_ROLE, f"{worker.name} does not serve {role} now")


def proving(name: str, role: RoleName, sizes: tuple[int, int] = (2, 2), **how: str) -> tuple[Workers, BatonError | None]:
    """What became of it."""

    async def main() -> tuple[Workers, BatonError | None]:
        cluster = SimulatedCluster(Sizes(*sizes), Times(), RouterConfig())
        workers = Workers(cluster.fleet, **how)
        usable: dict[RoleName, list[WorkerRecord]] = {
            "prefill": [one for one in cluster.records if one.role == "prefill"],
            "decode": [one for one in cluster.records if one.role == "decode"],
        }
        [worker] = [one for one in cluster.records if one.name == name]
        try:
            await prove(workers, usable, worker, (role,))
        except BatonError as error:
            return workers, error
        finally:
            assert not cluster.fleet.leases, "a lease was left"
            await cluster.fleet.close()
        return workers, None

    return virtual_time.run(main())


@pytest.mark.parametrize(("name", "role"), [("decode-0", "prefill"), ("prefill-0", "decode")])
def test_a_worker_that_says_what_others_say_is_admitted(name: str, role: RoleName) -> None:
    workers, error = proving(name, role)
    assert error is None and workers.wishes == [(name, (role,), True)], "it accepts work, and nobody is told"
    assert (name, role) in workers.asked and TOKENS > 1


@pytest.mark.parametrize(("name", "role"), [("decode-0", "prefill"), ("prefill-0", "decode")])
def test_a_worker_that_lies_is_not_admitted(name: str, role: RoleName) -> None:
    """Negative control: without the proof it would serve, and its record would look as good as any."""
    workers, error = proving(name, role, liar=name)
    assert error is not None and f"{name} is not admitted to {role}" in str(error)
    before = "decode" if role == "prefill" else "prefill"
    assert workers.wishes[-1] == (name, (before,), False), "it serves what it did before"


def test_a_worker_that_did_not_switch_is_not_admitted() -> None:
    workers, error = proving("decode-0", "prefill", stuck="decode-0")
    assert error is not None and error.reason is Reason.WRONG_ROLE and workers.wishes[-1] == ("decode-0", ("decode",), False)


def test_the_only_prefill_worker_proves_that_it_decodes() -> None:
    workers, error = proving("prefill-0", "decode", sizes=(1, 1))
    assert error is None and ("prefill-0", "decode") in workers.asked
    workers, error = proving("prefill-0", "decode", sizes=(1, 1), liar="prefill-0")
    assert error is not None and "not admitted" in str(error)


def test_without_another_decode_worker_there_is_nothing_to_compare_with() -> None:
    _, error = proving("decode-0", "prefill", sizes=(1, 1))
    assert error is not None and "no other worker decodes" in str(error)


def test_what_it_serves_already_needs_no_proof() -> None:
    workers, error = proving("decode-0", "decode")
    assert error is None and not workers.wishes and not workers.asked
