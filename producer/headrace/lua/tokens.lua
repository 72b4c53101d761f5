-- emit and finish: the only ways into a token log, fenced by owner and epoch.

local FIELDS_AN_ITEM = 6

local function log_holds(log, id)
  local found = redis.pcall('XRANGE', log, id, id)
  return not found.err and #found > 0
end

-- Tokens are charged to their tenants once a call, not once a chunk.
local function charge(bill, lane, tenant, num_tokens)
  local of_lane = bill[lane]
  if not of_lane then
    of_lane = {}
    bill[lane] = of_lane
  end
  of_lane[tenant] = (of_lane[tenant] or 0) + num_tokens
end

-- The tokens are in their logs by now: books that somebody spoiled must not have the call refused.
local function settle_bill(q, bill)
  for lane, of_lane in pairs(bill) do
    for tenant, num_tokens in pairs(of_lane) do
      redis.pcall('ZADD', served_key(q, lane), 'XX', 'INCR', num_tokens, tenant)
    end
  end
end

-- Why a worker may not write: the outcome, and the tokens in the log.
local function refusal(q, tenant, id)
  local r = load_request(q, tenant, id)
  if not r then return 'GONE', 0 end
  return is_over(r) and 'DONE' or 'FENCED', r.num_tokens
end

-- The outcome and the tokens in the log, or nothing for a chunk that the log now ends with. It makes
-- no tables of its own: a flush has hundreds of items.
local function emit_one(q, worker, bill, tenant, id, epoch, offset, num_tokens, chunk)
  local key, length, lane, wish = load_held(q, worker, tenant, id, epoch)
  if not key then return refusal(q, tenant, id) end
  if offset > length then return 'GAP', length end
  local log, stop = log_key(q, tenant, id), offset + num_tokens
  if offset < length then
    local is_applied = stop <= length and log_holds(log, stop .. '-0')
    if not is_applied then return 'OVERLAP', length end
    return wish or stop < length and 'OK' or nil, length
  end
  -- One unusable log must not keep the other requests of the batch from going on.
  local added = redis.pcall('XADD', log, stop .. '-0', CHUNK_FIELD, chunk)
  if type(added) == 'table' and added.err then return 'GONE', length end
  redis.call('HSET', key, 'num_tokens', stop)
  charge(bill, lane, tenant, num_tokens)
  return wish, stop
end

-- One packed argument and a reply of exceptions: a client in Python pays for each value it sends or
-- reads one by one, and a flush has hundreds.
local function unpack_items(packed)
  local is_readable, flat = pcall(cmsgpack.unpack, packed or '')
  if not is_readable or type(flat) ~= 'table' then refuse('the items are not readable') end
  for at = 1, #flat, FIELDS_AN_ITEM do
    local tenant, id, chunk = flat[at], flat[at + 1], flat[at + 5]
    if type(tenant) ~= 'string' or type(id) ~= 'string' then refuse('an item has no name') end
    if type(chunk) ~= 'string' then refuse('an item is cut short') end
    flat[at + 2] = whole('epoch', flat[at + 2], 1)
    flat[at + 3] = whole('offset', flat[at + 3], 0)
    flat[at + 4] = whole('num_tokens', flat[at + 4], 1)
  end
  return flat
end

-- ARGV: worker, then a msgpack array with six values for each item: tenant, request id, epoch,
--       offset, num_tokens, chunk
-- Reply: {place, outcome, tokens in the log now} for each item, counted from 1, that was not simply
--        appended; an item that is not named is OK, and its log ends with it
local function emit(keys, args)
  local q, worker = keys[1], worker_name(args[1])
  local flat, exceptions, bill = unpack_items(args[2]), {}, {}
  for at = 1, #flat, FIELDS_AN_ITEM do
    local outcome, length = emit_one(q, worker, bill, unpack(flat, at, at + FIELDS_AN_ITEM - 1))
    if outcome then
      local place = (at - 1) / FIELDS_AN_ITEM + 1
      exceptions[#exceptions + 1] = { place, outcome, length }
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
