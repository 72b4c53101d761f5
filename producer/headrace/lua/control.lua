-- cancel, status, depth: what a client or an operator asks of a request and of the queue.

-- ARGV: tenant, request id. Reply: the state afterwards, or nil when the request is not known.
local function cancel(keys, args)
  local q = keys[1]
  local r = load_request(q, args[1], args[2])
  if not r then return false end
  if r.state == 'queued' then
    conclude(q, r, now_ms(), cancelled())
  elseif r.state == 'running' and not r.cancel then
    redis.call('HSET', r.key, 'cancel', 1)
    -- A hint: without it, the holder learns from its next emit.
    redis.call('PUBLISH', control_channel(q), reference(r.tenant, r.id))
  end
  return r.state
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
register('status', status, READING)
register('depth', depth, READING)
