"""How a second host gets the configuration of a running cluster: it proves that it knows the cluster's key.

The key itself is not sent. The answer holds the address of Redis with its password, so without TLS it is as secret as the network, like
every command that is sent to that Redis.
"""

import hmac
import os
from hashlib import blake2b

from baton.cluster.config import Config
from baton.cluster.config_layers import to_env
from baton.cluster.errors import BatonError, Reason

CHALLENGE_BYTES = 16
MAX_CHALLENGES = 64
VALID_S = 10.0
SHARED = ("BATON_CLUSTER_NAME", "BATON_MODEL_", "BATON_ENGINE_", "BATON_KV_", "BATON_REDIS_", "BATON_SECURITY_OPEN_ADMIN")
OF_ONE_HOST = ("BATON_KV_PORT", "BATON_KV_UCX_NET_DEVICES", "BATON_ENGINE_THREADS", "BATON_ENGINE_KV_MEMORY_MIB")


def prove(key: str, challenge: bytes) -> bytes:
    return blake2b(challenge, key=blake2b(key.encode(), digest_size=32, person=b"baton join").digest(), digest_size=32).digest()


class Joining:
    """The router's side. Each challenge is good for one proof, within VALID_S."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._open: dict[bytes, float] = {}  # challenge → when it was made, oldest first

    def challenge(self, now: float) -> bytes:
        """`now`: seconds. If too many are open, the oldest is forgotten."""
        if len(self._open) >= MAX_CHALLENGES:
            del self._open[next(iter(self._open))]
        made = os.urandom(CHALLENGE_BYTES)
        self._open[made] = now
        return made

    def admit(self, challenge: bytes, proof: bytes, now: float) -> dict[str, str]:
        """Returns the variables of the configuration. Raises BatonError(UNAUTHENTICATED)."""
        made, key = self._open.pop(challenge, None), self._config.cluster.key
        if key is None or made is None or now - made > VALID_S or not hmac.compare_digest(proof, prove(key, challenge)):
            raise BatonError(Reason.UNAUTHENTICATED, "this is no proof of the cluster's key (BATON_CLUSTER_KEY)")
        env = to_env(self._config)
        return {name: value for name, value in env.items() if name.startswith(SHARED) and name not in OF_ONE_HOST}
