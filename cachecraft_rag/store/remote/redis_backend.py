"""Redis and Valkey.

All keys begin with the layout version. `rows/<place>` is a hash of a chunk's rows by variant id, and
`data/<place>/<name>` a payload. The budget is kept by scripts, which Redis runs one at a time: `score` (sorted set)
ranks what is there, `sizes` (hash) and `bytes` (counter) say how much that is, `uploads` (sorted set) when an upload
counts as abandoned. Room is reserved before the first byte is sent, so the budget holds with any number of writers.

Scores age by a `clock`, as in `store.eviction`: what comes starts at it, a use lifts what has fallen behind to it, and
each eviction moves it towards the score of what left: a tenth of the way, or all of it where that is more than nobody's
use can have made.

A member of `score` begins with `created`: among equals the oldest gives way first. One server, or a primary with its
replicas; not a cluster, whose scripts cannot see all keys.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from redis import asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeout

from cachecraft_rag.store.expected import MOST_VARIANTS
from cachecraft_rag.store.remote.base import LONGEST_ROWS, PIECE_BYTES, Outcome, Parcel, Usage, told
from cachecraft_rag.store.remote.config import RemoteConfig
from cachecraft_rag.store.remote.rows import ROOT

T = TypeVar("T")
_MOST_WORDS = 2000  # of a script's arguments: nobody else is served while it runs
_FIRST_PIECE = 64 << 10  # holds the header, which has to be there before anything is planned
# `member` is created:scope/chunk/variant-created, all of fixed width.
# Numbers are read with `real` or `count`: one that somebody else has written must not end all sending.
_COMMON = """
local P, call = KEYS[1], redis.call
local function real(text)
  local number = tonumber(text or 0)
  if not number or number ~= number or number < 0 or number > 2^52 then return 0 end
  return number
end
local function count(text) return math.floor(real(text)) end
local function grow(by)
  call('SET', P .. 'bytes', string.format('%.0f', math.max(0, count(call('GET', P .. 'bytes')) + by)))
end
local function member_of(place, variant, created)
  return created .. ':' .. place .. '/' .. variant .. '-' .. created
end
local function forget(name)  -- bytes of a member or an upload that counts no more
  local size = count(call('HGET', P .. 'sizes', name))
  call('HDEL', P .. 'sizes', name)
  grow(-size)
  return size
end
local function drop(member)
  local created, place, variant = member:sub(1, 16), member:sub(18, 82), member:sub(84, 115)
  call('ZREM', P .. 'score', member)
  call('UNLINK', P .. 'data/' .. member:sub(18))
  local row = call('HGET', P .. 'rows/' .. place, variant)
  if row and row:sub(1, 16) == created then call('HDEL', P .. 'rows/' .. place, variant) end
  return forget(member)
end
local function abandon(token)
  call('ZREM', P .. 'uploads', token)
  call('UNLINK', P .. 'upload/' .. token)
  return forget(token)
end
"""
_RESERVE = """
local token, place, variant = ARGV[1], ARGV[2], ARGV[3]
local nbytes, budget, patience = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
if call('HEXISTS', P .. 'rows/' .. place, variant) == 1 then return 'already there' end
if nbytes > budget then return 'no room' end
local now = tonumber(call('TIME')[1])
for _, dead in ipairs(call('ZRANGEBYSCORE', P .. 'uploads', '-inf', now)) do abandon(dead) end
local excess = nbytes + count(call('GET', P .. 'bytes')) - budget
local clock = real(call('GET', P .. 'clock'))
while excess > 0 do
  local least, score = unpack(call('ZRANGE', P .. 'score', 0, 0, 'WITHSCORES'))
  if not least then return 'no room' end  -- all of it is reserved by other writers
  excess = excess - drop(least)
  local ahead = math.max(0, real(score) - clock)
  clock = clock + (ahead > 2 and ahead or ahead / 10)  -- 2: `eviction.worth` of what was never used, at most
  call('SET', P .. 'clock', string.format('%.17g', clock))
