-- Dead letters: list them, play one again, throw them away.

local MAX_LISTED = 100 -- letters read in one call, payloads and all

local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end

-- ARGV: most, start id or '-'
-- Reply: a list of {entry id, tenant, request id, reason, strikes, worker, payload bytes, deaths};
--        a death is {worker, epoch, tokens at the grant, tokens at the death, alone, Unix ms, cause}
local function list_dead(keys, args)
  local most = whole('count', args[1], 1)
  local found = redis.call('XRANGE', dead_key(keys[1]), args[2], '+', 'COUNT', math.min(most, MAX_LISTED))
  local letters = {}
  for i, entry in ipairs(found) do
    local f = fields_of(entry)
    letters[i] = { entry[1], f.tenant, f.request_id, f.reason, f.strikes, f.worker, #f.payload,
      evidence_of(f.evidence) }
  end
  return letters
end

-- ARGV: entry id. Reply: 1 when the request was queued again under its id, 0 when there is no such
-- letter any more, or its id is taken by another request.
local function replay_dead(keys, args)
  local q = keys[1]
  local entry = redis.call('XRANGE', dead_key(q), args[1], args[1])[1]
  if not entry then return 0 end
  local f = fields_of(entry)
  local key = request_key(q, f.tenant, f.request_id)
  local digest = redis.sha1hex(f.payload)
  local known = redis.call('HMGET', key, 'state', 'error_code', 'digest')
  if known[1] and (known[2] ~= 'dead_lettered' or known[3] ~= digest) then return 0 end
  redis.call('DEL', key)
  accept(q, {
    tenant = f.tenant, id = f.request_id, payload = f.payload, cost = tonumber(f.cost),
    lane = tonumber(f.lane), attached = f.attached, result_ttl_ms = tonumber(f.result_ttl_ms),
    epoch = tonumber(f.epoch or 0), -- goes on, so that no write of its first life is ever accepted
  }, digest, now_ms())
  remove_dead(q, entry)
  return 1
end

-- ARGV: entry ids, or none for all. Reply: how many were deleted.
local function purge_dead(keys, args)
  local q, deleted = keys[1], 0
  if #args == 0 then
    redis.call('HDEL', dead_books_key(q), 'bytes')
    return redis.call('XTRIM', dead_key(q), 'MAXLEN', 0)
  end
  for _, id in ipairs(args) do
    local entry = redis.call('XRANGE', dead_key(q), id, id)[1]
    if entry then
      remove_dead(q, entry)
      deleted = deleted + 1
    end
  end
  return deleted
end

register('list_dead', list_dead, READING)
register('replay_dead', replay_dead)
register('purge_dead', purge_dead, FREEING)
