-- One request: the fields of its hash, and the ways in which it changes state.
--
--   state          queued, running, finished, failed or cancelled
--   payload        bytes, msgpack; from enqueue to the end, then removed
--   digest         SHA-1 of the payload; tells a retry from another request of that id
--   cost           tokens, the client's estimate of prompt and output together
--   lane           priority, 0 soonest … 9
--   entry          id of its entry in the lane
--   attached       1 when somebody reads the stream as it grows, else 0
--   epoch          grants so far; the fencing token
--   num_tokens     tokens in the log; the next emit must start here
--   owner          worker that holds it; only while running
--   granted_tokens num_tokens at the current grant; what is beyond is progress
--   strikes        holders that vanished since it last got on
--   deaths         holders that vanished, in all
--   evidence       msgpack: the last deaths, see strikes.lua
--   alone          1 when the current grant was made to an otherwise empty worker
--   cancel         1 once somebody asked the holder to stop
--   finish         1 once somebody asked the holder to end it with what there is
--   enqueued_ms, started_ms (first grant), finished_ms, deadline_ms (absent: none)
--                  Unix milliseconds by Redis's clock
--   result_ttl_ms  how long the token log is kept after the end
--   finish_reason, error_code, error_message
--                  as in the terminal entry
--   closed_by      worker that finished it, or _queue; tells a repeated finish from a late one

-- The queue must know how long each worker's leases are: workers may differ. The heartbeat sets the
-- time to live of the hash; until the first one it lasts long enough.
local function note_lease(q, worker, lease_ms)
  local key = worker_key(q, worker)
  redis.call('HSET', key, '_lease_ms', lease_ms)
  if redis.call('PTTL', key) < 0 then redis.call('PEXPIRE', key, lease_ms * 4) end
end

local function lease_of(q, worker)
  local lease_ms = redis.pcall('HGET', worker_key(q, worker), '_lease_ms')
  return type(lease_ms) == 'string' and natural(lease_ms) or nil
end

local function is_waiting_place(consumer) return consumer == REQUEUED or consumer == SUSPECTS end

local STATES = { queued = true, running = true, finished = true, failed = true, cancelled = true }

-- Whether claim, reap and janitor can come to the request by what it says of itself.
local function can_be_found(r)
  local is_in_lane = r.lane and r.lane < LANES and r.entry and #r.entry <= 41
    and r.entry:match('^%d+-%d+$') ~= nil
  local is_owned = r.owner and r.owner ~= '' and not is_waiting_place(r.owner)
  return is_in_lane and (r.state ~= 'running' or is_owned)
end

-- The request, or nil, also for a hash of the wrong type, and for one in which a field that is
-- always there is missing or holds what no function writes: its producer may write into it.
local function load_request(q, tenant, id)
  if not is_tenant(tenant) or not is_request_id(id) then return nil end
  local key = request_key(q, tenant, id)
  local v = redis.pcall('HMGET', key, 'state', 'epoch', 'num_tokens', 'owner', 'lane', 'entry',
    'cost', 'strikes', 'alone', 'attached', 'cancel', 'deadline_ms', 'enqueued_ms',
    'result_ttl_ms', 'closed_by', 'finish', 'deaths', 'granted_tokens')
  if v.err or not STATES[v[1]] then return nil end
  local r = {
    key = key, tenant = tenant, id = id, state = v[1], epoch = natural(v[2]),
    num_tokens = natural(v[3]), owner = v[4], lane = natural(v[5]), entry = v[6],
    cost = natural(v[7]), strikes = natural(v[8]), alone = v[9] == '1',
    attached = v[10] == '1' and 1 or 0, cancel = v[11] == '1', deadline_ms = natural(v[12]), enqueued_ms = natural(v[13]),
    result_ttl_ms = natural(v[14]), closed_by = v[15], finish = v[16] == '1',
    deaths = natural(v[17]) or 0, granted_tokens = natural(v[18]) or 0,
  }
  local is_whole = r.epoch and r.num_tokens and r.cost and r.strikes and r.enqueued_ms
    and r.result_ttl_ms
  return is_whole and can_be_found(r) and r or nil
end

