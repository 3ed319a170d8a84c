"""The cluster that an experiment runs on: what it is, how busy it is, and the door for requests. All that is asked has a deadline."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from uuid import uuid4

import grpc

from baton.access.access import Access, find
from baton.access.options import ClientIdentity, ClusterOptions
from baton.cluster.config import ConfigError
from baton.cluster.errors import BatonError, Reason, invalid
from baton.cockpit.knobs import Settings
from baton.cockpit.meter import Looked, WorkerUsage, looked
from baton.launch.state import StateError
from baton.v1 import worker_pb2, worker_pb2_grpc
from loadtest.grpc_door import GrpcDoor, Pem

ASK_S = 3.0
Find = Callable[[str], Access]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What an experiment needs to know. `speculation`: the method that the workers guess by; empty: none."""

    model: str
    prefill: int
    decode: int
    max_model_len: int
    max_num_seqs: dict[str, int]  # of each worker
    speculation: str
    page: str  # address of the live page; empty: unknown


def finder(place: ClusterOptions, identity: ClientIdentity) -> Find:
    """Finds it again each time, because one that was started anew has other ports; but a port-forward to a release stays."""
    look: Find = lambda endpoint: find(endpoint, place, identity)  # type: ignore[arg-type]  # noqa: E731
    return look if place.release is None else cache(look)


class CockpitCluster:
    def __init__(self, look: Find) -> None:
        """`look`: finds a door of it."""
        self._find = look

    async def facts(self) -> ClusterFacts:
        """Raises BatonError(NO_WORKER) with the reason if there is no cluster, or it does not answer."""
        return await asyncio.to_thread(self._facts)

    async def open(self, settings: Settings, facts: ClusterFacts) -> "OpenedDoor":
        """Raises BatonError: as `facts`, and INVALID_FIELD for what this cluster cannot do."""
        if settings.prompt + settings.output > facts.max_model_len:
            raise invalid("prompt", f"with the output it is longer than the {facts.max_model_len} tokens of {facts.model}")
        if settings.speculation == "on" and not facts.speculation:
            raise invalid("speculation", "these workers do not guess: start the cluster with --engine.speculation prompt_lookup or draft")
        access, pem, admin = await asyncio.to_thread(self._open)
        return OpenedDoor(access, pem, admin, settings, facts)

    def _facts(self) -> ClusterFacts:
        with _told():
            access = self._find("admin")
            with access.channel() as channel:
                answer = worker_pb2_grpc.AdminStub(channel).Status(worker_pb2.StatusRequest(), timeout=ASK_S)
        workers = [one.record for one in answer.workers if not one.error]
        if not any(one.pool == "decode" for one in workers):
            raise BatonError(Reason.NO_WORKER, "the cluster has no decode worker that answers")
        guesses = {one.speculation[0] for one in workers if one.pool == "decode" and one.speculation}
        return ClusterFacts(
            answer.model,
            sum(one.pool == "prefill" for one in workers),
            sum(one.pool == "decode" for one in workers),
            min(int(one.max_model_len) for one in workers),
            {one.name: int(one.max_num_seqs) for one in workers},
            min((one for one in guesses if one != "none"), default=""),
            answer.endpoints.get("page", ""),
        )

    def _open(self) -> tuple[Access, Pem | None, grpc.Channel]:
        with _told():
            grpc_door, admin = self._find("grpc"), self._find("admin")
            identity = grpc_door.identity
            read = [file.read_bytes() if file else None for file in (identity.ca, identity.key, identity.cert)]
            return grpc_door, (read[0], read[1], read[2]) if identity.tls else None, admin.channel()


class OpenedDoor:
    """The door of one run, and what tells how busy the cluster is. Requests of two runs share no prefix; with caching off, no two do."""

    def __init__(self, access: Access, pem: Pem | None, admin: grpc.Channel, settings: Settings, facts: ClusterFacts) -> None:
        salt = f"cockpit {uuid4().hex}"
        method = facts.speculation if settings.speculation == "on" else "none"
        how = {"speculation": {"method": method}} if facts.speculation else {}
        own = settings.caching == "off"
        self.door = GrpcDoor(
            access.address, salt, access.identity.api_key, pem, access.identity.server_name,
            more=lambda: how | ({"cache_salt": f"cockpit {uuid4().hex}"} if own else {}),
        )  # fmt: skip
        self._admin, self._facts = admin, facts

    async def look(self) -> Looked:
        """All None if nobody answers in time."""
        try:
            answer = await asyncio.to_thread(worker_pb2_grpc.AdminStub(self._admin).Live, worker_pb2.LiveRequest(), timeout=ASK_S)
        except grpc.RpcError:
            return Looked()
        workers = [
            WorkerUsage(
                one.pool == "decode", one.running, one.waiting, one.free_blocks, one.kv_blocks, self._facts.max_num_seqs.get(one.name, 0)
            )
            for one in answer.workers
            if one.state in ("ready", "draining")
        ]
        return looked(answer.router.queued, workers)

    async def close(self) -> None:
        await self.door.close()
        self._admin.close()


@contextmanager
def _told() -> Iterator[None]:
    """What hinders is said in words."""
    try:
        yield
    except (StateError, ConfigError, OSError) as error:
        raise BatonError(Reason.NO_WORKER, f"there is no cluster: {error}") from None
    except grpc.RpcError as error:
        told = error.details() if isinstance(error, grpc.Call) else str(error)
        raise BatonError(Reason.NO_WORKER, f"the cluster does not answer: {told}") from None
