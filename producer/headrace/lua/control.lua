-- cancel, finish_now, reprioritise, wishes, status, depth: what a client or an operator asks of a
-- request and of the queue.

-- End a request at once when nobody holds it, else raise a flag for the holder. The flag has the
-- name of a field that load_request reads.
local function ask_to_end(q, tenant, id, flag, ending)
  local r = load_request(q, tenant, id)
  if not r then return false end
  if r.state == 'queued' then
    conclude(q, r, now_ms(), ending())
  elseif r.state == 'running' and not r[flag] then
    redis.call('HSET', r.key, flag, 1)
    tell_holder(q, r)
  end
  return r.state
end

-- ARGV: tenant, request id. Reply: the state afterwards, or nil when the request is not known.
local function cancel(keys, args)
  return ask_to_end(keys[1], args[1], args[2], 'cancel', cancelled)
end

-- ARGV and reply as for cancel.
local function finish_now(keys, args)
  return ask_to_end(keys[1], args[1], args[2], 'finish', stopped_early)
end

-- ARGV: tenant, request id, priority
-- Reply: the state, or nil when the request is not known; one that has ended stays as it was.
local function reprioritise(keys, args)
  local q, lane = keys[1], priority_of(args[3])
  local r = load_request(q, args[1], args[2])
  if not r then return false end
  if is_over(r) or r.lane == lane then return r.state end
  move_lane(q, r, lane, now_ms(), r.epoch > 0)
  if r.state == 'running' then tell_holder(q, r) else wake(q) end
  return r.state
end

-- ARGV: worker, then held requests
-- Reply: in msgpack, for each that the worker does hold {tenant, request id, epoch,
--        "CANCEL" or "FINISH" or '', priority}; all that it holds is looked at every second
local function wishes(keys, args)
  local q, worker = keys[1], worker_name(args[1])
  check_held(args, 2)
  local told = {}
  for at = 2, #args, FIELDS_A_HELD do
    local tenant, id, epoch = args[at], args[at + 1], tonumber(args[at + 2])
    local key, _, lane, wish = load_held(q, worker, tenant, id, epoch)
    if key then told[#told + 1] = { tenant, id, epoch, wish or '', lane } end
  end
  return cmsgpack.pack(told)
end

-- ARGV: tenant, request id. Reply: the fields below in this order, nil for what is absent.
local function status(keys, args)
  local key = request_key(keys[1], args[1], args[2])
  local v = redis.call('HMGET', key, 'state', 'num_tokens', 'epoch', 'strikes', 'lane', 'owner',
    'enqueued_ms', 'started_ms', 'finished_ms', 'deadline_ms', 'finish_reason', 'error_code',
    'error_message')
  return v[1] and v or false
end

-- Reply: the hash of counts, field by field.
local function depth(keys)
  return redis.call('HGETALL', stats_key(keys[1]))
end

register('cancel', cancel, FREEING)
register('finish_now', finish_now, FREEING)
register('reprioritise', reprioritise)
register('wishes', wishes, READING)
register('status', status, READING)
register('depth', depth, READING)
