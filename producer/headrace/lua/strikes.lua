-- Strikes: what a vanished holder means for a request, and when it becomes a dead letter.
--
-- docs/protocol.md has the rule. Progress, the tokens in the log since the grant, tells an innocent
-- from poison: poison that fails at one place does not get past it.

local MAX_DEATHS = 3 -- times max_strikes: from then on a request stays a suspect, whatever it emits
local MAX_UNSENT = 32 -- tokens that a vanished worker may have made and never sent, about
local MAX_EVIDENCE = 10 -- deaths that are remembered in detail
local MAX_CLEARED = 256 -- suspects that one call looks at when the culprit is found

-- A request that may be the culprit gets a worker of its own. The worker stops claiming, runs
-- empty, takes it, and takes nothing else until it is over.
local function is_suspect(r, max_strikes)
  local is_struck = r.strikes > 0 and r.strikes >= max_strikes - 1
  return is_struck or r.deaths >= MAX_DEATHS * max_strikes
end

-- Suspects wait apart, so that whoever must not take them gets past them.
local function waiting_place(r, max_strikes)
  return is_suspect(r, max_strikes) and SUSPECTS or REQUEUED
end

-- Each death is {worker, epoch, tokens at the grant, tokens at the death, alone, Unix ms, cause}.
-- What somebody wrote there by hand is left out, or has the shape of one.
local function evidence_of(text)
  local is_read, found = pcall(cmsgpack.unpack, text or '')
  local deaths = {}
  for _, d in ipairs(is_read and type(found) == 'table' and found or {}) do
    if type(d) == 'table' then
      deaths[#deaths + 1] = { tostring(d[1]), measure(d[2]), measure(d[3]), measure(d[4]),
        measure(d[5]), measure(d[6]), tostring(d[7]) }
    end
  end
  return deaths
end

local function add_evidence(r, death)
  local evidence = evidence_of(redis.call('HGET', r.key, 'evidence'))
  if #evidence >= MAX_EVIDENCE then table.remove(evidence, 1) end
  evidence[#evidence + 1] = death
  redis.call('HSET', r.key, 'evidence', cmsgpack.pack(evidence))
end

-- Requests that died in one call died together.
local function mark_of(death) return death[1] .. ':' .. death[6] end

-- Whether all that speaks against a suspect are deaths that it shared with a culprit.
local function is_cleared(q, r)
  local culprits = redis.call('HGET', dead_books_key(q), 'culprits')
  if not culprits or r.strikes == 0 then return false end
  local evidence = evidence_of(redis.call('HGET', r.key, 'evidence'))
  if #evidence < r.strikes then return false end
  for i = #evidence - r.strikes + 1, #evidence do
    if not culprits:find('\n' .. mark_of(evidence[i]) .. '\n', 1, true) then return false end
  end
  return true
end

-- It goes back to where everybody waits, as if those deaths had not been.
local function clear(q, r)
  r.deaths, r.strikes = math.max(0, r.deaths - r.strikes), 0
  redis.call('HSET', r.key, 'deaths', r.deaths, 'strikes', 0)
  hand_to(q, r, REQUEUED)
end

-- The culprit is found: those that died with it need no worker of their own. Suspects of other lanes
-- are cleared when a claim comes to them.
local function clear_company(q, r, evidence)
  local marks = {}
  for i, death in ipairs(evidence) do marks[i] = mark_of(death) end
  redis.call('HSET', dead_books_key(q), 'culprits', '\n' .. table.concat(marks, '\n') .. '\n')
  local key = lane_key(q, r.lane, r.tenant)
  local waiting = redis.pcall('XPENDING', key, GROUP, '-', '+', MAX_CLEARED, SUSPECTS)
  if waiting.err then return end
  for _, item in ipairs(waiting) do
    local entry = redis.call('XRANGE', key, item[1], item[1])[1]
    local id = entry and read_entry(entry).request_id
    local suspect = id and load_request(q, r.tenant, id)
    if suspect and suspect.state == 'queued' and is_cleared(q, suspect) then clear(q, suspect) end
  end
end

local function field_of(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
end

-- Fields of the books of dead letters: bytes, of all their payloads; culprits, the deaths of the last
-- one, a line each: <worker>:<Unix ms>.
local function count_dead_bytes(q, by)
  local key = dead_books_key(q)
  local left = add_up(key, 'bytes', by)
  if left <= 0 or redis.call('XLEN', dead_key(q)) == 0 then redis.call('HDEL', key, 'bytes') end
  return left
end

-- Delete one dead letter, given as read from the stream.
local function remove_dead(q, entry)
  redis.call('XDEL', dead_key(q), entry[1])
  return count_dead_bytes(q, -#(field_of(entry, 'payload') or ''))
end

-- The oldest give way, so many in one call at most.
local function make_room_for_dead(q)
  local key = dead_key(q)
  local bytes = natural(redis.call('HGET', dead_books_key(q), 'bytes')) or 0
  for _ = 1, MAX_REMOVED do
    local length = redis.call('XLEN', key)
    local is_full = length > MAX_DEAD or bytes > MAX_DEAD_BYTES and length > 1
    local oldest = is_full and redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
    if not oldest then return end
    bytes = remove_dead(q, oldest)
  end
end

local function reason_of(r, progress)
  local place = progress == 0 and 'before it emitted a token' or progress .. ' tokens after its grant'
  return 'it took down the worker that ran it alone ' .. place .. ', strike ' .. r.strikes
    .. ', death ' .. r.deaths
end

local function bury(q, r, now, worker, progress)
  local v = redis.call('HMGET', r.key, 'payload', 'evidence')
  local text, payload = reason_of(r, progress), v[1] or ''
  redis.call('XADD', dead_key(q), '*', 'tenant', r.tenant, 'request_id', r.id, 'reason', text,
    'strikes', r.strikes, 'worker', worker, 'cost', r.cost, 'lane', r.lane, 'attached', r.attached,
    'result_ttl_ms', r.result_ttl_ms, 'epoch', r.epoch, 'evidence', v[2] or '', 'payload', payload)
  -- Letters deleted by hand are still counted; the first of a new row begins anew.
  if redis.call('XLEN', dead_key(q)) == 1 then redis.call('HDEL', dead_books_key(q), 'bytes') end
  count_dead_bytes(q, #payload)
  make_room_for_dead(q)
  clear_company(q, r, evidence_of(v[2]))
  conclude(q, r, now, ended_by_queue('failed', 'error', 'dead_lettered', text))
end

-- The holder vanished. `unsent` is how many tokens it may have made that are not in the log.
local function strike(q, r, now, death)
  local progress = r.num_tokens - r.granted_tokens
  r.deaths = r.deaths + 1
  if progress > death.unsent then r.strikes = 0 end -- past the place where it died before
  r.strikes = r.strikes + 1
  redis.call('HSET', r.key, 'strikes', r.strikes, 'deaths', r.deaths)
  add_evidence(r, { death.worker, r.epoch, r.granted_tokens, r.num_tokens, r.alone and 1 or 0, now,
    death.cause })
  local is_stuck = r.strikes >= death.max_strikes and progress == 0
  local is_worn_out = r.deaths >= MAX_DEATHS * death.max_strikes and progress <= MAX_UNSENT
  if r.alone and not wished_end(r) and (is_stuck or is_worn_out) then
    return bury(q, r, now, death.worker, progress)
  end
  requeue(q, r, now, waiting_place(r, death.max_strikes))
end
