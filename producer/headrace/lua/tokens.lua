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

local function emit_one(q, worker, tenant, id, epoch, offset, num_tokens, chunk)
  local r = load_request(q, tenant, id)
  if not r then return { 'GONE', 0 } end
  if is_over(r) then return { 'DONE', r.num_tokens } end
  if not is_held(r, worker, epoch) then return { 'FENCED', r.num_tokens } end
  local position = position_of(q, r, offset, num_tokens)
  if position == 'GAP' or position == 'OVERLAP' then return { position, r.num_tokens } end
  if position == 'new' then
    local stop = offset + num_tokens
    -- One unusable log must not keep the other requests of the batch from going on.
    local added = redis.pcall('XADD', log_key(q, tenant, id), stop .. '-0', CHUNK_FIELD, chunk)
    if type(added) == 'table' and added.err then return { 'GONE', r.num_tokens } end
    redis.call('HSET', r.key, 'num_tokens', stop)
    redis.call('ZADD', served_key(q, r.lane), 'XX', 'INCR', num_tokens, tenant)
    r.num_tokens = stop
  end
  return { r.cancel and 'CANCEL' or r.finish and 'FINISH' or 'OK', r.num_tokens }
end

-- ARGV: worker, then for each item: tenant, request id, epoch, offset, num_tokens, chunk
-- Reply: for each item {outcome, tokens in the log now}
local function emit(keys, args)
  local q, worker = keys[1], worker_name(args[1])
  local items = {}
  for at = 2, #args, FIELDS_AN_ITEM do
    items[#items + 1] = {
      args[at], args[at + 1], whole('epoch', args[at + 2], 1), whole('offset', args[at + 3], 0),
      whole('num_tokens', args[at + 4], 1), args[at + 5] or refuse('an item is cut short'),
    }
  end
  local replies = {}
  for i, item in ipairs(items) do
    replies[i] = emit_one(q, worker, item[1], item[2], item[3], item[4], item[5], item[6])
  end
  return replies
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