end
call('ZADD', P .. 'uploads', now + patience, token)
call('HSET', P .. 'sizes', token, nbytes)
grow(nbytes)
return 'go on'
"""
_COMMIT = """
local token, place, variant, row = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local score, payload_bytes, most = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local rows, created = P .. 'rows/' .. place, row:sub(1, 16)
if not call('ZSCORE', P .. 'uploads', token) then return 'too slow' end
local refused = call('STRLEN', P .. 'upload/' .. token) ~= payload_bytes and 'too slow'
if call('HEXISTS', rows, variant) == 1 then refused = 'already there' end
if refused then abandon(token) return refused end
local member = member_of(place, variant, created)
call('RENAME', P .. 'upload/' .. token, P .. 'data/' .. member:sub(18))
call('PERSIST', P .. 'data/' .. member:sub(18))
call('HSET', P .. 'sizes', member, call('HGET', P .. 'sizes', token))
call('HDEL', P .. 'sizes', token)
call('ZREM', P .. 'uploads', token)
call('ZADD', P .. 'score', real(call('GET', P .. 'clock')) + real(score), member)
local others = call('HGETALL', rows)  -- the newest is spared, or a full chunk would never learn anything new
call('HSET', rows, variant, row)
local ranked = {}
for i = 1, #others, 2 do
  local other = member_of(place, others[i], others[i + 1]:sub(1, 16))
  table.insert(ranked, {tonumber(call('ZSCORE', P .. 'score', other) or 0), other})
