-- Whose turn it is: which lane, and in it which tenant.

local AGEING_MS = 10000 -- a lane passed over for so long goes next, whatever its weight
local TENANTS_A_PAGE = 16
local LANE_FIELDS = {} -- made once, without ipairs, which does not exist while a library is loaded
for lane = 0, LANES - 1 do
  LANE_FIELDS[lane * 3 + 1] = 'queued:' .. lane
  LANE_FIELDS[lane * 3 + 2] = 'turn:' .. lane
  LANE_FIELDS[lane * 3 + 3] = 'since:' .. lane
end

-- Lanes share by weight, as in stride scheduling (Waldspurger and Weihl, 1995): a grant moves its
-- lane's turn on by cost * 2^lane, and the lowest turn is next, so each lane gets about twice the
-- tokens of the one behind it. Strict order would starve bulk work; ageing keeps the last lane,
-- with its weight of 1/512, from waiting for ever.
local function next_lane(q, now, exhausted, ignores_age)
  local v = redis.call('HMGET', stats_key(q), unpack(LANE_FIELDS))
  local best, best_turn, oldest, oldest_since
  for lane = 0, LANES - 1 do
    local turn, since = measure(v[lane * 3 + 2]), measure(v[lane * 3 + 3])
    if v[lane * 3 + 1] and not exhausted[lane] then
      if not best or turn < best_turn then best, best_turn = lane, turn end
      if not oldest or since < oldest_since then oldest, oldest_since = lane, since end
    end
  end
  if oldest and now - oldest_since >= AGEING_MS and not ignores_age then best = oldest end
  return best, best_turn
end

-- The queue's own turn is the lowest one, also when an old lane was served out of order: newcomers
-- must not start behind where that lane is.
local function take_turn(q, r, now)
  local stats, field = stats_key(q), 'turn:' .. r.lane
  local turn = measure(redis.call('HGET', stats, field)) + turn_of(r.lane, r.cost)
  redis.call('HSET', stats, field, turn, 'turn', r.lowest_turn, 'since:' .. r.lane, now)
end

local function has_queued(q, lane, tenant, seen)
  local queued = redis.call('HEXISTS', stats_key(q), 'queued:' .. lane .. ':' .. tenant) == 1
  return queued and not seen.unreadable[lane_key(q, lane, tenant)]
end

-- The tenant served least, of those that have something queued here: the virtual token counter of
-- Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Pages without one are
-- passed over once a call: grants move tenants only towards the end.
local function next_tenant(q, lane, seen)
  local start = seen.first[lane] or 0
  while seen.left > 0 do
    seen.first[lane] = start
    local page = redis.call('ZRANGE', served_key(q, lane), start, start + TENANTS_A_PAGE - 1)
    if #page == 0 then return nil end
    for _, tenant in ipairs(page) do
      if has_queued(q, lane, tenant, seen) then return tenant end
    end
    local removed = 0
    for _, tenant in ipairs(page) do removed = removed + remove_stranger(q, lane, tenant) end
    start, seen.left = start + #page - removed, seen.left - removed
  end
end
