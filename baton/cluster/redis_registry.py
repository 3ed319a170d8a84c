"""The registry in Redis (6.2 or later).

    baton:{NAME}:worker:W    JSON record of worker W, expires
    baton:{NAME}:fence:W     newest incarnation of W, expires later
    baton:{NAME}:members     set of worker names; readers drop those whose record is gone
    baton:{NAME}:router:R, router-fence:R, routers     the same for routers
    baton:{NAME}:start:W, start-fence:W, starts           the same for workers that are starting
    baton:{NAME}:events      stream of block events, about `stream_maxlen` long
    baton:{NAME}:pools       JSON of the wanted pool sizes
    baton:{NAME}:planner     "TERM WHO" of the planner that leads, expires; planner-term: the number of the last term
    baton:{NAME}:prover, prover-term     the same for the router that lets workers prove themselves
    baton:{NAME}:planner-change    the change that the planner makes, JSON
    baton:{NAME}:plans       list of what planners decided, bounded
    baton:{NAME}:agreed:T    what all workers do alike about T, expires

The braces are literal: they make a sharded Redis keep all keys of one of our clusters in one slot, so that one script may touch them
together. The scripts cope with any value under a key: a writer overwrites a value of the wrong type, a reader counts it as garbage.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from baton.cluster.config import RedisConfig, SecurityConfig
from baton.cluster.records import BlockEvent, Kind, Pools, Record, RouterRecord, StartRecord, WorkerRecord, kind_of
from baton.cluster.redis_client import RedisClient
from baton.cluster.registry import EVENTS_BATCH, FENCE_LIFETIMES, Office, StaleIncarnation

# Beginnings of the keys of a record and of its fence, and the key of the set of names.
_NAMES: dict[Kind, tuple[str, str, str]] = {
    "worker": ("worker:", "fence:", "members"),
    "router": ("router:", "router-fence:", "routers"),
    "start": ("start:", "start-fence:", "starts"),
}
R = TypeVar("R")
_PUBLISH_BATCH = 256  # events in one command
SLICE_KEYS = 4096  # decoded in one turn of the event loop
SLICE_RECORDS = 128

# KEYS record, fence, members. ARGV incarnation, JSON, record ms, fence ms, name. Returns the newer incarnation when there is one.
# Incarnations are compared as decimal text, because a Lua number holds only 53 bits of them.
_JOIN = """
local newest = redis.pcall('GET', KEYS[2])
if type(newest) == 'string' and string.match(newest, '^%d+$') then
  if #newest > #ARGV[1] or (#newest == #ARGV[1] and newest > ARGV[1]) then return newest end
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SET', KEYS[2], ARGV[1], 'PX', ARGV[4])
if redis.call('TYPE', KEYS[3]).ok ~= 'set' then redis.call('DEL', KEYS[3]) end
redis.call('SADD', KEYS[3], ARGV[5])
return false
"""

# KEYS record, fence, members. ARGV incarnation, name.
_LEAVE = """
if redis.pcall('GET', KEYS[2]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.pcall('SREM', KEYS[3], ARGV[2])
end
"""

# KEYS members. ARGV prefix of a record's key. Returns name, JSON, name, JSON, ...; JSON is empty if the key holds something else.
_MEMBERS = """
local names = redis.pcall('SMEMBERS', KEYS[1])
if names.err then return {'', ''} end
local found = {}
for _, name in ipairs(names) do
  local record = redis.pcall('GET', ARGV[1] .. name)
  if record then
    found[#found + 1] = name
    found[#found + 1] = type(record) == 'string' and record or ''
  else
    redis.pcall('SREM', KEYS[1], name)
  end
end
return found
"""

# KEYS stream. ARGV maxlen, then w, i, s, k, b, m of each event. The script deletes only if it must: once a script has written, Redis no
# longer stops it for lack of memory.
_PUBLISH = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'stream' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
for i = 2, #ARGV, 6 do
  redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*',
    'w', ARGV[i], 'i', ARGV[i + 1], 's', ARGV[i + 2], 'k', ARGV[i + 3], 'b', ARGV[i + 4], 'm', ARGV[i + 5])
end
"""

# KEYS office, its term. ARGV who, lease ms, own term. Returns the term, 0 if another leads.
_LEAD = """
local held = redis.pcall('GET', KEYS[1])
if type(held) == 'string' and string.match(held, '^%d+ .') then
  if held ~= ARGV[3] .. ' ' .. ARGV[1] then return 0 end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return tonumber(ARGV[3])
end
local term = redis.pcall('INCR', KEYS[2])
if type(term) ~= 'number' then
  redis.call('DEL', KEYS[2])
  term = redis.call('INCR', KEYS[2])
end
redis.call('SET', KEYS[1], term .. ' ' .. ARGV[1], 'PX', ARGV[2])
return term
"""

# KEYS office. ARGV "TERM WHO".
_RESIGN = """
if redis.pcall('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

# KEYS planner, pools. ARGV "TERM WHO", prefill, decode that must be wanted now, JSON. Returns 1 if it was written.
_PLAN = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local data = redis.pcall('GET', KEYS[2])
if type(data) ~= 'string' then return 0 end
local read, now = pcall(cjson.decode, data)
if not read or type(now) ~= 'table' or now.stop == true then return 0 end
if tostring(now.prefill) ~= ARGV[2] or tostring(now.decode) ~= ARGV[3] then return 0 end
redis.call('SET', KEYS[2], ARGV[4])
return 1
"""

# KEYS planner, planner-change. ARGV "TERM WHO", JSON. Returns 1 if it was written.
_CHANGE = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
return 1
"""

# KEYS plans. ARGV note, how many are kept.
_NOTE = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'list' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], -tonumber(ARGV[2]), -1)
"""

# KEYS plans. ARGV how many.
_NOTED = """
local found = redis.pcall('LRANGE', KEYS[1], -tonumber(ARGV[1]), -1)
return found.err and {} or found
"""

# KEYS agreed. ARGV mine, lease ms. Returns what holds; empty: nothing.
_AGREE = """
local held = redis.pcall('GET', KEYS[1])
if type(held) ~= 'string' or held == '' then held = ARGV[1] end
if held ~= '' then redis.call('SET', KEYS[1], held, 'PX', ARGV[2]) end
return held
"""


class RedisRegistry:
    """`url`: see `redis_url`; for an embedded server, the address that it was started with. `security`: the authority and the certificate
    for rediss://."""

    def __init__(self, url: str, cluster: str, config: RedisConfig, security: SecurityConfig | None = None) -> None:
        self.garbage = 0
        self._prefix = f"baton:{{{cluster}}}:"
        self._config = config
        self._read: dict[Kind, dict[bytes, tuple[bytes, Any]]] = {}  # name → JSON, record
        self._commands = RedisClient(url, config, security)
        self._blocking = RedisClient(url, config, security)  # a blocked XREAD holds its connection

    async def join(self, record: Record) -> None:
        ttl_ms = round(self._config.record_ttl_s * 1000)
        newest = await self._commands.script(
            _JOIN,
            self._keys(kind_of(record), record.name),
            (record.incarnation, record.to_json(), ttl_ms, ttl_ms * FENCE_LIFETIMES, record.name),
        )
        if newest is not None:
            raise StaleIncarnation(record.name, record.incarnation, int(newest))

    async def leave(self, name: str, incarnation: int, kind: Kind = "worker") -> None:
        await self._commands.script(_LEAVE, self._keys(kind, name), (incarnation, name))

    async def members(self) -> list[WorkerRecord]:
        return await self._records("worker", WorkerRecord.from_json)

    async def routers(self) -> list[RouterRecord]:
        return await self._records("router", RouterRecord.from_json)

    async def starts(self) -> list[StartRecord]:
        return await self._records("start", StartRecord.from_json)

    async def publish(self, events: Sequence[BlockEvent]) -> None:
        for start in range(0, len(events), _PUBLISH_BATCH):
            values = [value for event in events[start : start + _PUBLISH_BATCH] for value in event.to_fields().values()]
            await self._commands.script(_PUBLISH, (self._key("events"),), (self._config.stream_maxlen, *values))

    async def events(self, after: str | None, wait_s: float) -> tuple[list[BlockEvent], str]:
        if after is None:
            return [], await self._last_id()
        stream, block_ms = self._key("events"), round(wait_s * 1000)
        block = ("BLOCK", block_ms) if block_ms > 0 else ()  # BLOCK 0 would wait for ever
        reply = await self._blocking.call("XREAD", "COUNT", EVENTS_BATCH, *block, "STREAMS", stream, after, wait_s=max(wait_s, 0.0))
        if not reply:
            # If the server lost its data and its clock is behind, new entries have ids before the cursor: start again from the beginning.
            return [], "0-0" if _order(await self._last_id()) < _order(after) else after
        found: list[BlockEvent] = []
        decoded = 0
        for entry_id, fields in reply[0][1]:
            after = entry_id.decode()
            try:
                found.append(BlockEvent.from_fields(fields))
                decoded += len(found[-1].keys)
            except ValueError:
                self.garbage += 1
            if decoded >= SLICE_KEYS:
                decoded = 0
                await asyncio.sleep(0)
        return found, after

    async def desire(self, pools: Pools) -> None:
        await self._commands.call("SET", self._key("pools"), pools.to_json())

    async def desired(self) -> Pools | None:
        data = await self._commands.call("GET", self._key("pools"))
        if data is None:
            return None
        try:
            return Pools.from_json(data)
        except ValueError:
            self.garbage += 1
            return None

    async def lead(self, who: str, ttl_s: float, term: int = 0, office: Office = "planner") -> int:
        keys = (self._key(office), self._key(f"{office}-term"))
        return int(await self._commands.script(_LEAD, keys, (who, round(ttl_s * 1000), term)))

    async def leader(self, office: Office = "planner") -> str:
        held = await self._commands.call("GET", self._key(office))
        return cast(bytes, held).decode(errors="replace").partition(" ")[2] if held is not None else ""

    async def resign(self, who: str, term: int, office: Office = "planner") -> None:
        await self._commands.script(_RESIGN, (self._key(office),), (f"{term} {who}",))

    async def plan(self, who: str, term: int, before: Pools, wanted: Pools) -> bool:
        if before.stop:
            return False
        keys = (self._key("planner"), self._key("pools"))
        return bool(await self._commands.script(_PLAN, keys, (f"{term} {who}", before.prefill, before.decode, wanted.to_json())))

    async def note_change(self, who: str, term: int, change: bytes) -> bool:
        keys = (self._key("planner"), self._key("planner-change"))
        return bool(await self._commands.script(_CHANGE, keys, (f"{term} {who}", change)))

    async def noted_change(self) -> bytes | None:
        return cast(bytes | None, await self._commands.call("GET", self._key("planner-change")))

    async def note_plan(self, note: bytes, keep: int) -> None:
        await self._commands.script(_NOTE, (self._key("plans"),), (note, keep))

    async def noted_plans(self, last: int) -> list[bytes]:
        return list(await self._commands.script(_NOTED, (self._key("plans"),), (last,)))

    async def agree(self, topic: str, mine: str, ttl_s: float) -> str:
        held = await self._commands.script(_AGREE, (self._key(f"agreed:{topic}"),), (mine, round(ttl_s * 1000)))
        return cast(bytes, held).decode(errors="replace")

    async def ping(self) -> None:
        await self._commands.call("PING")

    async def close(self) -> None:
        for client in (self._commands, self._blocking):
            await client.close()

    def _key(self, name: str) -> str:
        return self._prefix + name

    def _keys(self, kind: Kind, name: str) -> tuple[str, str, str]:
        record, fence, members = _NAMES[kind]
        return self._key(record + name), self._key(fence + name), self._key(members)

    async def _records(self, kind: Kind, read: Callable[[bytes, str], R]) -> list[R]:
        prefix, _, members = _NAMES[kind]
        reply = await self._commands.script(_MEMBERS, (self._key(members),), (self._key(prefix),))
        before, now = self._read.get(kind, {}), dict[bytes, tuple[bytes, Any]]()
        for number, (name, data) in enumerate(zip(reply[::2], reply[1::2], strict=True), 1):
            if number % SLICE_RECORDS == 0:
                await asyncio.sleep(0)
            if name in before and before[name][0] == data:
                now[name] = before[name]  # most have not changed since the last look
                continue
            try:
                now[name] = data, read(data, name.decode())
            except ValueError:
                self.garbage += 1
        self._read[kind] = now
        return [now[name][1] for name in sorted(now)]

    async def _last_id(self) -> str:
        newest = await self._commands.call("XREVRANGE", self._key("events"), "+", "-", "COUNT", 1)
        return cast(str, newest[0][0].decode()) if newest else "0-0"


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, counter = entry_id.partition("-")
    return int(milliseconds), int(counter)
