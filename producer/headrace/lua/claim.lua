-- claim: grant a worker what fits into its free KV blocks, soonest and least served first.
--
-- ARGV: worker, nonce, free sequences, free tokens, total tokens, lease ms, most strikes, then for
--       each priority that runs there, soonest first: priority, and the sequences and tokens that
--       requests of sooner priority would find if all of this one and later gave way
-- Reply: {grants, wake cursor, lanes that cannot be read}; a grant is {tenant, request id, epoch,
--        num_tokens, payload, cost, priority, strikes, attached, enqueued ms, deadline ms or '',
--        now ms}

-- In one call, which nobody else's can pass: at about 0.1 ms each, some milliseconds.
local MAX_CLOSED = 64 -- expired or broken entries put away, empty lanes passed over
local MAX_GRANTS = 64
local MAX_REPLY_BYTES = 8 * 1024 * 1024 -- payloads in one reply, but for the last
-- No client makes a larger payload, as in packing.py. A worker never loads one that somebody wrote
-- by hand, so its memory is bounded by what Redis would hand it.
local MAX_PAYLOAD_BYTES = 2 * 1024 * 1024
local LEAST_ISOLATION_MS = 5000 -- well above the time between two claims of an idle worker

-- The first entry that waits in a place of a lane, or nil; and what is wrong with the lane, if it is.
local function first_waiting(key, place)
  local pending = redis.pcall('XPENDING', key, GROUP, '-', '+', 1, place)
  if pending.err and pending.err:find('NOGROUP', 1, true) then
    ensure_group(key)
    return nil
  end
  if pending.err then return nil, pending.err end
  if not pending[1] then return nil end
  local id = pending[1][1]
  local entry = redis.call('XRANGE', key, id, id)[1]
  return entry and read_entry(entry) or { id = id }
end

-- Read the head of a lane without granting it: a suspect if they are wanted, else what was handed
-- back, else the next new entry, which then waits among those handed back. So a request that does
-- not fit keeps its place. Returns nil and no error when nothing is there.
local function head(key, takes_suspects)
  if takes_suspects then
    local entry, fault = first_waiting(key, SUSPECTS)
    if entry or fault then return entry, fault end
  end
  local entry, fault = first_waiting(key, REQUEUED)
  if entry or fault then return entry, fault end
  local read = redis.call('XREADGROUP', 'GROUP', GROUP, REQUEUED, 'COUNT', 1, 'STREAMS', key, '>')
  if not read then return nil end
  return read_entry(read[1][2][1])
end

local function oversized(size)
  return ended_by_queue('failed', 'error', 'undecodable',
    'the payload has ' .. size .. ' bytes, at most ' .. MAX_PAYLOAD_BYTES .. ' are taken')
end

-- Put away what is not to be granted. Returns whether it did.
local function put_away(q, lane, tenant, entry, r, now)
  if not entry.request_id then -- deleted or added by hand; the janitor finds whose it was
    drop_entry(q, lane, tenant, entry.id)
  elseif not r then
    close_orphan(q, 'queued', lane, tenant, entry)
  elseif is_over(r) or r.entry ~= entry.id or r.lane ~= lane then
    drop_stray(q, lane, tenant, entry.id)
  elseif r.state == 'running' then
    hand_to(q, r, r.owner) -- the group was lost and began again at 0; the holder has not changed
  elseif is_expired(r, now) then
    conclude(q, r, now, expired(r))
  else
    local size = redis.call('HSTRLEN', r.key, 'payload')
    if size <= MAX_PAYLOAD_BYTES then return false end
    conclude(q, r, now, oversized(size))
  end
  return true
end

-- One worker at a time runs empty for suspects, so that the others can go on. Its turn ends when it
-- has not met one for a while.
local function isolates(q, worker)
  local isolator = redis.call('GET', isolator_key(q))
  return not isolator or isolator == worker
end

local function take_isolation(q, worker, lease_ms)
  if not isolates(q, worker) then return end
  redis.call('SET', isolator_key(q), worker, 'PX', math.max(lease_ms, LEAST_ISOLATION_MS))
end

local function grant(q, r, worker, now, alone)
  hand_to(q, r, worker) -- the lease begins here
  r.epoch = r.epoch + 1
  redis.call('HSET', r.key, 'state', 'running', 'owner', worker, 'epoch', r.epoch,
    'alone', alone and 1 or 0, 'granted_tokens', r.num_tokens)
  count(q, 'queued', r.lane, r.tenant, -1)
  count(q, 'running', r.lane, r.tenant, 1)
  take_turn(q, r, now)
  if redis.call('HSETNX', r.key, 'started_ms', now) == 1 then
    -- The prompt is charged when it is first taken, output as it is emitted. The queue cannot count
    -- prompt tokens; a quarter of the bytes is near enough to keep the shares fair.
    local prompt = math.ceil(redis.call('HSTRLEN', r.key, 'payload') / 4)
    redis.call('ZADD', served_key(q, r.lane), 'XX', 'INCR', prompt, r.tenant)
  end
end

local PAYLOAD = 5 -- its place in a grant

local function describe(r, now)
  local payload = redis.call('HGET', r.key, 'payload') or ''
  return { r.tenant, r.id, r.epoch, r.num_tokens, payload, r.cost, r.lane, r.strikes, r.attached,
    r.enqueued_ms, r.deadline_ms or '', now }
end

