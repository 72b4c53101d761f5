-- Lanes: a stream for each tenant at each priority, and the counts that follow its entries.
--
-- Fields of the stats hash:
--   queued, running            requests of the queue
--   queued:<lane>, queued:<lane>:<tenant>, and the same for running
--                              requests of a lane, and of a tenant in it; no field means none
--   bytes                      payloads of queued and running requests
--   turn, turn:<lane>          where the sharing of lanes stands, in weighted tokens; see next_lane
--   since:<lane>               Unix ms of the lane's last grant, or of its first request since it
--                              was empty
--   sweep_cursor, janitor_cursor, repair_cursor, books_cursor
--                              where the next reap, janitor, search for lost entries and for
--                              counts of nobody go on

-- `what` is "queued" or "running". Three counts move together: of the queue, of the lane, and of
-- the tenant in the lane. A count of zero has no field, so the hash has fields only for tenants
-- that have work. Returns the count of the lane.
local function count(q, what, lane, tenant, by)
  local stats = stats_key(q)
  local in_lane
  for depth, field in ipairs({ what, what .. ':' .. lane, what .. ':' .. lane .. ':' .. tenant }) do
    local value = add_up(stats, field, by)
    if value <= 0 then redis.call('HDEL', stats, field) end
    if depth == 2 then in_lane = value end
  end
  return in_lane
end

local function count_bytes(q, by)
  if by == 0 then return end
  local left = add_up(stats_key(q), 'bytes', by)
  if left <= 0 then redis.call('HDEL', stats_key(q), 'bytes') end
end

-- How far a grant moves the turn of its lane on; see next_lane. A request that asks for more than
-- any worker has must not shut out all that come after it in its lane.
local function turn_of(lane, cost) return math.min(cost, LARGEST_TURN) * 2 ^ lane end

-- A lane that was empty must not bring the turns it saved up: it queues behind the turn that the
-- last grant was made at.
local function count_queued(q, lane, tenant, cost, now)
  if count(q, 'queued', lane, tenant, 1) > 1 then return end
  local turns = redis.call('HMGET', stats_key(q), 'turn', 'turn:' .. lane)
  local turn = math.max(measure(turns[1]) + turn_of(lane, cost), measure(turns[2]))
  redis.call('HSET', stats_key(q), 'turn:' .. lane, turn, 'since:' .. lane, now)
end

-- The group begins at 0, not at the end: what was enqueued before the first worker counts, too.
local function ensure_group(key)
  local made = redis.pcall('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
  if made.err and not made.err:find('BUSYGROUP', 1, true) then error(made) end
end

-- A newcomer starts at the lowest counter in use: at zero it would be served alone for as long as
-- the others have been served already. Returns whether the tenant is one.
local function join_lane(q, lane, tenant)
  local key = served_key(q, lane)
  if redis.call('ZSCORE', key, tenant) then return false end
  local lowest = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or 0
  redis.call('ZADD', key, lowest, tenant)
  return true
end

-- An entry holds the request's id, its cost, and the size of its payload, which has to be known
-- when the hash is gone.
local function add_entry(q, lane, tenant, id, cost, size)
  local key = lane_key(q, lane, tenant)
  if redis.call('EXISTS', key) == 0 then ensure_group(key) end
  local entry = redis.call('XADD', key, '*', 'r', id, 'c', cost, 'b', size)
  join_lane(q, lane, tenant)
  return entry
end

-- Requests of a tenant that wait or run in a lane, by the counts.
local function num_requests(q, lane, tenant)
  local suffix = ':' .. lane .. ':' .. tenant
  local work = redis.call('HMGET', stats_key(q), 'queued' .. suffix, 'running' .. suffix)
  return (natural(work[1]) or 0) + (natural(work[2]) or 0)
end

-- A lane without work does not exist: neither stream nor consumers nor counter are left behind.
local function close_lane(q, lane, tenant)
  if num_requests(q, lane, tenant) > 0 then return end
  redis.call('ZREM', served_key(q, lane), tenant)
  -- Counts may have been lost by hand; a stream that still holds entries is never deleted.
  local length = redis.pcall('XLEN', lane_key(q, lane, tenant))
  if length == 0 then redis.call('DEL', lane_key(q, lane, tenant)) end
end

-- Who has no lane has no work: any producer may write names here. Returns how many were removed.
local function remove_stranger(q, lane, tenant)
  if redis.call('EXISTS', lane_key(q, lane, tenant)) == 1 then return 0 end
  return redis.call('ZREM', served_key(q, lane), tenant)
end

-- Counts of a lane without a single entry are invented, or somebody deleted the lane; then the
-- janitor counts again what it puts back.
local function forget_if_empty(q, lane, tenant)
  if redis.call('XLEN', lane_key(q, lane, tenant)) > 0 then return end
  for _, what in ipairs({ 'queued', 'running' }) do
    local field = what .. ':' .. lane .. ':' .. tenant
    local number = redis.call('HGET', stats_key(q), field)
    if number then
      count(q, what, lane, tenant, -(natural(number) or 0))
      redis.call('HDEL', stats_key(q), field)
    end
  end
  close_lane(q, lane, tenant)
end

-- An entry that others added by hand may hold anything; without a usable id it is dropped.
local function read_entry(entry)
  local fields = entry[2]
  local id = fields[1] == 'r' and is_request_id(fields[2]) and fields[2] or nil
  return { id = entry[1], request_id = id, size = natural(fields[6]) or 0 }
end

local function drop_entry(q, lane, tenant, entry)
  local key = lane_key(q, lane, tenant)
  -- A lane that is no stream any more cannot hold up the end of its requests.
  redis.pcall('XACK', key, GROUP, entry)
  redis.pcall('XDEL', key, entry)
end

-- An entry that is no live request's. The janitor may have taken it for one that lost its count; then
-- there are no more entries than requests.
local function drop_stray(q, lane, tenant, entry)
  local queued = redis.call('HGET', stats_key(q), 'queued:' .. lane .. ':' .. tenant)
  local length = redis.pcall('XLEN', lane_key(q, lane, tenant))
  local is_counted = queued and type(length) == 'number'
    and length <= num_requests(q, lane, tenant)
  drop_entry(q, lane, tenant, entry)
  if is_counted then
    count(q, 'queued', lane, tenant, -1)
    close_lane(q, lane, tenant)
  end
end