local function is_over(r) return r.state ~= 'queued' and r.state ~= 'running' end
local function is_held(r, worker, epoch)
  return r.state == 'running' and r.owner == worker and r.epoch == epoch
end
local function is_expired(r, now) return r.deadline_ms ~= nil and r.deadline_ms <= now end

-- What emit and wishes ask of a request: its key, num_tokens, lane, and "CANCEL" or "FINISH" if a
-- client wants that. Nil if the worker does not hold it at that epoch; load_request then says what
-- is the matter. To read and check all fields would take Redis twice as long; a request that lacks
-- another one meets that when it ends.
local function load_held(q, worker, tenant, id, epoch)
  if not is_tenant(tenant) or not is_request_id(id) then return nil end
  local key = request_key(q, tenant, id)
  local v = redis.pcall('HMGET', key, 'state', 'owner', 'epoch', 'num_tokens', 'lane', 'cancel',
    'finish')
  if v.err or v[1] ~= 'running' or v[2] ~= worker or natural(v[3]) ~= epoch then return nil end
  local num_tokens, lane = natural(v[4]), natural(v[5])
  if not num_tokens or not lane or lane >= LANES then return nil end
  return key, num_tokens, lane, v[6] == '1' and 'CANCEL' or v[7] == '1' and 'FINISH' or nil
end

-- Somebody removed the lane entry by hand: put it back, so that the request does not get stuck.
local function restore_entry(q, r)
  local size = redis.call('HSTRLEN', r.key, 'payload')
  r.entry = add_entry(q, r.lane, r.tenant, r.id, r.cost, size)
  redis.call('HSET', r.key, 'entry', r.entry)
end

-- Make a consumer the holder of the entry, idle for 0 ms. FORCE repairs a PEL that lost the entry;
-- JUSTID leaves the delivery count alone.
local function hand_to(q, r, consumer)
  local key = lane_key(q, r.lane, r.tenant)
  local function claim_entry()
    return redis.pcall('XCLAIM', key, GROUP, consumer, 0, r.entry, 'FORCE', 'JUSTID')
  end
  local reply = claim_entry()
  if reply.err and reply.err:find('NOGROUP', 1, true) then
    ensure_group(key)
    reply = claim_entry()
  end
  -- A lane that is no stream any more holds no lease, but its requests can still be emitted and
  -- finished; claim reports the lane. An empty reply means that the entry itself is gone.
  if reply.err or #reply > 0 then return end
  restore_entry(q, r)
  claim_entry()
end

-- A hint, no more than the name of a request: its holder looks what is wanted. Without it, the
-- holder learns from its next emit, or when it looks by itself.
local function tell_holder(q, r)
  redis.call('PUBLISH', control_channel(q), reference(r.tenant, r.id))
end

-- Take an unfinished request to another lane, with its holder and its counts. One that waits comes
-- last among the new ones there, or with those that were handed back, which go before them.
local function move_lane(q, r, lane, now, is_ahead)
  local old_lane, old_entry = r.lane, r.entry
  local size = redis.call('HSTRLEN', r.key, 'payload')
  r.entry = add_entry(q, lane, r.tenant, r.id, r.cost, size)
  r.lane = lane
  redis.call('HSET', r.key, 'lane', lane, 'entry', r.entry)
  if r.state == 'running' then
    hand_to(q, r, r.owner)
    count(q, 'running', lane, r.tenant, 1)
  else
    if is_ahead then hand_to(q, r, REQUEUED) end
    count_queued(q, lane, r.tenant, r.cost, now)
  end
  drop_entry(q, old_lane, r.tenant, old_entry)
  count(q, r.state, old_lane, r.tenant, -1)
  close_lane(q, old_lane, r.tenant)
end

local function terminal_entry(reason, code, message)
  return cmsgpack.pack({ v = PROTOCOL, reason = reason, code = code, error = message })
end

local function write_terminal(log, num_tokens, terminal)
  local id = num_tokens .. '-1'
  local written = redis.pcall('XADD', log, id, TERMINAL_FIELD, terminal)
  if type(written) == 'table' and written.err then
    redis.call('DEL', log) -- somebody spoiled the log; the request must end all the same
    redis.call('XADD', log, id, TERMINAL_FIELD, terminal)
  end
