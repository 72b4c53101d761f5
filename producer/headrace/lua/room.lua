-- The room of a worker: what is free there, and what would be if work of later priority gave way.

local function rooms_if_displaced(args, first)
  local rooms = {}
  for i = first, #args, 3 do
    rooms[#rooms + 1] = {
      priority = whole('priority', args[i], 0),
      seqs = whole('seqs', args[i + 1], 0), tokens = whole('tokens', args[i + 2], 0),
    }
  end
  return rooms
end

local function read_room(args)
  return {
    is_untouched = true, -- by this claim
    free_seqs = whole('free_seqs', args[3], 0),
    free_tokens = whole('free_tokens', args[4], 0),
    total_tokens = whole('total_tokens', args[5], 1),
    lease_ms = whole('lease_ms', args[6], 1),
    max_strikes = whole('max_strikes', args[7], 1),
    if_displaced = rooms_if_displaced(args, 8),
  }
end

-- Whether it fits once what runs there of later priority has given way.
local function displaces(r, room)
  for _, left in ipairs(room.if_displaced) do
    if left.priority > r.lane then
      return left.seqs >= 1 and math.min(r.cost, room.total_tokens) <= left.tokens
    end
  end
  return false
end

local function fits(r, room, seen)
  if is_suspect(r, room.max_strikes) then
    return room.is_untouched and room.free_seqs >= 1 and room.free_tokens == room.total_tokens
  end
  local is_free = room.free_seqs >= 1 and math.min(r.cost, room.total_tokens) <= room.free_tokens
  return is_free and not seen.ignores_age or displaces(r, room)
end

local function take_room(r, room)
  local cost = math.min(r.cost, room.total_tokens)
  room.is_untouched = false
  room.free_seqs, room.free_tokens = room.free_seqs - 1, room.free_tokens - cost
  for _, left in ipairs(room.if_displaced) do
    left.seqs, left.tokens = left.seqs - 1, left.tokens - cost
  end
end
