-- heartbeat and janitor: who is alive, what is left behind, and what somebody removed by hand.
--
-- Fields of a worker's hash, which ends with its last heartbeat's TTL:
--   seen_ms    Unix ms of the last heartbeat
--   _lease_ms  how long its leases are
--   _nonce     of the last claim that was granted something
--   _grants    msgpack: [[tenant, request id, epoch], …], what was granted then
--   _suspect   <tenant>:<request id>:<epoch> of the last request that was granted alone
--   others     what the worker tells of itself

-- ARGV: worker, ttl ms, then field and value in turn
local function heartbeat(keys, args)
  local q, worker = keys[1], worker_name(args[1])
  local ttl_ms = whole('ttl_ms', args[2], 1)
  if #args % 2 ~= 0 then refuse('field ' .. args[#args] .. ' has no value') end
  for at = 3, #args, 2 do
    if args[at]:sub(1, 1) == '_' then refuse('field ' .. args[at] .. ' belongs to the queue') end
  end
  local key, now = worker_key(q, worker), now_ms()
  redis.call('HSET', key, 'seen_ms', now)
  for at = 3, #args, 2 do redis.call('HSET', key, args[at], args[at + 1]) end
  redis.call('PEXPIRE', key, ttl_ms)
  redis.call('ZADD', workers_key(q), now, worker)
  return 1
end

local function is_alive(q, worker) return redis.call('EXISTS', worker_key(q, worker)) == 1 end

local function forget_workers(q, most)
  local removed = 0
  for _, worker in ipairs(redis.call('ZRANGE', workers_key(q), 0, most - 1)) do
    if not is_alive(q, worker) then
      removed = removed + redis.call('ZREM', workers_key(q), worker)
    end
  end
  return removed
end

-- Deleting a consumer with pending entries would lose them, so those wait for the reaper.
local function remove_idle_consumers(q, lane, tenant)
  local key = lane_key(q, lane, tenant)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', key, GROUP)
  if consumers.err then return 0 end
  local removed = 0
  for _, consumer in ipairs(consumers) do
    local name, pending = consumer[2], consumer[4]
    if not is_waiting_place(name) and pending == 0 and not is_alive(q, name) then
      redis.call('XGROUP', 'DELCONSUMER', key, GROUP, name)
      removed = removed + 1
    end
  end
  return removed
end

local function has_entry(q, r)
  local found = redis.pcall('XRANGE', lane_key(q, r.lane, r.tenant), r.entry, r.entry)
  -- A lane that is no stream is left as it is, for somebody to look at.
  if found.err then return true end
  -- A lane that was deleted may give the same id again, to another request.
  return #found > 0 and read_entry(found[1]).request_id == r.id
end

local function is_later(a, b)
  local a_ms, a_seq = a:match('^(%d+)-(%d+)$')
  local b_ms, b_seq = b:match('^(%d+)-(%d+)$')
  if a_ms ~= b_ms then return tonumber(a_ms) > tonumber(b_ms) end
  return tonumber(a_seq) > tonumber(b_seq)
end

-- Whether claim or reap will come across the entry: it is pending, or still to be delivered.
local function is_within_reach(q, r)
  local key = lane_key(q, r.lane, r.tenant)
  local pending = redis.pcall('XPENDING', key, GROUP, r.entry, r.entry, 1)
  if pending[1] then return true end
  if r.state == 'running' then return false end
  if pending.err then return true end -- a group that is made anew delivers everything
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    if group[2] == GROUP then return is_later(r.entry, group[8]) end
  end
end

-- A request that waits or runs needs its entry, its lease, and a place of its tenant in the lane;
-- else nobody will ever take it.
local function repair_request(q, key)
  local tenant, id = key:sub(#q + 6):match('^([^:]*):(.*)$') -- behind "{q}:req:"
  local r = load_request(q, tenant, id)
  if not r or is_over(r) then return 0 end
  local is_back = join_lane(q, r.lane, tenant)
  if r.deadline_ms then
    redis.call('ZADD', deadlines_key(q), 'NX', r.deadline_ms, reference(tenant, id))
  end
  if not has_entry(q, r) then
    restore_entry(q, r)
  elseif is_within_reach(q, r) then
    return is_back and 1 or 0
  elseif r.state == 'queued' then
    hand_to(q, r, REQUEUED) -- a claim moves it on if it is a suspect
  end
  -- A holder may be alive: it keeps the request, with a fresh lease that it has to renew.
  if r.owner then hand_to(q, r, r.owner) else wake(q) end
  return 1
end

local function repair_requests(q, most)
  local stats = stats_key(q)
  local cursor = cursor_of(redis.call('HGET', stats, 'repair_cursor'))
  -- Characters that mean something in a pattern cannot occur in a queue name.
  local pattern = request_key(q, '*', '*')
  local page = redis.call('SCAN', cursor, 'MATCH', pattern, 'COUNT', most, 'TYPE', 'hash')
  if page[1] ~= cursor then redis.call('HSET', stats, 'repair_cursor', page[1]) end
  local repaired = 0
  for _, key in ipairs(page[2]) do repaired = repaired + repair_request(q, key) end
  return repaired
end

-- ARGV: worker, how many keys to look at. Reply: how many things were removed or repaired.
local function janitor(keys, args)
  local q = keys[1]
  worker_name(args[1])
  local left = whole('count', args[2], 1)
  local done = forget_workers(q, left) + repair_requests(q, left)
  walk_lanes(q, 'janitor_cursor', function(lane, tenant)
    done = done + remove_stranger(q, lane, tenant) + remove_idle_consumers(q, lane, tenant)
      + recount(q, lane, tenant)
    left = left - 1
    return left > 0
  end)
  return done + remove_foreign_counts(q, whole('count', args[2], 1)) + add_up_books(q)
end

register('heartbeat', heartbeat, FREEING)
register('janitor', janitor, FREEING)
