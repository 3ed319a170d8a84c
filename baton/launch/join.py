"""A second host for a running cluster: it learns the configuration from a router, and starts workers that join."""

import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc

from baton.cluster.address import address_towards, is_loopback
from baton.cluster.config import Config
from baton.cluster.config_layers import load
from baton.cluster.guard import metadata
from baton.cluster.joining import prove
from baton.cluster.redis_url import parse
from baton.cluster.rpc import channel, to_error
from baton.launch.plan import UpError
from baton.v1 import worker_pb2, worker_pb2_grpc

ANSWER_S = 10.0


async def learn(address: str, config: Config) -> dict[str, str]:
    """`address`: the admin address of a router. Returns the cluster's configuration as variables. Raises UpError."""
    key, shown = config.cluster.key, metadata(config)
    if not key:
        raise UpError("--join: set BATON_CLUSTER_KEY to the key of that cluster (it must have one: set the same there)")
    async with channel(address, config.security) as wire:
        stub = worker_pb2_grpc.AdminStub(wire)
        try:
            asked = await stub.Join(worker_pb2.JoinRequest(), timeout=ANSWER_S, metadata=shown)
            proof = worker_pb2.JoinRequest(challenge=asked.challenge, proof=prove(key, asked.challenge))
            return dict((await stub.Join(proof, timeout=ANSWER_S, metadata=shown)).env)
        except grpc.aio.AioRpcError as error:
            raise UpError(f"--join: {address}: {to_error(error).message}") from None


def configure(address: str, learned: Mapping[str, str], files: Sequence[Path], flags: Mapping[str, str]) -> Config:
    """What this host was told, over the configuration of the cluster. Raises ConfigError, UpError."""
    host, _, port = address.rpartition(":")
    try:
        ours = address_towards(host.strip("[]"), int(port))
    except (OSError, ValueError) as error:
        raise UpError(f"--join: {address}: {error}") from None
    own = {"BATON_CLUSTER_HOST": ours, **learned}
    config = load(files, {**own, **os.environ}, flags).config
    redis = config.redis.url
    if redis.startswith("unix:") or (not is_loopback(host) and all(is_loopback(place) for place, _ in parse(redis).hosts)):
        raise UpError(
            "--join: the Redis of that cluster cannot be reached from another host; start the cluster with --cluster.host, and on a host"
            " without a default route with --cluster.advertise"
        )
    return config


def draw_label() -> str:
    """A label that no other host has, even one with the same name."""
    return f"{socket.gethostname().partition('.')[0][:20].lower()}{secrets.token_hex(2)}"
