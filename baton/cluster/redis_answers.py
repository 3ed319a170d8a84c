"""Answers that are kept in Redis until they expire, beside the registry (`baton.cluster.redis_registry`).

    baton:{NAME}:answer:A             the answer A, sealed by the router (`router.kept`); expires
    baton:{NAME}:answers              sorted set of TENANT:A:BYTES, by the time at which A expires, ms
    baton:{NAME}:answers-of:TENANT    the same of one tenant
    baton:{NAME}:answers-held         sorted set of tenants, by the bytes that each holds
    baton:{NAME}:answers-bytes        bytes of all together

A and TENANT are digests in hexadecimal. All together are bounded, because the registry lives in the same memory. Where there is no room,
the oldest answer of the tenant that holds the most makes room: a tenant that writes much pushes out its own answers only.
"""

from typing import Any

from baton.cluster.config import RedisConfig, SecurityConfig
from baton.cluster.redis_client import RedisClient

# What both scripts do to the index. KEYS answer. ARGV prefix.
_FORGET = """
local prefix = ARGV[1]
local function forget(member)
  local tenant, name, size = string.match(member, '^(%x+):(%x+):(%d+)$')
  redis.call('DEL', prefix .. 'answer:' .. name)
  redis.call('ZREM', prefix .. 'answers', member)
  redis.call('ZREM', prefix .. 'answers-of:' .. tenant, member)
  if tonumber(redis.call('ZINCRBY', prefix .. 'answers-held', -size, tenant)) <= 0 then
    redis.call('ZREM', prefix .. 'answers-held', tenant)
  end
  return tonumber(redis.call('INCRBY', prefix .. 'answers-bytes', -size))
end
"""
# ARGV prefix, tenant, name, answer, life in ms, most bytes of all together.
_PUT = (
    _FORGET
    + """
local tenant, name, size, life, most = ARGV[2], ARGV[3], #ARGV[4], ARGV[5], tonumber(ARGV[6])
if size > most then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'answers', '-inf', now, 'LIMIT', 0, 256)) do forget(member) end
redis.call('SET', KEYS[1], ARGV[4], 'PX', life)
local member = tenant .. ':' .. name .. ':' .. size
redis.call('ZADD', prefix .. 'answers', now + life, member)
redis.call('ZADD', prefix .. 'answers-of:' .. tenant, now + life, member)
redis.call('ZINCRBY', prefix .. 'answers-held', size, tenant)
local held = tonumber(redis.call('INCRBY', prefix .. 'answers-bytes', size))
while held > most do
  local largest = redis.call('ZREVRANGE', prefix .. 'answers-held', 0, 0)[1]
  if not largest then break end
  local oldest = redis.call('ZRANGE', prefix .. 'answers-of:' .. largest, 0, 0)[1]
  if oldest then held = forget(oldest) else redis.call('ZREM', prefix .. 'answers-held', largest) end
end
for _, index in ipairs({'answers', 'answers-of:' .. tenant, 'answers-held', 'answers-bytes'}) do
  redis.call('PEXPIRE', prefix .. index, life)
end
return redis.call('EXISTS', KEYS[1])
"""
)
# ARGV prefix, tenant, name. Returns whether there was one.
_DELETE = (
    _FORGET
    + """
local size = redis.call('STRLEN', KEYS[1])
if size == 0 then return 0 end
forget(ARGV[2] .. ':' .. ARGV[3] .. ':' .. size)
return 1
"""
)


class RedisAnswers:
    """Implements `router.kept.Answers`. `url` and `security`: see `redis_client`. `most_bytes`: of all answers together, of all routers."""

    def __init__(self, url: str, cluster: str, config: RedisConfig, security: SecurityConfig, most_bytes: int) -> None:
        self._prefix = f"baton:{{{cluster}}}:"
        self._client = RedisClient(url, config, security)
        self._most_bytes = most_bytes

    async def put(self, tenant: str, name: str, answer: bytes, life_s: float) -> bool:
        kept = await self._script(_PUT, name, tenant, name, answer, round(life_s * 1000), self._most_bytes)
        return bool(kept)

    async def get(self, name: str) -> bytes | None:
        found = await self._client.call("GET", self._key(name))
        return found if isinstance(found, bytes) else None

    async def delete(self, tenant: str, name: str) -> bool:
        return bool(await self._script(_DELETE, name, tenant, name))

    async def close(self) -> None:
        await self._client.close()

    def _key(self, name: str) -> str:
        return f"{self._prefix}answer:{name}"

    async def _script(self, script: str, name: str, *arguments: Any) -> Any:
        return await self._client.script(script, (self._key(name),), (self._prefix, *arguments))
