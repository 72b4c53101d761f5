-- emit and finish: the only ways into a token log, fenced by owner and epoch.

local FIELDS_AN_ITEM = 6

local function log_holds(log, id)
  local found = redis.pcall('XRANGE', log, id, id)
  return not found.err and #found > 0
end

-- Where an item stands: "new" when it may be appended, else the answer to give.
local function position_of(q, r, offset, num_tokens)
  local stop = offset + num_tokens
  if offset == r.num_tokens then return 'new' end
  if offset > r.num_tokens then return 'GAP' end
  local applied = stop <= r.num_tokens and log_holds(log_key(q, r.tenant, r.id), stop .. '-0')
  return applied and 'OK' or 'OVERLAP'
end

-- Tokens are charged to their tenants once a call, not once a chunk.
local function charge(bill, r, num_tokens)
  local of_lane = bill[r.lane] or {}
  bill[r.lane] = of_lane
  of_lane[r.tenant] = (of_lane[r.tenant] or 0) + num_tokens
end

-- The tokens are in their logs by now: books that somebody spoiled must not have the call refused.
local function settle_bill(q, bill)
  for lane, of_lane in pairs(bill) do
    for tenant, num_tokens in pairs(of_lane) do
      redis.pcall('ZADD', served_key(q, lane), 'XX', 'INCR', num_tokens, tenant)
    end
  end
end

-- What a holder's emit needs of its request, or nil: then load_request says what is the matter. With
-- all fields read and checked, an item took Redis twice as long. One that lacks another field meets
-- that when it ends.
local function load_own(q, worker, tenant, id, epoch)
  if not is_tenant(tenant) or not is_request_id(id) then return nil end
  local key = request_key(q, tenant, id)
  local v = redis.pcall('HMGET', key, 'state', 'owner', 'epoch', 'num_tokens', 'lane', 'cancel',
    'finish')
  if v.err or v[1] ~= 'running' or v[2] ~= worker or natural(v[3]) ~= epoch then return nil end
  local num_tokens, lane = natural(v[4]), natural(v[5])
  if not num_tokens or not lane or lane >= LANES then return nil end
  return {
    key = key, tenant = tenant, id = id, num_tokens = num_tokens, lane = lane,
    cancel = v[6] == '1', finish = v[7] == '1',
  }
end

local function emit_one(q, worker, bill, tenant, id, epoch, offset, num_tokens, chunk)
  local r = load_own(q, worker, tenant, id, epoch)
  if not r then
    r = load_request(q, tenant, id)
    if not r then return { 'GONE', 0 } end
    if is_over(r) then return { 'DONE', r.num_tokens } end
    return { 'FENCED', r.num_tokens }
  end
  local position = position_of(q, r, offset, num_tokens)
  if position == 'GAP' or position == 'OVERLAP' then return { position, r.num_tokens } end
  if position == 'new' then
    local stop = offset + num_tokens
    -- One unusable log must not keep the other requests of the batch from going on.
    local added = redis.pcall('XADD', log_key(q, tenant, id), stop .. '-0', CHUNK_FIELD, chunk)
    if type(added) == 'table' and added.err then return { 'GONE', r.num_tokens } end
    redis.call('HSET', r.key, 'num_tokens', stop)
    r.num_tokens = stop
    charge(bill, r, num_tokens)
  end
  return { r.cancel and 'CANCEL' or r.finish and 'FINISH' or 'OK', r.num_tokens }
end

-- One packed argument and a reply of exceptions: a client in Python pays for each value it sends or
-- reads one by one, and a flush has hundreds.
local function unpack_items(packed)
  local is_readable, flat = pcall(cmsgpack.unpack, packed or '')
  if not is_readable or type(flat) ~= 'table' then refuse('the items are not readable') end
  local items = {}
  for at = 1, #flat, FIELDS_AN_ITEM do
    local tenant, id, chunk = flat[at], flat[at + 1], flat[at + 5]
    if type(tenant) ~= 'string' or type(id) ~= 'string' then refuse('an item has no name') end
    if type(chunk) ~= 'string' then refuse('an item is cut short') end
    items[#items + 1] = {
      tenant, id, whole('epoch', flat[at + 2], 1), whole('offset', flat[at + 3], 0),
      whole('num_tokens', flat[at + 4], 1), chunk,
    }
  end
  return items
end

-- ARGV: worker, then a msgpack array with six values for each item: tenant, request id, epoch,
--       offset, num_tokens, chunk
-- Reply: {place, outcome, tokens in the log now} for each item, counted from 1, that was not simply
--        appended; an item that is not named is OK, and its log ends with it
local function emit(keys, args)
  local q, worker = keys[1], worker_name(args[1])
  local items, exceptions, bill = unpack_items(args[2]), {}, {}
  for i, item in ipairs(items) do
    local reply = emit_one(q, worker, bill, unpack(item))
    if reply[1] ~= 'OK' or reply[2] ~= item[4] + item[5] then
      exceptions[#exceptions + 1] = { i, reply[1], reply[2] }
    end
  end
  settle_bill(q, bill)
  return exceptions
end

local ENDINGS = { finished = true, failed = true, cancelled = true }

-- ARGV: worker, tenant, request id, epoch, num_tokens, state, terminal entry, finish reason,
--       error code or '', error message
-- Reply: {outcome, tokens in the log}
local function finish(keys, args)
  local q, worker = keys[1], worker_name(args[1])
  local epoch, num_tokens = whole('epoch', args[4], 1), whole('num_tokens', args[5], 0)
  if not ENDINGS[args[6]] then refuse('state ' .. args[6] .. ' does not end a request') end
  local r = load_request(q, args[2], args[3])
  if not r then return { 'GONE', 0 } end
  if is_over(r) then
    local repeated = r.closed_by == worker and r.epoch == epoch
    return { repeated and 'OK' or 'DONE', r.num_tokens }
  end
  if not is_held(r, worker, epoch) then return { 'FENCED', r.num_tokens } end
  if num_tokens ~= r.num_tokens then return { 'GAP', r.num_tokens } end
  conclude(q, r, now_ms(), {
    state = args[6], terminal = args[7], reason = args[8], by = worker,
    code = args[9] ~= '' and args[9] or nil, message = args[10],
  })
  return { 'OK', num_tokens }
end

register('emit', emit)
register('finish', finish, FREEING)
