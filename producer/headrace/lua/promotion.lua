-- Promotion: a request whose deadline comes near moves to a sooner lane, once.
--
-- With less than a quarter of its time left, it takes half its priority number: 9 becomes 4, 5
-- becomes 2, 1 becomes 0. So a deadline is no way for bulk work into the lanes of who waits at a
-- screen. It goes before what is new in its new lane, or it would wait behind those who have time.

local SHARE_LEFT = 4 -- of the time from enqueue to deadline, the last one of so many parts
local MAX_PROMOTED = 32 -- in one call

local function promotion_ms(r)
  return r.deadline_ms - math.floor((r.deadline_ms - r.enqueued_ms) / SHARE_LEFT)
end

local function plan_promotion(q, r)
  if not r.deadline_ms or r.lane == 0 then return end
  redis.call('ZADD', promotions_key(q), promotion_ms(r), reference(r.tenant, r.id))
end

local function promote(q, r, now)
  local lane = math.floor(r.lane / 2)
  local target = redis.pcall('XLEN', lane_key(q, lane, r.tenant))
  if lane == r.lane or type(target) == 'table' then return end -- claim reports an unusable lane
  move_lane(q, r, lane, now, true)
  if r.state == 'running' then tell_holder(q, r) end
end

-- A request that runs moves, too: its holder ranks it anew, and so does a takeover.
local function promote_due(q, now)
  local key = promotions_key(q)
  for _, text in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, MAX_PROMOTED)) do
    local tenant, id = parse_reference(text)
    local r = tenant and load_request(q, tenant, id)
    local is_planned = r and not is_over(r) and r.deadline_ms
    local is_due = is_planned and promotion_ms(r) <= now
    if is_due then promote(q, r, now) end
    redis.call('ZREM', key, text)
    if is_planned and not is_due then plan_promotion(q, r) end -- somebody wrote it here by hand
  end
end
