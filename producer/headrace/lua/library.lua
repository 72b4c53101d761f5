#!lua name=headrace_1
-- The queue's functions: contract, constants, key names and argument checks that all of them share.
--
-- The files of this folder are one library, joined in the order that functions.py names.
--
-- 1. KEYS[1] is the queue's base key, its hash tag `{q}`. Every other key is named from it, so all
--    of them live in one slot.
-- 2. A call may be repeated: a client retries when a reply is lost. The repetition changes nothing
--    and is answered like the first, or with what has become of the request since.
-- 3. Each grant raises the request's epoch, and only the owner at the current epoch may write: the
--    epoch is a fencing token, like the sequencers of Chubby (Burrows, OSDI 2006).
-- 4. Arguments are checked before the first write, and writes are ordered so that a prefix of them
--    is harmless: first the entry of a lane, then the request; first the terminal entry, then the
--    state.
-- 5. A request ends in conclude() and nowhere else, with one terminal entry in its token log.
-- 6. The lease is the idle time of the lane entry in the group's list of pending entries (PEL).
--    Strikes are ours: Redis's delivery count also rises when a worker reads its own history.
-- 7. Counts change in the same call as what they count.
-- 8. Loops are bounded and replies are small; what is left over is for the next call.

local GROUP = 'workers'
-- Consumers that hold what waits: what was handed back, which goes before new entries, and suspects.
local REQUEUED, SUSPECTS = '_requeued', '_suspects'
local LANES = 10
local TOMBSTONE = 4 -- a request's hash outlives its token log by this factor
local LARGEST_TURN = 32768 -- tokens, the most that one grant counts when lanes share
local RETRY_AFTER_MS = 1000 -- what a client is told to wait when the queue is full
local MAX_DEAD, MAX_DEAD_BYTES = 10000, 64 * 1024 * 1024 -- dead letters kept, and their payloads
local MAX_REMOVED = 1000 -- dead letters that one call deletes to make room
local ORPHAN_TTL_MS = 3600000 -- for the token log of a request whose hash is gone
local LARGEST = 10 ^ 14 - 1 -- number in a request: Lua writes 15 digits with an exponent
local CHUNK_FIELD, TERMINAL_FIELD = 'c', 'e'
local PROTOCOL = 1

local function lane_key(q, lane, tenant) return q .. ':in:' .. lane .. ':' .. tenant end
local function request_key(q, tenant, id) return q .. ':req:' .. tenant .. ':' .. id end
local function log_key(q, tenant, id) return q .. ':out:' .. tenant .. ':' .. id end
local function served_key(q, lane) return q .. ':served:' .. lane end
local function worker_key(q, worker) return q .. ':worker:' .. worker end
local function stats_key(q) return q .. ':stats' end
local function workers_key(q) return q .. ':workers' end
local function deadlines_key(q) return q .. ':deadlines' end
local function promotions_key(q) return q .. ':promotions' end
local function sweep_key(q) return q .. ':sweep' end
local function isolator_key(q) return q .. ':isolator' end
local function wake_key(q) return q .. ':wake' end
local function control_channel(q) return q .. ':ctl' end
local function dead_key(q) return q .. ':dead' end
-- Apart from the stats, into which any producer may write: none can have dead letters dropped.
local function dead_books_key(q) return q .. ':dead:books' end

-- Redis's clock is the only one that the queue knows; workers and clients may be wrong by hours.
local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function refuse(text)
  error(redis.error_reply('ERR headrace: ' .. text))
end

local function whole(name, value, low)
  local number = tonumber(value)
  if not number or number ~= math.floor(number) or number < low or number > 2 ^ 53 then
    refuse(name .. ' must be a whole number from ' .. low .. ', not ' .. tostring(value))
  end
  return number
end

local function optional_whole(name, value, low)
  if value == '' then return nil end
  return whole(name, value, low)
end

local function priority_of(value)
  local lane = whole('priority', value, 0)
  if lane >= LANES then refuse('priority must be below ' .. LANES .. ', not ' .. value) end
  return lane
end

-- A count that Redis holds, or nil: what others wrote by hand must not make a function stumble. Most
-- have one digit: epochs, lanes, strikes.
local DIGITS = {}
for digit = 0, 9 do DIGITS[digit .. ''] = digit end

local function natural(text)
  return DIGITS[text] or text and #text <= 14 and text:match('^%d+$') and tonumber(text) or nil
end

local function worker_name(value)
  if not value or value == '' or value:sub(1, 1) == '_' then
    refuse('worker id must not be empty or begin with _, not ' .. tostring(value))
  end
  return value
end

-- As in keys.py: names are parts of key names, and every reader has to be able to print them.
local function is_tenant(text) return #text <= 64 and text:match('^[A-Za-z0-9._-]+$') ~= nil end
local function is_request_id(text)
  return #text <= 160 and text:match('^[A-Za-z0-9._:@/+=-]+$') ~= nil
end

-- The books of a queue are shared by its producers, and what one writes into them by hand must not
-- stop the others: what is no measure is 0, what is no cursor is the beginning, and a count that
-- cannot be counted on begins anew.
local function measure(text)
  local number = tonumber(text or 0)
  return number and number == number and math.abs(number) < 1e18 and number or 0
end

local function cursor_of(text)
  return text and #text <= 19 and text:match('^%d+$') or '0'
end

local function add_up(key, field, by)
  by = by + 0 -- Lua writes the negative of 0 as -0, which Redis refuses
  local sum = redis.pcall('HINCRBY', key, field, by)
  if type(sum) == 'number' then return sum end
  redis.call('HDEL', key, field)
  return redis.call('HINCRBY', key, field, by)
end

-- One name for a request inside deadlines and claim answers; a tenant holds no colon, an id may.
local function reference(tenant, id) return tenant .. ':' .. id end
local function parse_reference(text) return text:match('^([^:]*):(.*)$') end

-- Idle workers block on this stream. One entry is enough: its id only has to be newer than the
-- cursor that their last claim returned. A stream whose ids somebody used up begins anew.
local function wake(q)
  local added = redis.pcall('XADD', wake_key(q), 'MAXLEN', 1, '*', 'w', 1)
  if type(added) ~= 'table' or not added.err then return end
  redis.call('DEL', wake_key(q))
  redis.call('XADD', wake_key(q), 'MAXLEN', 1, '*', 'w', 1)
end

local function wake_cursor(q)
  local last = redis.call('XREVRANGE', wake_key(q), '+', '-', 'COUNT', 1)[1]
  return last and last[1] or '0-0'
end

-- Functions that end requests, or keep what is running alive, must work when memory is full.
local FREEING, READING = { 'allow-oom' }, { 'no-writes', 'allow-oom' }

local function register(name, callback, flags)
  redis.register_function({
    function_name = 'headrace_1_' .. name, callback = callback, flags = flags or {},
  })
end
