"""Only a host that proves the cluster's key learns the configuration, and the key itself never travels."""

import pytest

from baton.cluster.config import Config
from baton.cluster.config_layers import load
from baton.cluster.errors import BatonError, Reason
from baton.cluster.joining import MAX_CHALLENGES, VALID_S, Joining, prove

KEY = "the key of this cluster"


def config(key: str | None = KEY) -> Config:
    env = {
        "BATON_CLUSTER_NAME": "one", "BATON_ENGINE_BLOCK_SIZE": "32", "BATON_ENGINE_THREADS": "3", "BATON_KV_PORT": "20000",
        "BATON_REDIS_URL": "redis://:word@10.0.0.1:6379/0", "BATON_ROUTER_PORT": "9000", "BATON_CLUSTER_HOST": "10.0.0.1",
    }  # fmt: skip
    return load([], {**env, **({"BATON_CLUSTER_KEY": key} if key else {})}).config


def refused(joining: Joining, challenge: bytes, proof: bytes, now: float) -> bool:
    with pytest.raises(BatonError) as refusal:
        joining.admit(challenge, proof, now)
    return refusal.value.reason is Reason.UNAUTHENTICATED


def test_a_proof_brings_what_all_hosts_share() -> None:
    joining = Joining(config())
    challenge = joining.challenge(0.0)
    learned = joining.admit(challenge, prove(KEY, challenge), VALID_S)
    assert learned == {"BATON_CLUSTER_NAME": "one", "BATON_ENGINE_BLOCK_SIZE": "32", "BATON_REDIS_URL": "redis://:word@10.0.0.1:6379/0"}
    assert load([], learned).config.engine.block_size == 32


def test_no_other_proof_does() -> None:
    joining = Joining(config())
    challenge = joining.challenge(0.0)
    assert refused(joining, challenge, prove("another key of that size", challenge), 0.0)
    assert refused(joining, challenge, prove(KEY, challenge), 0.0), "a challenge is good for one proof"
    late = joining.challenge(0.0)
    assert refused(joining, late, prove(KEY, late), VALID_S + 0.1)
    assert refused(joining, b"my own challenge", prove(KEY, b"my own challenge"), 0.0)
    assert refused(joining, joining.challenge(0.0), b"", 0.0)


def test_a_cluster_without_a_key_admits_nobody() -> None:
    joining = Joining(config(None))
    challenge = joining.challenge(0.0)
    assert refused(joining, challenge, prove("", challenge), 0.0)


def test_the_challenges_are_bounded() -> None:
    joining = Joining(config())
    first = joining.challenge(0.0)
    for _ in range(MAX_CHALLENGES):
        last = joining.challenge(0.0)
    assert refused(joining, first, prove(KEY, first), 0.0)
    assert joining.admit(last, prove(KEY, last), 0.0)
