-- enqueue: accept a request once, however often it is sent.
--
-- ARGV: tenant, request id, payload, cost, priority, ttl ms or '', deadline in Unix ms or '',
--       result ttl ms, most queued or '', attached 0/1, most queued of the tenant or ''
-- Reply: {"OK", state} · {"DUPLICATE", state} · {"CONFLICT", state}
--        {"FULL", retry after ms, "queue" or "tenant": whose bound it is}

local function parse_enqueue(args)
  local request = {
    tenant = args[1], id = args[2], payload = args[3],
    cost = math.min(whole('cost', args[4], 1), LARGEST),
    lane = priority_of(args[5]),
    ttl_ms = optional_whole('ttl_ms', args[6], 0),
    deadline_ms = optional_whole('deadline_ms', args[7], 0),
    result_ttl_ms = math.min(whole('result_ttl_ms', args[8], 1), LARGEST),
    max_queued = optional_whole('max_queued', args[9], 1),
    attached = args[10] == '1' and 1 or 0,
    max_of_tenant = optional_whole('max_queued_per_tenant', args[11] or '', 1),
  }
  if not is_tenant(request.tenant) then refuse('bad tenant ' .. request.tenant) end
  if not is_request_id(request.id) then refuse('bad request id ' .. request.id) end
  return request
end

local function earlier(a, b)
  if a and b then return math.min(a, b) end
  return a or b
end

-- Queue a request that is not known; also used when a dead letter is played again.
local function accept(q, request, digest, now)
  local key = request_key(q, request.tenant, request.id)
  -- A log without a hash is a leftover; its old entries would make the first emit fail.
  redis.call('DEL', log_key(q, request.tenant, request.id))
  local size = #request.payload
  local entry = add_entry(q, request.lane, request.tenant, request.id, request.cost, size)
  redis.call('HSET', key, 'state', 'queued', 'payload', request.payload, 'digest', digest,
    'cost', request.cost, 'lane', request.lane, 'entry', entry, 'attached', request.attached,
    'epoch', request.epoch or 0, 'num_tokens', 0, 'strikes', 0, 'enqueued_ms', now,
    'result_ttl_ms', request.result_ttl_ms)
  count_queued(q, request.lane, request.tenant, request.cost, now)
  count_bytes(q, size)
  local deadline = earlier(request.deadline_ms, request.ttl_ms and now + request.ttl_ms)
  if deadline then
    deadline = math.min(deadline, LARGEST)
    redis.call('HSET', key, 'deadline_ms', deadline)
    redis.call('ZADD', deadlines_key(q), deadline, reference(request.tenant, request.id))
  end
  local r = load_request(q, request.tenant, request.id)
  if is_expired(r, now) then
    conclude(q, r, now, expired(r))
  else
    plan_promotion(q, r)
    wake(q)
  end
  return r.state
end

local function num_queued_of(q, tenant)
  local fields, sum = {}, 0
  for lane = 0, LANES - 1 do fields[lane + 1] = 'queued:' .. lane .. ':' .. tenant end
  local counts = redis.call('HMGET', stats_key(q), unpack(fields))
  for lane = 0, LANES - 1 do sum = sum + (natural(counts[lane + 1]) or 0) end
  return sum
end

-- The bound that keeps a request out, or nil. A tenant hears of its own first: that one it can mend.
local function reached_bound(q, request)
  local most = request.max_of_tenant
  if most and num_queued_of(q, request.tenant) >= most then return 'tenant' end
  local queued = natural(redis.call('HGET', stats_key(q), 'queued')) or 0
  if request.max_queued and queued >= request.max_queued then return 'queue' end
end

local function enqueue(keys, args)
  local q = keys[1]
  local request = parse_enqueue(args)
  local digest = redis.sha1hex(request.payload)
  local known = redis.call('HMGET', request_key(q, request.tenant, request.id), 'state', 'digest')
  if known[1] then return { known[2] == digest and 'DUPLICATE' or 'CONFLICT', known[1] } end
  local bound = reached_bound(q, request)
  if bound then return { 'FULL', RETRY_AFTER_MS, bound } end
  return { 'OK', accept(q, request, digest, now_ms()) }
end

register('enqueue', enqueue)