end
table.sort(ranked, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
for i = 1, #ranked + 1 - most do drop(ranked[i][2]) end
return 'sent'
"""
_LOOKUP = """
local most, longest, found = tonumber(ARGV[1]), tonumber(ARGV[2]), {}
for i = 3, #ARGV do
  local rows, kept, size, key = {}, {}, 0, KEYS[1] .. 'rows/' .. ARGV[i]
  local many = redis.pcall('HLEN', key)
  if type(many) == 'number' and many <= most then rows = redis.call('HVALS', key) end
  for _, row in ipairs(rows) do
    size = size + #row
    if size <= longest then table.insert(kept, row) end
  end
  table.insert(found, kept)
end
return found
"""
_RAISE = """
local clock = real(call('GET', P .. 'clock'))
for i = 1, #ARGV, 2 do
  local score = call('ZSCORE', P .. 'score', ARGV[i])
  if score then call('ZADD', P .. 'score', math.max(real(score), clock) + real(ARGV[i + 1]), ARGV[i]) end
end
"""
_ABANDON = "abandon(ARGV[1])"
_REMOVE = "drop(ARGV[1])"  # also where `score` does not know it: a row of somebody who keeps to no rules
_REMOVE_ROW = "if call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then call('HDEL', KEYS[2], ARGV[1]) end"


class RedisBackend:
    """See `base.Backend`."""

    def __init__(self, config: RemoteConfig) -> None:
        """Connects when first asked something. Raises ValueError when the URL makes no sense to the library."""
        self._config, self._prefix = config, ROOT + ":"
        self._redis: Any = aioredis.Redis.from_url(
            config.url,
            socket_connect_timeout=config.connect_timeout_s,
            socket_timeout=config.put_timeout_s,  # a last resort: every call is cancelled long before
            retry=Retry(NoBackoff(), 0),  # retried by the tier, within its time limits
        )
        script = self._redis.register_script
        self._lookup = script(_LOOKUP)
        self._reserve, self._commit = script(_COMMON + _RESERVE), script(_COMMON + _COMMIT)
        self._abandon, self._remove = script(_COMMON + _ABANDON), script(_COMMON + _REMOVE)
        self._remove_row, self._raise = script(_COMMON + _REMOVE_ROW), script(_COMMON + _RAISE)

    async def lookup(self, places: Sequence[str]) -> list[list[bytes]]:
        """See `Backend.lookup`; one round trip."""
        most = max(MOST_VARIANTS, self._config.variants_per_chunk)
        return [list(rows) for rows in await self._ask(self._lookup, most, LONGEST_ROWS, *places)]

    async def read(self, name: str) -> AsyncIterator[bytes | memoryview]:
        """See `Backend.read`."""
        start, step = 0, _FIRST_PIECE
        while True:
            asking = self._redis.getrange(f"{self._prefix}data/{name}", start, start + step - 1)
            try:
                piece = await self._told(asking)
            except FileNotFoundError:  # it is there, but no payload: as good as gone
                return
            if piece:
                yield piece
            if len(piece) < step:
                return
            start, step = start + step, min(4 * step, PIECE_BYTES)

    async def put(self, parcel: Parcel) -> Outcome:
        """See `Backend.put`."""
        token, config = uuid.uuid4().hex, self._config
        patience = int(config.put_timeout_s) + 2
        budget = (parcel.nbytes, config.budget_bytes, patience)
        answer: Outcome | Literal["go on"]
        answer = await self._ask(self._reserve, token, parcel.place, parcel.variant_id, *budget)
        if answer != "go on":
            return answer
        try:
            await self._send(f"{self._prefix}upload/{token}", parcel.payload, patience)
            limits = (repr(parcel.score), parcel.payload_bytes, config.variants_per_chunk)
            done: Outcome = await self._ask(self._commit, token, parcel.place, parcel.variant_id, parcel.row, *limits)
            return done
        except OSError:
            await self._ask(self._abandon, token)  # if that fails too, it counts as abandoned in a while
            raise

    async def _send(self, key: str, payload: Sequence[memoryview], patience: int) -> None:
        for part in payload:
            for start in range(0, part.nbytes, PIECE_BYTES):
                await self._told(self._redis.append(key, part[start : start + PIECE_BYTES]))
                if start == 0:  # from the first piece on: only this removes what a killed writer leaves
                    await self._told(self._redis.expire(key, patience))

    async def raise_score(self, gains: Mapping[str, float]) -> None:
        """See `Backend.raise_score`."""
        raised = [word for name, gain in gains.items() for word in (_member(name), repr(gain))]
        for start in range(0, len(raised), _MOST_WORDS):
            await self._ask(self._raise, *raised[start : start + _MOST_WORDS])

    async def remove(self, name: str) -> None:
        """See `Backend.remove`."""
        await self._ask(self._remove, _member(name))

    async def remove_row(self, place: str, row: bytes) -> None:
        """See `Backend.remove_row`."""
        key = f"{self._prefix}rows/{place}"
        for variant_id, found in (await self._told(self._redis.hgetall(key))).items():
            if found == row:
                await self._told(self._remove_row(keys=[self._prefix, key], args=[variant_id, row]))

    async def usage(self) -> Usage:
        """See `Backend.usage`."""

        async def ask() -> Usage:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.zcard(f"{self._prefix}score")
                pipe.get(f"{self._prefix}bytes")
                variants, nbytes = await pipe.execute()
            return Usage(variants, int(nbytes or 0))

        return await self._told(ask())

    async def probe(self) -> None:
        """See `Backend.probe`."""
        await self._told(self._redis.ping())

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._told(self._redis.aclose())

    async def _ask(self, script: Any, *arguments: Any) -> Any:
        answer = await self._told(script(keys=[self._prefix], args=arguments))
        return answer.decode() if isinstance(answer, bytes) else answer

    async def _told(self, asking: Awaitable[T]) -> T:
        """What Redis answers. Raises OSError, no secret in its text; FileNotFoundError for a key of another kind."""
        return await told(asking, self._failure, RedisError)

    def _failure(self, error: Exception) -> OSError:
        text = f"{type(error).__name__}: {self._config.hide(error)}"
        if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
            return FileNotFoundError(text)
        return TimeoutError(text) if isinstance(error, RedisTimeout | TimeoutError) else OSError(text)


def _member(name: str) -> str:
    return f"{name[-16:]}:{name}"
