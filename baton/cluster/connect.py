"""Makes the registry that a configuration names."""

from baton.cluster.config import Config, ConfigError
from baton.cluster.redis_registry import RedisRegistry
from baton.cluster.registry import Registry


def connect_registry(config: Config) -> Registry:
    """Does not contact Redis yet. Raises ConfigError if `redis.url` is "embedded": `baton up` starts that server and replaces the value."""
    if config.redis.url == "embedded":
        raise ConfigError(
            "redis.url: 'embedded' is for `baton up`, which starts the server; a process started by hand needs the address"
            " (BATON_REDIS_URL=redis://host:port)"
        )
    return RedisRegistry(config.redis.url, config.cluster.name, config.redis, config.security)