-- The same nonce asks for the same grants; those lost or finished since are left out.
local function granted_before(q, worker, nonce, now)
  local v = redis.call('HMGET', worker_key(q, worker), '_nonce', '_grants')
  if v[1] ~= nonce then return nil end
  local grants = {}
  for _, item in ipairs(cmsgpack.unpack(v[2])) do
    local r = load_request(q, item[1], item[2])
    if r and is_held(r, worker, item[3]) then grants[#grants + 1] = describe(r, now) end
  end
  return grants
end

local function remember_grants(q, worker, nonce, grants, lease_ms)
  local key = worker_key(q, worker)
  local items = {}
  for i, item in ipairs(grants) do items[i] = { item[1], item[2], item[3] } end
  redis.call('HSET', key, '_nonce', nonce, '_grants', cmsgpack.pack(items))
  note_lease(q, worker, lease_ms)
end

local function runs_suspect(q, worker)
  local suspect = redis.call('HGET', worker_key(q, worker), '_suspect')
  if not suspect then return false end
  local tenant, id, epoch = suspect:match('^([^:]*):(.*):(%d+)$')
  local r = load_request(q, tenant, id)
  return r ~= nil and is_held(r, worker, tonumber(epoch))
end

-- The request at the head of a lane, or nil when it was put away or cannot be read.
local function head_request(q, lane, tenant, now, seen)
  local key = lane_key(q, lane, tenant)
  local entry, fault = head(key, seen.takes_suspects)
  if not entry then
    seen.unreadable[key] = true
    if fault then seen.faults[#seen.faults + 1] = key else forget_if_empty(q, lane, tenant) end
    return nil
  end
  local r = entry.request_id and load_request(q, tenant, entry.request_id)
  if put_away(q, lane, tenant, entry, r, now) then return nil end
  if is_suspect(r, seen.max_strikes) and is_cleared(q, r) then clear(q, r) end
  if is_suspect(r, seen.max_strikes) and not seen.takes_suspects then
    hand_to(q, r, SUSPECTS)
    return nil
  end
  return r
end

local function next_request(q, now, seen)
  while seen.left > 0 do
    local lane, lowest_turn = next_lane(q, now, seen.exhausted, seen.ignores_age)
    if not lane then return nil end
    local tenant = next_tenant(q, lane, seen)
    if tenant then
      local r = head_request(q, lane, tenant, now, seen)
      if r then
        r.lowest_turn = lowest_turn
        return r
      end
      seen.left = seen.left - 1
    elseif seen.left > 0 then
      seen.exhausted[lane] = true
    end
  end
  seen.is_cut_short = true
end

-- The next request if it fits. A lane whose age brought it up waits for free room; until there is
-- some, work of later priority may give way to whoever would be next without it.
local function next_that_fits(q, worker, room, seen, now)
  local r = next_request(q, now, seen)
  local suspect = r and is_suspect(r, room.max_strikes)
  if suspect then take_isolation(q, worker, room.lease_ms) end
  if r and fits(r, room, seen) then return r, suspect end
  if not r or suspect or seen.ignores_age or not room.if_displaced[1] then return nil end
  seen.ignores_age = true
  return next_that_fits(q, worker, room, seen, now)
end

-- Stops at the first request that does not fit: taking smaller ones past it would starve it.
local function grant_what_fits(q, worker, room, seen, now)
  local grants, num_bytes = {}, 0
  while #grants < MAX_GRANTS and (room.free_seqs >= 1 or room.if_displaced[1]) do
    local r, suspect = next_that_fits(q, worker, room, seen, now)
    if not r then break end
    grant(q, r, worker, now, suspect)
    grants[#grants + 1] = describe(r, now)
    take_room(r, room)
    num_bytes = num_bytes + #grants[#grants][PAYLOAD]
    if suspect then
      local held = reference(r.tenant, r.id) .. ':' .. r.epoch
      redis.call('HSET', worker_key(q, worker), '_suspect', held)
      break
    end
    if num_bytes >= MAX_REPLY_BYTES then
      seen.is_cut_short = true
      break
    end
  end
  return grants
end

local function new_search(takes_suspects, max_strikes)
  return {
    takes_suspects = takes_suspects, max_strikes = max_strikes,
    exhausted = {}, unreadable = {}, first = {}, faults = {}, left = MAX_CLOSED,
  }
end

-- Reply: the grants, and how the search for them went.
local function search(q, worker, room, now)
  local max_strikes, is_empty = room.max_strikes, room.free_tokens == room.total_tokens
    and room.free_seqs >= 1
  if runs_suspect(q, worker) then
    take_isolation(q, worker, room.lease_ms)
    return {}, new_search(false, max_strikes)
  end
  local seen = new_search(isolates(q, worker), max_strikes)
  local grants = grant_what_fits(q, worker, room, seen, now)
  if #grants == 0 and is_empty and not seen.takes_suspects and not seen.is_cut_short then
    seen = new_search(true, max_strikes) -- nothing else to do, so suspects do no harm
    grants = grant_what_fits(q, worker, room, seen, now)
  end
  return grants, seen
end

local function claim(keys, args)
  local q, worker, nonce = keys[1], worker_name(args[1]), args[2]
  local room = read_room(args)
  local now = now_ms()
  local grants, seen = granted_before(q, worker, nonce, now), { faults = {} }
  if not grants then
    promote_due(q, now)
    grants, seen = search(q, worker, room, now)
    if #grants > 0 then remember_grants(q, worker, nonce, grants, room.lease_ms) end
  end
  -- With work left over, the cursor is one that wakes the worker at once.
  return { grants, seen.is_cut_short and '0-0' or wake_cursor(q), seen.faults }
end

register('claim', claim)
