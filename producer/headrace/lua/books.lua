-- Books: the counts of the queue, put right from what its lanes hold.
--
-- Every function keeps them true, but any producer may write into them by hand, and a lane without a
-- count is never looked into. The janitor compares, a few lanes at a time.

local MAX_SUMMED = 500 -- tenants of a lane; the counts of a larger one follow those of its tenants

local function tell_count(q, field, told, number)
  if told == tostring(number) or not told and number == 0 then return 0 end
  if number == 0 then
    redis.call('HDEL', stats_key(q), field)
  else
    redis.call('HSET', stats_key(q), field, number)
  end
  return 1
end

-- Returns 1 if the count of a tenant was wrong, else 0.
local function put_right(q, what, lane, tenant, number)
  local field = what .. ':' .. lane .. ':' .. tenant
  local told = redis.call('HGET', stats_key(q), field)
  local counted = natural(told)
  if told and not counted then redis.call('HDEL', stats_key(q), field) end
  local wrong = number - (counted or 0)
  if wrong == 0 then return 0 end
  count(q, what, lane, tenant, wrong)
  return 1
end

-- What a worker holds runs, all else waits. While repair_request puts lost entries back, bite by
-- bite, the counts follow.
local function recount(q, lane, tenant)
  local key = lane_key(q, lane, tenant)
  local pending = redis.pcall('XPENDING', key, GROUP)
  if pending.err then return 0 end
  local length, running = redis.call('XLEN', key), 0
  for _, holder in ipairs(pending[4] or {}) do
    if not is_waiting_place(holder[1]) then running = running + tonumber(holder[2]) end
  end
  running = math.min(running, length)
  local wrong = put_right(q, 'running', lane, tenant, running)
    + put_right(q, 'queued', lane, tenant, length - running)
  if wrong > 0 then wake(q) end
  return wrong
end

-- Counts of a tenant that has no place in the lane are nobody's.
local function remove_foreign_counts(q, most)
  local stats, removed = stats_key(q), 0
  local cursor = cursor_of(redis.call('HGET', stats, 'books_cursor'))
  local page = redis.call('HSCAN', stats, cursor, 'COUNT', most)
  for at = 1, #page[2], 2 do
    local what, lane, tenant = page[2][at]:match('^(%a+):(%d):(.+)$')
    local is_count = what == 'queued' or what == 'running'
    if is_count and not redis.call('ZSCORE', served_key(q, lane), tenant) then
      removed = removed + redis.call('HDEL', stats, page[2][at])
    end
  end
  if page[1] ~= cursor then redis.call('HSET', stats, 'books_cursor', page[1]) end
  return removed
end

local function sum_of_lane(q, what, lane)
  local tenants = redis.call('ZRANGE', served_key(q, lane), 0, -1)
  local fields, sum = {}, 0
  for i, tenant in ipairs(tenants) do fields[i] = what .. ':' .. lane .. ':' .. tenant end
  local counts = #fields > 0 and redis.call('HMGET', stats_key(q), unpack(fields)) or {}
  for i = 1, #fields do sum = sum + (natural(counts[i]) or 0) end
  return sum
end

-- The count of each lane is the sum over its tenants, that of the queue the sum over its lanes.
-- Returns how many were wrong.
local function add_up_books(q)
  local wrong = 0
  for _, what in ipairs({ 'queued', 'running' }) do
    local sum = 0
    for lane = 0, LANES - 1 do
      local field = what .. ':' .. lane
      local told = redis.call('HGET', stats_key(q), field)
      local number = natural(told) or 0
      if redis.call('ZCARD', served_key(q, lane)) <= MAX_SUMMED then
        number = sum_of_lane(q, what, lane)
        wrong = wrong + tell_count(q, field, told, number)
      end
      sum = sum + number
    end
    wrong = wrong + tell_count(q, what, redis.call('HGET', stats_key(q), what), sum)
  end
  if wrong > 0 then wake(q) end
  return wrong
end
