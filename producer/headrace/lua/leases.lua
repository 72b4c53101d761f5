-- renew, release and reap: who holds a request, for how long, and what if the holder is gone.

local FIELDS_A_HELD = 3
local MAX_LANES_A_CALL = 20 -- pages of lanes that one sweep looks at
local DEADLINE_GRACE_MS = 1000 -- how long a holder has to end what is past its deadline

-- Held requests are (tenant, request id, epoch), from args[from] on.
local function check_held(args, from)
  for at = from, #args, FIELDS_A_HELD do whole('epoch', args[at + 2], 1) end
end

-- Call visit(request, tenant, id, epoch) for each held request; the request is nil unless the worker
-- holds it at that epoch.
local function each_held(q, worker, args, from, visit)
  check_held(args, from)
  for at = from, #args, FIELDS_A_HELD do
    local r = load_request(q, args[at], args[at + 1])
    local held = r and is_held(r, worker, tonumber(args[at + 2]))
    visit(held and r or nil, args[at], args[at + 1], args[at + 2])
  end
end

-- ARGV: worker, lease ms, then held requests. Reply: those that are lost.
local function renew(keys, args)
  local q, worker = keys[1], worker_name(args[1])
  local lease_ms, lost = whole('lease_ms', args[2], 1), {}
  each_held(q, worker, args, 3, function(r, tenant, id, epoch)
    if r then
      hand_to(q, r, worker)
    else
      lost[#lost + 1] = { tenant, id, tonumber(epoch) }
    end
  end)
  if #lost * FIELDS_A_HELD < #args - 2 then note_lease(q, worker, lease_ms) end
  return lost
end

-- ARGV: worker, strike, most strikes, then held requests. Reply: how many were the worker's.
-- The strike is 0, 1, or 1 and the cause: "1 killed by signal 9". Whoever tells of one has flushed
-- all that was made before.
local function release(keys, args)
  local q, worker = keys[1], worker_name(args[1])
  local is_death, cause = args[2]:match('^(%d) ?(.*)$')
  local max_strikes = whole('max_strikes', args[3], 1)
  local death = { worker = worker, max_strikes = max_strikes, unsent = 0, cause = cause }
  local now, released = now_ms(), 0
  each_held(q, worker, args, 4, function(r)
    if not r then return end
    released = released + 1
    if is_death == '1' then
      strike(q, r, now, death)
    else
      requeue(q, r, now, waiting_place(r, max_strikes))
    end
  end)
  if released > 0 then wake(q) end
  return released
end

-- Walk the lanes that have work, page by page, from where the last call stopped. visit returns
-- false when this call has done enough; its page is then looked at again.
local function walk_lanes(q, cursor_field, visit)
  local stats = stats_key(q)
  local from = redis.call('HGET', stats, cursor_field) or '0:0'
  local lane, cursor = from:match('^(%d):(%d+)$')
  lane, cursor = lane or '0', cursor_of(cursor)
  local function save()
    local at = lane .. ':' .. cursor
    if at ~= from then redis.call('HSET', stats, cursor_field, at) end
  end
  for _ = 1, MAX_LANES_A_CALL do
    local page = redis.call('ZSCAN', served_key(q, lane), cursor, 'COUNT', 16)
    for i = 1, #page[2], 2 do
      if not visit(tonumber(lane), page[2][i]) then return save() end
    end
    cursor = page[1]
    if cursor == '0' then
      lane = (lane + 1) % LANES
      if lane .. ':0' == from then return save() end
    end
  end
  save()
end

-- A holder ends what it runs at the deadline, with text that the log does not hold yet.
local function is_left_to_holder(r, now)
  return r.state == 'running' and now < (r.deadline_ms or 0) + DEADLINE_GRACE_MS
end

local function expire_overdue(q, now, most)
  local closed = {}
  local due = redis.call('ZRANGEBYSCORE', deadlines_key(q), '-inf', now, 'LIMIT', 0, most)
  for _, text in ipairs(due) do
    local tenant, id = parse_reference(text)
    local r = tenant and load_request(q, tenant, id)
    if not r or is_over(r) then
      redis.call('ZREM', deadlines_key(q), text)
    elseif not is_expired(r, now) then -- its place here is not its own: any producer may write here
      redis.call('ZREM', deadlines_key(q), text)
      if r.deadline_ms then redis.call('ZADD', deadlines_key(q), r.deadline_ms, text) end
    elseif not is_left_to_holder(r, now) then
      conclude(q, r, now, expired(r))
      closed[#closed + 1] = { tenant, id }
    end
  end
  return closed
end

-- A pending entry whose holder let its lease run out.
local function take_back(q, lane, tenant, entry_id, worker, now, sweep)
  local key = lane_key(q, lane, tenant)
  local found = redis.call('XRANGE', key, entry_id, entry_id)[1]
  if not found then -- deleted by hand; the janitor finds whose it was
    return redis.call('XACK', key, GROUP, entry_id)
  end
  local entry = read_entry(found)
  if not entry.request_id then return drop_entry(q, lane, tenant, entry_id) end
  local r = load_request(q, tenant, entry.request_id)
  if not r then return close_orphan(q, 'running', lane, tenant, entry) end
  local is_stray = r.entry ~= entry_id or r.lane ~= lane or is_over(r)
  if is_stray then return drop_entry(q, lane, tenant, entry_id) end
  if r.state == 'queued' then return hand_to(q, r, waiting_place(r, sweep.max_strikes)) end
  strike(q, r, now, {
    worker = worker, max_strikes = sweep.max_strikes, unsent = MAX_UNSENT,
    cause = 'its lease ran out',
  })
  local list = r.state == 'queued' and sweep.requeued or r.state == 'failed' and sweep.dead
  if list then list[#list + 1] = { tenant, r.id } end
end

local function sweep_lane(q, lane, tenant, now, sweep)
  local key = lane_key(q, lane, tenant)
  local consumers = redis.pcall('XINFO', 'CONSUMERS', key, GROUP)
  if consumers.err then return end -- no stream, or no group yet; claim reports or repairs it
  for _, consumer in ipairs(consumers) do
    local name, pending = consumer[2], consumer[4]
    if not is_waiting_place(name) and pending > 0 and sweep.left > 0 then
      local lease_ms = lease_of(q, name) or sweep.lease_ms
      local lapsed = redis.call('XPENDING', key, GROUP, 'IDLE', lease_ms, '-', '+', sweep.left, name)
      for _, item in ipairs(lapsed) do
        take_back(q, lane, tenant, item[1], name, now, sweep)
        sweep.left = sweep.left - 1
      end
    end
  end
end

-- All workers call reap; one sweep per quarter of a lease is enough, of the shortest lease that is
-- about: nobody waits for the turn of a worker with a longer one.
local function take_sweep(q, worker, lease_ms)
  local key, turn = sweep_key(q), math.max(1, math.floor(lease_ms / 4))
  if redis.call('SET', key, worker, 'NX', 'PX', turn) then return true end
  if redis.call('GET', key) == worker then return true end
  local left = redis.call('PTTL', key)
  if left >= 0 and left <= turn then return false end -- one without an end was written by hand
  redis.call('SET', key, worker, 'PX', turn)
  return true
end

-- ARGV: worker, lease ms, most requests to take back, most strikes
-- Reply: {requeued, dead-lettered, expired}, each a list of {tenant, request id}
local function reap(keys, args)
  local q, worker = keys[1], worker_name(args[1])
  local sweep = {
    lease_ms = whole('lease_ms', args[2], 1), left = whole('count', args[3], 1),
    max_strikes = whole('max_strikes', args[4], 1), requeued = {}, dead = {},
  }
  if not take_sweep(q, worker, sweep.lease_ms) then return { {}, {}, {} } end
  local now = now_ms()
  local overdue = expire_overdue(q, now, sweep.left)
  walk_lanes(q, 'sweep_cursor', function(lane, tenant)
    sweep_lane(q, lane, tenant, now, sweep)
    return sweep.left > 0
  end)
  if #sweep.requeued > 0 then wake(q) end
  return { sweep.requeued, sweep.dead, overdue }
end

register('renew', renew, FREEING)
register('release', release, FREEING)
register('reap', reap, FREEING)