end

local function ended_by_queue(state, reason, code, message)
  return {
    state = state, reason = reason, code = code, message = message, by = '_queue',
    terminal = terminal_entry(reason, code, message),
  }
end

local function cancelled()
  return ended_by_queue('cancelled', 'cancelled', 'cancelled', 'cancelled by a client')
end

-- An answer, not an error: the text ends with the last token that the log holds.
local function stopped_early() return ended_by_queue('finished', 'stopped_early') end

-- What a request has made by its deadline is its answer; one that never ran has none.
local function expired(r)
  if r.state == 'running' or r.num_tokens > 0 then
    return ended_by_queue('finished', 'deadline')
  end
  return ended_by_queue('failed', 'error', 'deadline_exceeded',
    'the deadline passed while the request was queued')
end

-- How somebody asked for a request to end that its holder has not ended, or nil.
local function wished_end(r)
  return r.cancel and cancelled() or r.finish and stopped_early() or nil
end

-- The one end of every request: terminal entry first, then the state, then the acknowledgement.
local function conclude(q, r, now, ending)
  local log = log_key(q, r.tenant, r.id)
  write_terminal(log, r.num_tokens, ending.terminal)
  redis.call('PEXPIRE', log, r.result_ttl_ms)
  local size = redis.call('HSTRLEN', r.key, 'payload')
  redis.call('HSET', r.key, 'state', ending.state, 'finish_reason', ending.reason,
    'finished_ms', now, 'closed_by', ending.by)
  if ending.code then
    redis.call('HSET', r.key, 'error_code', ending.code, 'error_message', ending.message)
  end
  redis.call('HDEL', r.key, 'payload', 'owner', 'alone', 'cancel', 'finish')
  redis.call('PEXPIRE', r.key, r.result_ttl_ms * TOMBSTONE)
  drop_entry(q, r.lane, r.tenant, r.entry)
  redis.call('ZREM', deadlines_key(q), reference(r.tenant, r.id))
  redis.call('ZREM', promotions_key(q), reference(r.tenant, r.id))
  count(q, r.state, r.lane, r.tenant, -1)
  count_bytes(q, -size)
  close_lane(q, r.lane, r.tenant)
  r.state = ending.state
end

-- A running request becomes claimable again, before everything newer in its lane.
local function requeue(q, r, now, place)
  local ending = wished_end(r)
  if ending then return conclude(q, r, now, ending) end
  hand_to(q, r, place)
  redis.call('HSET', r.key, 'state', 'queued')
  redis.call('HDEL', r.key, 'owner', 'alone')
  count_queued(q, r.lane, r.tenant, r.cost, now)
  count(q, 'running', r.lane, r.tenant, -1)
  r.state = 'queued'
end

-- The hash of a request is gone, or unusable, while its lane entry is not: readers of its log get a
-- terminal entry. An entry that somebody added by hand was never counted; then the lane has more
-- entries than requests.
local function close_orphan(q, what, lane, tenant, entry)
  local id = entry.request_id
  local log = log_key(q, tenant, id)
  local last = redis.pcall('XREVRANGE', log, '+', '-', 'COUNT', 1)
  local position = not last.err and last[1] and last[1][1] or '0-0'
  local num_tokens, kind = position:match('^(%d+)-(%d+)$')
  if kind == '0' then
    local terminal = terminal_entry('error', 'lost', 'the data of the request is gone')
    write_terminal(log, num_tokens, terminal)
    redis.call('PEXPIRE', log, ORPHAN_TTL_MS)
  end
  local is_counted = redis.call('XLEN', lane_key(q, lane, tenant)) <= num_requests(q, lane, tenant)
  drop_entry(q, lane, tenant, entry.id)
  redis.call('DEL', request_key(q, tenant, id))
  redis.call('ZREM', deadlines_key(q), reference(tenant, id))
  redis.call('ZREM', promotions_key(q), reference(tenant, id))
  if is_counted then
    count(q, what, lane, tenant, -1)
    count_bytes(q, -entry.size)
  end
  close_lane(q, lane, tenant)
end
