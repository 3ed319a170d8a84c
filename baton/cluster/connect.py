"""The registry that a configuration asks for."""

from baton.cluster.config import Config, ConfigError
from baton.cluster.redis_registry import RedisRegistry
from baton.cluster.registry import Registry


def connect_registry(config: Config) -> Registry:
    """Nothing is asked of Redis yet. Raises ConfigError while `redis.url` is "embedded": who starts a cluster starts that server too."""
    if config.redis.url == "embedded":
        raise ConfigError(
            "redis.url: 'embedded' is for `baton up`, which starts the server; a process started by hand needs the address"
            " (BATON_REDIS_URL=redis://host:port)"
        )
    return RedisRegistry(config.redis.url, config.cluster.name, config.redis)
